"""Scales and margins of "auto" in a training: measured once, recorded, and the same as with the
number.
"""

from __future__ import annotations

import json
import tomllib

import pytest
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.core.errors import RecipeError
from visavis.training import scale_trials
from visavis.training.recipes.files import read_recipe


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(scale_trials, "TRIAL_STEPS", 12)
    monkeypatch.setattr(scale_trials, "MEASURED_BATCHES", 1)


@pytest.fixture
def tiny(tmp_path):
    """A recipe of two phases, of which both have a value of "auto"."""
    return write_recipe(
        tmp_path / "tiny.toml",
        {"objective": "Triplet(margin='auto')", "optimizer": {"lr": 0.01}},
        {"objective": "Unified(gamma='auto')", "optimizer": {"lr": 0.02}},
        seed=3,
        visual={"granularity": "regions"},
        model={"embedding_dim": 16, "word_dim": 8, "dropout": 0.2, "region_pool": "mean"},
        training={"batch_size": 16, "checkpoint_s": 0},
    )


def recorded_objectives(run):
    return [phase["objective"] for phase in tomllib.loads((run / "run.toml").read_text())["phases"]]


def test_auto_trains_as_the_recorded_numbers(tiny, scenes, tmp_path, outcome):
    run, given = tmp_path / "auto", tmp_path / "given"
    result = visavis.train(tiny, data=scenes, out=run)
    first, second = recorded_objectives(run)
    assert "auto" not in first + second
    assert result.objective == second
    numbers = {"phases.0.objective": first, "phases.1.objective": second}
    visavis.train(tiny, data=scenes, out=given, overrides=numbers)
    assert outcome(run)["model"] == outcome(given)["model"]
    record = json.loads((run / "environment.json").read_text())
    assert "margin='auto'" in record["auto"]["phases.0.objective"]
    assert "gamma='auto'" in record["auto"]["phases.1.objective"]
    assert json.loads((given / "environment.json").read_text())["auto"] == {}


def test_auto_follows_the_spread_of_trials(tiny, scenes, tmp_path, monkeypatch):
    """Spreads that fall in proportion to the square root of the scale: the product is 5 at 50."""
    spreads = {20.0: 0.1 * (50 / 20) ** 0.5, 50.0: 0.1}
    monkeypatch.setattr(scale_trials, "trial_spread", lambda *arguments: spreads[arguments[-1]])
    run = tmp_path / "run"
    visavis.train(tiny, data=scenes, out=run)
    assert recorded_objectives(run) == [
        "Triplet(margin=0.15, reduction='sum')",
        "Unified(margin=0.2, gamma=50.0, reduction='sum')",
    ]


@pytest.mark.parametrize(
    ("spreads", "gamma"), [((0.2, 0.02), 200.0), ((0.01, 0.009), 200.0), ((9.0, 8.0), 5.0)]
)
def test_auto_is_limited_to_a_range(monkeypatch, spreads, gamma):
    """Where the product falls, is too small, or is too large at any scale of the range."""
    by_scale = dict(zip(scale_trials.TRIAL_SCALES, spreads, strict=True))
    monkeypatch.setattr(scale_trials, "trial_spread", lambda *arguments: by_scale[arguments[-1]])
    spread = scale_trials.settled_spread(None, None, None)
    assert scale_trials.SCALE_TIMES_SPREAD / spread == pytest.approx(gamma)


def test_auto_of_a_learned_scale_is_refused(tiny):
    recipe = read_recipe(tiny, {"objective": "InfoNCE(tau='auto')"})
    learned = recipe.model_copy(update={"model": {**recipe.model, "scale": "learned"}})
    with pytest.raises(RecipeError, match=r"phases.0.objective.*tau.*learned"):
        scale_trials.check_auto(learned)
    scale_trials.check_auto(recipe)
