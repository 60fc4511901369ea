"""Ranking coherence in blocks, random scores, undefined queries, and protocols with listed
positives.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from visavis import Targets
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, SpecError
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.image_file import Image
from visavis.evaluation import Protocol, rank_scores
from visavis.evaluation.metrics import (
    average_precision_at_r,
    coherent_scores,
    ndcg_at,
    positive_ranks,
    r_precision,
)
from visavis.evaluation.protocols import get_protocol
from visavis.papers.relevance import RelevanceEstimator, ranking_coherence
from visavis.training.evaluation.evaluate_dataset import evaluate_dataset, read_listed_positives

CAPTIONS = 3


@dataclass(frozen=True)
class MatrixEstimator(RelevanceEstimator):
    """Degrees out of a matrix ``[captions, captions]``."""

    matrix: Tensor

    def for_captions(self, captions):
        return lambda rows, columns: self.matrix[rows][:, columns]


def world(images: int) -> tuple[Dataset, Encoded, Encoded, Tensor]:
    """A data set of captioned images, its encoded items, and symmetric relevance of all captions."""
    number = images * CAPTIONS
    data = Dataset(
        name="world",
        images=tuple(Image(f"{i}.jpg", "test") for i in range(images)),
        captions=tuple(f"caption {i}" for i in range(number)),
        image_of=np.arange(number) // CAPTIONS,
    )
    vectors = torch.nn.functional.normalize(torch.randn(images + number, 8), dim=1)
    relevance = torch.rand(number, number, dtype=torch.float64)
    return data, Encoded(vectors[:images]), Encoded(vectors[images:]), (relevance + relevance.T) / 2


def product(visual: Encoded, text: Encoded) -> Tensor:
    return visual.vectors @ text.vectors.T


def test_coherence_reference_uses_first_captions() -> None:
    data, visual, text, relevance = world(30)
    scores, near = product(visual, text)[:, ::CAPTIONS], relevance[::CAPTIONS, ::CAPTIONS]
    found = ranking_coherence(visual, text, product, data, MatrixEstimator(relevance), ks=(5, 20))
    for k in (5, 20):
        for way, matrix in (("i2t", scores), ("t2i", scores.T)):
            expected = coherent_scores(matrix, near, k=k)
            assert found.per_query[f"{way}_cs_at_{k}"] == pytest.approx(expected.numpy(), abs=1e-12)
            assert found.metrics[f"{way}_cs_at_{k}"] == pytest.approx(
                expected.mean().item(), abs=1e-12
            )
            assert found.per_query[f"{way}_ndcg_at_{k}"] == pytest.approx(
                ndcg_at(matrix, near, k=k).numpy(), abs=1e-12
            )


def test_coherence_paper_uses_all_captions_and_tau_a() -> None:
    data, visual, text, relevance = world(12)
    relevance = (4 * relevance).round() / 4
    scores, near = product(visual, text), relevance[::CAPTIONS]
    found = ranking_coherence(
        visual, text, product, data, MatrixEstimator(relevance), semantics="paper", ks=(7,)
    )
    assert found.candidates == (36, 12)
    assert found.per_query["i2t_cs_at_7_paper"] == pytest.approx(
        coherent_scores(scores, near, k=7, tau="a").numpy()
    )
    assert found.per_query["t2i_cs_at_7_paper"] == pytest.approx(
        coherent_scores(scores.T, near.T, k=7, tau="a").numpy()
    )


@pytest.mark.parametrize("semantics", ["reference", "paper"])
@pytest.mark.parametrize("memory", [2000, 12_000, 40_000])
def test_coherence_does_not_depend_on_blocks(memory: int, semantics: str) -> None:
    data, visual, text, relevance = world(20)
    shapes: list[tuple[int, int]] = []

    def score(visual: Encoded, text: Encoded) -> Tensor:
        shapes.append((len(visual), len(text)))
        return (
            product(visual, text).double().round(decimals=5)
        )  # one product in several shapes differs in its last bits

    one = ranking_coherence(
        visual, text, score, data, MatrixEstimator(relevance), semantics=semantics, memory=memory
    )
    assert (
        max(32 * (rows + columns) + 16 * rows * columns for rows, columns in shapes) <= memory / 2
    )
    whole = ranking_coherence(
        visual, text, score, data, MatrixEstimator(relevance), semantics=semantics
    )
    assert max(rows * columns for rows, columns in shapes) == 20 * (
        20 if semantics == "reference" else 60
    )
    assert one.random_baseline == whole.random_baseline
    for name, values in whole.per_query.items():
        np.testing.assert_array_equal(one.per_query[name], values)


def test_coherence_of_perfect_reversed_and_random_orders() -> None:
    data, _, _, relevance = world(40)
    for sign in (1, -1):
        near = sign * relevance[::CAPTIONS, ::CAPTIONS]
        items = Encoded(torch.arange(40)), Encoded(torch.arange(40 * CAPTIONS))
        found = ranking_coherence(
            *items,
            lambda v, t, near=near: near[v.vectors][:, t.vectors // CAPTIONS],
            data,
            MatrixEstimator(relevance),
        )
        assert found.ks == (40,)
        assert found.metrics["i2t_cs_at_40"] == pytest.approx(sign)
        assert found.metrics["t2i_cs_at_40"] == pytest.approx(sign)
        deviation = math.sqrt(
            2 * (2 * 40 + 5) / (9 * 40 * 39) / 40
        )  # of the mean of 40 taus of independent orders
        assert abs(found.random_baseline["i2t_cs_at_40"]) < 4 * deviation
        assert 0.5 < found.random_baseline["i2t_ndcg_at_40"] < 1


def test_coherence_excludes_undefined_queries_from_mean() -> None:
    data, visual, text, relevance = world(10)
    relevance[0] = relevance[:, 0] = 0.0
    relevance[CAPTIONS] = 0.5
    found = ranking_coherence(visual, text, product, data, MatrixEstimator(relevance), ks=(10,))
    assert found.undefined["i2t_cs_at_10"] == 2
    assert found.undefined["i2t_ndcg_at_10"] == 1
    assert found.metrics["i2t_cs_at_10"] == pytest.approx(
        np.nanmean(found.per_query["i2t_cs_at_10"])
    )
    none = ranking_coherence(
        visual, text, product, data, MatrixEstimator(torch.zeros_like(relevance)), ks=(10,)
    )
    assert none.metrics["i2t_cs_at_10"] is none.random_baseline["i2t_cs_at_10"] is None
    shown = json.loads(json.dumps(none.to_json(), allow_nan=False))
    assert shown["i2t_cs_at_10_undefined"] == 10


def test_coherence_of_constant_scores() -> None:
    data, visual, text, relevance = world(10)
    found = ranking_coherence(
        visual,
        text,
        lambda v, t: torch.ones(len(v), len(t)),
        data,
        MatrixEstimator(relevance),
        ks=(4,),
    )
    assert found.undefined["i2t_cs_at_4"] == 10
    assert found.metrics["i2t_ndcg_at_4"] < found.random_baseline["i2t_ndcg_at_4"]


def test_coherence_ranks_folds_separately() -> None:
    data, visual, text, relevance = world(12)
    folds = Protocol(name="folds", description="", folds=3)
    whole = ranking_coherence(
        visual, text, product, data, MatrixEstimator(relevance), folds=folds.folds
    )
    assert (whole.ks, whole.candidates) == ((4,), (4, 4))
    scores, near = product(visual, text)[:, ::CAPTIONS], relevance[::CAPTIONS, ::CAPTIONS]
    parts = [
        coherent_scores(scores[i : i + 4, i : i + 4], near[i : i + 4, i : i + 4], k=4)
        for i in (0, 4, 8)
    ]
    assert whole.per_query["i2t_cs_at_4"] == pytest.approx(torch.cat(parts).numpy())


def test_coherence_rejects_invalid_arguments() -> None:
    data, visual, text, relevance = world(6)
    with pytest.raises(
        SpecError, match=r"^'CBow' in 'CBow\(\)' is not in the catalog: did you mean CBoW\?"
    ):
        ranking_coherence(visual, text, product, data, "CBow()")
    with pytest.raises(
        SpecError, match=r"^semantics: expected 'reference' or 'paper', got 'code'\.$"
    ):
        ranking_coherence(visual, text, product, data, MatrixEstimator(relevance), semantics="code")
    with pytest.raises(
        DataError, match=r"^relevance of image 4: expected finite numbers, got NaN\."
    ):
        broken = relevance.clone()
        broken[4 * CAPTIONS] = torch.nan
        ranking_coherence(visual, text, product, data, MatrixEstimator(broken), memory=2000)
    with pytest.raises(DataError, match=r"^scores of image 0: expected finite numbers, got NaN\."):
        ranking_coherence(
            visual, text, lambda v, t: product(v, t) * torch.nan, data, MatrixEstimator(relevance)
        )


@pytest.fixture(scope="module")
def coco() -> Dataset:
    return open_dataset("coco_5k_test_text")


def structured(data: Dataset) -> tuple[Encoded, Encoded]:
    visual = torch.nn.functional.normalize(torch.randn(len(data.images), 32), dim=1)
    return Encoded(visual), Encoded(
        visual[torch.from_numpy(data.image_of)] + 0.2 * torch.randn(len(data.captions), 32)
    )


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "images", "texts"), [("eccv-caption", 1261, 1332), ("cxc", 5000, 24972)]
)
def test_listed_positives_of_5k_test(
    coco: Dataset, data_folder: Path, name: str, images: int, texts: int
) -> None:
    of_images, of_texts = read_listed_positives(get_protocol(name), coco)
    assert (len(of_images.queries), len(of_texts.queries)) == (images, texts)
    listed = {
        image["filename"]: image
        for image in json.loads(
            (data_folder / "coco_5k_test_text/dataset_coco_5k_test.json").read_text()
        )["images"]
    }
    answers = json.loads(
        (
            data_folder / f"coco_5k_test_text/{name.removesuffix('-caption')}_image_to_caption.json"
        ).read_text()
    )
    for row in (0, 17, images - 1):
        image = listed[coco.images[of_images.queries[row]].name]
        texts_of = {
            coco.captions[i] for i in of_images.targets[row : row + 1].positive[0].nonzero()[:, 0]
        }
        assert {
            sentence["raw"]
            for sentence in image["sentences"]
            if sentence["sentid"] in answers[str(image["cocoid"])]
        } <= texts_of
        assert len(answers[str(image["cocoid"])]) - len(texts_of) in (0, 1)


@pytest.mark.data
@pytest.mark.long
def test_listed_protocol_ranks_all_candidates(coco: Dataset) -> None:
    visual, text = structured(coco)
    found = evaluate_dataset(visual, text, product, coco, [get_protocol("eccv-caption")])
    of_images, of_texts = read_listed_positives(get_protocol("eccv-caption"), coco)
    image_places = positive_ranks(product(visual[of_images.queries], text), of_images.targets)
    text_places = positive_ranks(product(visual, text[of_texts.queries]).T, of_texts.targets)
    assert (found.num_images, found.num_texts, len(found.image_ranks), len(found.text_ranks)) == (
        5000,
        25000,
        1261,
        1332,
    )
    for way, expected in (("i2t", image_places), ("t2i", text_places)):
        assert found.metrics[f"{way}_r_precision"] == pytest.approx(
            r_precision(expected).mean().item()
        )
        assert found.metrics[f"{way}_map_at_r"] == pytest.approx(
            average_precision_at_r(expected).mean().item()
        )
        assert found.metrics[f"{way}_r1"] == pytest.approx(
            100 * (expected[:, 0] <= 1).double().mean().item()
        )


@pytest.mark.long
@pytest.mark.data
@pytest.mark.parametrize("name", ["eccv-caption", "cxc"])
def test_listed_protocol_of_collapsed_and_perfect_model(coco: Dataset, name: str) -> None:
    one = torch.nn.functional.normalize(torch.randn(1, 48), dim=1)
    images, texts = Encoded(one.expand(5000, -1)), Encoded(one.expand(25000, -1))
    collapsed = evaluate_dataset(images, texts, product, coco, [get_protocol(name)]).metrics
    assert collapsed["rsum"] == collapsed["i2t_map_at_r"] == collapsed["t2i_r_precision"] == 0
    if name == "eccv-caption":
        of_images, _ = read_listed_positives(get_protocol(name), coco)
        row = torch.full((5000,), len(of_images.queries))
        row[of_images.queries] = torch.arange(len(of_images.queries))

        def perfect_score(visual: Encoded, text: Encoded) -> Tensor:
            rows = row[visual.vectors]
            known = of_images.targets[rows.clamp(max=len(of_images.queries) - 1)].positive[
                :, text.vectors
            ]
            return (known & (rows < len(of_images.queries))[:, None]).float()

        found = evaluate_dataset(
            Encoded(torch.arange(5000)),
            Encoded(torch.arange(25000)),
            perfect_score,
            coco,
            [get_protocol(name)],
        ).metrics
        assert found["i2t_r1"] == 100
        assert found["i2t_map_at_r"] == found["i2t_r_precision"] == 1


@pytest.mark.data
def test_listed_protocol_rejects_other_data(coco: Dataset) -> None:
    few = coco.take(np.arange(10))
    visual, text = structured(few)
    with pytest.raises(SpecError, match=r"^protocol cxc: expected 5000 images, got 10"):
        evaluate_dataset(visual, text, product, few, [get_protocol("cxc")])
    data, _, _, _ = world(3)
    with pytest.raises(
        DataError, match=r"^image 0\.jpg is not in .*coco_5k_test_text/dataset_coco_5k_test\.json"
    ):
        read_listed_positives(get_protocol("cxc"), data)
    swapped = coco.take(np.arange(3))
    object.__setattr__(swapped, "captions", tuple(reversed(swapped.captions)))
    with pytest.raises(
        DataError,
        match=r"^image COCO_val2014_000000391895\.jpg has other captions than in .*, or another order",
    ):
        read_listed_positives(get_protocol("cxc"), swapped)
    with pytest.raises(SpecError, match=r"^protocol cxc: expected listed positives, got ids"):
        rank_scores(torch.eye(3), range(3), range(3), protocol="cxc")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            '{"7": [1, 2]}',
            r"eccv_image_to_caption\.json: expected ids of coco_5k_test_text.*, got 7",
        ),
        ('["7"]', r"eccv_image_to_caption\.json: .* should be an object"),
        ('{"x": [1]}', r"json: x\.\[key\] is 'x': input should be a valid integer"),
        ('{"5": 3}', r"json: 5 is 3: input should be a valid array"),
        ("{", "is not JSON"),
    ],
)
def test_listed_protocol_reports_damaged_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, sentence: str
) -> None:
    folder = tmp_path / "coco_5k_test_text"
    folder.mkdir()
    image = {
        "filename": "a.jpg",
        "cocoid": 5,
        "sentids": [1, 2],
        "sentences": [{"raw": "a dog"}, {"raw": "a cat"}],
    }
    (folder / "dataset_coco_5k_test.json").write_text(json.dumps({"images": [image]}))
    (folder / "eccv_image_to_caption.json").write_text(content)
    monkeypatch.setenv("VISAVIS_DATA", str(tmp_path))
    data = Dataset(
        name="one",
        images=(Image("a.jpg", "test"),),
        captions=("a dog", "a cat"),
        image_of=np.zeros(2, dtype=np.int64),
    )
    with pytest.raises(DataError, match=sentence):
        read_listed_positives(get_protocol("eccv-caption"), data)
    (folder / "eccv_image_to_caption.json").unlink()
    with pytest.raises(DataError, match=r"eccv_image_to_caption\.json: expected an existing path"):
        read_listed_positives(get_protocol("eccv-caption"), data)


def test_positives_may_be_shared_by_queries() -> None:
    overlapping = Targets.from_pairs([0, 0, 1], [0, 1, 1], 2, 3)
    found = positive_ranks(torch.tensor([[3.0, 1.0, 2.0], [0.0, 2.0, 1.0]]), overlapping)
    assert r_precision(found).tolist() == [0.5, 1.0]
    assert average_precision_at_r(found).tolist() == [0.5, 1.0]
