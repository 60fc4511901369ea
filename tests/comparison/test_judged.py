"""What people judged as another test of a comparison: the measures of ``visavis judged``, seed by seed, chosen by nothing."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

import visavis
from visavis.comparison.bootstrap import over_sentences
from visavis.data import open_dataset
from visavis.errors import DataError, RecipeError, RunError
from visavis.evaluation.judged import JudgedAnswer, measured
from visavis.progress import Silent

KEYS = ["judged_r1", "judged_r5", "judged_r10", "judged_ordered"]


class Listener(Silent):
    """Keeps what was said."""

    def __init__(self):
        self.told = []

    def say(self, sentence):
        self.told.append(sentence)


@pytest.fixture(scope="module")
def judged(plain, votes, tmp_path_factory):
    """A finished comparison, asked later, with what was said."""
    folder, listener = shutil.copytree(plain.folder, tmp_path_factory.mktemp("judged") / "both"), Listener()
    before = {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/result.json")}
    found = visavis.compare(resume=folder, judgements=votes, workers=1, progress=listener)
    assert {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/result.json")} == before
    return found, listener.told


def test_hand_values_of_an_answer():
    scores = np.array([0.9, 0.5, 0.5, 0.3, 0.1])
    answer = JudgedAnswer.of(scores, fits=[1, 3], wrong=[2, 4])
    assert answer == JudgedAnswer(rank=3, pairs=4, ordered=2)  # the tie counts against the model, as a rank and as a pair
    assert measured([answer, JudgedAnswer(1, 0, 0)]) == dict(zip(KEYS, [50.0, 100.0, 100.0, 50.0], strict=True))
    assert measured([JudgedAnswer(1, 0, 0)])["judged_ordered"] is None


def test_every_run_is_asked_with_its_saved_model_and_what_is_no_test_is_counted(plain, judged):
    found, told = judged
    assert any(
        sentence.endswith(
            "2 sentences that 3 judged images fit, each ranking 12 images of split test; in order: of 3 pairs of an image that fits and one "
            "that does not, those with the first above; not asked: 1 that none of them fits; 3 of 9 judgements are left out: 2 of "
            "pictures of split train, 1 of pictures that are not in scenes, or not as they were judged."
        )
        for sentence in told
    )
    assert found.best == plain.best
    for one in found.outcomes:
        model, data = visavis.load(one.folder), open_dataset(found.settings[0].content["data"]["path"]).split("test")
        scores = model.score([image.open() for image in data.images], ["a red star", "a small blue circle"]).T.numpy()
        expected = [JudgedAnswer.of(scores[0], [0, 1], [2]), JudgedAnswer.of(scores[1], [3], [0])]
        assert {key: one.numbers[key] for key in KEYS} == measured(expected)


def test_every_table_has_its_columns_with_the_statistics_of_the_others(judged):
    found, _ = judged
    folder, row = found.folder, found.table.rows[0]
    means = [f"{row.mean(key):.1f}" for key in KEYS]
    assert [cell.split("±")[0] for cell in found.table.text().splitlines()[2].split()[-4:]] == means
    line = next(line for line in (folder / "table.md").read_text().splitlines() if line.startswith(f"| {row.name}"))
    assert [cell.strip(" *").split(" ±")[0] for cell in line.split("|")[-5:-1]] == means
    assert r"\multicolumn{4}{c}{judged}" in (folder / "table.tex").read_text()
    lines = {(line["row"], line["metric"]): line for line in csv.DictReader((folder / "table.csv").read_text().splitlines())}
    other = next(iter(found.behind))
    pair, drawn = found.judged_behind("judged_r5")[other], found.over_sentences.difference(found.best.name, other, "judged_r5")
    assert float(lines[other, "judged_r5"]["difference"]) == pytest.approx(-pair.difference)
    assert lines[other, "judged_r5"]["verdict"] == pair.turned().verdict
    assert (lines[other, "judged_r5"]["images_low"] != "") == (drawn.interval is not None)
    content = json.loads((folder / "comparison.json").read_text())
    assert content["judged"]["behind"]["judged_ordered"][0]["difference"] == found.judged_behind("judged_ordered")[other].difference
    assert content["table"]["chance"]["judged_ordered"] == 50
    page = (folder / "report.html").read_text()
    assert page.count("What people judged") == 1
    assert f"{other}: in order" in page


def test_judgements_stay_with_the_folder_and_more_seeds_are_asked_too(judged, votes, tmp_path):
    found, _ = judged
    folder = shutil.copytree(found.folder, tmp_path / "moved")
    more = visavis.compare(resume=folder, seeds=3, workers=1)
    assert [set(KEYS) <= one.numbers.keys() for one in more.outcomes] == [True] * 6
    other, listener = tmp_path / "other.jsonl", Listener()
    other.write_bytes(votes.read_bytes() * 2)
    visavis.compare(resume=folder, judgements=other, workers=1, progress=listener)
    assert f"{folder / 'judgements.jsonl'} is replaced by the judgements given: 9 lines before, 18 now." in listener.told
    shutil.copy(votes, folder / "judgements.jsonl")
    shutil.rmtree(more.outcomes[0].folder / "model")
    other.write_bytes(b"".join(votes.read_bytes().splitlines(keepends=True)[:3]))
    with pytest.raises(RunError, match=r"01-.*-seed-1 has its results, but no longer its model, which alone can answer what people judged"):
        visavis.compare(resume=folder, judgements=other, workers=1)
    assert (folder / "judgements.jsonl").read_bytes() == votes.read_bytes()


def test_judgements_that_test_nothing_are_refused_before_any_work(recipe, votes, tmp_path):
    nothing = tmp_path / "votes.jsonl"
    nothing.write_bytes(b"".join(votes.read_bytes().splitlines(keepends=True)[3:4]))
    with pytest.raises(DataError, match=r"fits: 1 of 1 judgements are left out: 1 of pictures of split train\. Judge some"):
        visavis.compare(recipe, judgements=nothing, out=tmp_path / "none", workers=1)
    stored = {"text": {"view": "words", "features": str(tmp_path)}}
    with pytest.raises(RecipeError, match="reads stored features of the captions of the data alone"):
        visavis.compare(recipe, judgements=votes, overrides=stored, out=tmp_path / "none", workers=1)
    assert not (tmp_path / "none").exists()


def test_sentences_are_drawn_with_their_pairs():
    """By the formula of a share: its standard error over draws is that of the sentences; a sentence without pairs moves no order."""
    hits = np.arange(40) % 4 == 0
    answers = [JudgedAnswer(1 if hit else 20, 2 if hit else 0, 1 if hit else 0) for hit in hits]
    draws = over_sentences({"a": {0: answers}, "b": {0: [replace(answer, ordered=0) for answer in answers]}})
    assert draws.value("a", "judged_r1").value == 25
    assert draws.value("a", "judged_r1").deviation == pytest.approx(100 * np.sqrt(0.25 * 0.75 / 40), rel=0.1)
    order = draws.difference("a", "b", "judged_ordered")
    assert (order.value, order.deviation, order.interval) == (50, 0, None)
    few = over_sentences({"a": {0: [JudgedAnswer(1, 0, 0)] * 3 + [JudgedAnswer(1, 2, 1)]}}, draws=200).value("a", "judged_ordered")
    assert few.value == 50
    assert 0 < few.draws < 200
