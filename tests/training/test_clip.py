"""Fine-tuning of CLIP: every variant of the recipe ``clip`` resumes exactly, loads, and runs every
command.
"""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, RecipeError, RunError, SpecError
from visavis.data.synthetic import write_synthetic_scenes
from visavis.models.clip.model import CLIP, export_to_transformers
from visavis.objectives import InfoNCE
from visavis.training.fine_tuned_models import interpolate_weights, smallest_alpha
from visavis.training.optimizer import layer_heights, make_optimizer
from visavis.training.recipes.files import read_recipe, read_recipe_file
from visavis.training.recipes.settings import Phase

pytest.importorskip("transformers")

HAS_PEFT = importlib.util.find_spec("peft") is not None
adapters = pytest.mark.skipif(not HAS_PEFT, reason="needs peft")
DAILY = ("linear", "lora", "wise")
"""Variants of the daily suite: trained heads, adapters, and all weights with interpolation."""
VARIANTS = [
    pytest.param(
        row,
        marks=[
            *([adapters] if read_recipe(f"clip/{row}").model.get("lora_rank") else []),
            *([] if row in DAILY else [pytest.mark.long]),
        ],
    )
    for row in read_recipe_file("clip").variants
]


@pytest.fixture(scope="module")
def small(dual_encoders, few_scenes):
    """Overrides for small variants: a tiny model, few images, few and large steps."""
    encoder = str(dual_encoders / "clip")
    sizes = {
        "training.batch_size": 8,
        "epochs": 2,
        "training.checkpoint_s": 1e6,
        "training.threads": 1,
        "phases.0.optimizer.lr": 0.01,
    }
    return {
        "data.path": str(few_scenes),
        "visual.encoder": encoder,
        "text.encoder": encoder,
        **sizes,
    }


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_resumes_loads_and_runs_every_command(
    variant, small, few_scenes, in_pieces, outcome, tmp_path
):
    whole = visavis.train(f"clip/{variant}", overrides=small, out=tmp_path / "whole")
    assert in_pieces(f"clip/{variant}", tmp_path / "pieces", overrides=small) >= 2
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")
    assert whole.best_step >= 0
    assert visavis.evaluate(tmp_path / "whole").metrics == whole.test.metrics
    # The other variants save models of the same two kinds: with adapters, and with all weights.
    if variant in ("lora", "wise"):
        assert (
            visavis.evaluate(tmp_path / "whole", split="val").metrics["rsum"]
            == whole.validation_rsum
        )
        assert (
            len(visavis.search(tmp_path / "whole", "a red circle", collection=few_scenes, top=3))
            == 3
        )
        assert visavis.papers_diagnose(tmp_path / "whole").counts[0].objective
    model = visavis.load(tmp_path / "whole")
    torch.testing.assert_close(model.encode_texts(["a red circle"]).norm(dim=1), torch.ones(1))


def test_training_with_other_image_size_prints_sizes(small, listener, tmp_path):
    visavis.train(
        "clip/full",
        overrides=small | {"visual.image_size": 64, "epochs": 1},
        out=tmp_path / "run",
        progress=listener,
    )
    notes = [text for text in listener.messages if "interpolated" in text]
    assert len(notes) == 1 and "32 x 32" in notes[0] and "64 x 64" in notes[0]
    assert visavis.load(tmp_path / "run").processor.preprocess.preprocessing.resize == (64, 64)
    assert visavis.evaluate(tmp_path / "run").metrics


def matcher(dual_encoders, kind="clip", **fields):
    width = {"clip": 10, "siglip": 16}[kind]
    return CLIP(
        CLIP.Config(
            backbone=str(dual_encoders / kind), visual_input_dim=width, text_input_dim=14, **fields
        )
    )


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_early_layers_learn_at_lower_rates(dual_encoders, kind):
    phase = Phase(
        epochs=1,
        objective="InfoNCE()",
        optimizer={"lr": 1.0, "layer_decay": 0.5, "lr_multipliers": {"text": 3.0}},
    )
    groups = make_optimizer(matcher(dual_encoders, kind), phase).param_groups
    rates = {
        name.removeprefix("model."): group["base_lr"]
        for group in groups
        for name in group["param_names"]
    }
    assert rates["vision_model.embeddings.patch_embedding.weight"] == 0.125
    assert rates["vision_model.encoder.layers.0.mlp.fc1.weight"] == 0.25
    assert rates["vision_model.encoder.layers.1.self_attn.q_proj.bias"] == 0.5
    assert rates["vision_model.post_layernorm.weight"] == 1
    assert rates["text_model.embeddings.token_embedding.weight"] == 0.375
    assert rates["text_model.encoder.layers.0.mlp.fc1.weight"] == 0.75


