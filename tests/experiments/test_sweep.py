"""Sweeps: detection of the single varied value of a comparison, and its curve."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from visavis.evaluation.statistics import Interval
from visavis.research.experiments.comparison_report import plot_sweeps
from visavis.research.experiments.comparison_result import Comparison, find_sweeps
from visavis.research.experiments.grid import build_settings
from visavis.research.experiments.jobs import RunOutcome
from visavis.training.recipes.files import read_recipe

HEADS = read_recipe("heads-flickr8k")
MARGINS = [f"Unified(margin={margin}, gamma=60)" for margin in (0.3, 0.1, 0.2)]


def swept(objectives=(), models=(), grid=()):
    """Sweeps of settings with validation RSUM = position + seed, and a test RSUM of ten times that."""
    settings = build_settings(HEADS, objectives, models, grid)
    return find_sweeps(
        [
            (setting, [outcome(setting.name, seed, position + seed) for seed in (1, 2, 3)])
            for position, setting in enumerate(settings)
        ]
    )


def outcome(name, seed, rsum):
    return RunOutcome(name, seed, Path(), float(rsum), {"rsum": 10.0 * rsum})


def test_find_sweeps_by_hand():
    (sweep,) = swept(MARGINS)
    validation, test = sweep.curves[""]
    assert sweep.name == "margin"
    assert [(point.value, point.rsum.mean, point.rsum.seeds) for point in validation] == [
        (0.1, 3, 3),
        (0.2, 4, 3),
        (0.3, 2, 3),
    ]
    assert [point.rsum.mean for point in test] == [30, 40, 20]
    assert test[0].rsum.spread == Interval(20, 40, "range of 3 seeds")
    assert json.loads(json.dumps(sweep.to_json()))["curves"][0]["test"][0]["mean"] == 30


@pytest.mark.parametrize(
    ("given", "name", "curves"),
    [
        ({"grid": ["phases.0.optimizer.lr=[1e-4, 1e-3, 1e-2]"]}, "phases.0.optimizer.lr", [""]),
        (
            {"models": [f"Heads(embedding_dim={dim})" for dim in (64, 128, 256)]},
            "model.embedding_dim",
            [""],
        ),
        ({"grid": ["epochs=[1, 2, 3]"]}, "phases.0.epochs", [""]),
        (
            {
                "objectives": ["VLC()", "TripletHN()"],
                "grid": ["training.batch_size=[64, 128, 256]"],
            },
            "training.batch_size",
            ["VLC", "TripletHN"],
        ),
    ],
)
def test_find_sweeps_finds_the_varied_value(given, name, curves):
    (sweep,) = swept(**given)
    assert sweep.name == name
    assert [any(part in label for label in sweep.curves) for part in curves] == [True] * len(curves)
    assert len(sweep.curves) == len(curves)


@pytest.mark.parametrize(
    "given",
    [
        {"objectives": MARGINS[:2]},
        {"objectives": ["Unified()", "VLC()", "TripletHN()"]},
        {
            "objectives": [
                "Unified(margin=0.1, gamma=10)",
                "Unified(margin=0.2, gamma=20)",
                "Unified(margin=0.3, gamma=40)",
            ]
        },
        {"grid": ["training.device=['cpu', 'cuda', 'auto']"]},
    ],
    ids=["two values", "no number", "together", "names"],
)
def test_find_sweeps_needs_three_values_of_one_number(given):
    assert swept(**given) == ()


def test_find_sweeps_separates_two_numbers_and_references():
    gammas = [f"Unified(margin=0.2, gamma={gamma})" for gamma in (20, 100)]
    gamma, margin = swept(["TripletHN()", *MARGINS, *gammas, "VLC()"])
    assert (gamma.name, list(gamma.curves)) == ("gamma", ["objective=Unified, margin=0.2"])
    assert (margin.name, list(margin.curves)) == ("margin", ["objective=Unified, gamma=60.0"])
    assert gamma.references == margin.references and list(gamma.references) == [
        "TripletHN()",
        "VLC()",
    ]
    assert [(validation.mean, test.mean) for validation, test in gamma.references.values()] == [
        (2, 20),
        (8, 80),
    ]


def test_find_sweeps_leaves_a_measured_number_out():
    (sweep,) = swept([*MARGINS, "Unified(margin='auto', gamma=60)"])
    assert sweep.name == "margin"
    assert [point.value for point in sweep.curves[""][0]] == [0.1, 0.2, 0.3]
    assert list(sweep.references) == ["Unified(margin='auto', gamma=60)"]


@pytest.mark.parametrize(("draws", "means"), [(True, [1, 11, 21]), (False, [2, 11, 21])])
def test_sweeps_of_drawn_validation_compare_equal_seeds(draws, means):
    recipe = read_recipe("heads-flickr8k", {"evaluation.random_validation": draws})
    settings = build_settings(recipe, sorted(MARGINS), [], [])
    # The first setting has two seeds more.
    outcomes = tuple(
        outcome(setting.name, seed, 10 * position + seed)
        for position, setting in enumerate(settings)
        for seed in range(1, 2 if position else 4)
    )
    comparison = Comparison(Path(), "", tuple(settings), outcomes)
    (sweep,) = comparison.sweeps
    assert [[point.rsum.mean for point in points] for points in sweep.curves[""]] == [
        means,
        [10 * mean for mean in means],
    ]
    assert [comparison.comparable_validation(setting) for setting in settings] == means


def test_find_sweeps_finds_both_numbers_of_a_grid():
    batch_sizes, rates = (
        "training.batch_size=[64, 128, 256]",
        "phases.0.optimizer.lr=[1e-4, 1e-3, 1e-2]",
    )
    assert [(sweep.name, len(sweep.curves)) for sweep in swept(grid=[batch_sizes, rates])] == [
        ("phases.0.optimizer.lr", 3),
        ("training.batch_size", 3),
    ]


def test_plot_sweeps_depends_on_the_points():
    assert plot_sweeps(swept(MARGINS)) != plot_sweeps(swept(sorted(MARGINS)))


def test_plot_sweeps_draws_references_at_their_rsum():
    (sweep,) = swept([*MARGINS, "VLC()"])
    lower = {
        name: tuple(replace(split, mean=split.mean / 2) for split in splits)
        for name, splits in sweep.references.items()
    }
    assert plot_sweeps([sweep]) != plot_sweeps([replace(sweep, references=lower)])
