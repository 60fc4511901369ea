"""What one number does to RSUM: found in whatever was compared, and never where more than one thing could be the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from visavis.comparison.jobs import Outcome
from visavis.comparison.settings import settings_of
from visavis.comparison.statistics import t_interval
from visavis.comparison.sweep import sweep_of
from visavis.report.choice.figures import sweep_picture
from visavis.training.recipe_files import read_recipe

HEADS = read_recipe("heads-flickr8k")
MARGINS = [f"Unified(margin={margin}, gamma=60)" for margin in (0.3, 0.1, 0.2)]


def swept(objectives=(), models=(), grid=()):
    """The sweep of settings whose validation RSUM is their place, plus the seed, and whose test RSUM is ten times that."""
    settings = settings_of(HEADS, objectives, models, grid)
    return sweep_of(
        [(setting, [outcome(setting.name, seed, place + seed) for seed in (1, 2, 3)]) for place, setting in enumerate(settings)]
    )


def outcome(name, seed, rsum):
    return Outcome(name, seed, Path(), float(rsum), {"rsum": 10.0 * rsum})


def test_values_by_hand():
    sweep = swept(MARGINS)
    validation, test = sweep.curves[""]
    assert sweep.name == "margin"
    assert [(point.value, point.mean, point.seeds) for point in validation] == [(0.1, 3, 3), (0.2, 4, 3), (0.3, 2, 3)]
    assert [point.mean for point in test] == [30, 40, 20]
    assert test[0].interval == t_interval([20, 30, 40])
    assert json.loads(json.dumps(sweep.to_json()))["curves"][0]["test"][0]["mean"] == 30


@pytest.mark.parametrize(
    ("given", "name", "curves"),
    [
        ({"grid": ["phases.0.optimizer.lr=[1e-4, 1e-3, 1e-2]"]}, "phases.0.optimizer.lr", [""]),
        ({"models": [f"Heads(width={width})" for width in (64, 128, 256)]}, "model.width", [""]),
        ({"grid": ["epochs=[1, 2, 3]"]}, "phases.0.epochs", [""]),
        (
            {"objectives": ["VLC()", "TripletHN()"], "grid": ["training.batch_size=[64, 128, 256]"]},
            "training.batch_size",
            ["VLC", "TripletHN"],
        ),
    ],
)
def test_one_number_is_found_wherever_it_stands(given, name, curves):
    sweep = swept(**given)
    assert sweep.name == name
    assert [any(part in label for label in sweep.curves) for part in curves] == [True] * len(curves)
    assert len(sweep.curves) == len(curves)


@pytest.mark.parametrize(
    "given",
    [
        {"objectives": MARGINS[:2]},
        {"objectives": [*MARGINS, "VLC()"]},
        {"objectives": ["Unified()", "VLC()", "TripletHN()"]},
        {"grid": ["training.batch_size=[64, 128, 256]", "phases.0.optimizer.lr=[1e-4, 1e-3, 1e-2]"]},
        {"objectives": ["Unified(margin=0.1, gamma=10)", "Unified(margin=0.2, gamma=20)", "Unified(margin=0.3, gamma=40)"]},
        {"grid": ["training.device=['cpu', 'cuda', 'auto']"]},
    ],
    ids=["two values", "another objective", "no number", "two numbers", "together", "names"],
)
def test_nothing_is_drawn_where_it_would_not_be_one_number(given):
    assert swept(**given) is None


def test_its_picture_shows_the_points():
    assert sweep_picture(swept(MARGINS)) != sweep_picture(swept(sorted(MARGINS)))