def test_parameters_between_layer_lists_join_previous_list():
    names = [
        "class",
        "trunk.layers.0.w",
        "trunk.layers.1.w",
        "trunk.norm",
        "head.0.w",
        "head.2.w",
        "projection",
    ]
    assert layer_heights(names) == ([0, 1, 2, 2, 3, 4, 5], 4)
    assert layer_heights(["a", "b.weight"]) == ([1, 1], 0)


def test_scale_starts_at_pretrained_value_within_bounds(dual_encoders, small, tmp_path):
    start = matcher(dual_encoders, scale="learned").scale
    pretrained = load_file(dual_encoders / "clip" / "model.safetensors")["logit_scale"].exp().item()
    assert start().item() == pytest.approx(pretrained)
    assert start.bounds == (min(1.0, pretrained), 100.0)
    assert matcher(dual_encoders).scale is None
    # Any step leaves the bounds.
    bounded = small | {
        "model.scale_bounds": [0.5, 200.0],
        "phases.0.optimizer.lr_multipliers": {"scale": 1e5},
    }
    visavis.train("clip/full", overrides=bounded, out=tmp_path / "run")
    learned = visavis.load(tmp_path / "run").matcher.scale().item()
    log = [
        json.loads(line)["health"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert ["temperature" in health["alerts"] for health in log] == [False, True, True]
    assert {health["scale"] for health in log[1:]} <= {0.5, 200.0}
    assert learned in [pytest.approx(health["scale"]) for health in log]
    (own, *_) = visavis.papers_diagnose(tmp_path / "run").counts
    assert own.objective == repr(InfoNCE(tau=round(1 / learned, 6)))


def test_scale_has_no_weight_decay(dual_encoders):
    phase = Phase(epochs=1, objective="InfoNCE()", optimizer={"weight_decay": 0.1})
    groups = make_optimizer(matcher(dual_encoders, scale="learned"), phase).param_groups
    assert {group["weight_decay"] for group in groups if group["part"] == "scale"} == {0.0}


def test_fixed_margin_objective_has_no_scale(small, tmp_path):
    with pytest.raises(
        RecipeError,
        match=r"expected an objective without a fixed gamma or margin, because CLIP learns a scale, got Unified\(.*\)\. Use",
    ):
        visavis.train(
            "clip/full", overrides=small | {"objective": "Unified()"}, out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        RecipeError,
        match=r"scale_bounds: expected two numbers above 0, the smaller one first, got \(3\.0, 2\.0\)",
    ):
        visavis.train(
            "clip/full", overrides=small | {"model.scale_bounds": [3, 2]}, out=tmp_path / "run"
        )


@adapters
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_adapters_start_neutral_and_alone_are_trained(dual_encoders, kind, tmp_path):
    plain, adapted = (
        matcher(dual_encoders, kind),
        matcher(dual_encoders, kind, lora_rank=2, lora_layers=["q_proj", "out_proj"]),
    )
    pixels, texts = Encoded(torch.randn(2, 3, 32, 32)), Encoded(torch.tensor([[2, 5, 3]]))
    added = [weight for name, weight in adapted.named_parameters() if "lora_B" in name]
    assert added and not any(
        weight.any() for weight in added
    )  # The initial update is exactly zero.
    close = (
        torch.testing.assert_close
    )  # Equal up to rounding: wrapped attention layers use another code path in torch.
    close(adapted.encode_visual(pixels).vectors, plain.encode_visual(pixels).vectors)
    close(adapted.encode_text(texts).vectors, plain.encode_text(texts).vectors)
    by_part = adapted.parameters_by_part()
    names = {name for part in ("visual", "text") for name, _ in by_part[part]}
    assert names == set(adapted.state_dict()) == {name for name, _ in adapted.named_parameters()}
    assert len(names) == 2 * 2 * 2 * 2, (
        "two matrices, of two kinds of layers, in two layers, of two encoders"
    )
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    adapted.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == names


@adapters
def test_adapters_need_weights_they_were_trained_on(dual_encoders, small, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(dual_encoders / "clip", base)
    own = {"visual.encoder": str(base), "text.encoder": str(base)}
    visavis.train("clip/lora", overrides=small | own, out=tmp_path / "run")
    weights = load_file(base / "model.safetensors")
    save_file(
        {name: weight * 1.01 for name, weight in weights.items()},
        base / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        DataError,
        match=r"^\S*base: expected weights \w{16}, which these adapters belong to, got \w{16}",
    ):
        visavis.load(tmp_path / "run")
    shutil.rmtree(base)
    with pytest.raises(
        DataError,
        match=r"^These adapters need their pretrained model \S*base\. \S*base: expected a folder",
    ):
        visavis.load(tmp_path / "run")


def test_full_finetuning_needs_no_pretrained_folder(dual_encoders, small, few_scenes, tmp_path):
    base, run = tmp_path / "base", tmp_path / "moved"
    shutil.copytree(dual_encoders / "clip", base)
    own = {"visual.encoder": str(base), "text.encoder": str(base), "epochs": 1}
    expected = visavis.train("clip/full", overrides=small | own, out=tmp_path / "run").test
    found = visavis.search(tmp_path / "run", "a red circle", collection=few_scenes, top=3)
    shutil.rmtree(base)
    (tmp_path / "run").rename(run)
    assert visavis.evaluate(run).metrics == expected.metrics
    assert visavis.search(run, "a red circle", collection=few_scenes, top=3) == found
    assert (
        visavis.load(export_to_transformers(visavis.load(run).matcher, tmp_path / "exported"))
        .encode_texts(["a red circle"])
        .isfinite()
        .all()
    )
    with pytest.raises(DataError, match=r"^\S*base: expected a folder with a config\.json"):
        visavis.evaluate(run, pretrained=True)


@adapters
def test_missing_layers_are_reported(dual_encoders):
    with pytest.raises(
        SpecError,
        match=r"lora_layers: expected endings of linear layers of CLIPModel, got 'q_prj': did you mean q_proj\?",
    ):
        matcher(dual_encoders, lora_rank=2, lora_layers=["v_proj", "q_prj"])


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.matcher.state_dict().items()}


@pytest.mark.slow
def test_interpolation_alpha_is_chosen_by_validation(dual_encoders, small, listener, tmp_path):
    alphas = small | {
        "interpolation.alphas": [0.25, 0.5, 1.0],
        "interpolation.min_gain_ratio": 1e-6,
    }
    result = visavis.train("clip/wise", overrides=alphas, out=tmp_path / "run", progress=listener)
    visavis.train("clip/full", overrides=small, out=tmp_path / "full")
    start = weights_of(visavis.load(dual_encoders / "clip"))
    full, own = (
        weights_of(visavis.load(tmp_path / "full")),
        weights_of(visavis.load(tmp_path / "run")),
    )
    chosen = result.interpolation
    assert set(chosen.rsum) == {0.25, 0.5, 1.0}
    assert chosen.rsum[chosen.alpha] == result.validation_rsum
    assert chosen.alpha == smallest_alpha(chosen.start_rsum, chosen.rsum, 1e-6)
    assert (
        json.loads((tmp_path / "run" / "result.json").read_text())["interpolation"]["alpha"]
        == chosen.alpha
    )
    assert [
        sentence
        for sentence in listener.messages
        if sentence.startswith(f"Interpolated weights with alpha {chosen.alpha:g}: ")
    ]
    for name, weight in start.items():
        torch.testing.assert_close(
            own[name], (1 - chosen.alpha) * weight + chosen.alpha * full[name]
        )
    record = json.loads((tmp_path / "run" / "environment.json").read_text())
    (tmp_path / "run" / "environment.json").write_text(
        json.dumps(record | {"initial_weights_checksum": "0" * 16})
    )
    with pytest.raises(RunError, match="initial weights could not be reproduced"):
        visavis.train(resume=tmp_path / "run")


@adapters
def test_interpolated_adapters_scale_whole_update(dual_encoders):
    model = matcher(dual_encoders, lora_rank=2)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    end = {name: tensor + torch.rand_like(tensor) for name, tensor in start.items()}
    layer = model.model.text_model.encoder.layers[0].self_attn.q_proj
    updates = {}
    for alpha in (0, 0.5, 1):
        model.load_state_dict(interpolate_weights(start, end, alpha))
        updates[alpha] = layer.get_delta_weight("default")
    assert updates[1].abs().max() > 0
    torch.testing.assert_close(updates[0.5], updates[1] / 2)
    assert not updates[0].any()


def test_smallest_of_equal_alphas_is_chosen():
    assert smallest_alpha(100.0, {0.2: 99.0, 0.4: 99.0, 1.0: 50.0}, 0.9) == 0.2
    assert smallest_alpha(100.0, {0.2: 150.0, 0.4: 199.0, 1.0: 200.0}, 1.0) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["linear", "full"])
def test_forgetting_is_measured_on_other_data(variant, dual_encoders, small, listener, tmp_path):
    other = write_synthetic_scenes(
        tmp_path / "other",
        num_train=0,
        num_val=0,
        num_test=12,
        captions_per_image=1,
        size=32,
        seed=7,
    )
    result = visavis.train(
        f"clip/{variant}",
        overrides=small | {"evaluation.forgetting": str(other)},
        out=tmp_path / "run",
        progress=listener,
    )
    forgetting = result.forgetting
    evaluated = visavis.evaluate(tmp_path / "run", data=other, pretrained=True)
    assert (evaluated.metrics, evaluated.pretrained.metrics) == (
        forgetting.after.metrics,
        forgetting.before.metrics,
    )
    assert evaluated.to_json()["pretrained"]["rsum"] == forgetting.before.metrics["rsum"]
    assert forgetting.before.metrics == visavis.evaluate(dual_encoders / "clip", data=other).metrics
    assert forgetting.after.metrics == visavis.evaluate(tmp_path / "run", data=other).metrics
    assert (
        json.loads((tmp_path / "run" / "result.json").read_text())["forgetting"]["after"]["rsum"]
        == forgetting.after.metrics["rsum"]
    )
    assert any(
        "other, pretrained -> fine-tuned: RSUM" in sentence for sentence in listener.messages
    )


def test_forgetting_skips_broken_images(small, tmp_path):
    other = write_synthetic_scenes(
        tmp_path / "other",
        num_train=0,
        num_val=0,
        num_test=12,
        captions_per_image=1,
        size=32,
        seed=7,
    )
    (other / "images" / "000000.png").write_bytes(b"not an image")
    overrides = small | {"evaluation.forgetting": str(other), "data.skip_bad": True}
    forgetting = visavis.train("clip/linear", overrides=overrides, out=tmp_path / "run").forgetting
    assert (forgetting.before.num_images, forgetting.after.num_images) == (11, 11)


def test_invalid_forgetting_data_are_rejected_early(small, few_scenes, tmp_path):
    with pytest.raises(
        RecipeError,
        match=r"^evaluation\.forgetting: expected the same pretrained CLIP or SigLIP model .*, got scenes and vocabulary\.",
    ):
        visavis.train(
            "demo",
            data=few_scenes,
            overrides={"evaluation.forgetting": str(few_scenes)},
            out=tmp_path / "run",
        )
    with pytest.raises(DataError, match="gone"):
        visavis.train(
            "clip/full",
            overrides=small | {"evaluation.forgetting": str(tmp_path / "gone")},
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rank", [pytest.param(2, marks=adapters), 0])
def test_trained_model_exports_as_transformers_folder(rank, dual_encoders, tmp_path):
    trained = matcher(dual_encoders, lora_rank=rank, scale="learned")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.full_like(parameter, 0.1))
    again = visavis.load(export_to_transformers(trained, tmp_path / "exported")).matcher
    items = Encoded(torch.tensor([[2, 5, 8, 3]]))
    torch.testing.assert_close(
        again.encode_text(items).vectors, trained.eval().encode_text(items).vectors
    )
    assert not torch.allclose(
        again.encode_text(items).vectors,
        matcher(dual_encoders).encode_text(items).vectors,
        atol=1e-3,
    )
    scale = load_file(tmp_path / "exported" / "model.safetensors")["logit_scale"]
    assert scale.exp().item() == pytest.approx(trained.scale().item())


def test_only_runs_of_pretrained_models_have_base(few_scenes, tmp_path):
    visavis.train(
        "demo",
        data=few_scenes,
        overrides={"epochs": 1, "training.batch_size": 16},
        out=tmp_path / "run",
    )
    with pytest.raises(
        RunError,
        match=r"run: expected runs that fine-tune one and the same CLIP or SigLIP model, got runs of .+\. Remove --pretrained\.",
    ):
        visavis.evaluate(tmp_path / "run", pretrained=True)
