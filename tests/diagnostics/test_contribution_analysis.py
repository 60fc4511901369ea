"""`visavis papers diagnose`: counts of batches at any checkpoint, and errors."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from tests.fixtures.recipes import write_recipe

import visavis
from visavis import Targets
from visavis.cli.console import print_result
from visavis.core.errors import RefusedOverwrite, RunError, SpecError, VisavisError
from visavis.core.progress import NoProgress
from visavis.data.synthetic import write_synthetic_scenes
from visavis.objectives import NTXent, SmoothAP, Triplet, TripletHN, Unified
from visavis.papers.diagnostics import contributing_samples
from visavis.papers.diagnostics.contributing_samples import released_targets
from visavis.papers.diagnostics.contribution_analysis import (
    BATCH_SIZE,
    batch_measures,
    diagnostic_loader,
    load_checkpoint,
    phase_of_best_model,
    render_diagnosis,
    scored_batches,
)
from visavis.training.checkpoint import Checkpoint
from visavis.training.monitoring.validation_metrics import validation_metrics
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.supervision import PairSupervision
from visavis.training.train_step import phase_loss


@pytest.fixture(scope="module")
def many_scenes(tmp_path_factory) -> Path:
    return write_synthetic_scenes(
        tmp_path_factory.mktemp("world") / "scenes",
        num_train=140,
        num_val=12,
        num_test=12,
        captions_per_image=2,
        size=32,
    )


@pytest.fixture(scope="module")
def run(many_scenes, tmp_path_factory) -> Path:
    recipe = write_recipe(
        tmp_path_factory.mktemp("recipe") / "tiny.toml",
        {
            "epochs": 2,
            "objective": "Triplet()",
            "supervision": "PairSupervision(by='position')",
            "optimizer": {"lr": 0.01},
        },
        {
            "objective": "Unified(gamma=20)",
            "optimizer": {"lr": 1e-9},
            "initial_weights": "best",
        },
        visual={"granularity": "regions"},
        model={"embedding_dim": 16, "word_dim": 8, "dropout": 0.5},
        training={"batch_size": 32},
    )
    return visavis.train(recipe, data=many_scenes, out=tmp_path_factory.mktemp("runs") / "run").run


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_phase_of_best_model_follows_log(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    recipe, rows = read_run_recipe(run), rows_of(run)
    for best in (1, len(rows) - 1):
        changed = [row | {"rsum": 9e9 if i == best else row["rsum"]} for i, row in enumerate(rows)]
        (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in changed))
        phase, step = phase_of_best_model(copy, recipe)
        assert (repr(phase.objective), step) == (rows[best]["objective"], rows[best]["step"])


def test_diagnosis_averages_batches(run):
    """Mean and deviation over the two full batches of 128 of the 280 captions, each counted here by
    itself.
    """
    result = visavis.papers_diagnose(run, objective=["NTXent(tau=0.2)", "TripletHN()"])
    assert (result.batches, result.images, result.texts, result.epsilon) == (
        2,
        BATCH_SIZE,
        BATCH_SIZE,
        0.01,
    )
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    loader = diagnostic_loader(data_module)
    phase, _ = phase_of_best_model(run, read_run_recipe(run))
    by = "position" if "position" in repr(phase.supervision) else "ids"
    found = list(scored_batches(loader, matcher, PairSupervision(by=by), 2))
    for objective in (NTXent(tau=0.2), TripletHN()):
        (count,) = [count for count in result.counts if count.objective == repr(objective)]
        for way, turn in (("i2t", lambda x: x), ("t2i", lambda x: x.T)):
            values = [
                contributing_samples(objective, turn(scores), turn(targets))
                for scores, targets in found
            ]
            for name in ("per_moved", "per_query", "in_batch", "idle"):
                numbers = [getattr(value, name) for value in values]
                assert count.mean[f"{way}_{name}"] == pytest.approx(sum(numbers) / 2, nan_ok=True)
                assert count.std[f"{way}_{name}"] == pytest.approx(
                    abs(numbers[0] - numbers[1]) / 2, nan_ok=True
                )
            assert count.mean[f"{way}_pull"] == pytest.approx(
                sum(value.pull.mean().item() for value in values) / 2
            )


def test_diagnosis_is_frozen_and_repeatable(run):
    before = (run / "model" / "model.safetensors").read_bytes()
    one, two = (visavis.papers_diagnose(run, max_batches=1) for _ in range(2))
    assert one == two
    assert one.batches == 1
    assert (run / "model" / "model.safetensors").read_bytes() == before
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    matcher.train()
    scores, targets = next(
        iter(scored_batches(diagnostic_loader(data_module), matcher, PairSupervision(), 1))
    )
    assert not matcher.training
    assert not scores.requires_grad
    assert scores.shape == targets.shape == (BATCH_SIZE, BATCH_SIZE)


def test_diagnosis_lists_own_objective_first(run):
    own = repr(phase_of_best_model(run, read_run_recipe(run))[0].objective)
    result = visavis.papers_diagnose(
        run, objective=[own, "Unified(gamma=5)", "Unified(gamma=5.0)"], max_batches=1
    )
    named = [count.objective for count in result.counts if count.semantics == "paper"]
    assert named == [own, repr(Unified(gamma=5))]
    assert (
        visavis.papers_diagnose(run, objective="VLC()", max_batches=1)
        .counts[-1]
        .objective.startswith("VLC(")
    )


def test_diagnosis_includes_released_counts(run):
    result = visavis.papers_diagnose(run, objective=["Triplet()"], max_batches=1)
    paper, released = (count for count in result.counts if count.objective.startswith("Triplet("))
    assert (paper.semantics, released.semantics) == ("paper", "reference")
    assert released_targets(TripletHN(), 4, 4) is None
    assert released_targets(Triplet(), 4, 20) is None
    assert released_targets(SmoothAP(), 4, 20).candidate_ids.tolist() == [
        image for image in range(4) for _ in range(5)
    ]


def test_batch_measures_without_moved_queries():
    nothing = {
        way: contributing_samples(TripletHN(), torch.eye(3), Targets.paired(3))
        for way in ("i2t", "t2i")
    }
    found = batch_measures(nothing)
    assert math.isnan(found["i2t_per_moved"])
    assert found["t2i_idle"] == 3


def test_diagnosis_counts_each_epsilon(run):
    swept = visavis.papers_diagnose(
        run, objective="NTXent()", epsilon=[0.01, 0.2, 0.01], max_batches=1
    )
    assert (swept.epsilon, swept.epsilons) == (0.01, (0.01, 0.2))
    alone = visavis.papers_diagnose(run, objective="NTXent()", epsilon=0.2, max_batches=1)
    assert [count for count in swept.counts if count.epsilon == 0.2] == list(alone.counts)
    assert [count["epsilon"] for count in swept.to_json()["counts"][:2]] == [0.01, 0.2]


def test_diagnosis_counts_smooth_ap_with_slope(run, capsys):
    """The factor 1/tau is the same as an epsilon that is tau times smaller."""
    options = {"objective": ["SmoothAP(tau=0.01)", "TripletHN()"], "max_batches": 1}
    printed = visavis.papers_diagnose(run, with_slope=True, epsilon=0.01, **options)
    smaller = visavis.papers_diagnose(run, epsilon=0.01 * 0.01, **options)
    default = visavis.papers_diagnose(run, epsilon=0.01, **options)
    counts = [
        {count.objective.partition("(")[0]: count.mean["i2t_per_query"] for count in result.counts}
        for result in (printed, smaller, default)
    ]
    assert counts[0] == counts[1]
    assert counts[0]["SmoothAP"] > counts[2]["SmoothAP"]
    assert counts[0]["TripletHN"] == counts[2]["TripletHN"]
    assert (printed.to_json()["with_slope"], default.to_json()["with_slope"]) == (True, False)
    for result, shown in ((printed, True), (default, False)):
        print_result(result)
        assert ("with the factor 1/tau" in capsys.readouterr().out) is shown
        page = render_diagnosis(result)
        assert ("--with-slope" in page, "with the factor 1/tau" in page) == (shown, shown)


def test_load_checkpoint_reproduces_initial_weights(run):
    """Its similarities are those that the first row of the log was given by the training itself."""
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    point = load_checkpoint(run, "start", data_module, matcher, NoProgress())
    row = rows_of(run)[0]
    assert (point.step, repr(point.phase.objective)) == (row["step"], row["objective"])
    found, _ = validation_metrics(
        matcher,
        phase_loss(matcher, point.phase),
        PairSupervision(by="position"),
        data_module.loader(data_module.validation),
        read_run_recipe(run),
    )
    assert found == row["val"]
    start, best = (
        visavis.papers_diagnose(run, checkpoint=name, max_batches=1).counts
        for name in ("start", "best")
    )
    _, best_step = phase_of_best_model(run, read_run_recipe(run))
    assert (start == best) == (best_step == point.step)


def test_load_checkpoint_rejects_other_initial_weights(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    environment = json.loads((run / "environment.json").read_text())
    (tmp_path / "run" / "environment.json").write_text(
        json.dumps(environment | {"initial_weights_checksum": "0" * 16})
    )
    with pytest.raises(
        RunError, match=r"initial weights could not be reproduced .* Install .*torch \d"
    ):
        visavis.papers_diagnose(tmp_path / "run", checkpoint="start", max_batches=1)


def test_load_checkpoint_finds_saved_checkpoints(run):
    """Two checkpoints: at the end of the second phase, and at that of the first, where the next one
    stands ready to begin.
    """
    last = visavis.papers_diagnose(run, checkpoint="last", max_batches=1)
    assert (last.checkpoint, last.step, last.counts[0].objective) == (
        "last",
        24,
        repr(read_run_recipe(run).phases[1].objective),
    )
    assert visavis.papers_diagnose(run, checkpoint="24", max_batches=1).counts == last.counts
    assert visavis.papers_diagnose(run, checkpoint=16, max_batches=1).step == 16
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    load_checkpoint(run, "last", data_module, matcher, NoProgress())
    for name, tensor in Checkpoint.latest(RunFolder(run).checkpoints).weights.items():
        assert torch.equal(matcher.state_dict()[name], tensor)


def test_diagnosis_report_holds_counts_and_plots(run, tmp_path):
    page = tmp_path / "page.html"
    found = visavis.papers_diagnose(
        run, objective="TripletHN()", epsilon=[0.01, 0.1], max_batches=1, out=page
    )
    written = page.read_text()
    assert (
        written.count("data:image/png;base64,") == 6
    )  # counts against epsilon, curves, gradients, for light and for dark pages
    for count in found.counts:
        rows = written.partition(f", epsilon {count.epsilon:g}</th></tr>")[2]
        assert f"<td>{count.mean['t2i_in_batch']:.2f}<small>±0.00</small></td>" in rows
        assert "text to image</th>" in rows
    with pytest.raises(RefusedOverwrite):
        visavis.papers_diagnose(run, max_batches=1, out=page)


def test_diagnosis_json_has_null_without_moved_queries(run):
    result = visavis.papers_diagnose(run, objective=["TripletHN(margin=-3)"], max_batches=1)
    (count,) = [
        count
        for count in json.loads(json.dumps(result.to_json()))["counts"]
        if "-3.0" in count["objective"]
    ]
    assert count["i2t_per_moved_mean"] is None
    assert count["i2t_idle_mean"] == BATCH_SIZE
    assert count["i2t_push_mean"] == 0


@pytest.mark.parametrize(
    ("given", "kind", "sentence"),
    [
        ({"max_batches": 0}, VisavisError, r"batches: expected an integer >= 1, got 0"),
        ({"epsilon": []}, VisavisError, r"epsilon: expected weights between 0 and 1, got none"),
        (
            {"epsilon": [0.01, 1]},
            VisavisError,
            r"epsilon: expected weights between 0 and 1, got 0\.01, 1",
        ),
        (
            {"checkpoint": "end"},
            RunError,
            r"checkpoint: expected best, last, start or a saved step \(16, 24\), got 'end'\.$",
        ),
        (
            {"objective": ["Unifid()"]},
            SpecError,
            r"'Unifid' in 'Unifid\(\)' is not in the catalog: did you mean Unified\?",
        ),
    ],
)
def test_diagnosis_rejects_invalid_arguments(run, given, kind, sentence):
    with pytest.raises(kind, match=sentence):
        visavis.papers_diagnose(run, **given)


def test_diagnosis_rejects_incomplete_run(run, tmp_path):
    with pytest.raises(RunError, match=r"expected a run folder with run\.toml"):
        visavis.papers_diagnose(tmp_path)
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(RunError, match=r"expected a validation in metrics\.jsonl"):
        visavis.papers_diagnose(tmp_path / "run")
    (tmp_path / "run" / "model" / "model.safetensors").unlink()
    with pytest.raises(RunError, match="expected a model, but the training has not reached"):
        visavis.papers_diagnose(tmp_path / "run")
