"""Recorded norms of gradients: their values, and a training that a record does not change."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tests.processes import in_processes
from tests.training.process_cases import RECIPES, train_all, write_recipes

import visavis
from visavis.core.errors import RunError
from visavis.core.process_group import ONE_PROCESS
from visavis.models.base import observe_embeddings
from visavis.training.monitoring.gradient_norms import GradientNorms, is_recorded, mean_norms
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped
from visavis.training.trainer import Trainer
from visavis.training.training_run import prepare_training

EMBEDDINGS = [
    f"{encoder}_{place}"
    for encoder in ("visual", "text")
    for place in ("normalized", "tangent", "embedding")
]
SCORES, PARAMETERS = ["scores", "scores_per_query"], ["visual_parameters", "text_parameters"]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> dict[str, Path]:
    return write_recipes(tmp_path_factory.mktemp("recipes"))


def records(run: Path) -> list[dict[str, float]]:
    return [each for row in RunFolder(run).read_log() for each in row.get("gradient_steps", ())]


def train(recipe, data, out, **settings):
    values = {f"training.{name}": value for name, value in settings.items()}
    return visavis.train(recipe, data=data, out=out, overrides=values).run


def begin(recipe, data, folder, **overrides) -> Trainer:
    values = {"data.path": str(data), **overrides}
    trainer = Trainer(*prepare_training(read_recipe(recipe, values)), RunFolder(folder))
    trainer._begin_phase({})
    return trainer


def record_batch(trainer: Trainer) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The norms of the first batch, and its embeddings before normalization."""
    step, batch = trainer.train_step, next(iter(trainer.train_loader.epoch(1)))
    seen = list[torch.Tensor]()
    with observe_embeddings(lambda rows: seen.append(rows.detach())):
        trainer.matcher.eval()
        trainer.matcher.encode_visual(batch.visual)
        trainer.matcher.encode_text(batch.text)
    step.record_gradients()
    step.backward(batch, trainer.supervision.targets)
    step.step(1.0)
    return step.recorded_gradients(), dict(zip(("visual", "text"), seen, strict=True))


@pytest.mark.parametrize("name", ["pooled", "NCR", "offline"])
def test_recording_does_not_change_weights(recipes, recipe, scenes, tmp_path, outcome, name):
    """The recipe "pooled" is replaced by one with dropout, accumulation and two phases."""
    file = recipe if name == "pooled" else recipes[name]
    epochs = {} if name == "pooled" else {"epochs": 1}
    with_records, without = (
        outcome(
            visavis.train(
                file,
                data=scenes,
                out=tmp_path / str(every),
                overrides={"training.gradients_every": every, **epochs},
            ).run
        )
        for every in (1, 0)
    )
    for part in ("model", "peer", "weights", "optimizer", "supervision", "ranks"):
        assert with_records[part] == without[part]
    assert [row["rsum"] for row in with_records["log"]] == [row["rsum"] for row in without["log"]]
    assert all("gradient_steps" in row for row in with_records["log"][1:])
    assert not any("gradient_steps" in row for row in without["log"])


def test_run_records_its_first_step_by_default(recipe, scenes, tmp_path):
    run = visavis.train(recipe, data=scenes, out=tmp_path / "run").run
    assert records(run)[0].keys() == {"step", *SCORES, *EMBEDDINGS, *PARAMETERS}
    assert records(run)[0]["step"] == 0


def test_resumed_run_continues_the_records(recipe, scenes, tmp_path, stop_at, outcome):
    """A stop between two validations, after some records."""
    given = {"data": scenes, "overrides": {"training.gradients_every": 2}}
    whole = visavis.train(recipe, out=tmp_path / "whole", **given).run
    with pytest.raises(Stopped):
        visavis.train(recipe, out=tmp_path / "run", progress=stop_at(4), **given)
    state = json.loads(max((tmp_path / "run/checkpoint").glob("*/state.json")).read_text())
    assert [record["step"] for record in state["gradients"]] == [0, 2]
    visavis.train(resume=tmp_path / "run")
    assert outcome(tmp_path / "run")["log"] == outcome(whole)["log"]
    # A new phase has an optimizer of its own, and trains the text encoder only.
    frozen = [record for record in records(whole) if "visual_parameters" not in record]
    assert frozen and all("visual_embedding" not in record for record in frozen)


