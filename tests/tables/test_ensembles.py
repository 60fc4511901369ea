"""Starred rows: separately trained members, scored by their mean."""

from __future__ import annotations

import signal

import pytest
import torch

import visavis
from visavis.cli.console import print_result
from visavis.core.errors import MissingSupervision, RecipeError, RunError
from visavis.training import training_run as begin
from visavis.training.stop_signals import Stopped
from visavis.training.trainer import Trainer
from visavis.training.training_run import TrainingResult

from .toy import overrides

ROW = "unified/7/bfan-ensemble-unified"


@pytest.fixture(scope="module")
def trained(toys, tmp_path_factory) -> TrainingResult:
    return visavis.train(
        ROW, out=tmp_path_factory.mktemp("run") / "run", overrides=overrides(ROW, toys)
    )


def test_ensemble_is_mean_of_member_runs(trained):
    assert [member.run.name for member in trained.members] == ["equal", "prob"]
    folders = [member.run for member in trained.members]
    assert visavis.evaluate(folders).metrics == trained.test.metrics
    again = visavis.evaluate(trained.run)
    assert again.to_json() == trained.test.to_json()
    assert again.published.id == ROW
    assert [visavis.evaluate(folder).published for folder in folders] == [None, None], (
        "published values apply to the mean"
    )


def test_invalid_last_member_is_rejected_before_training(toys, tmp_path):
    unsupervised = overrides(ROW, toys) | {"members.prob.phases.0.objective": "Ladder()"}
    with pytest.raises(MissingSupervision, match=r"^phases\.0: Ladder: expected relevance"):
        visavis.train(ROW, out=tmp_path / "run", overrides=unsupervised)
    assert not (tmp_path / "run").exists()


def test_ensemble_validates_on_images_of_members(toys, tmp_path):
    few = visavis.train(
        ROW,
        out=tmp_path / "run",
        overrides=overrides(ROW, toys) | {"evaluation.validation_images": 2},
    )
    assert [few.validation_images, *(member.validation_images for member in few.members)] == [
        2,
        2,
        2,
    ]
    assert few.test.num_images > 2


def test_members_are_in_text_and_json_output(trained, capsys):
    print_result(trained)
    text = capsys.readouterr().out
    assert f"Published: {ROW}" in text
    assert all(f"{name}: best validation RSUM" in text for name in ("equal", "prob"))
    found = trained.to_json()
    assert [member["run"] for member in found["members"]] == [
        str(member.run) for member in trained.members
    ]
    assert found["published"]["published"]["rsum"]["published"] == 487.6


@pytest.mark.slow
def test_stopped_ensemble_resumes(trained, toys, tmp_path, monkeypatch):
    folder, run = tmp_path / "run", Trainer.run

    def stop_in_second_member(self):
        if self.folder.path.name == "prob":
            raise Stopped(str(self.folder.path), signal.SIGINT)
        return run(self)

    monkeypatch.setattr(begin.Trainer, "run", stop_in_second_member)
    with pytest.raises(Stopped, match=str(folder) + "$"):
        visavis.train(ROW, out=folder, overrides=overrides(ROW, toys))
    monkeypatch.undo()
    again = visavis.train(resume=folder)
    assert again.test.metrics == trained.test.metrics
    for member in trained.members:
        kept, new = (
            visavis.load(member_folder).matcher.state_dict()
            for member_folder in (member.run, folder / member.run.name)
        )
        assert all(torch.equal(kept[name], new[name]) for name in kept)


def test_invalid_ensemble_is_rejected(toys, tmp_path):
    with pytest.raises(RecipeError, match=r"members: expected two or more, .*, got 'one'"):
        visavis.train("demo", overrides={"members": {"one": {}}, "data.path": str(toys / "images")})
    changes = {"members": {"one": {}, "two": {"model.widht": 3}}, "data.path": str(toys / "images")}
    with pytest.raises(
        RecipeError, match=r"demo, member two: model\.widht is not a key of recipes"
    ):
        visavis.train("demo", out=tmp_path / "run", overrides=changes)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match=r"expected a run folder with run\.toml"):
        visavis.train(resume=toys)
