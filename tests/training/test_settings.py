"""Settings of optimizer and phases, each compared with a loop of ten steps in plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import visavis
from visavis.core.errors import RecipeError
from visavis.models.batch_encoding import device_of
from visavis.training.optimizer import WeightAverage, has_weight_decay, train_mode
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.settings import OptimizerSettings
from visavis.training.runs.run_folder import RunFolder
from visavis.training.train_step import check_phase
from visavis.training.trainer import Trainer
from visavis.training.training_run import prepare_training

transformers = pytest.importorskip("transformers")

STEPS = 10
RATE, DECAY = 1e-3, 0.5
CLIP = 0.01
EPS = 1e-4
"""Gradients that are 0 but for rounding, such as those of the biases of keys, move nothing."""
DEFAULT_RULES = OptimizerSettings().no_decay


def values(folder: Path, scenes: Path, **settings: object) -> dict[str, object]:
    """Overrides of ``clip/full``. ``__`` in a name stands for a dot."""
    return {
        "data.path": str(scenes),
        "visual.encoder": str(folder),
        "text.encoder": str(folder),
        "training.batch_size": 8,
        "training.captions_per_image": 1,
        "model.scale_bounds": [0.01, 100.0],
        "training.metric_batches": 1,
        "training.threads": 1,
        "training.clip_norm": CLIP,
        "epochs": 5,
        "phases.0.optimizer": {"name": "AdamW", "lr": RATE, "layer_decay": 1.0},
        "phases.0.optimizer.weight_decay": DECAY,
        "phases.0.optimizer.eps": EPS,
        **{name.replace("__", "."): value for name, value in settings.items()},
    }


@pytest.fixture
def trainer(dual_encoders, few_scenes, tmp_path):
    """Builds a trainer of the tiny CLIP at the start of its phase."""

    def build(variant: str = "full", **settings: object) -> Trainer:
        recipe = read_recipe(
            f"clip/{variant}", values(dual_encoders / "clip", few_scenes, **settings)
        )
        begun = Trainer(*prepare_training(recipe), RunFolder(tmp_path))
        begun._begin_phase({})
        return begun

    return build


def batches(trainer: Trainer):
    """The batches of ten steps."""
    for epoch in range(1, 1 + STEPS // trainer.train_loader.num_batches):
        yield from trainer.train_loader.epoch(epoch, device=device_of(trainer.matcher))


def trained(trainer: Trainer) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after ten steps, with the names of transformers, and gradient norms."""
    norms = []
    for batch in batches(trainer):
        trainer.train_step.backward(batch, trainer.supervision.targets)
        norms.append(trainer.train_step.step(1.0))
    return named_as_transformers(trainer.matcher.state_dict()), norms


def named_as_transformers(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("model.").replace("learned_scale.log", "logit_scale"): weight.clone()
        for name, weight in weights.items()
    }


class PlainLoop:
    """Ten steps of fine-tuning, written with transformers and torch alone."""

    def __init__(self, folder, batches, *, decayed, frozen=(), clip=CLIP, ema=0.0, **adamw):
        model = transformers.CLIPModel.from_pretrained(folder).train()
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            parameter.requires_grad = not name.startswith(tuple(frozen))
        with_decay = [p for name, p in parameters.items() if decayed(name, p) and p.requires_grad]
        without = [p for name, p in parameters.items() if not decayed(name, p) and p.requires_grad]
        optimizer = torch.optim.AdamW(
            [
                {"params": with_decay, "weight_decay": DECAY},
                {"params": without, "weight_decay": 0.0},
            ],
            lr=RATE,
            **{"eps": EPS} | adamw,
        )
        self.norms = []
        self.average = {name: p.detach().clone() for name, p in parameters.items()}
        for step, batch in enumerate(batches, 1):
            mask = None if batch.text.mask is None else batch.text.mask.long()
            images = model.get_image_features(batch.visual.vectors).pooler_output
            texts = model.get_text_features(batch.text.vectors, attention_mask=mask).pooler_output
            images, texts = (
                torch.nn.functional.normalize(each, dim=-1) for each in (images, texts)
            )
            logits = model.logit_scale.exp() * images @ texts.T
            labels = torch.arange(len(logits))
            cross_entropy = torch.nn.functional.cross_entropy
            loss = cross_entropy(logits, labels) + cross_entropy(logits.T, labels)
            optimizer.zero_grad()
            (loss / 2).backward()
            gradients = [p.grad for p in parameters.values() if p.grad is not None]
            norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
            self.norms.append(norm.item())
            for gradient in gradients:
                gradient *= min(1.0, clip / (norm + 1e-6)) if clip else 1.0
            optimizer.step()
            decay = min(ema, step / (step + 9))
            for name, parameter in parameters.items():
                self.average[name] = decay * self.average[name] + (1 - decay) * parameter.detach()
        self.weights = model.state_dict()


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """The rule of open_clip and timm for this model, written by hand."""
    return parameter.ndim >= 2 and "position_embedding" not in name


