"""Public functions of metrics and evaluation accept any argument or raise an error of one line that names it."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from visavis import DataError, ShapeError, SpecError, Targets, VisavisError, evaluation, metrics
from visavis.data.dataset import Dataset, Image
from visavis.evaluation import Protocol
from visavis.evaluation import tiled_ranking as blocks
from visavis.graded.estimators.known_relevance import FunctionRelevance
from visavis.graded.ranking_coherence import ranking_coherence
from visavis.types import Encoded

NUMBERS = torch.arange(12.0).view(3, 4)
SMALL = Protocol(name="small", description="")
ODD: list[Any] = [
    *(None, True, 0, -1, 2.5, float("nan"), float("inf"), 10**30, 1j, "b", "", "5", b"x", object(), len, Encoded, SMALL),
    *([], [1, 2], [[1.0, 2.0], [3.0]], (), (0, 0), (2, -1), ("a", "b"), {}, {1}, iter([1, 2, 3])),
    *(np.float64(2), np.array(3.0), np.ones(3), np.ones((3, 4)), np.ones((2, 3, 4)), np.array(["a", "b", "c"]), np.array([None] * 3)),
    *(torch.tensor(3.0), *map(torch.ones, (0, 3, 5)), *(torch.ones(shape) for shape in ((0, 4), (3, 0), (7, 7), (2, 3, 4)))),
    *(NUMBERS.to(dtype) for dtype in (torch.complex64, torch.bool, torch.int8, torch.float16)),
    *(NUMBERS.bfloat16().requires_grad_(), NUMBERS.to_sparse(), NUMBERS.T, NUMBERS - 20, NUMBERS.log(), NUMBERS * torch.nan),
    *(NUMBERS.where(NUMBERS != 5, torch.nan), torch.tensor([0, 1, 2]), torch.tensor([True] * 3), torch.tensor([1, torch.nan, torch.inf])),
    *(Encoded(vectors) for vectors in (torch.ones(3, 2), torch.ones(0, 2), torch.tensor(1.0), np.ones((3, 2)), None, {})),  # type: ignore[arg-type]
    *(Targets.paired(3), Targets(query_ids=[0, 1, 2], candidate_ids=[5, 6, 7, 8])),
    *(torch.ones(shape, device="meta") for shape in ((3, 4), (3, 3), (3,))),
    *(
        torch.arange(3).to_sparse(),
        torch.eye(3).to_sparse(),
        torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ),
    *([{}, {}, {}], [[1], [2], [3]], [2**70] * 3, {1: 2}, [True, False, True], [1.5, 2, 3], np.array([1, 2, 3], dtype=object), 10**400),
    *(Encoded(torch.ones(3, 2, device="meta")), Encoded(torch.eye(3).to_sparse()), Encoded({"a": torch.ones(3, 2), "b": torch.ones(2, 2)})),
    *(Encoded(torch.ones(3, 2), mask=torch.ones(2, 2, dtype=torch.bool)), Encoded(torch.ones(3, 2), weights=5)),  # type: ignore[arg-type]
]
ALSO_CALLED = {
    "scores": "score",
    "image_ids": " image",
    "text_ids": " text",
    "visual": "item",
    "text": "item",
    "targets": "query",
}
"""Other names of an argument in error messages."""


def by_product(visual: Encoded, text: Encoded) -> torch.Tensor:
    return visual.vectors @ text.vectors.T  # type: ignore[operator, union-attr]


def alike(first: list[str], second: list[str]) -> np.ndarray:
    return np.array([[float(one == other) for other in second] for one in first])


def valid_arguments() -> dict[str, Any]:
    """Valid values by argument name. ``SPECIAL`` holds exceptions."""
    data = Dataset("world", tuple(Image(f"{i}.jpg", "test") for i in range(3)), ("a", "b", "c"), np.arange(3))
    ranks = torch.tensor([[1.0, 3.0], [2.0, torch.inf], [1.0, 2.0]], dtype=torch.float64)
    return {
        **dict.fromkeys(("visual", "text"), Encoded(torch.eye(3))),
        **dict.fromkeys(("image_ids", "text_ids"), torch.arange(3)),
        **dict.fromkeys(("positive_ranks", "image_ranks", "text_ranks"), ranks),
        **dict.fromkeys(("scores", "relevance"), NUMBERS),
        "targets": Targets(query_ids=[0, 1, 2], candidate_ids=[0, 1, 2, 0]),
        "ranks": torch.tensor([1, 2, 5]),
        "k": 2,
        "ks": (1, 2),
        "tau": "b",
        "semantics": "paper",
        "ties": "mean",
        "normalize": "hits",
        "direction": "i2t",
        "score": by_product,
        "protocol": SMALL,
        "memory": None,
        "data": data,
        "relevance_estimator": FunctionRelevance(alike),
    }


SPECIAL = {
    "rank_scores": {"scores": torch.eye(3)},
    "evaluate_listed": {"protocol": "cxc"},
}


def calls() -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Every public function with valid arguments."""
    public = [vars(module)[name] for module in (metrics, evaluation) for name in module.__all__]
    for function in (*filter(inspect.isfunction, public), SMALL.validate, SMALL.split_folds):
        valid = valid_arguments() | SPECIAL.get(function.__name__, {})
        yield function, {name: valid[name] for name in inspect.signature(function).parameters}


