"""A score without a declared cost: within memory, with the same values."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from visavis.core.blocking import measure_score_cost
from visavis.core.encoded import Encoded
from visavis.losses.pair_loss import PairLoss
from visavis.losses.targets import Targets
from visavis.objectives import CATALOG

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "attention.py"
spec = importlib.util.spec_from_file_location("attention", SCRIPT)
attention = importlib.util.module_from_spec(spec)
sys.modules["attention"] = attention
spec.loader.exec_module(attention)


def encoded(images: int, captions: int, width: int = 8):
    matcher, visual, text = attention.model_and_items(images, captions, width)
    with torch.no_grad():
        return matcher, matcher.encode_visual(visual), matcher.encode_text(text)


@pytest.fixture
def watched(monkeypatch):
    """Record the number of pairs of every block that is scored."""
    pairs = []
    score = attention.WordAttention.score

    def seen(self, visual, text):
        pairs.append(len(visual) * len(text))
        return score(self, visual, text)

    monkeypatch.setattr(attention.WordAttention, "score", seen)
    return pairs


def test_ranks_within_memory_match_one_block(watched):
    matcher, visual, text = encoded(20, 5)
    pair = measure_score_cost(matcher.score, visual, text, training=False).pair_bytes
    expected = attention.ranking(matcher, visual, text, attention.UNLIMITED)
    assert max(watched) == 20 * 100
    watched.clear()
    found = attention.ranking(matcher, visual, text, "4MB")
    assert max(watched) * pair < 4e6
    assert expected["image_ranks"].max() > 1
    for name, ranks in expected.items():
        np.testing.assert_array_equal(found[name], ranks)


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_step_within_memory_matches_whole_matrix(kind, watched):
    matcher, visual, text = (part.to(torch.float64) for part in encoded(24, 1))
    annotations = {
        name: torch.rand(24, 24, dtype=torch.float64)
        for name in ("relevance", "weight", "pair_margin")
    }
    annotations |= {
        f"{side}_margin": torch.rand(24, dtype=torch.float64) for side in ("query", "candidate")
    }
    annotations |= {
        f"{side}_offline_scores": torch.rand(24, 2, dtype=torch.float64)
        for side in ("query", "candidate")
    }
    targets = Targets.paired(24, **annotations)
    results = []
    for memory in (attention.UNLIMITED, "6MB"):
        watched.clear()
        leaves = [
            visual.vectors.clone().requires_grad_(),
            text.vectors.clone().requires_grad_(),
            matcher.inverse_temperature,
        ]
        items = (
            Encoded(leaf, part.mask) for leaf, part in zip(leaves, (visual, text), strict=False)
        )
        loss = PairLoss(kind(), score=matcher.score, memory=memory)(*items, targets=targets)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
        assert (max(watched) == 24 * 24) == (memory == attention.UNLIMITED)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.long
@pytest.mark.parametrize(("job", "images"), [("ranking", 1000), ("step", 256)])
def test_fresh_process_stays_within_memory(job, images, tmp_path):
    options = [
        "--job",
        job,
        "--images",
        str(images),
        "--memory",
        "1GB",
        "--out",
        str(tmp_path / "found.npz"),
    ]
    result = json.loads(
        subprocess.run(
            [sys.executable, SCRIPT, *options], check=True, capture_output=True, text=True
        ).stdout
    )
    assert result["bytes"] <= 1e9
