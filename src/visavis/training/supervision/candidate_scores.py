"""Scores of each query with its candidates, to find hard negatives: with all candidates, or with
preselected ones of a costly score.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from visavis.core.blocking import Score, score_in_blocks
from visavis.core.encoded import Direction, Encoded, unit_rows
from visavis.core.errors import RecipeError
from visavis.core.memory_budget import MemoryLimit, parse_memory
from visavis.losses.scoring import score_query_rows, tile_shape
from visavis.models.base import get_vectors
from visavis.models.layers import mean_pool

BYTES_PER_PAIR = 24.0
"""Bytes per pair during the search for negatives: scores, masked scores, positive pairs and dropped
pairs.
"""


def iter_candidate_scores(
    score: Score,
    visual: Encoded,
    text: Encoded,
    direction: Direction,
    query_images: Tensor,
    candidate_images: Tensor,
    *,
    preselect: int = 0,
    memory: MemoryLimit = None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield blocks of queries, indices of their candidates [N], and scores [R, N]. Preselected
    candidates begin with the positives, and have ``preselect`` negatives at most.
    """
    if not 0 < preselect < len(candidate_images):
        all_candidates = torch.arange(len(candidate_images), device=candidate_images.device)
        for rows, scores in score_query_rows(
            score, visual, text, direction, caller_bytes_per_pair=BYTES_PER_PAIR, memory=memory
        ):
            yield rows, all_candidates, scores
        return
    # Cosines of pooled items and scores of the preselected ones take half of the memory each.
    total_bytes = parse_memory(memory)
    half_memory = None if total_bytes is None else total_bytes // 2
    block_shape = None
    images, texts = map(Encoded, mean_pooled(visual, text))
    for rows, cosines in score_query_rows(
        _cosine, images, texts, direction, caller_bytes_per_pair=BYTES_PER_PAIR, memory=half_memory
    ):
        is_positive = query_images[rows, None] == candidate_images
        nearest = cosines.masked_fill(is_positive, float("-inf")).topk(preselect).indices
        for query, positive, negatives in zip(
            range(rows.start, rows.stop), is_positive, nearest, strict=True
        ):
            candidates = torch.cat([positive.nonzero().flatten(), negatives[~positive[negatives]]])
            row = slice(query, query + 1)
            pair = (
                (visual[row], text[candidates])
                if direction == "i2t"
                else (visual[candidates], text[row])
            )
            if block_shape is None:
                samples = (visual.largest_items(len(pair[0])), text.largest_items(len(pair[1])))
                block_shape = tile_shape(
                    score, *samples, caller_bytes_per_pair=0.0, memory=half_memory
                )
            yield row, candidates, score_in_blocks(score, *pair, block_shape).reshape(1, -1)


def mean_pooled(visual: Encoded, text: Encoded) -> tuple[Tensor, Tensor]:
    """Pool each item to one unit vector, so that a cosine can approximate a costly score."""
    # The vector is the mean of an item's regions, frames or words. For items with several named
    # parts, the means of the parts that both sides have are concatenated, so the cosine of a pair
    # is the mean of the cosines of its parts.
    images, _ = _named_parts(visual[:1])
    texts, _ = _named_parts(text[:1])
    common = [
        name
        for name, part in images.items()
        if name in texts and texts[name].shape[-1] == part.shape[-1]
    ]
    if not common:
        raise RecipeError(
            "preselect: expected regions and words with the same number of dimensions, got "
            "different ones. Set preselect to 0."
        )
    return _part_means(visual, common), _part_means(text, common)


def _cosine(visual: Encoded, text: Encoded) -> Tensor:
    return get_vectors(visual) @ get_vectors(text).T


def _named_parts(items: Encoded) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Vectors and masks by the names of parts. A single tensor has the name ""."""
    vectors = items.vectors if isinstance(items.vectors, dict) else {"": items.vectors}
    masks = (
        items.mask
        if isinstance(items.mask, dict)
        else {}
        if items.mask is None
        else {"": items.mask}
    )
    return vectors, masks


def _part_means(items: Encoded, names: list[str]) -> Tensor:
    """The concatenated means of the named parts, as unit vectors, in the order of the items."""
    indices = list[Tensor]()
    rows = list[Tensor]()
    for block_indices, block in items.iter_blocks():
        vectors, masks = _named_parts(block)
        means = [
            vectors[name] if vectors[name].dim() == 2 else mean_pool(vectors[name], masks.get(name))
            for name in names
        ]
        indices.append(block_indices)
        rows.append(
            unit_rows(torch.cat([unit_rows(mean.float()).nan_to_num(0.0) for mean in means], -1))
        )
    return torch.cat(rows)[torch.cat(indices).argsort()]
