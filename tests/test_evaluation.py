"""Evaluation in tiles: results equal those of the full matrix, exact ties and protocols."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.matching import mentions
from tests.sampling import pairwise
from torch import Tensor

from visavis import Targets
from visavis.core.blocking import ScoreCost
from visavis.core.encoded import Encoded
from visavis.core.errors import DataError, ShapeError, SpecError
from visavis.evaluation import CATALOG, Protocol, evaluate, rank_scores
from visavis.evaluation.metrics import best_ranks
from visavis.evaluation.metrics.ranking import Ties, best_rank_column
from visavis.evaluation.tiled_ranking import rank_by_tiles
from visavis.losses.scoring import DeviceScore

TIES = ("pessimistic", "mean", "optimistic")


def product(visual: Encoded, text: Encoded) -> Tensor:
    return visual.vectors @ text.vectors.T


def unit(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=dtype), dim=-1)


def ranks_by_tiles(
    visual: Tensor,
    text: Tensor,
    image_ids: Tensor,
    text_ids: Tensor,
    tile: tuple[int, int],
    ties: Ties = "pessimistic",
) -> list[list[int]]:
    ranked = rank_by_tiles(
        Encoded(visual), Encoded(text), product, image_ids, text_ids, max_tile=tile, ties=ties
    )
    return [best_rank_column(side.positive_ranks, ties).tolist() for side in ranked]


def captioned(
    images: int, captions: int, embedding_dim: int = 24, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    visual, ids = unit(images, embedding_dim, dtype=dtype), torch.arange(images)
    text = visual.repeat_interleave(captions, 0) + 0.2 * torch.randn(
        images * captions, embedding_dim, dtype=dtype
    )
    return visual, text, ids, ids.repeat_interleave(captions)


@st.composite
def integer_embeddings(draw: st.DrawFn) -> tuple[Encoded, Encoded, Tensor, Tensor]:
    """Embeddings of small integers, whose products are exact and often tied, and any ids."""
    images, identities = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    image_ids = torch.randint(identities, (images,), generator=generator)
    extra = image_ids[torch.randint(images, (draw(st.integers(0, 15)),), generator=generator)]
    text_ids = torch.cat([image_ids, extra])[
        torch.randperm(images + len(extra), generator=generator)
    ]
    visual, text = (
        torch.randint(-1, 2, (len(ids), 3), generator=generator).float()
        for ids in (image_ids, text_ids)
    )
    return Encoded(visual), Encoded(text), image_ids, text_ids


@pytest.mark.slow
@given(integer_embeddings(), st.integers(1, 30), st.integers(1, 30), st.sampled_from(TIES))
def test_evaluate_tiles_match_full_matrix(
    embeddings: tuple[Encoded, Encoded, Tensor, Tensor], rows: int, columns: int, ties: str
) -> None:
    visual, text, image_ids, text_ids = embeddings
    targets, scores = Targets(query_ids=image_ids, candidate_ids=text_ids), product(visual, text)
    expected = [
        best_ranks(scores, targets, ties=ties).tolist(),
        best_ranks(scores.T, targets.T, ties=ties).tolist(),
    ]
    assert (
        ranks_by_tiles(visual.vectors, text.vectors, image_ids, text_ids, (rows, columns), ties)
        == expected
    )
    actual = evaluate(
        visual, text, product, image_ids, text_ids, ties=ties, memory=64 * (rows + columns)
    )
    assert [actual.image_ranks.tolist(), actual.text_ranks.tolist()] == expected
    assert actual.metrics == rank_scores(scores, image_ids, text_ids, ties=ties).metrics
    assert (
        actual.score_samples["positive"].sort().values.tolist()
        == scores[targets.positive].sort().values.tolist()
    )
    for direction, block, block_targets, top in (
        ("i2t", scores, targets, actual.top_texts),
        ("t2i", scores.T, targets.T, actual.top_images),
    ):
        assert torch.equal(block.gather(1, torch.from_numpy(top)[:, None])[:, 0], block.amax(1))
        hardest = block.masked_fill(~block_targets.negative, -torch.inf).amax(1)
        assert (
            actual.score_samples[f"hardest_{direction}"].tolist()
            == hardest[hardest > -torch.inf].tolist()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_evaluate_ranks_match_argsort(dtype: torch.dtype) -> None:
    visual, text, image_ids, text_ids = captioned(230, 5, dtype=dtype)
    shuffled = torch.randperm(len(text))
    text, text_ids = text[shuffled], text_ids[shuffled]
    image_ranks, text_ranks = ranks_by_tiles(visual, text, image_ids, text_ids, (64, 300))
    scores = (visual @ text.T).numpy()
    for image, row in enumerate(scores):
        assert (
            image_ranks[image] == 1 + np.flatnonzero(text_ids.numpy()[np.argsort(-row)] == image)[0]
        )
    for caption, column in enumerate(scores.T):
        assert (
            text_ranks[caption]
            == 1 + np.flatnonzero(np.argsort(-column) == int(text_ids[caption]))[0]
        )


@pairwise(
    tile=[(1024, 5120), (7, 11), (3, 200), (1, 40)],
    images=[10, 37, 101],
    dtype=[torch.float32, torch.float64],
)
def test_evaluate_duplicated_image_is_exact_tie(
    images: int, tile: tuple[int, int], dtype: torch.dtype
) -> None:
    visual, text, image_ids, text_ids = captioned(images, 3, embedding_dim=64, dtype=dtype)
    half = images // 2
    visual[half : 2 * half] = visual[:half]
    single = ranks_by_tiles(
        visual[:half], text[: 3 * half], image_ids[:half], text_ids[: 3 * half], tile
    )[1]
    both = ranks_by_tiles(
        visual[: 2 * half], text[: 6 * half], image_ids[: 2 * half], text_ids[: 6 * half], tile
    )[1]
    # Every image occurs twice, so every competitor of a caption counts twice. The positive itself
    # does not count.
    assert both[: 3 * half] == [2 * rank for rank in single]


@pairwise(dtype=[torch.float32, torch.float64], images=[3, 10, 50, 257])
def test_evaluate_collapsed_model_has_worst_ranks(images: int, dtype: torch.dtype) -> None:
    embedding, ids = unit(1, 48, dtype=dtype), torch.arange(images)
    visual, text = (embedding.expand(n, -1) for n in (images, 5 * images))
    image_ranks, text_ranks = ranks_by_tiles(visual, text, ids, ids.repeat_interleave(5), (16, 33))
    assert set(image_ranks) == {5 * images - 4}
    assert set(text_ranks) == {images}


def test_evaluate_shares_captions_of_duplicated_image() -> None:
    visual, text = torch.eye(3)[[0, 1, 0]], torch.eye(3)[[0, 1, 2]]
    actual = evaluate(Encoded(visual), Encoded(text), product, [7, 8, 7], [7, 8, 7])
    assert actual.image_ranks.tolist() == [1, 1, 1]
    assert actual.text_ranks.tolist() == [
        1,
        1,
        2,
    ]  # the third text scores 0 for all: one other image ties, its two positives do not count


def test_evaluate_tiles_masks_and_named_parts() -> None:
    visual = Encoded({"look": torch.randn(9, 4, 6)}, {"look": torch.rand(9, 4) > 0.2})
    text = Encoded(torch.randn(18, 5, 6), torch.ones(18, 5, dtype=torch.bool))
    shapes = []

    def best_regions(visual: Encoded, text: Encoded) -> Tensor:
        shapes.append((len(visual), len(text)))
        pairs = torch.einsum("vrd,twd->vtrw", visual.vectors["look"], text.vectors)
        return pairs.masked_fill(~visual.mask["look"][:, None, :, None], -9).amax(2).mean(2)

    ids = torch.arange(9)
    tiled = evaluate(visual, text, best_regions, ids, ids.repeat(2), memory=25_000)
    assert (
        max(rows * columns for rows, columns in shapes) <= 100
    )  # out of 162 pairs, each with two tensors of 4 x 5 affinities
    assert tiled.metrics == rank_scores(best_regions(visual, text), ids, ids.repeat(2)).metrics


def test_evaluate_tile_size_follows_score_cost() -> None:
    visual, text, image_ids, text_ids = captioned(20, 5, embedding_dim=8)
    shapes = []

    class Costly:
        def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost:
            return ScoreCost(inference_bytes=984.0, training_bytes=1.0)

        def score(self, visual: Encoded, text: Encoded) -> Tensor:
            shapes.append((len(visual), len(text)))
            return product(visual, text)

    score = Costly().score
    items = 20 * 32, 100 * 32  # bytes
    for scored in (score, DeviceScore(score, torch.device("cpu"))):
        shapes.clear()
        small_memory = evaluate(
            Encoded(visual),
            Encoded(text),
            scored,
            image_ids,
            text_ids,
            memory=1000 * 20 * 50 + items[0] + items[1] // 2,
        )
        assert set(shapes) == {(20, 50)}
        shapes.clear()
        large_memory = evaluate(Encoded(visual), Encoded(text), scored, image_ids, text_ids)
        assert set(shapes) == {(20, 100)}
        assert small_memory.to_json() == large_memory.to_json()


def test_rank_scores_accepts_half_precision() -> None:
    visual, text, image_ids, text_ids = captioned(40, 2)
    scores = (visual @ text.T).bfloat16()
    actual = rank_scores(scores, image_ids, text_ids)
    assert (
        actual.text_ranks.tolist()
        == best_ranks(
            scores.float().T, Targets(query_ids=text_ids, candidate_ids=image_ids)
        ).tolist()
    )


def test_evaluate_rejects_text_without_image_in_folds() -> None:
    with pytest.raises(ShapeError, match="text 4: expected at least one image with its id"):
        rank_scores(
            torch.rand(4, 5),
            range(4),
            [0, 1, 2, 3, 9],
            protocol=Protocol(name="folds", description="", folds=2),
        )


def test_evaluate_averages_consecutive_folds() -> None:
    visual, text, image_ids, text_ids = captioned(20, 3, embedding_dim=4)
    folds = Protocol(name="folds", description="", folds=5)
    whole = evaluate(Encoded(visual), Encoded(text), product, image_ids, text_ids, protocol=folds)
    parts = [
        evaluate(
            Encoded(visual[i : i + 4]),
            Encoded(text[3 * i : 3 * i + 12]),
            product,
            image_ids[i : i + 4],
            text_ids[3 * i : 3 * i + 12],
        )
        for i in range(0, 20, 4)
    ]
    assert whole.metrics == {
        name: pytest.approx(np.mean([part.metrics[name] for part in parts]))
        for name in whole.metrics
    }
    assert whole.text_ranks.tolist() == np.concatenate([part.text_ranks for part in parts]).tolist()
    assert (whole.num_images, whole.num_texts, whole.captions_per_image) == (4, 12, 3)


def test_protocols_reject_other_data_set_sizes() -> None:
    assert [protocol.name for protocol in CATALOG] == [
        "plain",
        "flickr8k",
        "flickr30k",
        "coco-1k-5fold",
        "coco-5k",
        "eccv-caption",
        "cxc",
        "msrvtt-full",
        "msrvtt-1ka",
        "msvd",
    ]
    scores = torch.eye(3)
    with pytest.raises(SpecError, match=mentions("flickr8k", 1000, 3, "plain")):
        rank_scores(scores, range(3), range(3), protocol="flickr8k")
    with pytest.raises(SpecError, match=mentions("flickr9k", "flickr8k")):
        rank_scores(scores, range(3), range(3), protocol="flickr9k")
    five = Protocol(name="five", description="", captions_per_image=5)
    with pytest.raises(SpecError, match=mentions("five", 5, "image 0", 1)):
        rank_scores(scores, range(3), range(3), protocol=five)
    with pytest.raises(SpecError, match=mentions("folds", 2, "3 images")):
        rank_scores(
            scores, range(3), range(3), protocol=Protocol(name="folds", description="", folds=2)
        )


def test_rank_scores_rejects_invalid_inputs() -> None:
    with pytest.raises(ShapeError, match=mentions("image 1", "text")):
        rank_scores(torch.eye(2), [0, 1], [0, 0])
    with pytest.raises(ShapeError, match=mentions("text 1", "image")):
        rank_scores(torch.ones(1, 2), [0], [0, 1])
    with pytest.raises(ShapeError, match=mentions("scores", "[2, 2]", "[2, 3]")):
        rank_scores(torch.eye(2), [0, 1], [0, 1, 1])
    with pytest.raises(ShapeError, match=mentions("2", "3", "ids")):
        evaluate(Encoded(torch.eye(2)), Encoded(torch.eye(3)), product, range(3), range(3))
    with pytest.raises(DataError, match=mentions("image 1", "text 1", "NaN")):
        rank_scores(torch.tensor([[1.0, 0.0], [0.0, torch.nan]]), [0, 1], [0, 1])


def test_evaluate_rejects_parts_of_different_lengths() -> None:
    """The last row of the longer part would be left out, whichever row is the superfluous one."""
    longer = Encoded(torch.eye(2), mask=torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"^ids: expected one per row .* got 2 for 2 and 3\."):
        evaluate(longer, Encoded(torch.eye(2)), product, range(2), range(2))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_evaluate_rejects_empty_sides(shape: tuple[int, int]) -> None:
    """Metrics of no query would be NaN."""
    with pytest.raises(ShapeError, match=r"^images, texts: expected at least one of each"):
        rank_scores(torch.zeros(shape), range(shape[0]), range(shape[1]))


def test_evaluate_rejects_scores_of_another_shape() -> None:
    """A row of scores for all images would be broadcast."""

    def one_row(visual: Encoded, text: Encoded) -> Tensor:
        return product(visual, text)[:1]

    with pytest.raises(
        ShapeError, match=r"^score: expected shape \[2, 3\] .* got a Tensor of shape \[1, 3\]"
    ):
        evaluate(Encoded(torch.eye(3)), Encoded(torch.eye(3)), one_row, range(3), range(3))


@pytest.mark.parametrize("tile", [(2, 4), (9, 9)])
def test_evaluate_rejects_nan_score_of_negative_pair(tile: tuple[int, int]) -> None:
    """No comparison with NaN is true: such a pair would never stand before the right one."""

    def score(visual: Encoded, text: Encoded) -> Tensor:
        is_nan = (visual.vectors[:, None] == 2) & (text.vectors == 5)
        return torch.where(is_nan, torch.nan, torch.rand(len(visual), len(text)))

    items, ids = Encoded(torch.arange(9)), torch.arange(9)
    with pytest.raises(
        DataError, match=r"^score of image 2 and text 5: expected a number, got NaN"
    ):
        rank_by_tiles(items, items, score, ids, ids, max_tile=tile)


def test_rank_scores_takes_scores_with_gradient() -> None:
    scores = torch.eye(3).requires_grad_()
    assert rank_scores(scores, range(3), range(3)).metrics["rsum"] == 600


def test_evaluation_result_is_flat_json() -> None:
    actual = json.loads(json.dumps(rank_scores(torch.eye(4), range(4), range(4)).to_json()))
    assert actual["protocol"] == "plain"
    assert (
        actual["num_images"],
        actual["num_texts"],
        actual["captions_per_image"],
        actual["ties"],
    ) == (4, 4, 1.0, "pessimistic")
    assert actual["rsum"] == 600


@pytest.mark.parametrize(
    ("protocol", "videos", "captions"),
    [
        pytest.param("msrvtt-full", 2990, 2, marks=pytest.mark.long),
        ("msrvtt-1ka", 1000, 1),
        ("msvd", 670, 3),
    ],
)
def test_video_protocols_use_mean_rank_for_ties(protocol, videos, captions) -> None:
    """Pairs of videos tie, so the mean rank is 1.5, which is not a hit at 1 but a hit from 2 on."""
    ids = torch.arange(videos).repeat_interleave(captions)
    same = torch.arange(videos) // 2
    scores = (same[:, None] == same[ids][None]).double()
    actual = rank_scores(scores, range(videos), ids, protocol=protocol)
    assert (actual.ties, actual.num_images) == ("mean", videos)
    assert (actual.metrics["t2i_r1_mean_ties"], actual.metrics["t2i_r5_mean_ties"]) == (0, 100)
    assert np.unique(actual.text_ranks).tolist() == [1.5]
    assert (
        rank_scores(scores, range(videos), ids, protocol=protocol, ties="pessimistic").ties
        == "pessimistic"
    )
    with pytest.raises(SpecError, match=mentions(protocol, videos, 4)):
        rank_scores(torch.eye(4), range(4), range(4), protocol=protocol)
