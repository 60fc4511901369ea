"""Objective profiles: triplets and rotations against formulas of papers, and their report."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

import visavis
from visavis.core.errors import RefusedOverwrite, SpecError
from visavis.objectives import CATALOG, VLC, Goal, TripletHN, Unified, parse
from visavis.papers.diagnostics.objective_profile import (
    INITIAL_ANGLES,
    STEP_LENGTH,
    VECTOR_NAMES,
    ObjectiveProfiles,
    plot_pair_weights,
    profile_objectives,
    rotation,
    triplet_weights,
)

GRID = torch.tensor([-0.9, -0.3, 0.05, 0.4, 0.95], dtype=torch.float64)
POSITIVE, NEGATIVE = (axis.double() for axis in torch.meshgrid(GRID, GRID, indexing="ij"))

TRIPLET_WEIGHTS = {
    "con": (0.2 + NEGATIVE - POSITIVE > 0).double(),
    "nca": 1 / (1 + (10 * (POSITIVE - NEGATIVE)).exp()),
    "cir": 1 / (1 + (10 * (POSITIVE * (2 - POSITIVE) - NEGATIVE**2)).exp()),
}
PAIR_WEIGHTS = {
    "con": (torch.ones(5, 5), torch.ones(5, 5)),
    "lin": (1 - POSITIVE, NEGATIVE),
    "sig": (1 / (1 + (2 * (POSITIVE - 0.5)).exp()), 1 / (1 + (-10 * (NEGATIVE - 0.5)).exp())),
}


@pytest.mark.parametrize("pair", PAIR_WEIGHTS)
@pytest.mark.parametrize("triplet", TRIPLET_WEIGHTS)
def test_triplet_diagram_of_goal_matches_equations(triplet, pair):
    """T P+ pulls and T P- pushes: eqs. 5, 7, 8 of figure 2 and 9 to 11 of figure 3."""
    found = triplet_weights(Goal(triplet=triplet, pair=pair), GRID, GRID)
    weight, (pull, push) = TRIPLET_WEIGHTS[triplet], PAIR_WEIGHTS[pair]
    torch.testing.assert_close(found.pull, weight * pull, check_dtype=False)
    torch.testing.assert_close(found.push, weight * push, check_dtype=False)


@pytest.mark.parametrize("pair", ["lin_ms", "sig_ms"])
def test_triplet_weights_do_not_depend_on_equal_rest(pair):
    """Where the others are looked at, as near the diagonal, lin_ms is lin and sig_ms is sig."""
    plain, rest = (
        triplet_weights(Goal(triplet="nca", pair=name), GRID, GRID)
        for name in (pair.removesuffix("_ms"), pair)
    )
    looked_at = (POSITIVE <= NEGATIVE + 0.1) & (NEGATIVE >= POSITIVE - 0.1)
    assert looked_at.sum() == 15
    torch.testing.assert_close(rest.pull[looked_at], plain.pull[looked_at])
    torch.testing.assert_close(rest.push[looked_at], plain.push[looked_at])


def test_triplet_weights_of_unified_match_hand_values():
    """One negative: both weights are 1 / (1 + e^(gamma (s_p - s_n - m)))."""
    found = triplet_weights(
        Unified(margin=0.2, gamma=5), torch.tensor([0.6]), torch.tensor([0.3, 0.5])
    )
    expected = [1 / (1 + math.exp(5 * (0.6 - negative - 0.2))) for negative in (0.3, 0.5)]
    assert found.push[0].tolist() == pytest.approx(expected)
    assert found.pull[0].tolist() == pytest.approx(expected)
    assert found.magnitude[0].tolist() == pytest.approx(expected)


def test_rotation_of_hardest_negative_matches_hand_values():
    """Eqs. 11 and 12: |sin 8| on the hardest negative, nothing on the others. On the query both
    sines, on the other side the positive's.
    """
    found = rotation(TripletHN())
    sine = {angle: math.sin(math.radians(abs(angle))) for angle in INITIAL_ANGLES}
    assert found.norm.tolist() == pytest.approx(
        [sine[8] + sine[-14], sine[-14], sine[8], 0, 0, 0], abs=1e-12
    )
    turned_by = [math.degrees(math.atan(STEP_LENGTH * norm)) for norm in found.norm.tolist()]
    signs = (-1, 1, 1, 1, 1, 1)  # the query flees the negative, the positive comes to the query
    assert found.angle_after.tolist() == pytest.approx(
        [
            angle + sign * by
            for angle, sign, by in zip(INITIAL_ANGLES, signs, turned_by, strict=True)
        ]
    )


def test_rotation_of_near_hardest_negative_vanishes():
    """The paper's reason: with the hardest negative on the query its norm is 0, whatever the
    objective. The norms of the others only where they count.
    """
    hardest, soft, sharp = (
        rotation(objective).norm_by_angle
        for objective in (TripletHN(), Unified(gamma=1), Unified(gamma=50))
    )
    for norms in (hardest, soft, sharp):
        assert norms[0, VECTOR_NAMES.index("negative 1")] == pytest.approx(0, abs=1e-12)
    assert hardest[:, 3:].abs().max() == 0
    assert soft[0, 3:].max() > 0.1
    assert sharp[0, 5] < 1e-6 < sharp[0, 3]
    torch.testing.assert_close(
        rotation(VLC(gamma=5)).norm_by_angle, rotation(Unified(margin=0, gamma=5)).norm_by_angle
    )


@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_profile_of_every_objective_is_finite(kind):
    [found] = profile_objectives([f"{kind.__name__}()"])
    for values in (
        found.triplet_diagram.magnitude,
        found.by_positive.pull,
        found.by_negative.push,
        found.rotation.angle_after,
        found.rotation.norm_by_angle,
    ):
        assert values.isfinite().all()
    assert (found.triplet_diagram.magnitude > 0).any()
    assert parse(found.name) == kind()
    assert found.name == f"{kind.__name__}()"


@pytest.mark.slow
def test_profile_report_holds_plots_and_values(tmp_path):
    out = tmp_path / "anatomy"
    found = visavis.papers_anatomy(
        ["Unified(gamma=1)", "Unified(gamma=1.0)", "Goal(pair='lin')"], out=out
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "1-Unified.png",
        "2-Goal.png",
        "pair-weights.png",
        "profiles.json",
        "report.html",
    ]
    assert (out / "pair-weights.png").read_bytes() == plot_pair_weights(found.goals)
    assert json.loads((out / "profiles.json").read_text()) == found.to_json()
    page = (out / "report.html").read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page)[0] == "Unified(gamma=1.0)"
    assert page.count("data:image/png;base64,") == 3 * 2  # for light and for dark pages
    assert "http" not in page
    assert f"<td>{found.profiles[0].rotation.norm[0]:.3f}</td>" in page
    with pytest.raises(RefusedOverwrite):
        visavis.papers_anatomy("Triplet()", out=out)


def test_profile_rejects_missing_objective_without_folder(tmp_path):
    for specs, sentence in (
        ("Unifid()", r"did you mean Unified\?"),
        ([], "objective: expected at least one objective"),
    ):
        with pytest.raises(SpecError, match=sentence):
            visavis.papers_anatomy(specs, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_pair_weights_of_goal_match_figure_3():
    """Eqs. 9 to 13 with m = 0.1: lin_ms is 0.9 times, and 1.1 times, lin."""
    similarity = torch.tensor([0.0, 0.5, 0.8], dtype=torch.float64)
    weights = {
        pair: Goal(pair=pair).pair_weights(similarity, similarity)
        for pair in ("con", "lin", "sig", "lin_ms", "sig_ms")
    }
    expected = {
        "con": ([1, 1, 1], [1, 1, 1]),
        "lin": ([1, 0.5, 0.2], [0, 0.5, 0.8]),
        "sig": (
            [1 / (1 + math.exp(-1)), 0.5, 1 / (1 + math.exp(0.6))],
            [1 / (1 + math.exp(5)), 0.5, 1 / (1 + math.exp(-3))],
        ),
        "lin_ms": ([0.9, 0.45, 0.18], [0, 0.55, 0.88]),
        "sig_ms": (
            [1 / (0.1 + math.exp(-1)), 1 / 1.1, 1 / (0.1 + math.exp(0.6))],
            [1 / (0.1 + math.exp(5)), 1 / 1.1, 1 / (0.1 + math.exp(-3))],
        ),
    }
    for pair, (positive, negative) in expected.items():
        assert weights[pair][0].tolist() == pytest.approx(positive)
        assert weights[pair][1].tolist() == pytest.approx(negative)


def test_pair_weights_of_goal_are_plotted_once(tmp_path):
    specs = ["Goal(pair='lin')", "Goal(pair='lin_ms')", "Goal(triplet='con', pair='lin')"]
    found = ObjectiveProfiles(profile_objectives(specs), tmp_path)
    assert [one["name"] for one in found.to_json()["pair_weights"]] == ["lin", "lin_ms, m=0.1"]
    images = [plot_pair_weights([goal]) for goal in found.goals]
    assert images[0] != images[1] and plot_pair_weights(found.goals) not in images
