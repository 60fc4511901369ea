"""Training step: encoding in chunks, float16 with scaled gradients, activation checkpointing and
compilation.
"""

from __future__ import annotations

import os
import shutil
import signal
from copy import deepcopy
from functools import partial

import pytest
import torch
from tests.platforms import posix

import visavis
from visavis.core.errors import RecipeError
from visavis.core.progress import NoProgress
from visavis.models.batch_encoding import device_of
from visavis.training.encoder_blocks import encoder_blocks
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped
from visavis.training.trainer import Trainer
from visavis.training.training_run import prepare_training


@pytest.fixture
def clip(dual_encoders, few_scenes):
    """Builds a trainer of the tiny CLIP, with further settings."""
    encoder = str(dual_encoders / "clip")
    small = {
        "data.path": str(few_scenes),
        "visual.encoder": encoder,
        "text.encoder": encoder,
        "training.batch_size": 16,
    }

    def build(folder, **settings) -> Trainer:
        values = small | {f"training.{name}": value for name, value in settings.items()}
        trainer = Trainer(*prepare_training(read_recipe("clip/full", values)), RunFolder(folder))
        trainer._begin_phase({})
        return trainer

    return build


def gradients(trainer: Trainer) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    batch = next(iter(trainer.train_loader.epoch(1)))
    value = trainer.train_step.backward(
        batch.to(device_of(trainer.matcher)), trainer.supervision.targets
    )
    return value, {
        name: part.grad
        for name, part in trainer.matcher.named_parameters()
        if part.grad is not None
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"chunk_size": 3},
        {"activation_checkpointing": True},
        {"chunk_size": 5, "activation_checkpointing": True},
    ],
)
def test_memory_settings_do_not_change_loss_and_gradients(clip, tmp_path, settings):
    value, parts = gradients(clip(tmp_path / "whole"))
    saved_value, saved_parts = gradients(clip(tmp_path / "saved", **settings))
    assert saved_value == pytest.approx(value, rel=1e-6)
    assert parts.keys() == saved_parts.keys()
    for name, part in parts.items():
        torch.testing.assert_close(saved_parts[name], part, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
# Dynamo reads the gradient of intermediate tensors.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_blocks_do_not_change_loss_and_gradients(clip, tmp_path):
    value, parts = gradients(clip(tmp_path / "whole"))
    compiled_value, compiled_parts = gradients(
        clip(tmp_path / "compiled", compile=True, activation_checkpointing=True, chunk_size=4)
    )
    assert compiled_value == pytest.approx(value, rel=1e-5)
    for name, part in parts.items():
        torch.testing.assert_close(compiled_parts[name], part, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.slow
def test_only_training_is_compiled(clip, tmp_path, monkeypatch):
    """Blocks of images and of captions have a version each, and captions of other lengths one more.
    torch compiles at most 8.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    trainer = clip(tmp_path / "run", compile=True)
    trainer.start()
    trainer._validate()
    assert not counters["stats"]
    trainer._train_to_validation()
    assert 2 <= counters["stats"]["unique_graphs"] <= 3


def test_copied_blocks_are_compiled_with_their_own_weights(clip, tmp_path, monkeypatch):
    """fsdp trains a copy of the model. A block whose weights are zero passes on its input."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    matcher = clip(tmp_path / "run", compile=True).matcher.train()
    copied = deepcopy(matcher)
    original, block = encoder_blocks(matcher)[0], encoder_blocks(copied)[0]
    for parameter in block.parameters():
        parameter.data.zero_()
    items = torch.randn(2, 3, block.layer_norm1.normalized_shape[0], device=device_of(matcher))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(block(items, attention_mask=None), items)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not torch.equal(original(items, attention_mask=None), items)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [{}, {"chunk_size": 5, "activation_checkpointing": True}, {"compile": True}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_loss_and_gradients_on_gpu_are_those_on_cpu(clip, tmp_path, settings, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    value, parts = gradients(clip(tmp_path / "cpu", device="cpu"))
    gpu_value, gpu_parts = gradients(clip(tmp_path / "gpu", device="cuda", **settings))
    assert gpu_value == pytest.approx(value, rel=1e-5)
    for name, part in parts.items():
        torch.testing.assert_close(gpu_parts[name].cpu(), part, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True, "float16"])
def test_run_on_gpu_resumes_exactly(recipe, scenes, tmp_path, autocast, stop_at, outcome):
    values = {"data.path": str(scenes), "training.device": "cuda", "training.autocast": autocast}
    whole = visavis.train(str(recipe), overrides=values, out=tmp_path / "whole")
    with pytest.raises(Stopped):
        visavis.train(str(recipe), overrides=values, out=tmp_path / "stopped", progress=stop_at(8))
    assert outcome(visavis.train(resume=tmp_path / "stopped").run) == outcome(whole.run)


def test_chunks_hold_the_activations_of_one_chunk(clip, tmp_path):
    """Tensors that the graph of a step keeps for its backward pass, in numbers."""

    def kept(trainer: Trainer) -> int:
        batch, count = next(iter(trainer.train_loader.epoch(1))), [0]

        def count_and_keep(tensor: torch.Tensor) -> torch.Tensor:
            count[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count_and_keep, lambda tensor: tensor):
            trainer.train_step.module(batch, trainer.supervision.targets)
        return count[0]

    assert kept(clip(tmp_path / "chunks", chunk_size=2)) < kept(clip(tmp_path / "whole")) / 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_size": 4}, r"training\.chunk_size: expected 0, got 4\. VSE\+\+ has batch norm"),
        ({"compile": True}, r"training\.compile: expected an encoder with a list of blocks"),
        (
            {"activation_checkpointing": True},
            r"training\.activation_checkpointing: expected an encoder with a list of blocks",
        ),
    ],
)
def test_settings_without_effect_are_refused(few_scenes, tmp_path, settings, message):
    values = {
        "data.path": str(few_scenes),
        **{f"training.{name}": value for name, value in settings.items()},
    }
    with pytest.raises(RecipeError, match=message):
        Trainer(
            *prepare_training(read_recipe("photos/pixels-words", values)),
            RunFolder(tmp_path),
        )


def test_encoder_blocks_are_the_outer_layers(clip, tmp_path):
    blocks = encoder_blocks(clip(tmp_path).matcher)
    assert [type(block).__name__ for block in blocks] == ["CLIPEncoderLayer"] * 4


@posix
@pytest.mark.slow
def test_float16_resumes_with_its_gradient_scale(recipe, scenes, tmp_path):
    """The scale halves at each step whose gradient overflows, so it is part of the state."""
    values = {"data.path": str(scenes), "training.autocast": "float16", "training.threads": 1}
    whole = visavis.train(str(recipe), overrides=values, out=tmp_path / "whole")

    class StopAfterFiveSteps(NoProgress):
        def training_step(self, step):
            if step.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        visavis.train(
            str(recipe), overrides=values, out=tmp_path / "pieces", progress=StopAfterFiveSteps()
        )
    pieces = visavis.train(resume=tmp_path / "pieces")
    assert pieces.test.metrics == whole.test.metrics
    states = [
        Trainer(
            *prepare_training(read_recipe(str(recipe), values)),
            RunFolder(tmp_path / name),
        )
        for name in ("whole", "pieces")
    ]
    assert all(state.resume() for state in states)
    first, second = (state.state.scaler for state in states)
    assert first == second
    assert first["scale"] > 0
