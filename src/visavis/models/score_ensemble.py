"""Ensemble of matchers whose score is the mean of their scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visavis.core.encoded import Encoded, EncodedBatches
from visavis.models.base import Matcher


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
        self.config, self.members = members[0].config, nn.ModuleList(members)

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
    """Join the encodings of the same items by several matchers.

    Args:
        encoded: Encodings of each member.

    Returns:
        Items as ``ScoreEnsemble`` reads them.
    """
    batches = [items for items in encoded if isinstance(items, EncodedBatches)]
    if len(batches) == len(encoded) and all(items.has_same_layout(batches[0]) for items in batches):
        return EncodedBatches(
            [
                join_member_encodings(blocks)
                for blocks in zip(*(items.blocks for items in batches), strict=True)
            ],
            batches[0].block_index,
            batches[0].row_index,
        )
    return Encoded(
        {
            str(index): (items.vectors, items.mask, items.weights)  # type: ignore[misc]
            for index, items in enumerate(encoded)
        }
    )
