"""Apple GPUs: the choice of the device, and training, evaluation and encoding on a stand-in."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests.fake_gpu import fake_apple_gpu

import visavis
from visavis import PairLoss, Targets
from visavis.core.errors import RecipeError
from visavis.core.memory_budget import free_bytes
from visavis.core.process_group import ProcessGroup
from visavis.data.workers import choose_readers
from visavis.evaluation.metrics.graded_metrics import ndcg
from visavis.evaluation.metrics.ranking import best_ranks, mean_rank
from visavis.models.device import autocast_context, choose_device, has_native_bfloat16
from visavis.models.layers import Whitening
from visavis.objectives import Unified
from visavis.training.processes import check_processes
from visavis.training.recipes.files import read_recipe

# The stand-in turns a norm of torch into an older form of it.
pytestmark = pytest.mark.filterwarnings("ignore:at..frobenius_norm is deprecated")


def test_device_default_is_apple_gpu_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device() == choose_device("auto") == torch.device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device() == torch.device("cuda")


def test_device_properties_of_apple_gpu():
    with fake_apple_gpu():
        mps = choose_device("mps")
        assert not has_native_bfloat16(mps)
        assert free_bytes(mps) == 7 * 2**30
        assert choose_readers(0, mps, 1000) == 0
        for setting, dtype in ((True, torch.bfloat16), ("float16", torch.float16)):
            context = autocast_context(mps, setting)
            assert (context.device, context.fast_dtype, context._enabled) == ("mps", dtype, True)
        assert not autocast_context(mps, "auto")._enabled


def test_several_processes_reject_apple_gpu():
    with fake_apple_gpu():
        group = ProcessGroup(torch.device("cpu"), distributed_group=False)
        group.world_size = 2
        with pytest.raises(RecipeError, match=r'got mps\. .*training\.device = "cpu"'):
            check_processes(read_recipe("clip/full", {}), group)


@pytest.mark.parametrize("block_rows", [None, 2])
def test_loss_on_apple_gpu_equals_cpu(block_rows, generator):
    images, texts = torch.randn(2, 6, 8, generator=generator)
    expected = images.clone().requires_grad_()
    loss = PairLoss(Unified(), block_rows=block_rows)
    value = loss(expected, texts)
    value.backward()
    with fake_apple_gpu():
        leaf = images.to("mps").requires_grad_()
        on_gpu = loss(leaf, texts.to("mps"))
        on_gpu.backward()
        assert leaf.grad.device.type == "mps"
        assert on_gpu.item() == value.item()
        assert torch.equal(leaf.grad.cpu(), expected.grad)


def test_metrics_of_apple_gpu_equal_cpu(generator):
    scores, relevance = torch.rand(2, 6, 6, generator=generator)
    targets, features = Targets.paired(6), torch.randn(30, 4, generator=generator)
    ranks, gains, whitening = best_ranks(scores, targets), ndcg(scores, relevance), Whitening(4)
    whitening.fit(features)
    with fake_apple_gpu():
        on_gpu = scores.to("mps")
        with pytest.raises(TypeError, match="float64"):
            on_gpu.double()
        assert torch.equal(best_ranks(on_gpu, targets), ranks)
        assert torch.equal(ndcg(on_gpu, relevance.to("mps")), gains)
        assert mean_rank(ranks.to("mps")) == mean_rank(ranks)
        other = Whitening(4).to("mps")
        other.fit(features.to("mps"))
        assert torch.equal(other.matrix.cpu(), whitening.matrix)


@pytest.mark.slow
def test_training_on_apple_gpu_equals_cpu(scenes, recipe, tmp_path):
    settings = {"training.batches_per_epoch": 4, "model.dropout": 0.0}
    logs = []
    all_vectors = []
    for device in ("cpu", "auto"):
        with fake_apple_gpu():
            visavis.train(
                recipe,
                data=scenes,
                out=tmp_path / device,
                overrides=settings | {"training.device": device},
            )
            model = visavis.load(tmp_path / device, device=device)
            vectors = np.asarray(model.encode_texts(["a red circle", "two stars"]))
        lines = (tmp_path / device / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        logs.append([{**json.loads(line), "time": None} for line in lines])
        all_vectors.append(vectors)
    assert logs[0] == logs[1]
    # Vectors are normalized by other operations there.
    np.testing.assert_allclose(*all_vectors, rtol=0, atol=1e-6)
    record = json.loads((tmp_path / "auto" / "environment.json").read_text(encoding="utf-8"))
    assert record["cuda"] == "mps"
