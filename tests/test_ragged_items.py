"""Items of unequal length: equal to one tensor, and never all padded at once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from visavis.core.encoded import Encoded, RaggedItems, collect_batches, concatenate
from visavis.core.ragged import RaggedRows, are_offsets, offsets_from_counts
from visavis.evaluation import evaluate
from visavis.evaluation.tiled_ranking import _first_copies
from visavis.models.image_text.cross_attention import SCAN
from visavis.models.inference import device_score, score_all_pairs, score_indexed_pairs
from visavis.training.supervision.candidate_scores import mean_pooled

LONGEST, WIDTH, TEXTS, IMAGES, COPIED = 60, 8, 240, 16, 100


def block(number: int, length: int, named: bool) -> Encoded:
    """Sample items with padding at one side. Named items have a part without a mask, and weights."""
    mask = torch.arange(length) < torch.randint(1, length + 1, (number, 1))
    mask = mask.flip(1) if torch.rand(()) < 0.5 else mask
    vectors = torch.randn(number, length, 2) * mask[..., None]
    if not named:
        return Encoded(vectors, mask)
    return Encoded(
        {"words": vectors, "whole": torch.randn(number, 3)}, {"words": mask}, torch.rand(number, 2)
    )


@st.composite
def blocks_and_rows(draw):
    torch.manual_seed(draw(st.integers(0, 99)))
    named = draw(st.booleans())
    sizes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4))
    blocks = [block(*size, named) for size in sizes]
    places = st.integers(0, sum(map(len, blocks)) - 1)
    rows = draw(
        st.one_of(
            st.lists(places, max_size=6).map(lambda found: torch.tensor(found, dtype=torch.long)),
            st.builds(slice, places, places),
        )
    )
    return blocks, rows


def tensors(items: Encoded) -> list[torch.Tensor | None]:
    return tree_leaves((items.vectors, items.mask, items.weights))


@given(st.lists(st.integers(0, 5), max_size=6), st.data())
def test_ragged_rows_select_and_pad_items(counts, data):
    rows = np.random.default_rng(0).standard_normal((sum(counts), 2)).astype(np.float16)
    offsets = offsets_from_counts(counts)
    assert are_offsets(offsets, len(counts)) and not are_offsets(offsets, len(counts) + 1)
    arrays = np.split(rows, offsets[1:-1]) if counts else []
    items = st.integers(0, max(len(counts) - 1, 0))
    chosen = np.array(data.draw(st.lists(items, max_size=4 if counts else 0)), np.int64)
    max_length, min_length = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 3))
    for ragged in (RaggedRows(rows, offsets), RaggedRows(torch.from_numpy(rows), offsets)):
        assert [np.asarray(item).tolist() for item in ragged[chosen]] == [
            arrays[item].tolist() for item in chosen
        ]
        for part in (slice(1, 3), slice(None, None, 2)):
            assert [len(item) for item in ragged[part]] == counts[part]
        padded, mask = ragged.padded(chosen, max_length=max_length, min_length=min_length)
        assert padded.dtype == torch.float16 and not padded[~mask].any()
        lengths = [min(counts[item], max_length or counts[item]) for item in chosen]
        assert mask.shape == (len(chosen), max([min_length, *lengths]))
        for item, length, vectors, valid in zip(chosen, lengths, padded, mask, strict=True):
            spaced = [position * counts[item] // length for position in range(length)]
            assert valid.tolist() == [position < length for position in range(len(valid))]
            assert np.array_equal(vectors[valid].numpy(), arrays[item][spaced])


@given(blocks_and_rows())
def test_ragged_items_selection_matches_one_tensor(given):
    blocks, rows = given
    whole, kept = concatenate(blocks), RaggedItems.from_blocks(blocks)
    assert isinstance(collect_batches(blocks), RaggedItems) == (
        len({tuple(part.shape[1:] for part in tensors(b) if part is not None) for b in blocks}) > 1
    )
    assert len(kept) == len(whole) and len(kept[rows]) == len(whole[rows])
    for found, expected in zip(tensors(kept[rows]), tensors(whole[rows]), strict=True):
        if expected is None:
            assert found is None
            continue
        assert found.dtype == expected.dtype and len(found) == len(expected)
        if expected.dim() > 1:
            assert not expected[:, found.shape[1] :].any()
            expected = expected[:, : found.shape[1]]
        assert torch.equal(found, expected)


@given(blocks_and_rows())
def test_ragged_items_blocks_and_largest_items(given):
    blocks, _ = given
    kept = RaggedItems.from_blocks(blocks)
    order = torch.randperm(len(kept))
    places = torch.cat([places for places, _ in kept[order].iter_blocks()])
    assert places.sort().values.tolist() == list(range(len(kept)))
    longest = max(
        part.shape[1] for b in blocks for part in tensors(b.named_part("words")) if part is not None
    )
    assert tensors(kept.largest_items(1).named_part("words"))[0].shape[1] == longest


def test_ragged_items_named_part_without_names():
    blocks = [block(2, 3, named=False), block(1, 5, named=False)]
    kept = RaggedItems.from_blocks(blocks)
    assert kept.named_part("embedding") is kept
    assert kept != RaggedItems.from_blocks(blocks) and repr(kept) == "RaggedItems of 3 items"


@pytest.fixture
def scored():
    """Return SCAN with images, texts of 2 to 6 words and one of ``LONGEST``, and these texts in
    batches by length.

    The last text is a copy of another and is in the longest batch.
    """
    torch.manual_seed(0)
    matcher = (
        SCAN(
            SCAN.Config(
                visual_input_dim=3, text_granularity="words", text_input_dim=3, embedding_dim=WIDTH
            )
        )
        .double()
        .eval()
        .requires_grad_(False)
    )
    lengths = torch.randint(2, 7, (TEXTS,))
    lengths[7] = LONGEST
    texts = matcher.encode_text(
        Encoded(torch.randn(TEXTS, LONGEST, 3).double(), torch.arange(LONGEST) < lengths[:, None])
    )
    texts = texts[torch.cat([torch.arange(TEXTS - 1), torch.tensor([COPIED])])]
    order = torch.cat([lengths[:-1].argsort(stable=True), torch.tensor([TEXTS - 1])])
    blocks = [
        Encoded(texts.vectors[some, :length], texts.mask[some, :length])
        for some in order.split(TEXTS // 6)
        for length in [int(texts.mask[some].sum(1).max())]
    ]
    visual = matcher.encode_visual(Encoded(torch.randn(IMAGES, 5, 3).double()))
    return matcher, visual, texts, collect_batches(blocks)[order.argsort()]


def test_ragged_items_scores_match_one_tensor(scored):
    matcher, visual, texts, kept = scored
    for memory in (None, "1MB"):
        assert_close(
            score_all_pairs(matcher, visual, kept, memory),
            score_all_pairs(matcher, visual, texts, memory),
        )
    pairs = torch.arange(TEXTS) % IMAGES, torch.arange(TEXTS)
    assert_close(
        score_indexed_pairs(matcher, visual, kept, *pairs),
        score_indexed_pairs(matcher, visual, texts, *pairs),
    )
    found, expected = (
        evaluate(visual, items, device_score(matcher), range(IMAGES), pairs[0])
        for items in (kept, texts)
    )
    assert found.metrics == expected.metrics
    assert_close(mean_pooled(visual, kept), mean_pooled(visual, texts))


def test_ragged_items_find_equal_items_between_batches(scored):
    *_, texts, kept = scored
    for items in (texts, kept):
        first = _first_copies(items, torch.arange(TEXTS))
        assert first[-1] == COPIED and len(first.unique()) == TEXTS - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64])
@pytest.mark.parametrize("width", [1, 3, 8, 513])
def test_equal_items_are_found_in_any_order(dtype, width):
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(20, width, generator=generator) * 100).to(dtype)
    items = rows[torch.randint(20, (100,), generator=generator)]
    order = torch.randperm(100, generator=generator)
    first = dict[bytes, int]()
    for item in order.tolist():
        first.setdefault(items[item].numpy().tobytes(), item)
    expected = [first[item.numpy().tobytes()] for item in items]
    assert _first_copies(Encoded(items), order).tolist() == expected


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        sizes = (
            part.untyped_storage().nbytes()
            for part in tree_leaves(made)
            if isinstance(part, torch.Tensor)
        )
        self.bytes = max([self.bytes, *sizes])
        return made


@pytest.mark.slow
def test_ragged_items_are_never_all_padded(scored):
    matcher, visual, texts, kept = scored
    padded = texts.vectors.numel() * texts.vectors.itemsize
    assert (
        sum(
            part.numel() * part.itemsize
            for _, some in kept.iter_blocks()
            for part in (some.vectors,)
        )
        < padded / 4
    )
    with Largest() as largest:
        evaluate(
            visual,
            kept,
            device_score(matcher),
            range(IMAGES),
            torch.arange(TEXTS) % IMAGES,
            memory="200KB",
        )
        mean_pooled(visual, kept)
    assert largest.bytes < padded / 4
