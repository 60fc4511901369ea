"""Public functions accept any argument or raise an error of one line that names it."""

from __future__ import annotations

import inspect
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recipes import TINY_RECIPE

import visavis
from visavis import DataError, ShapeError, SpecError, Targets, VisavisError, evaluation
from visavis.core.encoded import Encoded
from visavis.core.errors import format_value
from visavis.core.process_group import ONE_PROCESS
from visavis.data import check_dataset, open_dataset
from visavis.data.dataset import Dataset, Image
from visavis.data.synthetic import write_synthetic_scenes
from visavis.evaluation import Protocol, metrics, statistics
from visavis.evaluation import tiled_ranking as blocks
from visavis.evaluation.feedback.evaluate_feedback import evaluate_feedback
from visavis.evaluation.feedback.records import Judgment, QueryKey, latest_judgments, read_feedback
from visavis.evaluation.graded.estimators.known_relevance import FunctionRelevance
from visavis.evaluation.graded.ranking_coherence import ranking_coherence
from visavis.retrieval.index_folder import Index
from visavis.retrieval.items import ItemFilter

NUMBERS = torch.arange(12.0).view(3, 4)
SMALL = Protocol(name="small", description="")
ODD: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        2.5,
        float("nan"),
        float("inf"),
        10**30,
        1j,
        "b",
        "",
        "5",
        b"x",
        object(),
        len,
        Encoded,
        SMALL,
    ),
    *([], [1, 2], [[1.0, 2.0], [3.0]], (), (0, 0), (2, -1), ("a", "b"), {}, {1}, iter([1, 2, 3])),
    *(
        np.float64(2),
        np.array(3.0),
        np.ones(3),
        np.ones((3, 4)),
        np.ones((2, 3, 4)),
        np.array(["a", "b", "c"]),
        np.array([None] * 3),
    ),
    *(
        torch.tensor(3.0),
        *map(torch.ones, (0, 3, 5)),
        *(torch.ones(shape) for shape in ((0, 4), (3, 0), (7, 7), (2, 3, 4))),
    ),
    *(NUMBERS.to(dtype) for dtype in (torch.complex64, torch.bool, torch.int8, torch.float16)),
    *(
        NUMBERS.bfloat16().requires_grad_(),
        NUMBERS.to_sparse(),
        NUMBERS.T,
        NUMBERS - 20,
        NUMBERS.log(),
        NUMBERS * torch.nan,
    ),
    *(
        NUMBERS.where(NUMBERS != 5, torch.nan),
        torch.tensor([0, 1, 2]),
        torch.tensor([True] * 3),
        torch.tensor([1, torch.nan, torch.inf]),
    ),
    *(Encoded(vectors) for vectors in (torch.ones(3, 2), torch.ones(0, 2), torch.tensor(1.0))),
    *(Targets.paired(3), Targets(query_ids=[0, 1, 2], candidate_ids=[5, 6, 7, 8])),
    *(torch.ones(shape, device="meta") for shape in ((3, 4), (3, 3), (3,))),
    *(
        torch.arange(3).to_sparse(),
        torch.eye(3).to_sparse(),
        torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ),
    *(
        [{}, {}, {}],
        [[1], [2], [3]],
        [2**70] * 3,
        {1: 2},
        [True, False, True],
        [1.5, 2, 3],
        np.array([1, 2, 3], dtype=object),
        10**5000,
    ),
    *(
        Encoded(torch.ones(3, 2, device="meta")),
        Encoded(torch.eye(3).to_sparse()),
        Encoded({"a": torch.ones(3, 2), "b": torch.ones(2, 2)}),
    ),
    *(
        Encoded(torch.ones(3, 2), mask=torch.ones(2, 2, dtype=torch.bool)),
        Encoded(torch.ones(3, 2), weights=5),
    ),  # type: ignore[arg-type]
]
ALSO_CALLED = {
    "scores": "score",
    "image_ids": " image",
    "text_ids": " text",
    "visual": "item",
    "text": "item",
    "targets": "query",
    "overrides": "key",
    "source": "folder",
    "items": "images",
}
"""Other names of an argument in error messages."""


def by_product(visual: Encoded, text: Encoded) -> torch.Tensor:
    return visual.vectors @ text.vectors.T  # type: ignore[operator, union-attr]


def alike(first: list[str], second: list[str]) -> np.ndarray:
    return np.array([[float(one == other) for other in second] for one in first])


