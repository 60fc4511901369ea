"""A cheap score that stands in for a costly one where all pairs of a data set are too many: cosines of means of fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from visavis.errors import RecipeError
from visavis.memory import Memory, parse_memory, score_in_blocks
from visavis.models.pooling import mean_pool
from visavis.scoring import Score, largest, score_by_rows, tile_shape
from visavis.types import Direction, Encoded

Choose = Callable[[slice, Tensor], Tensor]
"""``choose(queries, scores [R, C]) -> [R, P]``: the candidates that each of some queries keeps, by the cheap score."""


def pooled(visual: Encoded, text: Encoded) -> tuple[Tensor, Tensor]:
    """One unit vector an item: the mean of its regions, frames or words; of several named parts that both sides have, side by side.

    The cosine of a pair is then the mean over these parts of the cosines of their means, if both items have them all. Raises RecipeError
    where the sides have no part of one width in common.
    """
    (images, _), (texts, _) = _named(visual[:1]), _named(text[:1])
    common = [name for name, part in images.items() if name in texts and texts[name].shape[-1] == part.shape[-1]]
    if not common:
        raise RecipeError(
            "BankSupervision(preselect=...) compares means of regions and words, which have no common width here: leave it out."
        )
    return _means(visual, common), _means(text, common)


def scores_of_preselected(
    score: Score, visual: Encoded, text: Encoded, way: Direction, choose: Choose, *, held: float, memory: Memory
) -> Iterator[tuple[Tensor, Tensor]]:
    """The candidates that each query keeps by the cosine of ``pooled`` items ``[P]``, and their ``score`` with it ``[P]``, query by query.

    held: as in ``score_by_rows``. Cosines and scores take half of the memory each.
    """
    size = parse_memory(memory)
    half = None if size is None else size // 2
    images, texts = map(Encoded, pooled(visual, text))
    shape = None
    for rows, cosines in score_by_rows(_cosine, images, texts, way, held=held, memory=half):
        for query, listed in zip(range(rows.start, rows.stop), choose(rows, cosines), strict=True):
            own = slice(query, query + 1)
            pair = (visual[own], text[listed]) if way == "i2t" else (visual[listed], text[own])
            shape = shape or tile_shape(score, *map(largest, (visual, text), map(len, pair)), held=0.0, memory=half)
            yield listed, score_in_blocks(score, *pair, shape).flatten()


def _cosine(visual: Encoded, text: Encoded) -> Tensor:
    assert isinstance(visual.vectors, Tensor) and isinstance(text.vectors, Tensor)
    return visual.vectors @ text.vectors.T


def _named(items: Encoded) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Vectors and masks by the names of parts; one tensor has the name ""."""
    vectors = items.vectors if isinstance(items.vectors, dict) else {"": items.vectors}
    masks = items.mask if isinstance(items.mask, dict) else {} if items.mask is None else {"": items.mask}
    return vectors, masks


def _means(items: Encoded, names: list[str]) -> Tensor:
    """Those of the parts with these names, piece by piece, as the items are kept."""
    places, rows = list[Tensor](), list[Tensor]()
    for some, piece in items.pieces():
        vectors, masks = _named(piece)
        means = [vectors[name] if vectors[name].dim() == 2 else mean_pool(vectors[name], masks.get(name)) for name in names]
        places.append(some)
        rows.append(normalize(torch.cat([normalize(mean.float(), dim=-1).nan_to_num(0.0) for mean in means], -1), dim=-1))
    return torch.cat(rows)[torch.cat(places).argsort()]