FROZEN = ("vision_model.embeddings", "vision_model.pre_layrnorm", "vision_model.encoder.layers.0.")
CASES = {
    "no_decay": ({}, {}),
    "no_decay all": (
        {"phases__0__optimizer__no_decay": []},
        {"decayed": lambda name, _: name != "logit_scale"},
    ),
    "no_decay pattern": (
        {"phases__0__optimizer__no_decay": ["*.token_embedding.*", "*.bias"]},
        {
            "decayed": lambda name, _: (
                not name.endswith("bias")
                and "token_embedding" not in name
                and name != "logit_scale"
            )
        },
    ),
    "betas": ({"phases__0__optimizer__betas": [0.8, 0.95]}, {"betas": (0.8, 0.95)}),
    "eps": ({"phases__0__optimizer__eps": 0.01}, {"eps": 0.01}),
    "no clipping": ({"training__clip_norm": 0.0}, {"clip": 0.0}),
    "frozen_layers": ({"phases__0__frozen_layers": {"visual": 1}}, {"frozen": FROZEN}),
    "all frozen": (
        {"phases__0__frozen_layers": {"visual": 2, "text": 2}},
        {"frozen": (*FROZEN, "vision_model.encoder", "text_model.e")},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_setting_gives_weights_of_plain_loop(case, trainer, dual_encoders):
    settings, plain = CASES[case]
    ours = trainer(**settings)
    loop = PlainLoop(dual_encoders / "clip", batches(ours), **{"decayed": is_decayed} | plain)
    weights, norms = trained(ours)
    largest = max(
        (weights[name] - expected).abs().max().item() for name, expected in loop.weights.items()
    )
    assert largest < 1e-6
    assert norms == pytest.approx(loop.norms, rel=1e-4)
    assert max(loop.norms) > 1.5 * CLIP or case != "no_decay", "the gradient is clipped"


def test_average_is_that_of_plain_loop(trainer, dual_encoders):
    ours = trainer(training__ema_decay=0.5)
    loop = PlainLoop(dual_encoders / "clip", batches(ours), decayed=is_decayed, ema=0.5)
    raw, _ = trained(ours)
    with ours.train_step.averaged_weights():
        average = named_as_transformers(ours.matcher.state_dict())
    for name, expected in loop.average.items():
        torch.testing.assert_close(average[name], expected, rtol=0, atol=1e-6)
    again = named_as_transformers(ours.matcher.state_dict())
    assert all(torch.equal(again[name], weight) for name, weight in raw.items())
    assert not torch.equal(average["logit_scale"], raw["logit_scale"])


def test_average_copies_counts_and_averages_batch_statistics():
    norm = torch.nn.BatchNorm1d(3)
    average, start = WeightAverage(norm, 0.75), norm.running_mean.clone()
    for step in range(1, 40):
        norm(torch.randn(8, 3))
        average.update()
        decay = min(0.75, step / (step + 9))
        start = decay * start + (1 - decay) * norm.running_mean
    torch.testing.assert_close(average.tensors["running_mean"], start)
    assert average.tensors["num_batches_tracked"] == 39


NAMES = {
    "vision_model.embeddings.position_embedding.weight": False,  # CLIP
    "embeddings.position_embeddings": False,  # ViT
    "trunk.pos_embed": False,  # timm
    "positional_embedding": False,  # open_clip
    "embeddings.cls_token": False,
    "class_embedding": False,
    "embeddings.register_tokens": False,
    "layers.0.attention.relative_position_bias_table": False,  # Swin
    "encoder.relative_attention_bias.weight": False,  # MPNet
    "embeddings.token_type_embeddings.weight": True,
    "token_embedding.weight": True,
    "classifier.weight": True,
    "head.probe": True,
    "layers.0.self_attn.in_proj_bias": False,
}


@pytest.mark.parametrize("name", NAMES)
def test_rules_of_no_decay_know_names_of_libraries(name):
    assert has_weight_decay(name, torch.zeros(2, 2), DEFAULT_RULES) == NAMES[name]
    assert not has_weight_decay(name, torch.zeros(2), DEFAULT_RULES)
    assert has_weight_decay(name, torch.zeros(2), [])


def test_frozen_layers_stay_in_evaluation_mode(trainer):
    model = trainer(phases__0__frozen_layers={"visual": 1, "text": 2}).matcher
    train_mode(model)
    vision, text = model.model.vision_model, model.model.text_model
    frozen = [vision.embeddings, vision.encoder.layers[0], text.embeddings, text.encoder]
    for module in frozen:
        assert not any(part.training for part in module.modules())
        assert not any(part.requires_grad for part in module.parameters())
    learned = [vision.encoder.layers[1], vision.post_layernorm, text.final_layer_norm]
    for module in learned:
        assert all(part.training for part in module.modules())
        assert all(part.requires_grad for part in module.parameters())


@pytest.mark.slow
def test_frozen_adapters_keep_layer_of_pretrained_model(trainer):
    pytest.importorskip("peft")
    ours = trainer("lora", phases__0__frozen_layers={"visual": 1})
    before = {name: weight.clone() for name, weight in ours.matcher.state_dict().items()}
    for batch in batches(ours):
        ours.train_step.backward(batch, ours.supervision.targets)
        ours.train_step.step(1.0)
    changed = {
        name
        for name, weight in ours.matcher.state_dict().items()
        if not torch.equal(weight, before[name])
    }
    assert not any("vision_model.encoder.layers.0." in name for name in changed)
    assert any("vision_model.encoder.layers.1." in name for name in changed)
    assert any("text_model.encoder.layers.0." in name for name in changed)


def test_frozen_layers_and_layer_decay_count_the_same_layers(trainer):
    settings = {"phases__0__optimizer__layer_decay": 0.5}
    rates = [
        {
            name: group["base_lr"]
            for group in trainer(**settings, **more).train_step.optimizer.param_groups
            for name in group["param_names"]
        }
        for more in ({}, {"phases__0__frozen_layers": {"visual": 1}})
    ]
    assert set(rates[0]) - set(rates[1]) == {
        name for name in rates[0] if name.removeprefix("model.").startswith(FROZEN)
    }
    assert all(rates[0][name] == rate for name, rate in rates[1].items())


ERRORS = {
    "frozen_layers: expected at most 2 layers of visual, as many as CLIP has, got 3. Lower it.": {
        "phases__0__frozen_layers": {"visual": 3}
    },
    "frozen_layers: expected at most 0 layers of scale, as many as CLIP has, got 1. Remove it": {
        "phases__0__frozen_layers": {"scale": 1}
    },
    "frozen_layers: vision is not a part of CLIP": {"phases__0__frozen_layers": {"vision": 1}},
    "which matches none: did you mean biases_and_norms?": {
        "phases__0__optimizer__no_decay": ["bias_and_norms"]
    },
    "got '*.position_embeding.*', which matches none: ": {
        "phases__0__optimizer__no_decay": ["*.position_embeding.*"]
    },
    "optimizer.betas: expected two numbers, got [0.9]": {"phases__0__optimizer__betas": [0.9]},
    "phases.0.optimizer.betas.1: expected": {"phases__0__optimizer__betas": [0.9, 1.0]},
    "phases.0.optimizer.eps: expected": {"phases__0__optimizer__eps": -1e-8},
    "optimizer.betas, optimizer.eps: expected none with SGD": {
        "phases__0__optimizer": {"name": "SGD", "eps": 1e-8}
    },
    "training.ema_decay: expected": {"training__ema_decay": 1.0},
    "training.ema_decay: expected 0 with NoisySupervision": {
        "training__ema_decay": 0.9,
        "objective": "NCR()",
        "phases__0__supervision": "NoisySupervision()",
    },
}


@pytest.mark.parametrize("message", ERRORS)
def test_setting_without_effect_is_rejected(message, dual_encoders, few_scenes):
    with pytest.raises(RecipeError) as refused:
        given = values(dual_encoders / "clip", few_scenes, **ERRORS[message])
        recipe = read_recipe("clip/full", given)
        check_phase(prepare_training(recipe)[1], recipe.phases[0])
    assert message in str(refused.value)


@pytest.mark.slow
def test_run_keeps_averaged_weights_and_logs_raw_ones(recipe, scenes, listener, tmp_path):
    overrides = {"training.ema_decay": 0.9}
    run = visavis.train(
        recipe, data=scenes, out=tmp_path / "run", overrides=overrides, progress=listener
    )
    log = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    best = max(log, key=lambda row: row["rsum"])
    assert run.validation_rsum == best["rsum"]
    assert run.raw_validation_rsum == max(row["raw_weights"]["rsum"] for row in log)
    assert run.to_json()["raw_validation_rsum"] == run.raw_validation_rsum
    assert log[0]["raw_weights"]["rsum"] == log[0]["rsum"]
    assert any(row["raw_weights"] != {key: row[key] for key in row["raw_weights"]} for row in log)
    assert visavis.evaluate(tmp_path / "run", split="val").metrics["rsum"] == pytest.approx(
        best["rsum"]
    )
    (kept,) = (message for message in listener.messages if "Kept the averaged" in message)
    assert f"of step {run.best_step}, the best of {len(log)} validations" in kept
    norms = [
        (row["health"]["gradient_norm"], row["health"]["gradient_norm_max"]) for row in log[1:]
    ]
    assert all(0 < mean <= largest for mean, largest in norms)


@pytest.mark.slow
def test_run_with_average_and_frozen_layers_resumes_exactly(
    dual_encoders, few_scenes, outcome, in_pieces, tmp_path
):
    overrides = values(
        dual_encoders / "clip",
        few_scenes,
        training__ema_decay=0.8,
        training__checkpoint_s=0.0,
        phases__0__frozen_layers={"visual": 1},
        epochs=2,
    )
    visavis.train("clip/full", out=tmp_path / "whole", overrides=overrides)
    assert in_pieces("clip/full", tmp_path / "run", longest=1, overrides=overrides) >= 2
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    last = max((tmp_path / "run/checkpoint").glob("step-*"))
    average, raw = (load_file(last / f"{name}weights.safetensors") for name in ("averaged_", ""))
    assert average.keys() == raw.keys()
    name = "model.text_projection.weight"
    assert not torch.equal(average[name], raw[name])
