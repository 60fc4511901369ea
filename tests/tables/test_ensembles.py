"""Starred rows: members trained apart, each a run of its own, scored by their mean."""

from __future__ import annotations

import signal

import pytest
import torch

import visavis
from visavis.cli.output import print_trained
from visavis.errors import MissingSupervision, RecipeError, RunError
from visavis.runs import begin
from visavis.runs.begin import Trained
from visavis.training.stopping import Stopped
from visavis.training.trainer import Trainer

from .toy import overrides

ROW = "unified/7/bfan-ensemble-unified"


@pytest.fixture(scope="module")
def trained(toys, tmp_path_factory) -> Trained:
    return visavis.train(ROW, out=tmp_path_factory.mktemp("run") / "run", overrides=overrides(ROW, toys))


def test_each_member_is_a_run_and_the_ensemble_is_their_mean(trained):
    assert [member.folder.name for member in trained.members] == ["equal", "prob"]
    folders = [member.folder for member in trained.members]
    assert visavis.evaluate(folders).metrics == trained.test.metrics
    again = visavis.evaluate(trained.folder)
    assert again.to_json() == trained.test.to_json()
    assert again.published.address == ROW
    assert [visavis.evaluate(folder).published for folder in folders] == [None, None], "the figures are those of the mean"


def test_a_last_member_that_cannot_be_trained_is_refused_before_the_first_one_is(toys, tmp_path):
    untold = overrides(ROW, toys) | {"members.prob.phases.0.objective": "Ladder()"}
    with pytest.raises(MissingSupervision, match=r"^phase 0: Ladder needs relevance"):
        visavis.train(ROW, out=tmp_path / "run", overrides=untold)
    assert not (tmp_path / "run").exists()


def test_an_ensemble_is_validated_on_as_many_images_as_its_members(toys, tmp_path):
    few = visavis.train(ROW, out=tmp_path / "run", overrides=overrides(ROW, toys) | {"evaluation.validation_images": 2})
    assert [few.validation_images, *(member.validation_images for member in few.members)] == [2, 2, 2]
    assert few.test.num_images > 2


def test_the_members_stand_in_print_and_json(trained, capsys):
    print_trained(trained)
    text = capsys.readouterr().out
    assert f"Published: {ROW}" in text
    assert all(f"{name}: best RSUM" in text for name in ("equal", "prob"))
    found = trained.to_json()
    assert [member["run"] for member in found["members"]] == [str(member.folder) for member in trained.members]
    assert found["published"]["published"]["rsum"]["published"] == 487.6


def test_a_stopped_ensemble_goes_on_where_it_was(trained, toys, tmp_path, monkeypatch):
    folder, run = tmp_path / "run", Trainer.run

    def stopped_at_the_second(self):
        if self.files.folder.name == "prob":
            raise Stopped(str(self.files.folder), signal.SIGINT)
        return run(self)

    monkeypatch.setattr(begin.Trainer, "run", stopped_at_the_second)
    with pytest.raises(Stopped, match=str(folder) + "$"):
        visavis.train(ROW, out=folder, overrides=overrides(ROW, toys))
    monkeypatch.undo()
    again = visavis.train(resume=folder)
    assert again.test.metrics == trained.test.metrics
    for member in trained.members:
        kept, new = (visavis.load(place).matcher.state_dict() for place in (member.folder, folder / member.folder.name))
        assert all(torch.equal(kept[name], new[name]) for name in kept)


def test_what_is_no_ensemble_is_one_sentence(toys, tmp_path):
    with pytest.raises(RecipeError, match=r"members are 'one': expected two or more"):
        visavis.train("demo", overrides={"members": {"one": {}}, "data.path": str(toys / "pictures")})
    changes = {"members": {"one": {}, "two": {"model.widht": 3}}, "data.path": str(toys / "pictures")}
    with pytest.raises(RecipeError, match=r"demo, member two: model\.widht is not a key of recipes"):
        visavis.train("demo", out=tmp_path / "run", overrides=changes)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match=r"is no run folder"):
        visavis.train(resume=toys)
