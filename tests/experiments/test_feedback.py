"""Feedback in comparisons: metrics of every run on relevance judgments, which take no part in
selection.
"""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import visavis
from visavis.core.errors import DataError, RecipeError, RunError
from visavis.core.progress import NoProgress
from visavis.core.table_formats import format_text
from visavis.data.dataset_reader import open_dataset
from visavis.evaluation.bootstrap import bootstrap_queries
from visavis.evaluation.feedback_metrics import JudgedQueryResult, feedback_metrics

KEYS = ["judged_r1", "judged_r5", "judged_r10", "judged_ordered"]


class RecordedProgress(NoProgress):
    """Records the messages."""

    def __init__(self):
        self.messages = []

    def message(self, text):
        self.messages.append(text)


@pytest.fixture(scope="module")
def with_feedback(plain, votes, tmp_path_factory):
    """A finished comparison to which feedback was added, and its messages."""
    folder, progress = (
        shutil.copytree(plain.folder, tmp_path_factory.mktemp("feedback") / "both"),
        RecordedProgress(),
    )
    before = {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/result.json")}
    comparison = visavis.compare(resume=folder, feedback=votes, workers=1, progress=progress)
    assert {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/result.json")} == before
    return comparison, progress.messages


def test_feedback_metrics_by_hand():
    scores = np.array([0.9, 0.5, 0.5, 0.3, 0.1])
    result = JudgedQueryResult.from_scores(scores, relevant=[1, 3], not_relevant=[2, 4])
    assert result == JudgedQueryResult(
        rank=3, num_pairs=4, num_ordered=2
    )  # the tie counts against the model, in the rank and in the pairs
    assert feedback_metrics([result, JudgedQueryResult(1, 0, 0)]) == dict(
        zip(KEYS, [50.0, 100.0, 100.0, 50.0], strict=True)
    )
    assert feedback_metrics([JudgedQueryResult(1, 0, 0)])["judged_ordered"] is None


def test_feedback_is_scored_with_each_saved_model(plain, with_feedback):
    comparison, messages = with_feedback
    assert any(
        message.endswith(
            "2 text queries with 3 relevant images. Each query ranks 12 images of split test. In "
            "order: share of 3 pairs whose relevant "
            "image ranks above the one that is not relevant. Not evaluated: 1 queries without a "
            "relevant image. 3 of 9 judgments were "
            "skipped: 2 of images of split train, 1 of images that are not in scenes or have "
            "changed."
        )
        for message in messages
    )
    assert comparison.best == plain.best
    for one in comparison.outcomes:
        model, data = (
            visavis.load(one.folder),
            open_dataset(comparison.settings[0].recipe_values["data"]["path"]).split("test"),
        )
        scores = model.score(
            [image.open() for image in data.images], ["a red star", "a small blue circle"]
        ).T.numpy()
        expected = [
            JudgedQueryResult.from_scores(scores[0], [0, 1], [2]),
            JudgedQueryResult.from_scores(scores[1], [3], [0]),
        ]
        assert {key: one.measured_metrics[key] for key in KEYS} == feedback_metrics(expected)


def test_feedback_columns_and_statistics_are_in_every_table(with_feedback):
    comparison, _ = with_feedback
    folder, row = comparison.folder, comparison.results.rows[0]
    means = [f"{row.mean(key):.1f}" for key in KEYS]
    assert (
        format_text(comparison.results.table(row_notes=comparison.results.spread_kinds))
        .splitlines()[2]
        .split()[-4:]
        == means
    )
    line = next(
        line
        for line in (folder / "table.md").read_text().splitlines()
        if line.startswith(f"| {row.name}")
    )
    assert [cell.strip(" *").split(" (")[0] for cell in line.split("|")[-5:-1]] == means
    assert r"\multicolumn{4}{c}{feedback}" in (folder / "table.tex").read_text()
    lines = {
        (line["row"], line["metric"]): line
        for line in csv.DictReader((folder / "table.csv").read_text().splitlines())
    }
    other = next(iter(comparison.differences_from_best))
    pair, resampled = (
        comparison.feedback_differences_from_best("judged_r5")[other],
        comparison.query_bootstrap.difference(comparison.best.name, other, "judged_r5"),
    )
    assert float(lines[other, "judged_r5"]["difference"]) == pytest.approx(-pair.difference)
    assert lines[other, "judged_r5"]["verdict"] == pair.swapped().verdict
    assert (lines[other, "judged_r5"]["images_low"] != "") == (resampled.interval is not None)
    content = json.loads((folder / "comparison.json").read_text())
    assert (
        content["feedback"]["differences_from_best"]["judged_ordered"][0]["difference"]
        == comparison.feedback_differences_from_best("judged_ordered")[other].difference
    )
    assert content["table"]["chance"]["judged_ordered"] == 50
    page = (folder / "report.html").read_text()
    assert page.count("<h2>Relevance judgments") == 1
    assert f"{other}: in order" in page


@pytest.mark.slow
def test_feedback_stays_in_folder_and_covers_new_seeds(with_feedback, votes, tmp_path):
    comparison, _ = with_feedback
    folder = shutil.copytree(comparison.folder, tmp_path / "moved")
    more = visavis.compare(resume=folder, seeds=3, workers=1)
    assert [set(KEYS) <= one.measured_metrics.keys() for one in more.outcomes] == [True] * 6
    other, progress = tmp_path / "other.jsonl", RecordedProgress()
    other.write_bytes(votes.read_bytes() * 2)
    visavis.compare(resume=folder, feedback=other, workers=1, progress=progress)
    assert (
        f"{folder / 'feedback.jsonl'}: replaced by the given feedback (9 records before, 18 now)."
        in progress.messages
    )
    shutil.copy(votes, folder / "feedback.jsonl")
    shutil.rmtree(more.outcomes[0].folder / "model")
    other.write_bytes(b"".join(votes.read_bytes().splitlines(keepends=True)[:3]))
    with pytest.raises(
        RunError,
        match=r"01-.*-seed-1: expected the model, got only its results",
    ):
        visavis.compare(resume=folder, feedback=other, workers=1)
    assert (folder / "feedback.jsonl").read_bytes() == votes.read_bytes()


def test_feedback_without_test_images_is_rejected_first(recipe, votes, tmp_path):
    nothing = tmp_path / "votes.jsonl"
    nothing.write_bytes(b"".join(votes.read_bytes().splitlines(keepends=True)[3:4]))
    with pytest.raises(
        DataError,
        match=r"got none\. 1 of 1 judgments were skipped: 1 of images of split train\. Judge some",
    ):
        visavis.compare(recipe, feedback=nothing, out=tmp_path / "none", workers=1)
    stored = {"text": {"granularity": "words", "features": str(tmp_path)}}
    with pytest.raises(
        RecipeError,
        match="expected a text encoder, because feedback has text queries that are not captions, got stored features",
    ):
        visavis.compare(recipe, feedback=votes, overrides=stored, out=tmp_path / "none", workers=1)
    assert not (tmp_path / "none").exists()


def test_bootstrap_queries_resamples_queries_with_their_pairs():
    """The standard error is that of a proportion over queries. Queries without pairs do not change
    the ordered share.
    """
    hits = np.arange(40) % 4 == 0
    results = [
        JudgedQueryResult(1 if hit else 20, 2 if hit else 0, 1 if hit else 0) for hit in hits
    ]
    bootstrap = bootstrap_queries(
        {"a": {0: results}, "b": {0: [replace(result, num_ordered=0) for result in results]}}
    )
    assert bootstrap.value("a", "judged_r1").value == 25
    assert bootstrap.value("a", "judged_r1").std_error == pytest.approx(
        100 * np.sqrt(0.25 * 0.75 / 40), rel=0.1
    )
    order = bootstrap.difference("a", "b", "judged_ordered")
    assert (order.value, order.std_error, order.interval) == (50, 0, None)
    few = bootstrap_queries(
        {"a": {0: [JudgedQueryResult(1, 0, 0)] * 3 + [JudgedQueryResult(1, 2, 1)]}}, num_samples=200
    ).value("a", "judged_ordered")
    assert few.value == 50
    assert 0 < few.num_samples < 200
