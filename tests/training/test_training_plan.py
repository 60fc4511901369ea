"""Plan of a training: what ``resolve`` checks before data are read, and what a dry run prints."""

import json
import os

import pytest

import visavis
from visavis.core.errors import DataError, RecipeError
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.training_run import resolve


def test_dry_run_counts_steps_and_writes_nothing(few_scenes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = {"epochs": 2, "training.batch_size": 16}
    plan = visavis.train("demo", data=few_scenes, overrides=keys, dry_run=True)
    assert not os.listdir(tmp_path)
    trained = visavis.train("demo", data=few_scenes, overrides=keys, out="run")
    log = RunFolder(trained.run).read_log()
    assert plan.to_json()["steps"] == [log[-1]["step"]] == [2 * plan.steps_per_epoch]
    assert plan.recipe.to_dict() == read_recipe("run/run.toml").to_dict()
    assert plan.to_json()["images"]["val"] == trained.validation_images


def test_dry_run_prints_every_part(few_scenes, command_line):
    command = ["train", "demo", "--data", str(few_scenes), "--dry-run"]
    lines = command_line(*command)[1].splitlines()
    names = [line.partition(":")[0] for line in lines]
    assert names[:3] == ["recipe", "data", "train"]
    assert names[-5:] == ["images", "texts", "model", "phase 0", "evaluation"]
    printed = json.loads(command_line(*command, "--json")[1])
    assert printed["recipe"]["model"]["kind"] == "VSE++"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.embeding_dim", 3, "no field 'embeding_dim': did you mean embedding_dim"),
        ("model.visual_input_dim", 3, "it follows from the encoder or features of visual"),
        ("model.kind", "VSE+++", r"'VSE\+\+\+' is not a model: did you mean VSE\+\+"),
        ("objective", "Ladder()", "phases.0: Ladder"),
        ("published", "unified/2/nothing", "published"),
    ],
)
def test_recipe_is_refused_before_data_are_read(key, value, message):
    with pytest.raises((RecipeError, visavis.VisavisError), match=message):
        resolve(read_recipe("demo", {"data.path": "missing", key: value}))


def test_plan_of_ensemble_holds_a_plan_of_each_member(tmp_path):
    recipe = {"data.path": str(tmp_path), "members": {"a": {"seed": 1}, "b": {"seed": 2}}}
    plan = resolve(read_recipe("demo", recipe))
    assert {name: member.recipe.seed for name, member in plan.members.items()} == {"a": 1, "b": 2}
    with pytest.raises(DataError):
        visavis.train("demo", overrides=recipe, dry_run=True)