def test_embedding_gradient_is_tangent_divided_by_length(recipes, scenes, tmp_path):
    """For embeddings of one length, so that the norms over a batch have this factor, too."""
    trainer = begin(recipes["position"], scenes, tmp_path, **{"training.batch_size": 2})
    with torch.no_grad():
        for parameter in trainer.matcher.parameters():
            parameter.mul_(2)
    norms, embeddings = record_batch(trainer)
    for encoder, rows in embeddings.items():
        lengths = rows.norm(dim=1)
        shortest, longest = lengths.min().item(), lengths.max().item()
        ratio = norms[f"{encoder}_tangent"] / norms[f"{encoder}_embedding"]
        assert shortest * (1 - 1e-5) <= ratio <= longest * (1 + 1e-5)
        assert norms[f"{encoder}_tangent"] <= norms[f"{encoder}_normalized"]


def test_norms_match_hand_values(recipes, scenes, tmp_path):
    """TripletHN with a large margin: each query pushes one pair and pulls one, with weight 1."""
    overrides = {"phases.0.objective": "TripletHN(margin=3)", "training.clip_norm": 0.0}
    trainer = begin(recipes["position"], scenes, tmp_path, **overrides)
    parameters = {
        part: [parameter for _, parameter in members]
        for part, members in trainer.matcher.parameters_by_part().items()
    }
    batch = next(iter(trainer.train_loader.epoch(1)))
    trainer.train_step.record_gradients()
    trainer.train_step.backward(batch, trainer.supervision.targets, 0.5)
    expected = {
        f"{part}_parameters": math.sqrt(
            sum(each.grad.double().square().sum().item() for each in members)
        )
        for part, members in parameters.items()
    }
    total = trainer.train_step.step(1.0)
    norms = trainer.train_step.recorded_gradients()
    assert norms["scores_per_query"] == pytest.approx(math.sqrt(2))
    assert norms["scores"] == pytest.approx(0.5 * math.sqrt(2 * 2 * len(batch.images)))
    assert {name: norms[name] for name in expected} == pytest.approx(expected)
    assert math.hypot(*expected.values()) == pytest.approx(total)


def test_accumulated_batches_are_one_record(recipes, scenes, tmp_path):
    """The norms of two equal batches of half weight: equal to one batch, divided by the root of 2. The
    gradients of parameters are added, so their norm is the same.
    """
    batches = [begin(recipes["position"], scenes, tmp_path / str(number)) for number in (1, 2)]
    found = []
    for number, trainer in enumerate(batches, 1):
        batch = next(iter(trainer.train_loader.epoch(1)))
        trainer.train_step.record_gradients()
        for _ in range(number):
            trainer.train_step.backward(batch, trainer.supervision.targets, 1 / number)
        trainer.train_step.step(1.0)
        found.append(trainer.train_step.recorded_gradients())
    one, two = found
    for name in ("scores", *EMBEDDINGS):
        assert two[name] == pytest.approx(one[name] / math.sqrt(2), rel=1e-4)
    for name in ("scores_per_query", *PARAMETERS):
        assert two[name] == pytest.approx(one[name], rel=1e-4)


def test_chunks_and_precision_do_not_change_the_norms(recipes, scenes, tmp_path):
    whole, _ = record_batch(begin(recipes["position"], scenes, tmp_path / "whole"))
    chunks = {"training.chunk_size": 7}
    found, _ = record_batch(begin(recipes["position"], scenes, tmp_path / "chunks", **chunks))
    assert found == pytest.approx(whole, rel=1e-3)
    for autocast in (True, "float16"):
        half, _ = record_batch(
            begin(
                recipes["position"],
                scenes,
                tmp_path / str(autocast),
                **{"training.autocast": autocast},
            )
        )
        # TripletHN is discrete: another negative may be the hardest.
        assert half == pytest.approx(whole, rel=0.15)


