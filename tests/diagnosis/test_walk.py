"""``visavis diagnose``: the numbers are those of the batches it walks, at the best point, and errors are sentences."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import visavis
from visavis import Targets
from visavis.data.scenes import write_scenes
from visavis.diagnosis import contributing
from visavis.diagnosis.counting import rule_of
from visavis.diagnosis.points import best_phase, go_to
from visavis.diagnosis.walk import BATCH, batches_of, measures, walk
from visavis.errors import RefusedOverwrite, RunError, SpecError, VisavisError
from visavis.objectives import NTXent, SmoothAP, Triplet, TripletHN, Unified
from visavis.progress import Silent
from visavis.runs.folder import open_run, recipe_of
from visavis.supervision import PairSupervision
from visavis.training.checkpoint import Checkpoint
from visavis.training.loss import phase_loss
from visavis.training.probing import probe
from visavis.training.run_files import RunFiles

RECIPE = """
name = "tiny"
visual = { tower = "scenes", view = "grid" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSE++", width = 16, word_width = 8, dropout = 0.5 }
training = { batch_size = 32, probe_batches = 1, threads = 1 }

[[phases]]
epochs = 2
objective = "Triplet()"
supervision = "PairSupervision(by='position')"
optimizer = { lr = 0.01 }

[[phases]]
epochs = 1
objective = "Unified(gamma=20)"
optimizer = { lr = 1e-9 }
start_from = "best"
"""


class Said(Silent):
    def __init__(self):
        self.sentences = []

    def say(self, sentence):
        self.sentences.append(sentence)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("world") / "scenes", num_train=140, num_val=12, num_test=12, captions_per_image=2, size=32)


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory) -> Path:
    recipe = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    recipe.write_text(RECIPE)
    return visavis.train(recipe, data=scenes, out=tmp_path_factory.mktemp("runs") / "run").folder


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_best_point_is_that_of_the_best_validation(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    recipe, rows = recipe_of(run), rows_of(run)
    for best in (1, len(rows) - 1):
        changed = [row | {"rsum": 9e9 if i == best else row["rsum"]} for i, row in enumerate(rows)]
        (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in changed))
        phase, step = best_phase(copy, recipe)
        assert (phase.objective, step) == (rows[best]["objective"], rows[best]["step"])


def test_the_numbers_are_those_of_its_batches(run):
    """Mean and deviation over the two full batches of 128 of the 280 captions, each counted here by itself."""
    result = visavis.diagnose(run, objective=["NTXent(tau=0.2)", "TripletHN()"])
    assert (result.batches, result.images, result.texts, result.epsilon) == (2, BATCH, BATCH, 0.01)
    data_module, matcher = open_run(run, recipe_of(run), Silent())
    loader = batches_of(data_module)
    phase, _ = best_phase(run, recipe_of(run))
    by = "position" if "position" in phase.supervision else "ids"
    found = list(walk(loader, matcher, PairSupervision(by=by), 2))
    for objective in (NTXent(tau=0.2), TripletHN()):
        (count,) = [count for count in result.counts if count.objective == repr(objective)]
        for way, turn in (("i2t", lambda x: x), ("t2i", lambda x: x.T)):
            values = [contributing(objective, turn(scores), turn(targets)) for scores, targets in found]
            for name in ("per_moved", "per_query", "in_batch", "idle"):
                numbers = [getattr(value, name) for value in values]
                assert count.mean[f"{way}_{name}"] == pytest.approx(sum(numbers) / 2)
                assert count.deviation[f"{way}_{name}"] == pytest.approx(abs(numbers[0] - numbers[1]) / 2)
            assert count.mean[f"{way}_pull"] == pytest.approx(sum(value.pull.mean().item() for value in values) / 2)


def test_the_walk_is_frozen_without_dropout_and_the_same_each_time(run):
    before = (run / "model" / "model.safetensors").read_bytes()
    one, two = (visavis.diagnose(run, batches=1) for _ in range(2))
    assert one == two
    assert one.batches == 1
    assert (run / "model" / "model.safetensors").read_bytes() == before
    data_module, matcher = open_run(run, recipe_of(run), Silent())
    matcher.train()
    scores, targets = next(iter(walk(batches_of(data_module), matcher, PairSupervision(), 1)))
    assert not matcher.training
    assert not scores.requires_grad
    assert scores.shape == targets.shape == (BATCH, BATCH)


def test_the_runs_own_objective_comes_first_and_once(run):
    own = best_phase(run, recipe_of(run))[0].objective
    result = visavis.diagnose(run, objective=[own, "Unified(gamma=5)", "Unified(gamma=5.0)"], batches=1)
    named = [count.objective for count in result.counts if count.semantics == "paper"]
    assert named == [own, repr(Unified(gamma=5))]
    assert visavis.diagnose(run, objective="VLC()", batches=1).counts[-1].objective.startswith("VLC(")


def test_the_released_code_is_shown_where_it_counts_otherwise(run):
    result = visavis.diagnose(run, objective=["Triplet()"], batches=1)
    paper, released = (count for count in result.counts if count.objective.startswith("Triplet("))
    assert (paper.semantics, released.semantics) == ("paper", "reference")
    assert rule_of(TripletHN()) is None
    assert rule_of(Triplet()).released_targets(4, 20) is None
    assert rule_of(SmoothAP()).released_targets(4, 20).candidate_ids.tolist() == [image for image in range(4) for _ in range(5)]


def test_a_batch_that_moves_nothing_is_left_out_of_the_mean_of_the_moved():
    nothing = {way: contributing(TripletHN(), torch.eye(3), Targets.paired(3)) for way in ("i2t", "t2i")}
    found = measures(nothing)
    assert math.isnan(found["i2t_per_moved"])
    assert found["t2i_idle"] == 3


def test_each_epsilon_has_a_count_of_the_same_walk(run):
    swept = visavis.diagnose(run, objective="NTXent()", epsilon=[0.01, 0.2, 0.01], batches=1)
    assert (swept.epsilon, swept.epsilons) == (0.01, (0.01, 0.2))
    alone = visavis.diagnose(run, objective="NTXent()", epsilon=0.2, batches=1)
    assert [count for count in swept.counts if count.epsilon == 0.2] == list(alone.counts)
    assert [count["epsilon"] for count in swept.to_json()["counts"][:2]] == [0.01, 0.2]


def test_the_start_is_the_model_that_training_began_with(run):
    """Its similarities are those that the first row of the log was given by the training itself."""
    data_module, matcher = open_run(run, recipe_of(run), Silent())
    point = go_to(run, "start", data_module, matcher, Silent())
    row = rows_of(run)[0]
    assert (point.step, point.phase.objective) == (row["step"], row["objective"])
    found, _ = probe(
        matcher,
        phase_loss(matcher, point.phase),
        PairSupervision(by="position"),
        data_module.loader(data_module.validation),
        recipe_of(run),
    )
    assert found == row["val"]
    assert visavis.diagnose(run, at="start", batches=1).counts != visavis.diagnose(run, batches=1).counts


def test_a_start_that_comes_out_otherwise_is_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    environment = json.loads((run / "environment.json").read_text())
    (tmp_path / "run" / "environment.json").write_text(json.dumps(environment | {"start": "0" * 16}))
    with pytest.raises(RunError, match=r"what its training began with cannot be made anew.*: bring back .*torch \d"):
        visavis.diagnose(tmp_path / "run", at="start", batches=1)
    (tmp_path / "run" / "environment.json").write_text(json.dumps({key: environment[key] for key in environment if key != "start"}))
    said = Said()
    older = visavis.diagnose(tmp_path / "run", at="start", batches=1, progress=said)
    assert older.counts == visavis.diagnose(run, at="start", batches=1).counts
    assert any("those of its seed are taken, unchecked" in sentence for sentence in said.sentences)


def test_the_points_that_are_kept(run):
    """Two checkpoints: at the end of the second phase, and at that of the first, where the next one stands ready to begin."""
    last = visavis.diagnose(run, at="last", batches=1)
    assert (last.at, last.step, last.counts[0].objective) == ("last", 24, recipe_of(run).phases[1].objective)
    assert visavis.diagnose(run, at="24", batches=1).counts == last.counts
    assert visavis.diagnose(run, at=16, batches=1).step == 16
    data_module, matcher = open_run(run, recipe_of(run), Silent())
    go_to(run, "last", data_module, matcher, Silent())
    for name, tensor in Checkpoint.latest(RunFiles(run).checkpoints).weights.items():
        assert torch.equal(matcher.state_dict()[name], tensor)


def test_the_page_holds_the_counts_the_sweep_and_the_curves(run, tmp_path):
    page = tmp_path / "page.html"
    found = visavis.diagnose(run, objective="TripletHN()", epsilon=[0.01, 0.1], batches=1, out=page)
    written = page.read_text()
    assert written.count("data:image/png;base64,") == 4  # counts against epsilon, curves; for light and for dark pages
    for count in found.counts:
        assert f"epsilon {count.epsilon:g}, text to image" in written
        assert f"<td>{count.mean['t2i_in_batch']:.2f} ± 0.00</td>" in written
    with pytest.raises(RefusedOverwrite):
        visavis.diagnose(run, batches=1, out=page)


def test_what_nothing_moves_is_null_in_json(run):
    result = visavis.diagnose(run, objective=["TripletHN(margin=-3)"], batches=1)
    (count,) = [count for count in json.loads(json.dumps(result.to_json()))["counts"] if "-3.0" in count["objective"]]
    assert count["i2t_per_moved_mean"] is None
    assert count["i2t_idle_mean"] == BATCH
    assert count["i2t_push_mean"] == 0


@pytest.mark.parametrize(
    ("given", "kind", "sentence"),
    [
        ({"batches": 0}, VisavisError, r"a diagnosis of 0 batches says nothing: give --batches a number above 0"),
        ({"epsilon": []}, VisavisError, r"epsilon is nothing, expected weights above 0 and below 1"),
        ({"epsilon": [0.01, 1]}, VisavisError, r"epsilon is 0\.01, 1, expected weights above 0 and below 1"),
        ({"at": "end"}, RunError, r"has no point 'end': expected best, last, start, or the step of a checkpoint that is kept: 16, 24\.$"),
        ({"objective": ["Unifid()"]}, SpecError, r"'Unifid' in 'Unifid\(\)' is not in the catalog: did you mean Unified\?"),
    ],
)
def test_what_cannot_be_is_a_sentence(run, given, kind, sentence):
    with pytest.raises(kind, match=sentence):
        visavis.diagnose(run, **given)


def test_a_folder_without_a_model_or_a_log_is_refused(run, tmp_path):
    with pytest.raises(RunError, match=r"is no run folder: expected run\.toml"):
        visavis.diagnose(tmp_path)
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"has no metrics\.jsonl with a validation in it"):
        visavis.diagnose(tmp_path / "run")
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    with pytest.raises(RunError, match="holds no model yet"):
        visavis.diagnose(tmp_path / "run")
