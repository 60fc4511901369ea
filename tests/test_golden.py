"""The golden replay: the set that ships with the project, and small folders made here for every
rule it keeps.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from visavis import Targets
from visavis.objectives import (
    AOQ,
    NCR,
    SSP,
    VLC,
    Goal,
    InfoNCE,
    Ladder,
    MaxMargin,
    NTXent,
    Objective,
    SmoothAP,
    TripletHN,
    Unified,
)

PROJECT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def golden() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden", PROJECT / "tools" / "golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["golden"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Folder:
    """A golden folder in the making."""

    def __init__(self, path: Path):
        self.path = path
        self.arrays: dict[str, np.ndarray] = {}
        self.entries: dict[str, list[dict[str, Any]]] = {}

    def add(
        self, manifest: str, inputs: dict[str, Any], outputs: dict[str, Any], **entry: Any
    ) -> None:
        number = sum(len(entries) for entries in self.entries.values())
        keys = {}
        for side, values in (("inputs", inputs), ("outputs", outputs)):
            keys[side] = {name: f"case{number}/{side}#{name}" for name in values}
            self.arrays |= {keys[side][name]: np.asarray(value) for name, value in values.items()}
        self.entries.setdefault(manifest, []).append(
            {"case": f"case{number}", "params": {}, **keys, **entry}
        )

    def loss(
        self,
        ours: Objective,
        image: torch.Tensor,
        text: torch.Tensor,
        error: float = 0.0,
        facts: Any = None,
        **entry: Any,
    ) -> None:
        """An entry whose expected output is that of the objective, plus an error."""
        image, text = image.clone().requires_grad_(), text.clone().requires_grad_()
        value = ours(image @ text.T, Targets.paired(len(image), **(facts or {})))
        gradients = dict(
            zip(("grad_img", "grad_txt"), torch.autograd.grad(value, (image, text)), strict=True)
        )
        outputs = {"loss": value.item() + error} | {
            name: gradient.numpy() for name, gradient in gradients.items()
        }
        self.add(
            "losses",
            {"img": image.detach(), "txt": text.detach()},
            outputs,
            **{"variant": "any", **entry},
        )

    def write(self) -> Path:
        for manifest, entries in self.entries.items():
            (self.path / f"{manifest}_manifest.json").write_text(json.dumps({"entries": entries}))
            np.savez(self.path / f"{manifest}.npz", **self.arrays)
        return self.path


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def sides() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(
        torch.nn.functional.normalize(torch.randn(6, 8, dtype=torch.float64), dim=1)
        for _ in range(2)
    )  # type: ignore[return-value]


def last_line(
    golden: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[str, int]:
    code = golden.main([str(argument) for argument in arguments])
    return capsys.readouterr().out.splitlines()[-1], code


@pytest.mark.data
def test_the_golden_set_is_replayed_without_a_mismatch(
    golden: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = PROJECT.parent / "shared" / "golden"
    if not shared.is_dir():
        pytest.skip("the golden files are absent: ../shared/golden")
    computed, lines, (replayed, total, wrong) = golden.replay(shared)
    assert wrong == 0, [line for line in lines if line.startswith("MISMATCH")]
    assert total == 284
    assert replayed >= 234 + 12 + 26
    assert [
        line
        for line in lines
        if "metrics" in line and not line.startswith("left out: metrics mA2_N12_ties")
    ] == []  # no order of ties
    with np.load(shared / "metrics.npz", allow_pickle=False) as right:
        scored = [key for key in computed if key.startswith("cs")]
        assert len(scored) == 33
        assert all(
            np.allclose(computed[key], right[key], rtol=0, atol=1e-12, equal_nan=True)
            for key in scored
        )
    golden.main([str(shared), "--out", str(tmp_path / "out.npz")])
    assert f"replayed {replayed} of {total}, 0 mismatches" in capsys.readouterr().out
    with (
        np.load(tmp_path / "out.npz", allow_pickle=False) as out,
        np.load(shared / "losses.npz", allow_pickle=False) as right,
    ):
        assert set(out) == set(computed)
        key = "A0_B4_D16/unified/gamma50_m0.2#loss"
        assert out[key].shape == ()
        assert out[key] == pytest.approx(right[key])


def test_other_parameters_under_any_of_their_names(
    golden: ModuleType, folder: Folder, sides: Any, capsys: Any
) -> None:
    margins = torch.rand(6, dtype=torch.float64)
    folder.loss(NTXent(tau=0.07), *sides, objective="nt_xent", params={"temp": 0.07})
    folder.loss(
        NTXent(tau=1 / 20),
        *sides,
        objective="nt_xent",
        params={"logit_scale": 20.0, "denominator": "all candidates"},
    )
    folder.loss(
        NTXent(denominator="negatives"),
        *sides,
        objective="nt_xent",
        params={"denominator": "only the negatives"},
    )
    folder.loss(VLC(gamma=5), *sides, objective="vlc", params={"gamma": 5})
    folder.loss(
        Unified(margin=0.3, gamma=1e3),
        *sides,
        objective="unified",
        params={"gamma": 1e3, "margin": 0.3},
    )
    folder.loss(Unified(), *sides, objective="unified", params={})
    facts = {"query_margin": margins, "candidate_margin": margins}
    folder.loss(TripletHN(), *sides, objective="triplet_hn_adaptive_margin", facts=facts)
    folder.arrays["margins"] = margins.numpy()
    folder.entries["losses"][-1]["inputs"]["margins"] = "margins"
    assert last_line(golden, capsys, folder.write()) == ("replayed 7 of 7, 0 mismatches", 0)


def test_golden_dispatches_goal_by_variant_and_weights(
    golden: ModuleType, folder: Folder, sides: Any, capsys: Any
) -> None:
    weights = {"triplet_weight": "cir", "pair_weight": "lin_ms", "eps": 0.3, "temp": 4.0}
    for semantics, variant in (
        ("reference", "code_anything"),
        ("paper", "paper_anything"),
        ("paper", "any"),
    ):
        goal = Goal(triplet="cir", pair="lin_ms", epsilon=0.3, tau=4, semantics=semantics)
        folder.loss(goal, *sides, objective="goal", variant=variant, params=weights)
    folder.loss(
        Goal(), *sides, objective="goal", params={"logit_scale": 0.1, "alpha": 2, "margin": 0.2}
    )
    assert last_line(golden, capsys, folder.write()) == ("replayed 4 of 4, 0 mismatches", 0)


def test_several_captions_of_an_image_lie_side_by_side(
    golden: ModuleType, folder: Folder, sides: Any, capsys: Any
) -> None:
    image, text = sides[0][:2], sides[1]
    value = SmoothAP(tau=0.2)(
        image @ text.T, Targets(query_ids=[0, 1], candidate_ids=[0, 0, 0, 1, 1, 1])
    ).item()
    for error in (0.0, 1e-6):
        params = {"tau": 0.2, "captions_per_image": 3}
        folder.add(
            "losses",
            {"img": image, "txt": text},
            {"loss": value + error},
            objective="smooth_ap",
            params=params,
        )
    assert last_line(golden, capsys, folder.write()) == ("replayed 2 of 2, 1 mismatches", 1)


def test_golden_dispatches_by_variant_and_inputs(
    golden: ModuleType, folder: Folder, sides: Any, capsys: Any
) -> None:
    def add(
        ours: Objective,
        objective: str,
        variant: str,
        params: dict[str, Any],
        facts: Any = None,
        **inputs: Any,
    ) -> None:
        folder.loss(ours, *sides, objective=objective, params=params, facts=facts)
        entry = folder.entries["losses"][-1]
        entry["variant"] = variant
        entry["inputs"] |= {name: f"{entry['case']}/{name}" for name in inputs}
        folder.arrays |= {
            f"{entry['case']}/{name}": np.asarray(value) for name, value in inputs.items()
        }

    add(InfoNCE(tau=0.05), "info_nce", "clip_any", {"tau": 0.05})
    add(InfoNCE(tau=0.5, reduction="mean"), "info_nce", "mmt_any", {"logit_scale": 2.0})
    add(
        InfoNCE(tau=0.1),
        "info_nce_multi_positive",
        "xvlm",
        {"temp": 0.1},
        idx=[[5], [2], [9], [1], [0], [3]],
    )
    add(
        MaxMargin(margin=0.05, fix_norm=False),
        "max_margin",
        "mmt",
        {"margin": 0.05, "fix_norm": False},
    )
    add(
        SSP(margin=0.3, positive=(0.4, -0.2), negative=(0.1, 0.0, 1.0)),
        "ssp",
        "any",
        {"margin": 0.3, "pos": [0.4, -0.2], "neg": [0.1, 0, 1]},
    )
    labels = torch.rand(6, dtype=torch.float64)
    cells = 0.3 * (10 ** labels[:, None].expand(6, 6) - 1) / 9
    params = {"margin": 0.3, "soft_margin": "exponential", "hard_negative": True}
    add(
        NCR(semantics="reference"),
        "ncr",
        "hard",
        params,
        {"pair_margin": cells},
        labels=labels[:, None],
    )
    add(NCR(semantics="reference"), "ncr", "hard", params, {"pair_margin": cells.T}, labels=labels)
    add(
        NCR(warmup=True),
        "ncr",
        "mean",
        params | {"hard_negative": False},
        {"pair_margin": cells},
        labels=labels[:, None],
    )
    add(NCR(warmup=True, margin=0.1), "ncr", "warmup", {"margin": 0.1, "mode": "warmup"})
    anchors = dict.fromkeys(("query_margin", "candidate_margin"), cells[:, 0])
    add(TripletHN(), "ncr", "paper_anchor", params, anchors, labels=labels)
    off = {
        name: torch.randn(6, 8, dtype=torch.float64)
        for name in ("img_off", "txt_off", "img_off2", "txt_off2")
    }
    fixed = (off["img_off"] * off["txt_off"]).sum(1), (off["img_off2"] * off["txt_off2"]).sum(1)
    scores = {
        f"{name}_offline_scores": torch.stack([torch.zeros(6), part], 1)
        for name, part in zip(("query", "candidate"), fixed, strict=True)
    }
    zeros = {name: torch.zeros(6, 8, dtype=torch.float64) for name in ("img_off", "txt_off")}
    scores["query_offline_scores"][:, 1] = 0
    fields = {"margin_online": 0.1, "margin_offline": 0.05, "alpha": 0.5, "beta": 2.0}
    add(
        AOQ(margin=0.1, offline_margin=0.05, alpha=0.5, beta=2.0),
        "aoq",
        "bfan",
        fields,
        scores,
        **(off | zeros),
    )
    relevance = torch.rand(6, 6, dtype=torch.float64)
    steps = {"alphas": [0.3, 0.1, 0.2], "thetas": [0.7, 0.4], "betas": [1.0, 0.5, 0.5]}
    own = {"margins": (0.3, 0.1, 0.2), "thresholds": (0.7, 0.4), "betas": (1.0, 0.5, 0.5)}
    for variant, form in {
        "code_hc_L3": {"semantics": "reference"},
        "paper_hc_L3": {},
        "paper_sum_L3": {"sampling": "sum"},
        "cumulative_code_L3": {"semantics": "reference", "cumulative": True},
    }.items():
        add(
            Ladder(**own, **form),
            "ladder",
            variant,
            steps,
            {"relevance": relevance},
            relevance=relevance,
        )
    add(TripletHN(), "ladder", "code_hc_L1", {"alphas": [0.2], "thetas": [], "betas": [1.0]})
    assert last_line(golden, capsys, folder.write()) == ("replayed 16 of 16, 0 mismatches", 0)


def test_golden_reports_mismatch_and_unknown_objective(
    golden: ModuleType, folder: Folder, sides: Any, capsys: Any
) -> None:
    folder.loss(Unified(), *sides, objective="unified", error=1e-6)
    folder.loss(Unified(), *sides, objective="unified")
    folder.loss(Unified(), *sides, objective="superlative")
    folder.loss(Unified(), *sides, objective="unified", params={"tilt": 3})
    assert golden.main([str(folder.write())]) == 1
    out = capsys.readouterr().out
    assert "MISMATCH: losses case0 unified any: loss\n" in out
    assert "not replayed: losses case2 superlative any: visavis has no such objective\n" in out
    assert "not replayed: losses case3 unified any: Unified has no field 'tilt'" in out
    assert out.splitlines()[-1] == "replayed 2 of 4, 1 mismatches"


def test_tolerance_is_loose_only_from_a_sharpness_of_1000(
    golden: ModuleType, folder: Folder, sides: Any, capsys: Any
) -> None:
    for name, value in (("gamma", 1e3), ("logit_scale", 1e3), ("tau", 1e-3), ("gamma", 100.0)):
        size = float(
            VLC(gamma=1 / value if name == "tau" else value)(
                sides[0] @ sides[1].T, Targets.paired(6)
            )
        )
        folder.loss(
            VLC(gamma=1 / value if name == "tau" else value),
            *sides,
            objective="vlc",
            params={name: value},
            error=2e-8 * size,
        )
    assert last_line(golden, capsys, folder.write()) == ("replayed 4 of 4, 1 mismatches", 1)


def test_undefined_gradients_are_not_compared(
    golden: ModuleType, folder: Folder, sides: Any, capsys: Any
) -> None:
    for defined in (True, False):
        folder.loss(TripletHN(), *sides, objective="triplet_hn", gradient_defined=defined)
        folder.arrays[folder.entries["losses"][-1]["outputs"]["grad_txt"]] = np.full((6, 8), 9.0)
    assert last_line(golden, capsys, folder.write()) == ("replayed 2 of 2, 1 mismatches", 1)


def test_where_the_reference_raises_ours_must_be_finite(
    golden: ModuleType, folder: Folder, sides: Any, capsys: Any
) -> None:
    image, text = sides
    folder.add(
        "losses",
        {"img": image, "txt": text},
        {},
        objective="unified",
        reference_raises="RuntimeError: min of empty",
    )
    folder.add(
        "losses",
        {"img": image * torch.nan, "txt": text},
        {},
        objective="unified",
        reference_raises="RuntimeError",
    )
    assert last_line(golden, capsys, folder.write()) == ("replayed 2 of 2, 1 mismatches", 1)


def test_only_metrics_with_ties_and_nan(golden: ModuleType, folder: Folder, capsys: Any) -> None:
    scores = np.array([[2.0, 1.0, 2.0, 0.0], [0.0, 3.0, 1.0, 1.0]])
    ranks = {"rank_i2t_optimistic": [0, 1], "rank_i2t_pessimistic": [1, 1]}
    ranks |= {"rank_t2i_optimistic": [0, 1, 1, 0], "rank_t2i_pessimistic": [0, 1, 1, 0]}
    folder.add(
        "metrics", {"sim": scores}, {**ranks, "rsum": -1.0}, metric="recall_and_ranks", ties=True
    )
    constant = {"sim": np.eye(3), "rel": np.ones((3, 3))}
    undefined = {"cs2_i2t_per_query": np.full(3, np.nan), "cs2_i2t_mean": np.nan}
    folder.add("metrics", constant, undefined, metric="coherent_score", params={"K": [2]})
    folder.add("metrics", {"sim": scores}, {"x": 0.0}, metric="beauty")
    out = folder.path / "out.npz"
    assert last_line(golden, capsys, folder.write(), "--out", out) == (
        "replayed 2 of 3, 0 mismatches",
        0,
    )
    with np.load(out, allow_pickle=False) as arrays:
        assert "case0/outputs#rsum" not in arrays
        assert np.isnan(arrays["case1/outputs#cs2_i2t_mean"])
        assert arrays["case1/outputs#cs2_i2t_mean"].shape == ()


def test_golden_video_ranks_are_means_over_ties(
    golden: ModuleType, folder: Folder, capsys: Any
) -> None:
    """Twelve captions of a video each, by hand: the first caption scores ten videos alike, so that
    nine videos score two captions alike.
    """
    scores = np.eye(12)
    scores[0, :10] = 1.0
    answers = {
        "t2v_R1": 100 * 11 / 12,
        "t2v_R5": 100.0,
        "t2v_R10": 100.0,
        "t2v_MedR": 1.0,
        "t2v_MeanR": 1 + 4.5 / 12,
    }
    answers |= {
        "v2t_R1": 100 * 3 / 12,
        "v2t_R5": 100.0,
        "v2t_R10": 100.0,
        "v2t_MedR": 1.5,
        "v2t_MeanR": 1 + 9 * 0.5 / 12,
    }
    folder.add(
        "metrics",
        {"sim": scores},
        answers,
        metric="video_text",
        params={"captions_per_video": 1},
        ties=True,
    )
    assert last_line(golden, capsys, folder.write()) == ("replayed 1 of 1, 0 mismatches", 0)


def test_answers_may_be_kept_apart_from_the_folder(
    golden: ModuleType, folder: Folder, sides: Any, capsys: Any
) -> None:
    folder.loss(Unified(), *sides, objective="unified")
    folder.arrays = {name: array for name, array in folder.arrays.items() if "outputs" not in name}
    assert last_line(golden, capsys, folder.write(), "--out", folder.path / "out.npz") == (
        "replayed 1 of 1, 0 mismatches",
        0,
    )
    with np.load(folder.path / "out.npz", allow_pickle=False) as arrays:
        assert sorted(arrays) == [
            f"case0/outputs#{name}" for name in ("grad_img", "grad_txt", "loss")
        ]


def test_a_folder_without_manifests_is_refused(golden: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        golden.main([str(tmp_path)])
    assert stop.value.code == 2
