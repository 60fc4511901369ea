"""Judgements of a page as relevance: an index that a model knows by heart."""

import pytest

import visavis
from visavis.data.judgements import Asked, Judgement, open_judgements
from visavis.errors import DataError, RunError
from visavis.retrieval.index import Index
from visavis.retrieval.searching import Query, search


@pytest.fixture(scope="module")
def index(run, scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged") / "index"
    visavis.index(run, scenes, out=folder)
    return folder


def write(path, votes):
    with open_judgements(path) as file:
        for asked, item, fits in votes:
            file.add(Judgement("2024-05-31T10:00:00Z", "index", asked, item.key, item.content, fits))
    return path


def test_hand_values(index, tmp_path):
    opened = Index.open(index)
    hits = [hit.item for hit in search(opened, Query.of("a red circle"), top=20, fold=False).hits]
    asked = Asked(text="a red circle")
    votes = [(asked, hits[0], False), (asked, hits[3], True), (asked, hits[9], False), (asked, hits[5], True)]
    other = [(Asked(text="red -blue"), hits[0], True), (Asked(like=hits[1].key), hits[0], True)]
    result = visavis.judged(index, write(tmp_path / "votes.jsonl", votes + other))
    assert (result.queries, result.candidates, result.left_out) == (1, 70, 2)
    assert result.r == {1: 0.0, 5: 100.0, 10: 100.0}  # three unjudged or unfitting ones lie before the first that fits
    assert (result.pairs, result.ordered) == (4, 50.0)


def test_an_answer_that_was_taken_back_does_not_count_and_a_file_without_any_is_refused(index, tmp_path):
    item = next(iter(Index.open(index).items.values()))
    votes = [(Asked(text="a circle"), item, True), (Asked(text="a circle"), item, None)]
    with pytest.raises(DataError, match="no sentence"):
        visavis.judged(index, write(tmp_path / "votes.jsonl", votes))


def test_only_an_index_is_judged(run, tmp_path):
    with pytest.raises(RunError, match="is no index"):
        visavis.judged(run, tmp_path / "votes.jsonl")
