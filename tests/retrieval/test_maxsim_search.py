"""Laws of late-interaction search, and stores of items with several vectors."""

from contextlib import closing

import numpy as np
import pytest

from visavis.core.errors import DataError, ShapeError, SpecError
from visavis.retrieval.build.compression import compare_set_encodings, noisy_set_queries
from visavis.retrieval.items import IndexItem, ItemFilter
from visavis.retrieval.stores import maxsim_search
from visavis.retrieval.stores.base import MaxSimQuery, VectorSets
from visavis.retrieval.stores.catalog import open_store
from visavis.retrieval.stores.exact_search import ExactSearch
from visavis.retrieval.stores.maxsim_search import MaxSimSearch, pool_vectors

DIM = 16
DIRECTIONS = ("both", "t2i", "i2t")


def unit(random, *shape):
    vectors = random.standard_normal(shape)
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def make_sets(random, count, sizes=(1, 2, 7)):
    return VectorSets.from_arrays([unit(random, random.choice(sizes), DIM) for _ in range(count)])


def make_query(random, *weights):
    return MaxSimQuery.from_vectors(
        *((weight, unit(random, 3 + part, DIM)) for part, weight in enumerate(weights or (1.0,)))
    )


def reference_scores(sets, query, direction):
    """Scores by the definition."""
    scores = np.zeros(len(sets))
    for item, vectors in enumerate(sets):
        for weight, part in zip(query.weights, query.parts, strict=True):
            cosines = part.astype(np.float64) @ vectors.T.astype(np.float64)
            by_direction = {"t2i": cosines.max(1).mean(), "i2t": cosines.max(0).mean()}
            scores[item] += weight * (by_direction.get(direction) or sum(by_direction.values()) / 2)
    return scores.astype(np.float32)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("sizes", [(5,), (1, 2, 7)])
@pytest.mark.parametrize("weights", [(1.0,), (1.0, -0.5, 2.0)])
def test_maxsim_search_equals_definition(direction, sizes, weights):
    random = np.random.default_rng(1)
    sets, queries = make_sets(random, 300, sizes), [make_query(random, *weights) for _ in range(3)]
    for mask in (None, random.random(300) < 0.7, random.random(300) < 0.1):
        scores, items = MaxSimSearch(sets, direction).search(queries, 20, mask)
        for number, query in enumerate(queries):
            expected = reference_scores(sets, query, direction)
            allowed = np.arange(300) if mask is None else np.flatnonzero(mask)
            best = allowed[np.lexsort((allowed, -expected[allowed]))][:20]
            np.testing.assert_array_equal(items[number], best)
            np.testing.assert_allclose(scores[number], expected[best], rtol=0, atol=1e-7)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_maxsim_search_of_one_vector_is_cosine_search(direction):
    random = np.random.default_rng(2)
    rows, queries = unit(random, 200, DIM), unit(random, 5, DIM)
    found = MaxSimSearch(VectorSets(rows, np.arange(201)), direction).search(
        [MaxSimQuery.from_vectors((3.0, row[None])) for row in queries], 10
    )
    for values, expected in zip(found, ExactSearch(rows).search(queries, 10), strict=True):
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_maxsim_search_ignores_order_of_vectors(direction):
    random = np.random.default_rng(3)
    sets, query = make_sets(random, 100), make_query(random, 1.0, 0.5)
    shuffled = VectorSets.from_arrays([random.permutation(vectors) for vectors in sets])
    other = MaxSimQuery(query.weights, tuple(map(random.permutation, query.parts)))
    for values, expected in zip(
        MaxSimSearch(shuffled, direction).search([other], 50),
        MaxSimSearch(sets, direction).search([query], 50),
        strict=True,
    ):
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_maxsim_search_with_all_candidates_is_exact(direction, monkeypatch):
    random = np.random.default_rng(4)
    sets, queries = make_sets(random, 400), [make_query(random) for _ in range(4)]
    exact, pooled = (
        MaxSimSearch(sets, direction),
        MaxSimSearch(sets, direction, pooled=pool_vectors(sets, 2)),
    )
    for values, expected in zip(pooled.search(queries, 10), exact.search(queries, 10), strict=True):
        np.testing.assert_array_equal(values, expected)
    monkeypatch.setattr(maxsim_search, "MIN_CANDIDATES", 40)
    monkeypatch.setattr(maxsim_search, "CANDIDATES_PER_RESULT", 1)
    scores, items = pooled.search(queries, 10)
    for number, query in enumerate(queries):
        candidates = pooled.candidates(query, 40, np.arange(400))
        assert len(candidates) == 40
        assert set(items[number]) <= set(candidates)
        np.testing.assert_allclose(
            scores[number],
            reference_scores(sets, query, direction)[items[number]],
            rtol=0,
            atol=1e-7,
        )


