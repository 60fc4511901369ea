"""Ensembles of runs: mean score matrices of models that read different features, in the CLI and in
Python.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from tests.fixtures.recipes import write_recipe
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import RunError
from visavis.core.progress import NoProgress
from visavis.data.dataset_reader import open_dataset
from visavis.data.synthetic import write_synthetic_scenes
from visavis.evaluation import rank_scores
from visavis.evaluation.bootstrap import bootstrap_images
from visavis.evaluation.query_ranks import read_query_ranks
from visavis.training.runs.open_run import open_run, read_run_recipe


@pytest.fixture(scope="module")
def runs(few_scenes, tmp_path_factory):
    """A model of whole images, and a model of regions with a smaller vocabulary."""
    root = tmp_path_factory.mktemp("runs")
    for kind, granularity, count in (("VSE++", "pooled", 1), ("SCAN", "regions", 3)):
        recipe = write_recipe(
            root / "recipe.toml",
            {"epochs": 2, "optimizer": {"lr": 0.01}},
            visual={"granularity": granularity},
            text={"min_count": count},
            model={"kind": kind, "embedding_dim": 16, "word_dim": 8},
        )
        visavis.train(recipe, data=few_scenes, out=root / kind)
    return [root / "VSE++", root / "SCAN"]


def matrix(run, split="test"):
    """Return the scores of a run on its data, from its stored features."""
    data_module, matcher = open_run(run, read_run_recipe(run), NoProgress())
    with torch.no_grad():
        return matcher.score(*data_module.encode(matcher.eval(), data_module.data.split(split)))


def test_ensemble_metrics_match_mean_score_matrix(runs, few_scenes):
    test = open_dataset(few_scenes).split("test")
    mean = torch.stack([matrix(run) for run in runs]).mean(0)
    expected = rank_scores(mean, torch.arange(8), torch.from_numpy(test.image_of))
    together = visavis.evaluate(runs)
    assert together.metrics == expected.metrics
    assert np.array_equal(together.text_ranks, expected.text_ranks)
    assert together.metrics not in [visavis.evaluate(run).metrics for run in runs]
    assert visavis.evaluate([runs[1], runs[1]]).metrics == visavis.evaluate(runs[1]).metrics

    alone = [
        {hit.name: hit.score for hit in visavis.search(run, "a red circle", top=99)} for run in runs
    ]
    hits = visavis.search(runs, "a red circle", top=99)
    assert len(hits) == 24
    assert [hit.score for hit in hits] == pytest.approx(
        [np.mean([scores[hit.name] for scores in alone]) for hit in hits]
    )
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert [
        hit.name for hit in visavis.search(runs, "a red circle", collection=few_scenes, top=3)
    ] == [hit.name for hit in hits[:3]]


def test_run_stores_rank_of_every_query(runs):
    for run in runs:
        kept, expected = (
            read_query_ranks(run / "ranks.safetensors"),
            visavis.evaluate(run).query_ranks,
        )
        assert list(kept) == ["plain"]
        for name, values in vars(expected).items():
            assert np.array_equal(getattr(kept["plain"], name), values)
        assert bootstrap_images({"run": {0: kept["plain"]}}, num_samples=2).value(
            "run"
        ).value == pytest.approx(visavis.evaluate(run).metrics["rsum"])


def test_cli_evaluates_several_runs(runs):
    command = ["evaluate", *map(str, runs), "--json"]
    assert (
        json.loads(CliRunner().invoke(app, command).stdout)["rsum"]
        == visavis.evaluate(runs).metrics["rsum"]
    )
    found = CliRunner().invoke(
        app, ["search", *map(str, runs), "a red circle", "--top", "1", "--json"]
    )
    assert (
        json.loads(found.stdout)["hits"][0]["name"]
        == visavis.search(runs, "a red circle", top=1)[0].name
    )


def test_pretrained_folder_joins_ensemble(runs, dual_encoders):
    together = visavis.evaluate([dual_encoders / "clip", runs[0]])
    assert (together.protocol, together.num_images) == ("plain", 8)
    assert together.metrics != visavis.evaluate(runs[0]).metrics


def test_ensemble_rejects_mismatched_runs(runs, few_scenes, tmp_path):
    other = write_synthetic_scenes(
        tmp_path / "other",
        num_train=12,
        num_val=4,
        num_test=8,
        captions_per_image=2,
        size=32,
        seed=3,
    )
    visavis.train(
        runs[0] / "run.toml",
        data=other,
        out=tmp_path / "other run",
        overrides={"evaluation.protocol": "plain"},
    )
    with pytest.raises(
        RunError,
        match=r"other run: expected the same images and captions as .*VSE\+\+, got caption 0 '.*' instead of '",
    ):
        visavis.evaluate([runs[0], tmp_path / "other run"])
    with pytest.raises(
        RunError, match=r"SCAN: expected the same images and captions as .*other run, got caption 0"
    ):
        visavis.search([tmp_path / "other run", runs[1]], "a red circle")
    assert visavis.evaluate([runs[0], tmp_path / "other run"], data=other).num_texts == 16
    visavis.train(runs[0] / "run.toml", out=tmp_path / "val", overrides={"evaluation.test": "val"})
    with pytest.raises(
        RunError,
        match=r"^evaluation\.test: expected one value for all runs, got 'test' in .*VSE\+\+ and 'val' in .*val\. Choose one with --split",
    ):
        visavis.evaluate([runs[0], tmp_path / "val"])
    assert visavis.evaluate([runs[0], tmp_path / "val"], split="val").num_images == 4
    with pytest.raises(RunError, match="expected a second network in peer, found none"):
        visavis.papers_evaluate(runs, average=True)


def test_run_without_recipe_needs_named_data(runs, few_scenes, tmp_path):
    for run in runs:
        shutil.copytree(run / "model", tmp_path / run.name / "model")
        assert (
            visavis.evaluate(tmp_path / run.name, data=few_scenes).metrics
            == visavis.evaluate(run).metrics
        )
    with pytest.raises(RunError, match=r"expected a data set, but .* Name one with --data"):
        visavis.evaluate(tmp_path / run.name)


def test_ensemble_in_place_of_run_reports_its_runs(tmp_path):
    folder = tmp_path / "both"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
        (folder / name / "run.toml").touch()
    (folder / "ensemble.toml").touch()
    for call in (visavis.papers_diagnose, lambda run: visavis.explain(run, "a.jpg", "a dog")):
        with pytest.raises(
            RunError,
            match=r"both: expected one run, got an ensemble of a and b\. Name one of these runs, such as .*a",
        ):
            call(folder)
