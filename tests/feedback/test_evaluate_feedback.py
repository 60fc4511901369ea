"""Evaluation of an index with relevance judgments."""

import pytest

import visavis
from visavis.core.errors import DataError, RunError
from visavis.data.feedback.records import Judgment, QueryKey
from visavis.data.feedback.sources import write_feedback
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import SearchQuery, search_collection


@pytest.fixture(scope="module")
def index(tiny_run, few_scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged") / "index"
    visavis.index(tiny_run, few_scenes, out=folder)
    return folder


def write(path, votes):
    write_feedback(
        path,
        (
            Judgment("2024-05-31T10:00:00Z", "index", asked, item.key, item.content, fits)
            for asked, item, fits in votes
        ),
    )
    return path


def test_evaluate_feedback_matches_hand_values(index, tmp_path):
    opened = open_index(index)
    hits = [
        hit.item
        for hit in search_collection(
            opened, SearchQuery.from_text("a red circle"), top=20, group_duplicates=False
        ).hits
    ]
    asked = QueryKey(text="a red circle")
    votes = [
        (asked, hits[0], False),
        (asked, hits[3], True),
        (asked, hits[9], False),
        (asked, hits[5], True),
    ]
    other = [
        (QueryKey(text="red -blue"), hits[0], True),
        (QueryKey(similar_to=hits[1].key), hits[0], True),
    ]
    result = visavis.indexes_evaluate(index, write(tmp_path / "votes.jsonl", votes + other))
    assert (result.queries, result.candidates, result.skipped) == (1, 24, 2)
    assert result.recall == {
        1: 0.0,
        5: 100.0,
        10: 100.0,
    }  # three unjudged or irrelevant ones rank before the first relevant one
    assert (result.pairs, result.pairwise_accuracy) == (4, 50.0)


def test_evaluate_feedback_ignores_withdrawn_judgments(index, tmp_path):
    item = next(iter(open_index(index).items.values()))
    votes = [(QueryKey(text="a circle"), item, True), (QueryKey(text="a circle"), item, None)]
    with pytest.raises(DataError, match="expected a text query with a relevant item"):
        visavis.indexes_evaluate(index, write(tmp_path / "votes.jsonl", votes))


def test_evaluate_feedback_requires_index(tiny_run, index, tmp_path):
    with pytest.raises(RunError, match="expected an index"):
        visavis.indexes_evaluate(tiny_run, tmp_path / "votes.jsonl")
    with pytest.raises(
        RunError, match=r"expected a run or a model, got an index\. .* visavis indexes evaluate"
    ):
        visavis.evaluate(index)