def test_maxsim_search_orders_equal_scores_by_item():
    random = np.random.default_rng(5)
    vectors = unit(random, 4, DIM)
    sets = VectorSets.from_arrays([random.permutation(vectors) for _ in range(100)])
    scores, items = MaxSimSearch(sets, "both").search([make_query(random)], 30)
    assert items[0].tolist() == list(range(30))
    assert len(set(scores[0].tolist())) == 1


def test_maxsim_search_rejects_invalid_queries():
    search = MaxSimSearch(make_sets(np.random.default_rng(6), 3), "both")
    for query, top, error in (
        (np.ones((1, 3)), 1, ShapeError),
        (np.full((1, DIM), np.nan), 1, ShapeError),
        (np.ones((0, DIM)), 1, ShapeError),
        (np.ones((1, DIM)), 0, SpecError),
    ):
        with pytest.raises(error):
            search.search([MaxSimQuery.from_vectors((1.0, query))], top)
    assert [values.shape for values in search.search([], 3)] == [(0, 3), (0, 3)]
    assert search.search(
        [MaxSimQuery.from_vectors((1.0, np.ones((1, DIM))))], 5, np.zeros(3, bool)
    )[0].shape == (1, 0)


def test_pool_vectors_merges_similar_vectors():
    random = np.random.default_rng(7)
    centers = unit(random, 30, 4, DIM)
    sets = VectorSets.from_arrays(
        [np.repeat(item, 5, axis=0) for item in centers[:20]] + list(centers[20:, :2])
    )
    pooled = pool_vectors(sets, 4)
    assert pooled.counts.tolist() == [4] * 20 + [2] * 10
    for item, vectors in enumerate(pooled):
        assert np.abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-6
        assert (
            np.abs(centers[item] @ vectors.T).max(1) == pytest.approx(1, abs=1e-6)
            if item < 20
            else True
        )
    np.testing.assert_array_equal(pooled[20:].rows, sets[20:].rows)


def test_vector_sets_average_to_unit_vectors():
    sets = make_sets(np.random.default_rng(8), 20)
    mean = list(sets)[4].mean(0)
    assert np.allclose(sets.mean_vectors()[4], mean / np.linalg.norm(mean), atol=1e-6)


def make_items(count):
    return [
        IndexItem(
            f"{row:03d}",
            f"{row % 3}/{row:03d}.jpg",
            "image",
            str(row),
            row,
            row,
            metadata={"split": "test"},
        )
        for row in range(count)
    ]


def test_store_of_several_vectors(tmp_path):
    uri = tmp_path / "store"
    random = np.random.default_rng(9)
    items, sets, query = make_items(50), make_sets(random, 50), make_query(random)
    store = open_store(uri, DIM, late_interaction="both")
    assert store.search([query], 3) == [[]]
    assert store.table().items() == []
    store.add(items[:30], sets[:30])
    store.add(items[25:], sets[25:])
    store.delete(["007"])
    kept = [row for row in range(50) if row != 7]
    for opened in (store, open_store(uri, late_interaction="both")):
        assert opened.table().items() == [items[row] for row in kept]
        assert all(
            np.array_equal(*pair) for pair in zip(opened.all_vectors(), sets[kept], strict=True)
        )
        assert all(
            np.array_equal(*pair)
            for pair in zip(opened.vectors(["049", "001"]), sets[[49, 1]], strict=True)
        )
        scores = reference_scores(sets, query, "both")
        for where in (ItemFilter(), ItemFilter(path="1/*"), ItemFilter(metadata={"split": "none"})):
            [found] = opened.search([query], 10, where)
            allowed = [row for row in kept if where.matches(items[row])]
            expected = sorted(allowed, key=lambda row: (-scores[row], row))[:10]
            assert [key for key, _ in found] == [items[row].key for row in expected]
            assert opened.count(where) == len(allowed)
    store.add(items[:5], sets[10:15])
    assert all(
        np.array_equal(*pair)
        for pair in zip(store.vectors(["000", "004"]), sets[[10, 14]], strict=True)
    )
    with pytest.raises(ShapeError, match="expected one vector per item, got several vectors"):
        open_store(uri)
    store.close()