def refusal(function: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    try:
        function(**arguments)
    except Exception as error:  # noqa: BLE001  # the test checks its type
        return error
    return None


@pytest.mark.parametrize("sample_size", [12, pytest.param(len(ODD), marks=pytest.mark.long)])
def test_functions_reject_odd_arguments_in_one_line(sample_size: int) -> None:
    generator, refused = random.Random(0), 0
    for function, arguments in calls():
        for name in arguments:
            for odd in generator.sample(ODD, sample_size):
                called = f"{function.__name__}({name}={odd!r})"
                error = refusal(function, arguments | {name: odd})
                refused += error is not None
                accepted_words = (
                    name,
                    ALSO_CALLED.get(name, name),
                    "protocol cxc: expected",
                    "in the catalog",
                    "of the form",
                    "ids: expected",
                )
                message = str(error or f"{name}.")
                assert isinstance(error, VisavisError | None), (called, error)
                assert message.endswith((".", "?")), called
                assert "\n" not in message, called
                assert any(word in message for word in accepted_words), (called, message)
    assert refused > 500


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_evaluation_rejects_empty_sides(shape: tuple[int, int]) -> None:
    ids = [list(range(length)) for length in shape]
    visual, text = (Encoded(torch.eye(4)[:length]) for length in shape)
    for protocol in ("plain", SMALL):
        for call in (
            lambda: evaluation.evaluate(visual, text, by_product, *ids, protocol=protocol),  # noqa: B023
            lambda: evaluation.rank_scores(torch.zeros(shape), *ids, protocol=protocol),  # noqa: B023
        ):
            with pytest.raises(ShapeError, match=r"^images, texts: expected at least one of each, got none\."):
                call()
    if not shape[1]:
        for metric in (metrics.positive_ranks, metrics.best_ranks):
            with pytest.raises(ShapeError, match=r"^scores: expected at least one candidate"):
                metric(torch.zeros(shape), Targets(query_ids=ids[0], candidate_ids=ids[1]))


@pytest.mark.parametrize("odd", [0, -1, True, 2.0, "5", None, np.float64(5), torch.ones(2)])
def test_metrics_reject_invalid_cutoffs(odd: Any) -> None:
    given = valid_arguments()
    for metric, names in (
        (metrics.recall_at, ("ranks",)),
        (metrics.map_at_k, ("positive_ranks",)),
        (metrics.ndcg_at, ("scores", "relevance")),
    ):
        with pytest.raises(SpecError, match=r"^k: expected an integer >= 1, got .+\.$"):
            metric(**{name: given[name] for name in names}, k=odd)  # type: ignore[operator]
    assert metrics.recall_at(given["ranks"], np.int64(2)) == metrics.recall_at(given["ranks"], 2)


@pytest.mark.parametrize("odd", [-1, True, 2.0, "5", None, [], torch.ones(2), np.ones(3)])
def test_targets_reject_invalid_numbers_of_items(odd: Any) -> None:
    with pytest.raises(SpecError, match=r"^n: expected an integer >= 0, got .+\.$"):
        Targets.paired(odd)
    for name in ("num_queries", "num_candidates"):
        with pytest.raises(SpecError, match=f"^{name}: expected an integer >= 0, got .+"):
            Targets.from_pairs([0], [0], **{"num_queries": 1, "num_candidates": 1} | {name: odd})
    assert Targets.paired(np.int64(0)).shape == (0, 0)


def test_ndcg_rejects_invalid_relevance() -> None:
    for odd in (-0.5, torch.inf):
        relevance = torch.tensor([[1.0, 0.5], [0.5, odd]])
        with pytest.raises(DataError, match=r"^relevance of query 1: expected finite values >= 0 for nDCG"):
            metrics.ndcg(torch.rand(2, 2), relevance)
    assert metrics.coherent_scores(torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, -0.5]]), k=2).tolist() == [1]


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (lambda visual, text: None, "score: expected shape ["),
        (lambda visual, text: by_product(visual, text).numpy(), "score: expected shape ["),
        (lambda visual, text: by_product(visual, text)[:, :1], "score: expected shape ["),
        (
            lambda visual, text: by_product(visual, text).index_fill(1, torch.tensor([2]), torch.nan),
            "got NaN. Check the model and its features",
        ),
    ],
)
def test_evaluation_rejects_invalid_score_results(broken: Any, sentence: str) -> None:
    given = valid_arguments() | {"score": broken, "targets": Targets.paired(3), "memory": 2**20}
    for function in (evaluation.evaluate, ranking_coherence):
        known = inspect.signature(function).parameters
        arguments = {name: given[name] for name in known if name in given}
        if function is ranking_coherence:
            arguments["relevance"] = given["relevance_estimator"]
        with pytest.raises(VisavisError) as refused:
            function(**arguments)
        assert sentence in str(refused.value)


def test_metrics_reject_nan_score_of_negative_pair() -> None:
    """No comparison with NaN is true: such a pair would never stand before the right one."""

    def score(visual: Encoded, text: Encoded) -> torch.Tensor:
        return torch.where((visual.vectors[:, None] == 2) & (text.vectors == 5), torch.nan, torch.rand(len(visual), len(text)))  # type: ignore[call-overload, index]

    items = Encoded(torch.arange(9))
    for tile in ((2, 4), (9, 9)):
        with pytest.raises(
            DataError, match=r"^score of image 2 and text 5: expected a number, got NaN\. Check the model and its features\.$"
        ):
            blocks.rank_by_tiles(items, items, score, torch.arange(9), torch.arange(9), max_tile=tile)
