"""Replay of analysis entries from names and parameters."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

TOOL = Path(__file__).resolve().parents[2] / "tools" / "golden_analysis.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_analysis", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sides(images: int, texts: int | None = None, width: int = 8) -> dict[str, np.ndarray]:
    return {
        name: normalize(torch.randn(n, width, dtype=torch.float64), dim=1).numpy()
        for name, n in (("img", images), ("txt", texts or images))
    }


def replay(
    tool: ModuleType, inputs: dict[str, np.ndarray], objective: str, **params: Any
) -> dict[str, Any]:
    return {
        name: value.tolist()
        for name, value in tool.replay({"objective": objective, "params": params}, inputs).items()
    }


@pytest.mark.parametrize("size", [2, 3, 5, 24, 100])
def test_replay_triplets_with_any_margin(tool, size):
    inputs = sides(size)
    scores = inputs["img"] @ inputs["txt"].T
    found = replay(tool, inputs, "cocos_triplet", margin=0.35)
    for way, s in (("i2t", scores), ("t2i", scores.T)):
        counts = [sum(s[i, i] - s[i, j] < 0.35 for j in range(size) if j != i) for i in range(size)]
        assert found[f"{way}_Cq_per_query"] == counts
        assert found[f"{way}_CB"] == sum(counts)
        assert found[f"{way}_C0"] == found[f"{way}_C0_SH"] == counts.count(0)
        assert found[f"{way}_CB_SH"] == size - counts.count(0)
        moved = [number for number in counts if number]
        assert found[f"{way}_Cq_mean_over_nonzero_queries"] == pytest.approx(
            np.mean(moved) if moved else math.nan, nan_ok=True
        )
    released = replay(tool, inputs, "cocos_triplet_reference_code", margin=0.35)
    by_image = [
        sum(0.35 + scores[i, j] - scores[j, j] > 0 for j in range(size) if j != i)
        for i in range(size)
    ]
    assert released["sum_zeros_t2i"] == by_image.count(0)
    assert released["sum_t2i_grad_sum"] == found["t2i_CB"]
    assert released["max_i2t_grads_sum"] == found["i2t_CB_SH"]


def test_replay_reads_epsilon_from_parameters(tool):
    inputs = sides(12)
    assert (
        replay(tool, inputs, "cocos_ntxent_eps0.01", eps=0.3)["i2t_C_mean"]
        < replay(tool, inputs, "cocos_ntxent_eps0.3")["i2t_C_mean"]
    )
    found = replay(tool, inputs, "cocos_ntxent_eps0.07_reference_code", eps=0.07, tau=0.2)
    whole = [found[f"t2i_{part}_grad"] for part in ("low", "high")]
    assert sum(whole) == pytest.approx(found["1-s_t2i.diag.mean"])


def test_replay_uses_given_similarity(tool):
    inputs = sides(4) | {"sim": np.eye(4)}
    assert replay(tool, inputs, "cocos_triplet")["i2t_C0"] == 4


def test_replay_smooth_ap_of_one_image(tool):
    inputs = sides(1, 5)
    found = replay(tool, inputs, "cocos_smoothap_with_1_over_tau", tau=0.5)
    assert found["t2i_C0"] == 5
    assert math.isnan(found["t2i_C_mean_nonzero"])
    released = replay(tool, inputs, "cocos_smoothap_reference_code", tau=0.5, eps=0.0)
    assert (released["sum_t2i"], released["zeros_t2i"]) == (0, 5)
    assert released["sum_i2t"] == 4


@pytest.mark.parametrize(
    "name",
    ["cocos_triplet", "cocos_ntxent", "tangent_triplet_hn", "tangent_unified_g9", "tangent_vlc"],
)
def test_replay_of_one_pair_counts_nothing(tool, name):
    found = replay(tool, sides(1), name)
    assert all(
        np.nansum(np.abs(found[key])) == 0 for key in found if not key.endswith(("C0", "C0_SH"))
    )


def test_replay_tangents_of_identical_embeddings(tool):
    one = sides(6)
    twice = {name: np.concatenate([rows, rows]) for name, rows in one.items()}
    same = {name: np.repeat(one["img"][:1], 100, 0) for name in one}
    for name in ("tangent_triplet_hn", "tangent_unified", "tangent_vlc_g1"):
        assert np.isfinite(replay(tool, twice, name)["text"]).all()
        assert np.max(replay(tool, same, name, gamma=1)["text"]) < 1e-11
    ratio = (
        np.array(replay(tool, one, "tangent_vlc", gamma=30.0)["anchor"])
        / replay(tool, one, "tangent_unified", gamma=30.0, margin=0)["anchor"]
    )
    assert ratio == pytest.approx(30)


def test_replay_rejects_other_kinds(tool):
    assert (
        replay(tool, sides(2), "cocos_of_tomorrow")
        == replay(tool, sides(2), "tangent_of_tomorrow")
        == {}
    )
