"""A learned scale and bias start at the values of the model or of the objective, are logged,
resumed and exported.
"""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.processes import in_processes
from tests.training.process_cases import train_all

import visavis
from visavis.core.errors import RecipeError
from visavis.data.dataset_reader import open_dataset
from visavis.data.synthetic import write_synthetic_scenes
from visavis.models.clip.model import open_dual_encoder
from visavis.objectives import Sigmoid
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.learned_scale import describe_scale_and_bias
from visavis.training.recipes.recipe import build_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.trainer import Trainer
from visavis.training.training_run import prepare_training

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

VALUES = [(117.33, -12.93), (111.85, -12.9), (2.5, 0.75)]
"""Scales and biases, the first ones like those of published models."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """16 training images with one caption each, which are one batch."""
    folder = tmp_path_factory.mktemp("pairs") / "scenes"
    return write_synthetic_scenes(
        folder, num_train=16, num_val=4, num_test=4, captions_per_image=1, size=32
    )


@pytest.fixture(scope="module")
def pretrained(dual_encoders, tmp_path_factory):
    """A tiny SigLIP, or CLIP without a bias, with a given scale and bias."""

    def make(scale, bias=None):
        folder = tmp_path_factory.mktemp("models") / "model"
        shutil.copytree(dual_encoders / ("clip" if bias is None else "siglip"), folder)
        weights = load_file(folder / "model.safetensors")
        weights["logit_scale"].fill_(math.log(scale))
        if bias is not None:
            weights["logit_bias"].fill_(bias)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.fixture(scope="module")
def siglip(pretrained):
    return pretrained(111.85, -12.9)


def settings(folder, pairs, objective="Sigmoid()", **overrides):
    """Overrides of a training with one step per epoch."""
    sizes = {
        "epochs": 2,
        "training.batch_size": 16,
        "training.metric_batches": 1,
        "training.threads": 1,
        "training.checkpoint_s": 1e6,
    }
    sizes |= {"phases.0.optimizer.lr": 0.01, "phases.0.schedule.warmup": 0.0}
    return (
        {
            "data.path": str(pairs),
            "visual.encoder": str(folder),
            "text.encoder": str(folder),
            "objective": objective,
        }
        | sizes
        | overrides
    )


def read_log(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def outputs_of_transformers(folder, model, pairs):
    """Loss and probabilities of transformers for the training pairs, with the inputs of a model of
    visavis.
    """
    split = open_dataset(pairs).split("train")
    pixels = model.processor.process_images(
        [image.open() for image in split.images], "pixels"
    ).vectors
    tokens = model.processor.process_texts(split.captions).vectors
    with torch.no_grad():
        outputs = transformers.SiglipModel.from_pretrained(folder).eval()(
            input_ids=tokens, pixel_values=pixels, return_loss=True
        )
    return outputs.loss.item(), outputs.logits_per_image.sigmoid()


@pytest.mark.parametrize(("scale", "bias"), VALUES)
def test_siglip_starts_at_loss_of_transformers(scale, bias, pretrained, pairs, tmp_path):
    folder = pretrained(scale, bias)
    visavis.train("clip/full", overrides=settings(folder, pairs), out=tmp_path / "run")
    expected, _ = outputs_of_transformers(folder, visavis.load(folder), pairs)
    log = read_log(tmp_path / "run")
    assert log[0]["train"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert log[1]["running_loss"] == pytest.approx(expected, rel=1e-5)
    assert (log[0]["health"]["scale"], log[0]["health"]["bias"]) == (
        pytest.approx(scale),
        pytest.approx(bias),
    )
    low, high = log[0]["health"]["scale_bounds"]
    assert low < scale < high
    for name, start in (("scale", scale), ("bias", bias)):
        assert 1e-4 < abs(log[-1]["health"][name] / start - 1) < 0.1, "it is learned from there"


def test_siglip_starts_at_loss_of_transformers_on_two_processes(pretrained, pairs, tmp_path):
    cases = {
        f"{strategy}-{scale}": (strategy, pretrained(scale, bias))
        for scale, bias in VALUES
        for strategy in ("ddp", "fsdp")
    }
    jobs = {
        name: ("clip/full", settings(folder, pairs) | {"training.strategy": kind})
        for name, (kind, folder) in cases.items()
    }
    in_processes(train_all, (2, tmp_path / "rendezvous", jobs, tmp_path), nprocs=2)
    for name, (_, folder) in cases.items():
        expected, _ = outputs_of_transformers(folder, visavis.load(folder), pairs)
        log = read_log(tmp_path / name)
        assert log[0]["train"]["loss"] == pytest.approx(expected, rel=1e-5)
        assert log[1]["running_loss"] == pytest.approx(expected, rel=1e-5)
        one = tmp_path / f"{name}-one"
        visavis.train("clip/full", overrides=settings(folder, pairs), out=one)
        for row, alone in zip(log, read_log(one), strict=True):
            assert [row["health"][key] for key in ("scale", "bias")] == pytest.approx(
                [alone["health"][key] for key in ("scale", "bias")]
            )


@pytest.mark.parametrize("variant", ["full", "lora"])
def test_exported_siglip_gives_probabilities_of_transformers(variant, siglip, pairs, tmp_path):
    if variant == "lora":
        pytest.importorskip("peft")
    # Validations keep the last weights, whatever they rank.
    overrides = settings(siglip, pairs, **{"evaluation.validation": "train"})
    visavis.train(f"clip/{variant}", overrides=overrides, out=tmp_path / "run")
    model = visavis.load(tmp_path / "run")
    visavis.export(tmp_path / "run", format="hub", out=tmp_path / "hub")
    weights = load_file(tmp_path / "hub" / "model.safetensors")
    scale, bias = model.matcher.scale().item(), model.matcher.logit_bias.item()
    assert (weights["logit_scale"].exp().item(), weights["logit_bias"].item()) == (
        pytest.approx(scale),
        bias,
    )
    assert (weights["logit_scale"].shape, weights["logit_bias"].shape) == ((1,), (1,))
    _, probabilities = outputs_of_transformers(tmp_path / "hub", model, pairs)
    split = open_dataset(pairs).split("train")
    scores = model.score([image.open() for image in split.images], list(split.captions))
    torch.testing.assert_close(
        (scale * scores + bias).sigmoid(), probabilities, rtol=1e-4, atol=1e-6
    )
    assert (
        f"Training multiplied it by {scale:.4g} and added {bias:.4g} before"
        in (tmp_path / "hub" / "README.md").read_text()
    )
    again = open_dual_encoder(str(tmp_path / "hub"))[0].pretrained_logits
    assert again == {"scale": pytest.approx(scale), "bias": bias}


STARTS = {
    "Sigmoid()": (111.85, -12.9),
    "Sigmoid(scale=10, bias=-10)": (10, -10),
    "Sigmoid(scale=20.0)": (20, -12.9),
    "Sigmoid(bias=-5, reduction='mean')": (111.85, -5),
    "InfoNCE()": (111.85, None),
    "InfoNCE(tau=0.05)": (20, None),
    "NTXent(tau=0.25)": (4, None),
}


@pytest.mark.parametrize("objective", STARTS)
def test_values_that_objective_names_are_start(objective, siglip, pairs):
    recipe = read_recipe("clip/full", settings(siglip, pairs, objective))
    (scale, bias), matcher = STARTS[objective], prepare_training(recipe)[1]
    assert matcher.scale().item() == pytest.approx(scale)
    assert (matcher.logit_bias is None) == (bias is None)
    assert bias is None or matcher.logit_bias.item() == pytest.approx(bias)
    text = f", learned from scale {scale + 1e-5:.4g}" + (
        "" if bias is None else f" and bias {bias:.4g}"
    )
    differs = scale != 111.85 or bias not in (None, -12.9)
    assert (
        describe_scale_and_bias(matcher, recipe.phases[0])
        == text + " (pretrained: scale 111.9 and bias -12.9)" * differs
    )
    # The resolved recipe, as a run stores it, describes the same training.
    again = prepare_training(build_recipe(recipe.to_dict(), {}, "run.toml"))[1]
    assert all(
        torch.equal(part, again.state_dict()[name]) for name, part in matcher.state_dict().items()
    )


def test_new_objective_replaces_start_of_former_one():
    resolved = build_recipe(
        read_recipe("clip/full", {"objective": "Sigmoid(scale=20, bias=-5)"}).to_dict(),
        {},
        "run.toml",
    )
    assert resolved.phases[0].learned_start == ("scale", "bias")
    for objective, expected in (
        ("Sigmoid()", ()),
        ("Sigmoid(scale=20.0)", ("scale",)),
        ("InfoNCE()", ()),
    ):
        assert (
            build_recipe(resolved.to_dict(), {"objective": objective}, "run.toml")
            .phases[0]
            .learned_start
            == expected
        )
    assert (
        build_recipe(
            resolved.to_dict(), {"model.scale": "fixed", "objective": "Sigmoid(scale=3)"}, ""
        )
        .phases[0]
        .learned_start
        == ()
    )


def test_clip_without_bias_starts_sigmoid_at_its_bias(pretrained, pairs, tmp_path):
    visavis.train("clip/full", overrides=settings(pretrained(14.3), pairs), out=tmp_path / "run")
    log = read_log(tmp_path / "run")
    assert (log[0]["health"]["scale"], log[0]["health"]["bias"]) == (
        pytest.approx(14.3),
        Sigmoid().bias,
    )
    assert log[-1]["health"]["bias"] != Sigmoid().bias
    visavis.export(tmp_path / "run", format="hub", out=tmp_path / "hub")
    assert "logit_bias" not in load_file(tmp_path / "hub" / "model.safetensors"), (
        "CLIP of transformers has none"
    )
    assert (
        f" and added {visavis.load(tmp_path / 'run').matcher.logit_bias.item():.4g} before"
        in (tmp_path / "hub" / "README.md").read_text()
    )


@pytest.mark.parametrize("scale", [0.2, 100.0, 250.0])
def test_bounds_contain_pretrained_scale(scale, pretrained, pairs):
    learned = prepare_training(
        read_recipe("clip/full", settings(pretrained(scale), pairs, "InfoNCE()"))
    )[1].scale
    assert learned().item() == pytest.approx(scale)
    assert learned.bounds == pytest.approx((min(1, scale), max(100, scale)))


@pytest.mark.parametrize("temperature", [0.9, 0.07, 0.0005])
def test_bounds_contain_temperature_of_xvlm(temperature, towers, pairs):
    folders = {
        "visual": {"encoder": f"{towers}/vit", "granularity": "pixels"},
        "text": {"encoder": f"{towers}/bert", "granularity": "tokens"},
    }
    model = {
        "kind": "XVLM",
        "fusion_layers": 2,
        "embedding_dim": 6,
        "scale": "learned",
        "temperature": temperature,
    }
    phases = [{"epochs": 1, "objective": "Sigmoid()"}]
    recipe = build_recipe(
        {"name": "xvlm", "data": {"path": str(pairs)}, "model": model, "phases": phases, **folders},
        {},
        "test",
    )
    matcher = prepare_training(recipe)[1]
    assert (matcher.scale().item(), matcher.logit_bias.item()) == (
        pytest.approx(1 / temperature),
        Sigmoid().bias,
    )
    assert {name for name, _ in matcher.parameters_by_part()["scale"]} == {
        "learned_scale.log",
        "learned_bias",
    }


def test_bounds_of_recipe_win_and_are_reported(siglip, pairs):
    overrides = settings(siglip, pairs, **{"model.scale_bounds": [1.0, 50.0]})
    recipe = read_recipe("clip/full", overrides)
    expected = ", learned from scale 50 and bias -12.9 (pretrained: scale 111.9 and bias -12.9)"
    assert describe_scale_and_bias(prepare_training(recipe)[1], recipe.phases[0]) == expected
    with pytest.raises(
        RecipeError,
        match=r"^Sigmoid\(scale=70\.0, .*: initial_scale: expected a number >= 1 and <= 50, got 70\.0\..* bounds",
    ):
        prepare_training(read_recipe("clip/full", overrides | {"objective": "Sigmoid(scale=70)"}))


def test_fixed_scale_reports_pretrained_values(siglip, pairs):
    recipe = read_recipe("clip/full", settings(siglip, pairs, **{"model.scale": "fixed"}))
    assert (
        describe_scale_and_bias(prepare_training(recipe)[1], recipe.phases[0])
        == " (pretrained: scale 111.9 and bias -12.9)"
    )


def test_start_that_is_not_learned_is_rejected(pretrained, pairs, tmp_path):
    folder = pretrained(20.0)
    for overrides, name in (
        ({"model.scale": "fixed"}, "scale"),
        ({"objective": "InfoNCE()"}, "bias"),
    ):
        given = settings(folder, pairs) | overrides | {"phases.0.learned_start": [name]}
        with pytest.raises(
            RecipeError,
            match=f"^learned_start: expected values that CLIP learns with .*, got '{name}'. Remove it, or set",
        ):
            visavis.train("clip/full", overrides=given, out=tmp_path / "run")
    with pytest.raises(
        RecipeError,
        match=r"model\.logit_bias: expected none, because it follows from the objective of the phases",
    ):
        visavis.train(
            "clip/full",
            overrides=settings(folder, pairs) | {"model.logit_bias": "learned"},
            out=tmp_path / "run",
        )


TWO_PHASES = """
extends = ["clip/full"]
name = "two"
[[phases]]
epochs = 1
objective = "InfoNCE()"
optimizer = { lr = 0.01 }
[[phases]]
epochs = 2
objective = "Sigmoid(scale=20, bias=-5)"
optimizer = { lr = 0.1 }
[[phases]]
epochs = 1
objective = "Sigmoid(scale=20, bias=-5)"
optimizer = { lr = 0.001 }
"""


def test_phases_start_at_named_values_once_and_resume(siglip, pairs, in_pieces, outcome, tmp_path):
    recipe = tmp_path / "two.toml"
    recipe.write_text(TWO_PHASES)
    overrides = {
        key: value
        for key, value in settings(siglip, pairs).items()
        if key not in ("objective", "epochs")
    }
    overrides = {key: value for key, value in overrides.items() if not key.startswith("phases")} | {
        "training.checkpoint_s": 0.0
    }
    visavis.train(recipe, overrides=overrides, out=tmp_path / "run")
    health = [row["health"] for row in read_log(tmp_path / "run")]
    assert [health[0]["scale"], health[0]["bias"]] == pytest.approx([111.85, -12.9])
    assert health[2]["scale"] == pytest.approx(20, rel=0.2)
    moved = [row["bias"] for row in health]
    assert moved[0] == moved[1], "InfoNCE has no bias"
    # Adam moves the bias by at most its rate in a step, so that a new start in the last phase would
    # show.
    assert 0.05 < abs(moved[3] + 5) < 0.5 and abs(moved[4] - moved[3]) < 0.002
    assert in_pieces(recipe, tmp_path / "pieces", longest=1, overrides=overrides) >= 2
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "run")


def test_training_starts_from_run_with_or_without_bias(siglip, pairs, tmp_path):
    for name, objective in (("softmax", "InfoNCE()"), ("sigmoid", "Sigmoid()")):
        visavis.train(
            "clip/full",
            overrides=settings(siglip, pairs, objective, **{"evaluation.validation": "train"}),
            out=tmp_path / name,
        )
    learned = {name: visavis.load(tmp_path / name).matcher for name in ("softmax", "sigmoid")}
    for start, objective in (("softmax", "Sigmoid()"), ("sigmoid", "InfoNCE()")):
        out = tmp_path / f"{start}-{objective}"
        visavis.train(
            "clip/full",
            overrides=settings(siglip, pairs, objective) | {"start_from": str(tmp_path / start)},
            out=out,
        )
        health = read_log(out)[0]["health"]
        bias = learned[start].logit_bias
        assert (health["scale"], health["bias"]) == (
            pytest.approx(learned[start].scale().item()),
            pytest.approx(-12.9 if bias is None else bias.item()),
        )


def test_diagnosis_uses_learned_scale_and_bias(siglip, pairs, tmp_path):
    visavis.train("clip/full", overrides=settings(siglip, pairs), out=tmp_path / "run")
    matcher = visavis.load(tmp_path / "run").matcher
    own = visavis.parse(visavis.papers_diagnose(tmp_path / "run").counts[0].objective)
    assert (own.scale, own.bias) == (
        pytest.approx(matcher.scale().item()),
        matcher.logit_bias.item(),
    )


def train_from(objective, folder, pairs, tmp_path, steps=100):
    """Mean loss of the last ten steps on one batch of 16 pairs, and the mean cosine."""
    overrides = settings(folder, pairs, objective) | {
        "phases.0.optimizer": {"name": "AdamW", "lr": 0.003, "layer_decay": 1.0}
    }
    trainer = Trainer(*prepare_training(read_recipe("clip/full", overrides)), RunFolder(tmp_path))
    trainer._begin_phase({})
    losses = []
    for epoch in range(1, steps + 1):
        (batch,) = trainer.train_loader.epoch(epoch)
        losses.append(trainer.train_step.backward(batch, trainer.supervision.targets))
        trainer.train_step.step(1.0)
    matcher = trainer.matcher.eval()
    with torch.no_grad():
        cosines = matcher.score(
            matcher.encode_visual(batch.visual), matcher.encode_text(batch.text)
        )
    return sum(losses[-10:]) / 10, cosines.mean().item()


def test_sigmoid_learns_from_right_start_only(dual_encoders, pairs, tmp_path):
    """A model whose scores only hold the share of positives has the loss 3.74. From the start of
    SigLIP's pretraining the loss falls below it. From scale 100 without a bias it stays there, and
    from scale 1 without a bias, as ``SiglipModel`` of transformers is initialized, images and texts
    move to opposite points.
    """
    share = 1 / 16
    uninformed = -math.log(share) - 15 * math.log(1 - share)
    start = {
        values: train_from(
            "Sigmoid(scale={}, bias={})".format(*values), dual_encoders / "siglip", pairs, tmp_path
        )
        for values in ((10, -10), (100, 0), (1, 0))
    }
    assert start[10, -10][0] < uninformed - 0.5
    assert start[100, 0][0] > uninformed - 0.4
    loss, cosine = start[1, 0]
    assert loss > uninformed and cosine < -0.9
