"""Inference with matchers: encode items in batches, score items on the CPU within a memory
setting, and average the scores of several matchers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from visavis.core.blocking import BlockCost, block_shape
from visavis.core.encoded import Direction, Encoded, Modality, RaggedItems, collect_batches
from visavis.core.memory_budget import MemoryLimit, budget_bytes, chunk_slices
from visavis.losses.scoring import (
    DeviceScore,
    TwoStageScore,
    inference_block_cost,
    item_bytes,
    score_direction,
)
from visavis.models.base import Matcher
from visavis.models.batch_encoding import device_of, encode_batches

if TYPE_CHECKING:
    from visavis.core.process_group import ProcessGroup

OnBatch = Callable[[int, int], None]
"""Callback after each batch, with the number of encoded items and of all items."""


def encode_items(
    matcher: Matcher,
    side: Modality,
    inputs: Iterable[Encoded],
    batches: Sequence[np.ndarray],
    *,
    group: ProcessGroup | None = None,
    output_device: torch.device | str = "cpu",
    on_batch: OnBatch | None = None,
) -> Encoded:
    """Encode items of one side in evaluation mode, in ascending order of their indices."""
    # `batches` holds the indices of all processes, and `inputs` only the batches of this one.
    total = sum(map(len, batches if group is None else group.part(batches)))
    done = 0
    encode = matcher.encode_visual if side == "visual" else matcher.encode_text
    encoded = list[Encoded]()
    for batch in encode_batches(matcher, encode, inputs, output_device):
        encoded.append(batch)
        done += len(batch)
        if on_batch is not None:
            on_batch(done, total)
    if group is not None:
        # Each process gets all items.
        encoded = group.all_gather_batches(encoded, len(batches))
    return join_batches(encoded, batches)


def join_batches(encoded: Sequence[Encoded], batches: Sequence[np.ndarray]) -> Encoded:
    """Join encoded batches in ascending order of the indices ``batches``."""
    items = collect_batches(list(encoded))
    index = np.concatenate(batches)
    # A selection of all items would copy them.
    in_order = bool((index[1:] >= index[:-1]).all())
    return items if in_order else items[torch.from_numpy(np.argsort(index, kind="stable"))]


def consecutive_batches(count: int, size: int) -> list[np.ndarray]:
    """Split indices into batches in their order.

    Args:
        count: Number of items.
        size: Maximum size of a batch.

    Returns:
        Indices of each batch.

    Example:
        >>> [batch.tolist() for batch in consecutive_batches(5, 2)]
        [[0, 1], [2, 3], [4]]
    """
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


def equal_batches(index: np.ndarray, size: int) -> list[np.ndarray]:
    """Split indices into batches of nearly equal size.

    Args:
        index: Indices.
        size: Size of a batch. Batches are slightly larger if it does not divide the number of
            indices.

    Returns:
        Indices of each batch.

    Example:
        >>> [batch.tolist() for batch in equal_batches(np.arange(5), 2)]
        [[0, 1, 2], [3, 4]]
    """
    return np.array_split(index, max(1, len(index) // size))


def batches_by_length(texts: Sequence[str], size: int) -> list[np.ndarray]:
    """Split texts into batches of similar length, the shortest first.

    Args:
        texts: The texts.
        size: Size of a batch, or slightly less than it.

    Returns:
        Indices of each batch.

    Example:
        >>> [batch.tolist() for batch in batches_by_length(["a red dog", "a", "a dog"], 1)]
        [[1], [2], [0]]
    """
    return equal_batches(np.argsort([len(text) for text in texts], kind="stable"), size)


ITEM_COPIES_PER_PAIR = 3
"""Copies of both items in memory while single pairs are scored."""


def device_score(matcher: Matcher) -> DeviceScore:
    """Build the score of a matcher on its device for items on the CPU."""
    if not matcher.rerank_top_k:
        return DeviceScore(matcher.score, device_of(matcher))
    return TwoStageScore(
        matcher.score,
        device_of(matcher),
        matcher.first_stage_items,
        matcher.second_stage_scores,
        matcher.rerank_top_k,
    )


def score_all_pairs(
    matcher: Matcher,
    visual: Encoded,
    text: Encoded,
    memory: MemoryLimit = None,
    direction: Direction = "t2i",
) -> Tensor:
    """Score every visual item with every text on the CPU, ``[V, T]``, in one block if possible."""
    # [queries, candidates]: images are queries for i2t. With two stages, the first candidates of
    # each query are re-ranked.
    scores = score_direction(device_score(matcher), visual, text, direction, memory)
    return scores if direction == "i2t" else scores.T


@torch.no_grad()
def score_indexed_pairs(
    matcher: Matcher,
    visual: Encoded,
    text: Encoded,
    visual_index: Tensor,
    text_index: Tensor,
    memory: MemoryLimit = None,
) -> Tensor:
    """Score the pairs (visual_index[p], text_index[p]) with ``score_pairs``: ``[P]`` on the CPU."""
    device = device_of(matcher)
    # The cost of one pair includes one copy of its items already.
    cost = inference_block_cost(DeviceScore(matcher.score, device), visual, text).total_bytes(1, 1)
    cost += (ITEM_COPIES_PER_PAIR - 1) * (item_bytes(visual) + item_bytes(text))
    # As many pairs as memory holds at once.
    chunk_size = block_shape(1, len(visual_index), BlockCost(cost), budget_bytes(memory, device))[1]
    score_pairs = DeviceScore(matcher.score_pairs, device)
    blocks = [
        score_pairs(visual[visual_index[part]], text[text_index[part]])
        for part in chunk_slices(len(visual_index), chunk_size)
    ]
    return torch.cat(blocks) if blocks else torch.zeros(0)


class ScoreEnsemble(Matcher):
    """Matchers whose scores of a pair are averaged, for evaluation.

    Items hold the encodings of every member, as tensors by ``<member>/<field>/<part>``. Members
    that read the same items encode them here. Encodings of members with different features are
    joined by ``join_member_encodings``.

    Args:
        members: The matchers.

    Source:
        BFAN, SGRAF, VSE-infinity and NCR report two networks together in this way, in the starred
        rows of tables.
    """

    name = "Average"

    def __init__(self, members: Sequence[Matcher]):
        nn.Module.__init__(self)
        self.config = members[0].config
        self.members = nn.ModuleList(members)

    def encode_visual(self, items: Encoded) -> Encoded:
        return join_member_encodings([member.encode_visual(items) for member in self.members])  # type: ignore[operator]

    def encode_text(self, items: Encoded) -> Encoded:
        return join_member_encodings([member.encode_text(items) for member in self.members])  # type: ignore[operator]

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        return torch.stack(
            [member.score(*items) for member, *items in self._members(visual, text)]
        ).mean(0)

    @property
    def rerank_top_k(self) -> int:
        """Largest number of candidates that a member re-ranks. A member with one stage then returns
        the same score again.
        """
        return max(member.rerank_top_k for member in self.members)  # type: ignore[type-var, return-value]

    def first_stage_items(self, items: Encoded) -> Encoded:
        return join_member_encodings(
            [member.first_stage_items(encoding) for member, encoding in self._members(items)]
        )

    def second_stage_scores(self, visual: Encoded, text: Encoded) -> Tensor:
        scores = [
            (member.second_stage_scores if member.rerank_top_k else member.score_pairs)(*items)
            for member, *items in self._members(visual, text)
        ]
        return torch.stack(scores).mean(0)

    def _members(self, *sides: Encoded) -> Iterator[tuple[Any, ...]]:
        """Yield each member with its own encodings."""
        yield from (
            # The inverse of ``join_member_encodings``.
            (member, *(Encoded(*items.vectors[str(index)]) for items in sides))  # type: ignore[index]
            for index, member in enumerate(self.members)
        )

    def parts(self) -> dict[str, list[nn.Module]]:
        return {str(index): [member] for index, member in enumerate(self.members)}


def join_member_encodings(encoded: Sequence[Encoded]) -> Encoded:
    """Join the encodings of the same items by several matchers, as ``ScoreEnsemble`` reads them."""
    ragged = [items for items in encoded if isinstance(items, RaggedItems)]
    if len(ragged) == len(encoded) and all(
        torch.equal(items.index, ragged[0].index) for items in ragged
    ):
        stored = {str(index): items.stored for index, items in enumerate(ragged)}
        return RaggedItems((stored, None, None), ragged[0].index)
    return Encoded(
        {
            str(index): (items.vectors, items.mask, items.weights)  # type: ignore[misc]
            for index, items in enumerate(encoded)
        }
    )
