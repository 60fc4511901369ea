"""Training, evaluation, search and export of every kind of dual encoder."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import torch
from tests.dual_encoder_kinds import DAILY_KINDS, KINDS, by_hand
from tests.processes import in_processes
from tests.training.process_cases import train_all

import visavis
from visavis.data.dataset_reader import open_dataset
from visavis.data.synthetic import write_synthetic_scenes

transformers = pytest.importorskip("transformers")

adapters = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs peft")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """16 training images with one caption each, which are one batch."""
    folder = tmp_path_factory.mktemp("pairs") / "scenes"
    return write_synthetic_scenes(
        folder, num_train=16, num_val=4, num_test=4, captions_per_image=1, size=32
    )


def settings(kind, folder, pairs, **overrides):
    """Overrides of a training with one step per epoch."""
    return {
        "data.path": str(pairs),
        "visual.encoder": str(folder),
        "text.encoder": str(folder),
        "objective": "Sigmoid()" if kind.startswith("siglip") else "InfoNCE()",
        "epochs": 2,
        "training.batch_size": 16,
        "training.metric_batches": 1,
        "training.threads": 1,
        "training.checkpoint_s": 1e6,
        "phases.0.optimizer.lr": 0.003,
        "phases.0.schedule.warmup": 0.0,
        "evaluation.validation": "train",
    } | overrides


def read_log(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def inputs(pairs, split="train"):
    """Images and captions of a split."""
    part = open_dataset(pairs).split(split)
    return [image.open() for image in part.images], list(part.captions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_training_starts_at_loss_of_transformers(kind, kind_folders, pairs, tmp_path):
    folder = kind_folders(kind)
    visavis.train("clip/full", overrides=settings(kind, folder, pairs), out=tmp_path / "run")
    output, *_ = by_hand(folder, *inputs(pairs), return_loss=True)
    log = read_log(tmp_path / "run")
    assert log[0]["train"]["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert log[1]["running_loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    start = visavis.load(folder).matcher.pretrained_logits
    for name, value in start.items():
        assert log[0]["health"][name] == pytest.approx(value)
        assert log[-1]["health"][name] != log[0]["health"][name], "it is learned"
    low, high = log[0]["health"]["scale_bounds"]
    assert low < start["scale"] < high and high == (1000 if kind.startswith("siglip") else 100)
    # Trained weights, scale and bias give the same logits in transformers.
    model = visavis.load(tmp_path / "run")
    visavis.export(tmp_path / "run", format="hub", out=tmp_path / "hub")
    images, captions = inputs(pairs, "test")
    output, image_rows, text_rows = by_hand(tmp_path / "hub", images, captions)
    torch.testing.assert_close(model.encode_images(images), image_rows, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.encode_texts(captions), text_rows, rtol=0, atol=1e-6)
    bias = 0.0 if model.matcher.logit_bias is None else model.matcher.logit_bias.item()
    logits = model.matcher.scale().item() * model.score(images, captions) + bias
    torch.testing.assert_close(logits, output.logits_per_image, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", DAILY_KINDS)
@pytest.mark.slow
def test_folder_is_evaluated_indexed_and_searched(kind, kind_folders, pairs, tmp_path):
    folder = kind_folders(kind)
    result = visavis.evaluate(folder, data=pairs)
    _, image_rows, text_rows = by_hand(folder, *inputs(pairs, "test"))
    scores = text_rows @ image_rows.T
    ranks = (scores >= scores.diag()[:, None]).sum(1)
    assert result.metrics["t2i_r1"] == pytest.approx(100 * (ranks == 1).float().mean().item())
    visavis.index(folder, pairs, out=tmp_path / "index")
    images = [image for split in ("train", "val", "test") for image in inputs(pairs, split)[0]]
    query = inputs(pairs, "test")[1][0]
    expected = visavis.load(folder).score(images, [query])[:, 0].sort(descending=True).values
    # The second search reads the text without the whole model if the kind allows it.
    for _ in range(2):
        hits = visavis.search(tmp_path / "index", query, top=5)
        assert [hit.score for hit in hits] == pytest.approx(expected[:5].tolist(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["full", pytest.param("lora", marks=adapters), "linear"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_trains_resumes_and_exports(
    kind, variant, kind_folders, pairs, in_pieces, outcome, tmp_path
):
    overrides = settings(kind, kind_folders(kind), pairs)
    if variant == "linear":
        del overrides["objective"]
    whole = visavis.train(f"clip/{variant}", overrides=overrides, out=tmp_path / "whole")
    assert in_pieces(f"clip/{variant}", tmp_path / "pieces", overrides=overrides) >= 1
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")
    assert visavis.evaluate(tmp_path / "whole").metrics == whole.test.metrics
    if variant == "lora":
        visavis.export(tmp_path / "whole", format="hub", out=tmp_path / "hub")
        model, (images, captions) = visavis.load(tmp_path / "whole"), inputs(pairs, "test")
        _, image_rows, text_rows = by_hand(tmp_path / "hub", images, captions)
        torch.testing.assert_close(model.encode_images(images), image_rows, rtol=0, atol=1e-6)
        torch.testing.assert_close(model.encode_texts(captions), text_rows, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_training_with_dropout_resumes_exactly(kind_folders, pairs, in_pieces, outcome, tmp_path):
    """The text encoder of Chinese-CLIP has dropout, unlike CLIP."""
    folder = shutil.copytree(kind_folders("chinese_clip"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"hidden_dropout_prob": 0.3}
    (folder / "config.json").write_text(json.dumps(config))
    overrides = settings("chinese_clip", folder, pairs)
    visavis.train("clip/full", overrides=overrides, out=tmp_path / "whole")
    assert in_pieces("clip/full", tmp_path / "pieces", overrides=overrides) >= 1
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")
    first = read_log(tmp_path / "whole")
    assert first[1]["running_loss"] != pytest.approx(first[0]["train"]["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_settings_that_save_memory_change_no_loss(kind, kind_folders, pairs, tmp_path):
    losses = []
    for number, saving in enumerate(
        ({}, {"training.activation_checkpointing": True, "training.chunk_size": 4})
    ):
        run = tmp_path / str(number)
        overrides = settings(kind, kind_folders(kind), pairs, **saving)
        visavis.train("clip/full", overrides=overrides, out=run)
        losses.append([row["running_loss"] for row in read_log(run)[1:]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_two_processes_train_the_same_models(kind_folders, pairs, tmp_path):
    variants = [(kind, "full", "ddp") for kind in KINDS]
    variants += [("altclip", "full", "fsdp"), ("siglip2-naflex", "full", "fsdp")]
    if importlib.util.find_spec("peft"):
        variants += [("chinese_clip", "lora", "ddp"), ("siglip2-naflex", "lora", "ddp")]
    jobs = {
        f"{kind}-{variant}-{strategy}": (
            f"clip/{variant}",
            settings(kind, kind_folders(kind), pairs) | {"training.strategy": strategy},
        )
        for kind, variant, strategy in variants
    }
    in_processes(train_all, (2, tmp_path / "rendezvous", jobs, tmp_path / "two"), nprocs=2)
    for name, (recipe, overrides) in jobs.items():
        # One process without FSDP.
        one_process = overrides | {"training.strategy": "ddp"}
        visavis.train(recipe, overrides=one_process, out=tmp_path / "one" / name)
        two, one = (read_log(tmp_path / ranks / name) for ranks in ("two", "one"))
        for row, alone in zip(two[1:], one[1:], strict=True):
            assert row["running_loss"] == pytest.approx(alone["running_loss"], rel=1e-4)
        rows = [
            visavis.load(tmp_path / ranks / name).encode_texts(inputs(pairs)[1])
            for ranks in ("two", "one")
        ]
        torch.testing.assert_close(*rows, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("clip/full", {"visual.max_num_patches": 6, "visual.augment": True}),
        pytest.param("clip/full", {"training.workers": 1}, marks=pytest.mark.slow),
        ("clip/linear", {"visual.max_num_patches": 6}),
    ],
)
def test_patches_train_with_each_input(recipe, overrides, kind_folders, pairs, tmp_path):
    """Random crops, worker processes, and stored features of another number of patches."""
    settings_ = settings("siglip2-naflex", kind_folders("siglip2-naflex"), pairs, **overrides)
    if recipe == "clip/linear":
        del settings_["objective"]
    trained = visavis.train(recipe, overrides=settings_ | {"epochs": 1}, out=tmp_path / "run")
    model = visavis.load(tmp_path / "run")
    patches = model.processor.process_images(inputs(pairs, "test")[0], "pixels").vectors
    assert patches.shape == (4, overrides.get("visual.max_num_patches", 16), 8 * 8 * 3 + 2)
    assert visavis.evaluate(tmp_path / "run").metrics == trained.test.metrics


@pytest.mark.parametrize("kind", DAILY_KINDS)
@pytest.mark.parametrize("recipe", ["clip/full", pytest.param("clip/lora", marks=adapters)])
@pytest.mark.slow
def test_text_encoder_trains_alone_on_item_vectors(recipe, kind, kind_folders, pairs, tmp_path):
    folder = kind_folders(kind)
    visavis.index(folder, pairs, out=tmp_path / "index")
    options = settings(kind, folder, pairs)
    del options["visual.encoder"]
    result = visavis.train(
        recipe, index=tmp_path / "index", overrides=options, out=tmp_path / "run"
    )
    whole, model = visavis.load(folder), visavis.load(tmp_path / "run")
    assert model.processor.items == whole.fingerprint
    assert not any("vision" in name or "visual" in name for name in model.matcher.state_dict())
    assert visavis.evaluate(tmp_path / "run").metrics == result.test.metrics
    # The first validation is that of the pretrained model.
    first, *_, last = read_log(tmp_path / "run")
    pretrained = visavis.evaluate(folder, data=pairs, split="train")
    assert first["rsum"] == pytest.approx(pretrained.metrics["rsum"])
    assert last["train"]["loss"] < first["train"]["loss"]


@adapters
@pytest.mark.parametrize("of_run", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_default_recipe_adapts_text_encoder_of_index(of_run, kind_folders, pairs, tmp_path):
    model = folder = kind_folders("altclip")
    options = settings("altclip", folder, pairs)
    if of_run:
        model = visavis.train("clip/lora", overrides=options, out=tmp_path / "both").run
    visavis.index(model, pairs, out=tmp_path / "index")
    for key in ("visual.encoder", "text.encoder", "objective"):
        del options[key]
    visavis.train(index=tmp_path / "index", overrides=options, out=tmp_path / "run")
    first = read_log(tmp_path / "run")[0]["rsum"]
    assert first == pytest.approx(
        visavis.evaluate(model, data=pairs, split="train").metrics["rsum"]
    )
    names = visavis.load(tmp_path / "run").matcher.state_dict()
    assert all(".lora_" in name or name == "learned_scale.log" for name in names)
    assert any(".lora_" in name for name in names)
