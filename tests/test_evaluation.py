"""Evaluation by tiles: the same numbers as the whole matrix, exact ties, protocols."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from visavis import Targets
from visavis.errors import DataError, ShapeError, SpecError
from visavis.evaluation import CATALOG, Protocol, evaluate, rank_scores
from visavis.evaluation.blocks import ranked_by_tiles
from visavis.memory import ScoreCost
from visavis.metrics import ranks
from visavis.metrics.arguments import Ties
from visavis.metrics.ranking import best
from visavis.scoring import DeviceScore
from visavis.types import Encoded

TIES = ("pessimistic", "mean", "optimistic")


def product(visual: Encoded, text: Encoded) -> Tensor:
    return visual.vectors @ text.vectors.T


def unit(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=dtype), dim=-1)


def ranks_by_tiles(
    visual: Tensor, text: Tensor, image_ids: Tensor, text_ids: Tensor, tile: tuple[int, int], ties: Ties = "pessimistic"
) -> list[list[int]]:
    ranked = ranked_by_tiles(Encoded(visual), Encoded(text), product, image_ids, text_ids, tile=tile, ties=ties)
    return [best(side.places, ties).tolist() for side in ranked]


def captioned(images: int, captions: int, width: int = 24, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    visual, ids = unit(images, width, dtype=dtype), torch.arange(images)
    text = visual.repeat_interleave(captions, 0) + 0.2 * torch.randn(images * captions, width, dtype=dtype)
    return visual, text, ids, ids.repeat_interleave(captions)


@st.composite
def whole_number_worlds(draw: st.DrawFn) -> tuple[Encoded, Encoded, Tensor, Tensor]:
    """Embeddings of small whole numbers (products are exact, ties frequent, duplicates certain) and any ids."""
    images, identities = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    image_ids = torch.randint(identities, (images,), generator=generator)
    extra = image_ids[torch.randint(images, (draw(st.integers(0, 15)),), generator=generator)]
    text_ids = torch.cat([image_ids, extra])[torch.randperm(images + len(extra), generator=generator)]
    visual, text = (torch.randint(-1, 2, (len(ids), 3), generator=generator).float() for ids in (image_ids, text_ids))
    return Encoded(visual), Encoded(text), image_ids, text_ids


@given(whole_number_worlds(), st.integers(1, 30), st.integers(1, 30), st.sampled_from(TIES))
def test_any_tile_gives_the_ranks_of_the_whole_matrix(
    world: tuple[Encoded, Encoded, Tensor, Tensor], rows: int, columns: int, ties: str
) -> None:
    visual, text, image_ids, text_ids = world
    targets, scores = Targets(query_ids=image_ids, candidate_ids=text_ids), product(visual, text)
    expected = [ranks(scores, targets, ties=ties).tolist(), ranks(scores.T, targets.T, ties=ties).tolist()]
    assert ranks_by_tiles(visual.vectors, text.vectors, image_ids, text_ids, (rows, columns), ties) == expected
    found = evaluate(visual, text, product, image_ids, text_ids, ties=ties, memory=64 * (rows + columns))
    assert [found.image_ranks.tolist(), found.text_ranks.tolist()] == expected
    assert found.metrics == rank_scores(scores, image_ids, text_ids, ties=ties).metrics
    assert found.scores["positive"].sort().values.tolist() == scores[targets.positive].sort().values.tolist()
    for way, block, told, first in (("i2t", scores, targets, found.first_texts), ("t2i", scores.T, targets.T, found.first_images)):
        assert torch.equal(block.gather(1, torch.from_numpy(first)[:, None])[:, 0], block.amax(1))
        hardest = block.masked_fill(~told.negative, -torch.inf).amax(1)
        assert found.scores[f"hardest_{way}"].tolist() == hardest[hardest > -torch.inf].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_are_those_of_an_argsort_in_any_order_of_texts(dtype: torch.dtype) -> None:
    visual, text, image_ids, text_ids = captioned(230, 5, dtype=dtype)
    shuffled = torch.randperm(len(text))
    text, text_ids = text[shuffled], text_ids[shuffled]
    image_ranks, text_ranks = ranks_by_tiles(visual, text, image_ids, text_ids, (64, 300))
    scores = (visual @ text.T).numpy()
    for image, row in enumerate(scores):
        assert image_ranks[image] == 1 + np.flatnonzero(text_ids.numpy()[np.argsort(-row)] == image)[0]
    for caption, column in enumerate(scores.T):
        assert text_ranks[caption] == 1 + np.flatnonzero(np.argsort(-column) == int(text_ids[caption]))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tile", [(1024, 5120), (7, 11), (3, 200), (1, 40)])
@pytest.mark.parametrize("images", [10, 37, 101])
def test_a_duplicated_image_is_an_exact_tie(images: int, tile: tuple[int, int], dtype: torch.dtype) -> None:
    visual, text, image_ids, text_ids = captioned(images, 3, width=64, dtype=dtype)
    half = images // 2
    visual[half : 2 * half] = visual[:half]
    single = ranks_by_tiles(visual[:half], text[: 3 * half], image_ids[:half], text_ids[: 3 * half], tile)[1]
    both = ranks_by_tiles(visual[: 2 * half], text[: 6 * half], image_ids[: 2 * half], text_ids[: 6 * half], tile)[1]
    # every competitor of a caption, its own image included, now stands there twice; only the own one does not count
    assert both[: 3 * half] == [2 * rank for rank in single]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("images", [3, 10, 50, 257])
def test_a_collapsed_model_scores_nothing(images: int, dtype: torch.dtype) -> None:
    one, ids = unit(1, 48, dtype=dtype), torch.arange(images)
    visual, text = (one.expand(n, -1) for n in (images, 5 * images))
    image_ranks, text_ranks = ranks_by_tiles(visual, text, ids, ids.repeat_interleave(5), (16, 33))
    assert set(image_ranks) == {5 * images - 4}
    assert set(text_ranks) == {images}


def test_an_image_that_occurs_twice_has_all_captions_of_both() -> None:
    visual, text = torch.eye(3)[[0, 1, 0]], torch.eye(3)[[0, 1, 2]]
    found = evaluate(Encoded(visual), Encoded(text), product, [7, 8, 7], [7, 8, 7])
    assert found.image_ranks.tolist() == [1, 1, 1]
    assert found.text_ranks.tolist() == [1, 1, 2]  # the third text scores 0 everywhere: one other image ties, its own two do not count


def test_masks_named_parts_and_local_matchers_are_only_scored_through_score() -> None:
    visual = Encoded({"look": torch.randn(9, 4, 6)}, {"look": torch.rand(9, 4) > 0.2})
    text = Encoded(torch.randn(18, 5, 6), torch.ones(18, 5, dtype=torch.bool))
    shapes = []

    def best_regions(visual: Encoded, text: Encoded) -> Tensor:
        shapes.append((len(visual), len(text)))
        pairs = torch.einsum("vrd,twd->vtrw", visual.vectors["look"], text.vectors)
        return pairs.masked_fill(~visual.mask["look"][:, None, :, None], -9).amax(2).mean(2)

    ids = torch.arange(9)
    tiled = evaluate(visual, text, best_regions, ids, ids.repeat(2), memory=25_000)
    assert max(rows * columns for rows, columns in shapes) <= 100  # of 162; a pair holds 4 x 5 affinities, twice
    assert tiled.metrics == rank_scores(best_regions(visual, text), ids, ids.repeat(2)).metrics


def test_tiles_are_those_that_the_declared_cost_allows_on_whatever_device_is_scored() -> None:
    visual, text, image_ids, text_ids = captioned(20, 5, width=8)
    shapes = []

    class Costly:
        def score_cost(self, visual: Encoded, text: Encoded) -> ScoreCost:
            return ScoreCost(scored=984.0, trained=1.0)

        def score(self, visual: Encoded, text: Encoded) -> Tensor:
            shapes.append((len(visual), len(text)))
            return product(visual, text)

    score = Costly().score
    items = 20 * 32, 100 * 32  # bytes
    for scored in (score, DeviceScore(score, torch.device("cpu"))):
        shapes.clear()
        few = evaluate(Encoded(visual), Encoded(text), scored, image_ids, text_ids, memory=1000 * 20 * 50 + items[0] + items[1] // 2)
        assert set(shapes) == {(20, 50)}
        shapes.clear()
        many = evaluate(Encoded(visual), Encoded(text), scored, image_ids, text_ids)
        assert set(shapes) == {(20, 100)}
        assert few.to_json() == many.to_json()


def test_half_precision_scores_are_ranked_as_they_are() -> None:
    visual, text, image_ids, text_ids = captioned(40, 2)
    scores = (visual @ text.T).bfloat16()
    found = rank_scores(scores, image_ids, text_ids)
    assert found.text_ranks.tolist() == ranks(scores.float().T, Targets(query_ids=text_ids, candidate_ids=image_ids)).tolist()


def test_folds_are_consecutive_and_averaged() -> None:
    visual, text, image_ids, text_ids = captioned(20, 3, width=4)
    folds = Protocol(name="folds", description="", folds=5)
    whole = evaluate(Encoded(visual), Encoded(text), product, image_ids, text_ids, protocol=folds)
    parts = [
        evaluate(Encoded(visual[i : i + 4]), Encoded(text[3 * i : 3 * i + 12]), product, image_ids[i : i + 4], text_ids[3 * i : 3 * i + 12])
        for i in range(0, 20, 4)
    ]
    assert whole.metrics == {name: pytest.approx(np.mean([part.metrics[name] for part in parts])) for name in whole.metrics}
    assert whole.text_ranks.tolist() == np.concatenate([part.text_ranks for part in parts]).tolist()
    assert (whole.num_images, whole.num_texts, whole.captions_per_image) == (4, 12, 3)


def test_protocols_state_their_size_and_refuse_another() -> None:
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
    with pytest.raises(SpecError, match=r"^protocol flickr8k is defined on 1000 images, here are 3: .* use the protocol plain\.$"):
        rank_scores(scores, range(3), range(3), protocol="flickr8k")
    with pytest.raises(SpecError, match=r"^there is no protocol 'flickr9k': did you mean flickr8k\?"):
        rank_scores(scores, range(3), range(3), protocol="flickr9k")
    five = Protocol(name="five", description="", captions_per_image=5)
    with pytest.raises(SpecError, match=r"^protocol five has 5 captions for each image, image 0 has 1: "):
        rank_scores(scores, range(3), range(3), protocol=five)
    with pytest.raises(SpecError, match=r"^protocol folds needs 2 folds of equal size, here are 3 images"):
        rank_scores(scores, range(3), range(3), protocol=Protocol(name="folds", description="", folds=2))


def test_refusals_are_one_sentence() -> None:
    with pytest.raises(ShapeError, match=r"^image 1 belongs to no text: leave it out"):
        rank_scores(torch.eye(2), [0, 1], [0, 0])
    with pytest.raises(ShapeError, match=r"^text 1 belongs to no image: leave it out"):
        rank_scores(torch.ones(1, 2), [0], [0, 1])
    with pytest.raises(ShapeError, match=r"^scores have shape \[2, 2\], expected \[2, 3\]: images x texts"):
        rank_scores(torch.eye(2), [0, 1], [0, 1, 1])
    with pytest.raises(ShapeError, match=r"^there are 2 encoded items and 3 ids"):
        evaluate(Encoded(torch.eye(2)), Encoded(torch.eye(3)), product, range(3), range(3))
    with pytest.raises(ShapeError, match=r"^there is nothing to rank"):
        rank_scores(torch.empty(0, 0), [], [])
    with pytest.raises(DataError, match=r"^the score of image 1 and text 1 is NaN: the model or its features are broken"):
        rank_scores(torch.tensor([[1.0, 0.0], [0.0, torch.nan]]), [0, 1], [0, 1])


def test_a_result_is_one_flat_object_of_json() -> None:
    found = json.loads(json.dumps(rank_scores(torch.eye(4), range(4), range(4)).to_json()))
    assert found["protocol"] == "plain"
    assert (found["num_images"], found["num_texts"], found["captions_per_image"], found["ties"]) == (4, 4, 1.0, "pessimistic")
    assert found["rsum"] == 600


@pytest.mark.parametrize(("protocol", "videos", "captions"), [("msrvtt-full", 2990, 2), ("msrvtt-1ka", 1000, 1), ("msvd", 670, 3)])
def test_protocols_of_videos_count_ties_by_their_mean_rank(protocol, videos, captions) -> None:
    """Every second video scores as the one before it: of two that tie, the mean rank is 1.5, which is no hit at 1 and one at 2 and more."""
    ids = torch.arange(videos).repeat_interleave(captions)
    same = torch.arange(videos) // 2
    scores = (same[:, None] == same[ids][None]).double()
    found = rank_scores(scores, range(videos), ids, protocol=protocol)
    assert (found.ties, found.num_images) == ("mean", videos)
    assert (found.metrics["t2i_r1_mean_ties"], found.metrics["t2i_r5_mean_ties"]) == (0, 100)
    assert np.unique(found.text_ranks).tolist() == [1.5]
    assert rank_scores(scores, range(videos), ids, protocol=protocol, ties="pessimistic").ties == "pessimistic"
    with pytest.raises(SpecError, match=f"protocol {protocol} is defined on {videos} images, here are 4"):
        rank_scores(torch.eye(4), range(4), range(4), protocol=protocol)