def valid_arguments() -> dict[str, Any]:
    """Valid values by argument name. ``SPECIAL`` holds exceptions."""
    data = Dataset(
        "world", tuple(Image(f"{i}.jpg", "test") for i in range(3)), ("a", "b", "c"), np.arange(3)
    )
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
        "group": ONE_PROCESS,
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
                called = f"{function.__name__}({name}={format_value(odd)})"
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
            with pytest.raises(
                ShapeError, match=r"^images, texts: expected at least one of each, got none\."
            ):
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
        with pytest.raises(
            DataError, match=r"^relevance of query 1: expected finite values >= 0 for nDCG"
        ):
            metrics.ndcg(torch.rand(2, 2), relevance)
    assert metrics.coherent_scores(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, -0.5]]), k=2
    ).tolist() == [1]


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (lambda visual, text: None, "score: expected shape ["),
        (lambda visual, text: by_product(visual, text).numpy(), "score: expected shape ["),
        (lambda visual, text: by_product(visual, text)[:, :1], "score: expected shape ["),
        (
            lambda visual, text: by_product(visual, text).index_fill(
                1, torch.tensor([2]), torch.nan
            ),
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
        return torch.where(
            (visual.vectors[:, None] == 2) & (text.vectors == 5),
            torch.nan,
            torch.rand(len(visual), len(text)),
        )  # type: ignore[call-overload, index]

    items = Encoded(torch.arange(9))
    for tile in ((2, 4), (9, 9)):
        with pytest.raises(
            DataError,
            match=r"^score of image 2 and text 5: expected a number, got NaN\. Check the model and its features\.$",
        ):
            blocks.rank_by_tiles(
                items, items, score, torch.arange(9), torch.arange(9), max_tile=tile
            )


# The functions below read files: a data set, a run, an index and feedback, all tiny.

ODD_TEXTS = [
    "",
    " ",
    "\0",
    "a\0b",
    "\udcff",
    "\ud800",
    "~nosuchuser/x",
    "/proc/x",
    "x" * 300,
    "-1",
    "nan",
    "{}",
    "\x1b[2J",
    "a\nb",
]
ODD_VALUES = [
    *ODD,
    *ODD_TEXTS,
    Path("/proc/nowhere"),
    Path("\0"),
    [None],
    [""],
    ["\0"],
    [[]],
    {"a": 1},
    {1: "a"},
    {"": ""},
    -(10**5000),
    2**63,
    -1e308,
]
"""Odd values of any argument."""
LONG_CALLS = {
    ("demo", "out"),
    ("train", "recipe"),
    ("relevance", "estimator"),
    ("compare", "recipe"),
}
"""Arguments for which a path, an empty list or None starts a long call."""
NEW = Path("new")
"""Replaced by a new path for each call."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A data set, a recipe, a run, an index and a feedback file."""
    root = tmp_path_factory.mktemp("odd")
    scenes = write_synthetic_scenes(
        root / "scenes", num_train=16, num_val=4, num_test=4, captions_per_image=2, size=32
    )
    (root / "recipe.toml").write_text(TINY_RECIPE)
    run = visavis.train(root / "recipe.toml", data=scenes, out=root / "run").run
    index = visavis.index(run, scenes, out=root / "index", store=root / "index" / "vectors").folder
    item = next(iter(Index.open(index).items.values()))
    record = Judgment(
        "2026-01-01T00:00:00+00:00",
        "index",
        QueryKey("red circle"),
        item.key,
        item.content,
        relevant=True,
    )
    (root / "votes.jsonl").write_text(json.dumps(asdict(record)) + "\n")
    image = next(scenes.rglob("*.png"))
    return {
        "root": root,
        "scenes": scenes,
        "recipe": root / "recipe.toml",
        "run": run,
        "index": index,
        "votes": root / "votes.jsonl",
        "image": image,
    }


def api_calls(files: dict[str, Path]) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Every public function that reads files, with valid arguments. ``NEW`` is replaced by a new
    path for each call.
    """
    run, index, scenes, image, gone = (
        files["run"],
        files["index"],
        files["scenes"],
        files["image"],
        files["root"] / "gone",
    )
    known = {
        "demo": {"out": files["run"]},
        "catalog": {"kind": "recipes", "paper": "goal"},
        "data_audit": {"path": gone, "recipe": files["recipe"], "overrides": {}, "parts": "captions", "folds": 2, "seeds": 2},
        "data_convert": {"sources": [files["votes"]], "out": NEW},
        "data_scenes": {"out": NEW, "clips": False, "num_train": 2, "num_val": 0, "num_test": 1, "size": 32, "seed": 1},
        "features": {"path": scenes, "visual": "scenes", "out": NEW, "granularity": "pooled", "crops": 1, "frames_per_second": 0.0},
        "convert": {"checkpoint": image, "out": NEW, "text_encoder": "", "config": "", "image_size": None},
        "train": {"recipe": files["recipe"], "data": scenes, "out": NEW, "overrides": (), "feedback": None, "resume": None},
        "evaluate": {"run": run, "protocol": None, "split": "test", "data": scenes, "relevance": None, "semantics": "paper"},
        "compare": {"recipe": gone, "objective": "VLC()", "model": (), "grid": (), "seeds": 1, "budget": None, "data": gone, "out": NEW},
        "reproduce": {"table": "none/1", "rows": (), "base_recipe": None, "seeds": 1, "out": NEW, "overrides": ()},
        "diagnose": {"run": run, "objective": "VLC()", "checkpoint": "best", "epsilon": 0.1, "max_batches": 1, "data": scenes, "out": None},
        "probe": {"run": run, "num_images": 2, "data": scenes, "split": "test"},
        "explain": {"run": run, "image": image, "text": "red", "out": NEW.with_suffix(".png")},
        "anatomy": {"objective": "Nothing()", "out": NEW},
        "coherence": {"runs": run, "relevance": "SceneRelevance()", "queries": 1, "top": 2, "split": "test", "data": scenes, "seed": 0, "out": files["run"]},
        "agreement": {"runs": run, "data": scenes, "relevance": "SceneRelevance()"},
        "relevance": {"estimator": "SceneRelevance()"},
        "relevance_thresholds": {"data": scenes, "estimator": "SceneRelevance()", "caption_aggregation": "max", "num_pairs": 10, "out": None},
        "relevance_fit": {"out": NEW, "model": str(gone), "epochs": 1, "lr": 0.1, "batch_size": 2, "seed": 0},
        "export": {"run": gone, "format": "onnx", "out": NEW, "push": None},
        "index": {"run": run, "source": scenes, "out": NEW, "store": NEW, "moment_seconds": None, "embedding_dim": None, "workers": 1},
        "search": {"run": index, "query": "red", "image": image, "without": "blue", "metadata": {"split": "test"}, "top": 2, "path": "*"},
        "classify": {"run": run, "image": image, "labels": ["red", "blue"], "top": 1},
        "serve": {"index": gone, "host": "127.0.0.1", "port": 0, "token": None, "feedback": None},
        "load": {"path": run, "device": "cpu", "batch_size": 2},
    }  # fmt: skip
    for name in visavis.api.__all__:
        function = getattr(visavis, name)
        shared = {
            "memory": None,
            "progress": None,
            "model": None,
            "skip_bad": False,
            "path": scenes,
        }
        parameters = inspect.signature(function).parameters
        yield (
            function,
            {key: value for key, value in shared.items() if key in parameters}
            | known.get(name, {}),
        )


def class_calls(files: dict[str, Path]) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Public classes and functions below the API, with valid arguments."""
    opened = Index.open(files["index"])
    model, image = opened.model, str(files["image"])
    rows = {"a": {1: 2.0, 2: 3.0}, "b": {1: 2.5, 2: 3.0}}
    yield ItemFilter, {"path": "", "kind": None, "after": None, "before": None, "metadata": {}}
    yield (
        visavis.Retriever,
        {"matcher": model.matcher, "processor": model.processor, "batch_size": 2, "memory": None},
    )
    yield (
        visavis.Retriever.load,
        {"folder": files["run"], "device": None, "batch_size": 2, "memory": None},
    )
    yield model.with_embedding_dim, {"embedding_dim": 8}
    yield model.encode_images, {"images": [image]}
    yield model.encode, {"items": ["red"]}
    yield model.similarity, {"first": torch.ones(2, 3), "second": torch.ones(2, 3)}
    yield model.save, {"folder": NEW}
    yield model.encode_visual, {"images": [image]}
    yield model.encode_videos, {"videos": [image]}
    yield model.encode_texts, {"texts": ["red"]}
    yield model.encode_text, {"texts": ["red"]}
    yield model.score, {"images": [image], "texts": ["red"], "direction": "t2i"}
    yield visavis.parse, {"text": "VLC()"}
    yield open_dataset, {"path": files["scenes"], "skip_bad": False, "frames_per_second": 0.0}
    yield check_dataset, {"path": files["scenes"]}
    yield read_feedback, {"path": files["votes"]}
    yield QueryKey, {"text": "red", "similar_to": "", "image_hash": ""}
    yield latest_judgments, {"records": read_feedback(files["votes"])}
    yield (
        evaluate_feedback,
        {
            "file": files["votes"],
            "content_hashes": {"a": "b"},
            "rank": lambda text: [("a", 1.0)],
            "name": "x",
        },
    )
    yield statistics.t_interval, {"values": [1.0, 2.0], "confidence": 0.9}
    yield statistics.paired_t_test, {"a": rows["a"], "b": rows["b"], "names": ("a", "b")}
    yield statistics.holm, {"p_values": [0.1, 0.2]}
    yield statistics.paired_tests, {"rows": rows, "reference": "a"}
    yield statistics.differences_from, {"pairs": statistics.paired_tests(rows), "name": "a"}
    yield (
        statistics.more_seeds,
        {"difference": 1.0, "std": 1.0, "seeds": 2, "level": 0.05, "power": 0.8, "max_seeds": 20},
    )
    yield statistics.format_number, {"value": 1.0, "signed": False}


def check_odd_calls(
    calls: Iterable[tuple[Callable[..., Any], dict[str, Any]]], folder: Path, count: int | None
) -> int:
    """Call each function with odd values, ``count`` for each parameter. Return the number of
    errors.
    """
    generator, refused, faults, number = random.Random(1), 0, [], 0
    for function, arguments in calls:
        called = getattr(function, "__qualname__", repr(function))
        expected = str(refusal(function, fresh(arguments, folder / f"valid {called}")))
        for name in arguments:
            for odd in ODD_VALUES if count is None else generator.sample(ODD_VALUES, count):
                if (called, name) in LONG_CALLS and isinstance(odd, Iterable | Path | None):
                    continue
                number += 1
                cwd = folder / f"cwd {number}"
                cwd.mkdir()
                os.chdir(cwd)
                error = refusal(function, fresh(arguments, folder / str(number)) | {name: odd})
                message = str(error)
                refused += error is not None
                words = {
                    name,
                    name.replace("_", " "),
                    name.replace("_", "-"),
                    name.removesuffix("s"),
                    ALSO_CALLED.get(name, name),
                    *printed(odd),
                }
                named = (
                    error is None or message == expected or any(word in message for word in words)
                )
                if not isinstance(error, VisavisError | TypeError | None) or not named:
                    faults.append(
                        f"{called}({name}={format_value(odd)}): {type(error).__name__}: {message}"
                    )
    assert not faults, "\n".join(faults)
    return refused


def printed(odd: Any) -> set[str]:
    """Forms of a value, or of the items of a list, in a message. The path of an empty text is a
    dot.
    """
    items = (
        [odd, *odd]
        if isinstance(odd, tuple | list) or (isinstance(odd, np.ndarray) and odd.ndim)
        else [odd]
    )
    texts = {format_value(item) for item in items} | {
        str(item)
        for item in items
        if isinstance(item, str | float | Path) or (isinstance(item, int) and abs(item) < 10**60)
    }
    texts |= {text[:50] for text in texts}
    escaped = {ascii(text).strip("'") for text in texts}
    return (
        {"." if text in ("", "''") else text for text in texts}
        | escaped
        | {text.replace("udc", "x") for text in escaped}
    )


def fresh(arguments: dict[str, Any], path: Path) -> dict[str, Any]:
    return {
        name: path.with_suffix(value.suffix)
        if isinstance(value, Path) and value.stem == NEW.stem
        else value
        for name, value in arguments.items()
    }


def test_api_functions_reject_odd_arguments(files, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_odd_calls(api_calls(files), tmp_path, 2) > 100


def test_classes_reject_odd_arguments(files, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_odd_calls(class_calls(files), tmp_path, 5) > 100


@pytest.mark.long
@pytest.mark.parametrize("calls", [api_calls, class_calls])
def test_functions_reject_every_odd_argument(calls, files, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_odd_calls(calls(files), tmp_path, None) > 2000