def test_model_without_embeddings_records_what_exists(recipes, scenes, tmp_path):
    run = train(recipes["SCAN"], scenes, tmp_path / "run", gradients_every=3)
    for record in records(run):
        assert record.keys() == {"step", *SCORES, *PARAMETERS}


def test_overflow_of_a_step_is_no_record():
    norms = GradientNorms(ONE_PROCESS, 1.0)
    norms.parameters = {"visual_parameters": math.inf}
    assert norms.summarize() == {}
    norms.parameters = {"visual_parameters": 2.0}
    assert norms.summarize() == {"visual_parameters": 2.0}


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_optimizer_step_with_a_multiple_is_recorded(size, every):
    for first in range(0, 40, size):
        expected = any(step % every == 0 for step in range(first, first + size))
        assert is_recorded(first, size, every) == expected
    assert not is_recorded(0, size, 0)


def test_mean_norms_average_common_names():
    rows = [{"step": 0, "scores": 1.0, "text_parameters": 3.0}, {"step": 5, "scores": 2.0}]
    assert mean_norms(rows) == {"scores": 1.5}


@pytest.mark.slow
def test_trackers_receive_the_means(recipe, scenes, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"gradients_every": 2, "track": ["tensorboard"]}
    run = train(recipe, scenes, tmp_path / "run", **settings)
    events = EventAccumulator(str(RunFolder(run).tensorboard))
    events.Reload()
    logged = {each.step: each.value for each in events.Scalars("gradients/scores")}
    assert logged == pytest.approx(
        {
            row["step"]: row["gradients"]["scores"]
            for row in RunFolder(run).read_log()
            if "gradients" in row
        }
    )


@pytest.mark.slow
def test_two_processes_record_the_gradients_of_one(recipes, scenes, tmp_path):
    names = ("pooled", "SCAN", "graded")
    assert set(names) <= RECIPES.keys()
    overrides = {"data.path": str(scenes), "epochs": 1, "training.gradients_every": 1}
    jobs = {name: (str(recipes[name]), overrides) for name in names}
    jobs["sharded"] = (str(recipes["pooled"]), overrides | {"training.strategy": "fsdp"})
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
    for name, (file, values) in jobs.items():
        visavis.train(file, overrides=values, out=tmp_path / "1" / name)
    arguments = (2, tmp_path / "rendezvous", jobs, tmp_path / "2")
    in_processes(train_all, arguments, nprocs=2)
    for name in jobs:
        one, two = (records(tmp_path / number / name) for number in ("1", "2"))
        assert len(one) == len(two) > 1
        for expected, found in zip(one, two, strict=True):
            assert found == pytest.approx(expected, rel=1e-3)


def test_diagnose_compares_the_gradients_of_runs(recipes, scenes, tmp_path, command_line):
    runs = [
        visavis.train(
            recipes["position"],
            data=scenes,
            out=tmp_path / f"{objective.partition('(')[0]}-{seed}",
            overrides={
                "seed": seed,
                "epochs": 1,
                "training.batches_per_epoch": 2,
                "phases.0.objective": objective,
            },
        ).run
        for objective in ("TripletHN()", "Triplet(margin=0.1)")
        for seed in (1, 2)
    ]
    found = visavis.papers_diagnose(runs, max_batches=1, out=tmp_path / "report.html")
    assert [flow.name for flow in found.gradients] == ["TripletHN"] * 2 + ["Triplet"] * 2
    assert [list(flow.records) for flow in found.gradients] == [records(run) for run in runs]
    assert found.counts == visavis.papers_diagnose(runs[0], max_batches=1).counts
    page = (tmp_path / "report.html").read_text()
    assert "Gradients during training" in page
    assert "areas their range" in page
    assert all(str(run) in page for run in runs)
    code, out, _ = command_line("papers", "diagnose", *runs, "--max-batches", 1, "--quiet")
    assert code == 0
    assert "gradient norm" in out and "raw: before normalization" in out
    without = train(recipes["position"], scenes, tmp_path / "without", gradients_every=0)
    assert visavis.papers_diagnose(without, max_batches=1).gradients == ()
    with pytest.raises(RunError, match=r"without: expected recorded gradients .*gradients_every"):
        visavis.papers_diagnose([runs[0], without], max_batches=1)