def test_store_keeps_its_first_pass_after_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("visavis.retrieval.stores.maxsim_search.MIN_ITEMS", 10)
    monkeypatch.setattr(maxsim_search, "MIN_CANDIDATES", 5)
    random = np.random.default_rng(13)
    items, sets, query = make_items(50), make_sets(random, 50, (24,)), make_query(random)
    with closing(open_store(tmp_path, DIM, index_id="ab", late_interaction="t2i")) as writer:
        writer.add(items[:40], sets[:40])
        writer.prepare_search()
        with closing(open_store(tmp_path, index_id="ab", late_interaction="t2i")) as reader:
            assert reader.count() == 40
            writer.add(items[40:], sets[40:])
            assert writer.count() == 50
            called = []
            candidates = MaxSimSearch.candidates
            monkeypatch.setattr(
                MaxSimSearch,
                "candidates",
                lambda *arguments: called.append(1) or candidates(*arguments),
            )
            assert len(reader.search([query], 3)[0]) == 3
            assert called, "the pooled vectors of the first items are searched first"


@pytest.mark.parametrize(
    "selection",
    [
        slice(None),
        slice(3, 8),
        slice(8, 3),
        slice(1, 9, 3),
        slice(None, None, -1),
        [4, 4, 0],
        [],
    ],
)
def test_vector_sets_are_selected_like_a_list(selection):
    sets = make_sets(np.random.default_rng(14), 10)
    expected = (
        [list(sets)[i] for i in selection] if isinstance(selection, list) else list(sets)[selection]
    )
    selected = sets[selection]
    assert len(selected) == len(expected)
    assert all(np.array_equal(*pair) for pair in zip(selected, expected, strict=True))


def test_store_rejects_other_numbers_of_vectors(tmp_path):
    items = make_items(1)
    store = open_store(tmp_path / "several", DIM, late_interaction="t2i")
    open_store(tmp_path / "one", DIM)
    with pytest.raises(
        ShapeError, match=r"expected several vectors per item, got one vector\. Pass another folder"
    ):
        open_store(tmp_path / "one", late_interaction="t2i")
    for invalid in (
        np.ones((1, 3)),
        np.empty((0, DIM)),
        np.full((1, DIM), np.nan),
        np.full((1, DIM), 2.0),
    ):
        with pytest.raises(ShapeError, match=r"^vectors: expected"):
            store.add(items, VectorSets.from_arrays([invalid]))
    for milvus in (tmp_path / "store.db", "http://localhost:19530/x"):
        with pytest.raises(DataError, match=r"got Milvus\. Omit --store"):
            open_store(milvus, DIM, late_interaction="t2i")


def test_compare_set_encodings_measures_exact_search():
    sets = make_sets(np.random.default_rng(10), 120, (24,))
    report = compare_set_encodings(sets, noisy_set_queries(sets[:20]), "both")
    exact, compressed = report.encodings
    assert (exact.name, exact.recall_at_10, exact.stored_bytes) == ("float32", 100, 24 * DIM * 4)
    assert (compressed.name, compressed.stored_bytes) == ("all, 8 bits", 25 * DIM)
    assert compressed.recall_at_10 >= 98
    assert report.recommendation.startswith("Search: exact, ")
    assert "Use visavis indexes compress INDEX 1000: " in report.recommendation


def test_compare_set_encodings_reports_default_search(monkeypatch):
    monkeypatch.setattr("visavis.retrieval.build.compression.MIN_ITEMS", 100)
    sets = make_sets(np.random.default_rng(12), 120, (24,))
    report = compare_set_encodings(sets, noisy_set_queries(sets[:5]), "t2i")
    [default] = [one for one in report.encodings if one.name == "search"]
    assert (default.recall_at_10, default.rescored) == (100, maxsim_search.MIN_CANDIDATES)
    assert report.recommendation.startswith(
        f"Search: {maxsim_search.POOLED_VECTORS} pooled vectors per item, then exact scores of "
        "2,048 candidates."
    )
