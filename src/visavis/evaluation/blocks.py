"""Places of all images and texts, both directions, in one walk over tiles of the score matrix, which is never held.

A rank is a count: of the candidates that score at least what the query's own positive scores. Two things make it right:

- *Own scores come from the same product.* A product in another shape, or an elementwise sum, rounds differently, and
  items then outrank themselves. Hence the tiles that hold positive pairs are computed first, by the same calls as in
  the walk (a small part of all tiles, as items are ordered by id), and in the walk own positives are taken out of the
  count by the very values that were counted.
- *Equal items score equally.* The same vector in two rows of one product can give two results, as the last rows and
  columns of a matrix run through other code. Items that are equal in every bit are therefore scored once, and what
  they score counts for each of them: a duplicated image is a tie, and a collapsed model is all ties.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from visavis.errors import DataError, ShapeError
from visavis.evaluation.arguments import checked
from visavis.memory import Memory, scores_of
from visavis.metrics.arguments import Ties, refuse_rows
from visavis.metrics.ranking import by_query, place, places, steps
from visavis.scoring import Score, TwoStageScore, pick, score_by_rows, tile_shape
from visavis.targets import Targets
from visavis.types import Direction, Encoded

HELD_BY_COUNTING = 16.0
"""Bytes of a pair while a tile is counted: its scores or those of the tile before, and flags, in float64 at most."""
HELD_BY_PLACES = 48.0
"""Bytes of a pair while ``metrics.places`` works: scores, masked scores and flags in float64, and who belongs to whom."""


@dataclass(frozen=True)
class _Side:
    """The distinct items of one side, in order of id, cut into tiles.

    items ``[U]``: where each distinct item lies in the encoded ones. index ``[N]``: the distinct item of each item.
    copies ``[U]``: how many items are equal to it. cuts: bounds of the tiles in 0..U.
    """

    encoded: Encoded
    items: Tensor
    index: Tensor
    copies: Tensor
    cuts: list[int]

    def part(self, tile: int) -> Encoded:
        return pick(self.encoded, self.items[self.cuts[tile] : self.cuts[tile + 1]])

    def tile_of(self, item: Tensor) -> Tensor:
        return torch.bucketize(self.index[item], torch.tensor(self.cuts[1:]), right=True)


@dataclass(frozen=True, eq=False)
class Ranked:
    """The queries of one side. places ``[Q, M]``: as ``metrics.places`` defines them. first ``[Q]``: the candidate that scores highest.
    positive ``[Q, M]``: the scores of its positives, best first, filled with -inf. hardest ``[Q]``: that of its hardest negative, -inf without one.
    """

    places: Tensor
    first: Tensor
    positive: Tensor
    hardest: Tensor


@checked
@torch.no_grad()
def ranked_by_tiles(
    visual: Encoded,
    text: Encoded,
    score: Score,
    image_ids: Tensor,
    text_ids: Tensor,
    *,
    ties: Ties = "pessimistic",
    memory: Memory = None,
    tile: tuple[int, int] | None = None,
) -> tuple[Ranked, Ranked]:
    """Where each image's texts stand among all texts, and each text's images among all images.

    score: ``score(visual[rows], text[columns]) -> [rows, columns]``. image_ids ``[V]``, text_ids ``[T]``: equal = belong
    together. memory: what a tile may take. tile: the largest number of images and texts scored at once, where it is known; neither ever
    sets the result. A score in two stages orders the candidates of each direction otherwise: it is walked by rows, once for each.
    Raises ShapeError for an image or text that belongs to nothing, DataError for scores that are not numbers.
    """
    _check(visual, image_ids)
    _check(text, text_ids)
    image, caption = _positive_pairs(image_ids, text_ids)
    if isinstance(score, TwoStageScore):
        targets = Targets(query_ids=image_ids, candidate_ids=text_ids)
        of_images = ranked_by_rows(visual, text, score, targets, "i2t", ties=ties, memory=memory)
        return of_images, ranked_by_rows(visual, text, score, targets.T, "t2i", ties=ties, memory=memory)
    tile = tile or tile_shape(score, visual, text, held=HELD_BY_COUNTING, memory=memory)
    images, texts = _side(visual, image_ids, tile[0]), _side(text, text_ids, tile[1])
    tiles = images.tile_of(image) * (len(texts.cuts) - 1) + texts.tile_of(caption)
    order = torch.argsort(tiles, stable=True)
    image, caption, tiles = image[order], caption[order], tiles[order]

    walk = _walk(images, texts, score, tiles, image, caption, only_positive=True)
    own = torch.cat([block[row, column].cpu() for block, _, _, (row, column) in walk])
    by_image = _Count(by_query(own, image, len(image_ids)), images, texts, ties)
    by_text = _Count(by_query(own, caption, len(text_ids)), texts, images, ties)
    for block, (row_tile, column_tile), pairs, (row, column) in _walk(images, texts, score, tiles, image, caption):
        counted = block[row, column].cpu()
        by_image.add(block, row_tile, column_tile, image[pairs], column, counted)
        by_text.add(block.T, column_tile, row_tile, caption[pairs], row, counted)
    return by_image.ranked(torch.bincount(image)), by_text.ranked(torch.bincount(caption))


@checked
@torch.no_grad()
def ranked_by_rows(
    visual: Encoded,
    text: Encoded,
    score: Score,
    targets: Targets,
    way: Direction,
    *,
    ties: Ties = "pessimistic",
    memory: Memory = None,
) -> Ranked:
    """Where the right answers of one direction stand, whatever they are, by blocks of queries.

    way: "i2t": the visual items are the queries, "t2i": the texts are. targets: of these queries with all candidates. memory: sets
    the blocks and never the result. Raises as ``metrics.places`` does.
    """
    queries, candidates = (visual, text) if way == "i2t" else (text, visual)
    if targets.shape != (len(queries), len(candidates)):
        raise ShapeError(f"targets are of shape {list(targets.shape)}, expected {[len(queries), len(candidates)]}: queries x candidates.")
    _check(queries, torch.arange(len(queries)))
    _check(candidates, torch.arange(len(candidates)))
    found, own, first, hardest = [], [], [], []
    for rows, block in scores_by_rows(visual, text, score, way, memory=memory):
        told = targets[rows]
        found.append(places(block, told, ties=ties))
        own.append(by_query(block[told.positive], told.positive.nonzero()[:, 0], len(block)))
        first.append(block.argmax(1))
        hardest.append(block.masked_fill(~told.negative, -torch.inf).amax(1))
    return Ranked(_stacked(found, torch.inf), torch.cat(first), _stacked(own, -torch.inf), torch.cat(hardest))


def _stacked(parts: list[Tensor], filled: float) -> Tensor:
    """Rows of different lengths below each other."""
    widest = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, widest - part.shape[1]), value=filled) for part in parts])


@torch.no_grad()
def scores_by_rows(
    visual: Encoded, text: Encoded, score: Score, way: Direction, *, memory: Memory = None
) -> Iterator[tuple[slice, Tensor]]:
    """Some queries of one direction after the other, with their scores of all candidates ``[R, C]``, those of equal candidates equal.

    way, memory: as for ``ranked_by_rows``. Raises DataError for scores that are not numbers.
    """
    (what, queries), (_, candidates) = (("image", visual), ("text", text))[:: 1 if way == "i2t" else -1]
    side = _side(candidates, torch.arange(len(candidates)), len(candidates))
    distinct = pick(candidates, side.items)
    both = (visual, distinct) if way == "i2t" else (distinct, text)
    for rows, block in score_by_rows(score, *both, way, held=HELD_BY_PLACES, memory=memory):
        numbers = range(len(queries))[rows]
        refuse_rows(block.isnan(), f"the scores of {what} {{}} hold NaN: the model or its features are broken.", numbers)
        yield rows, block.cpu()[:, side.index]


class _Count:
    """Counts, tile by tile, the other candidates that come before each positive of each query of one side, and keeps which comes first, and
    what the hardest negative scores.
    """

    def __init__(self, own: Tensor, queries: _Side, candidates: _Side, ties: Ties):
        self.own, self.queries, self.candidates, self.steps = own, queries, candidates, steps(ties)
        self.before = own.new_zeros(own.shape, dtype=torch.float64)
        self.highest, self.first = own.new_full((len(queries.items),), -torch.inf), torch.zeros(len(queries.items), dtype=torch.long)
        self.hardest = own.new_full((len(own),), -torch.inf)
        self.order = torch.argsort(queries.index, stable=True)  # queries by their distinct item: a tile's lie together
        self.place = torch.argsort(self.order)
        self.cuts = torch.searchsorted(queries.index[self.order], torch.tensor(queries.cuts)).tolist()

    def add(
        self, block: Tensor, query_tile: int, candidate_tile: int, pair_query: Tensor, pair_candidate: Tensor, pair_score: Tensor
    ) -> None:
        """Count a block of scores (queries x candidates) in, and its positive pairs out: their queries, and the columns of their candidates."""
        distinct = slice(*self.queries.cuts[query_tile : query_tile + 2])
        highest, first = (part.cpu() for part in block.max(1))
        higher = highest > self.highest[distinct]
        self.highest[distinct] = torch.where(higher, highest, self.highest[distinct])
        self.first[distinct] = torch.where(higher, first + self.candidates.cuts[candidate_tile], self.first[distinct])
        queries = self.order[self.cuts[query_tile] : self.cuts[query_tile + 1]]
        copies = self.candidates.copies[self.candidates.cuts[candidate_tile] : self.candidates.cuts[candidate_tile + 1]].to(block)
        pairs, number = torch.stack([self.place[pair_query] - self.cuts[query_tile], pair_candidate]).unique(dim=1, return_counts=True)
        pairs = pairs[:, number == copies[pairs[1]].cpu()]  # of equal candidates that are not all positives, one is a negative
        for start, query in zip(
            range(0, len(queries), len(block)), queries.split(len(block)), strict=True
        ):  # equal queries share a row of the block
            row = self.queries.index[query] - self.queries.cuts[query_tile]
            scores = block if len(queries) == len(block) else block[row]
            within = pairs[:, (pairs[0] >= start) & (pairs[0] < start + len(query))].to(block.device)
            others = scores.index_put((within[0] - start, within[1]), scores.new_tensor(-torch.inf)).amax(1)
            self.hardest[query] = torch.maximum(self.hardest[query], others.cpu().to(self.hardest))
            slots = self.own[query].T.contiguous().to(block.device)
            flags = torch.empty_like(scores)  # 0 and 1 in the dtype of the scores: several times faster than bool
            for step in self.steps:
                before = torch.stack([step(scores, own[:, None], out=flags) @ copies for own in slots], 1)
                self.before[query] += before.cpu().double() / len(self.steps)
        for step in self.steps:
            positives = step(pair_score[:, None], self.own[pair_query]).double() / len(self.steps)
            self.before.index_add_(0, pair_query, positives, alpha=-1)

    def ranked(self, number: Tensor) -> Ranked:
        return Ranked(place(self.before, number), self.candidates.items[self.first[self.queries.index]], self.own, self.hardest)


def _walk(
    images: _Side, texts: _Side, score: Score, tiles: Tensor, image: Tensor, caption: Tensor, only_positive: bool = False
) -> Iterator[tuple[Tensor, tuple[int, int], slice, tuple[Tensor, Tensor]]]:
    """Each block of scores with its place in the grid, the positive pairs in it, and where in the block they lie."""
    columns = len(texts.cuts) - 1
    bounds = torch.searchsorted(tiles, torch.arange((len(images.cuts) - 1) * columns + 1)).tolist()
    for row_tile in range(len(images.cuts) - 1):
        visual = images.part(row_tile)
        for column_tile in range(columns):
            start, stop = bounds[row_tile * columns + column_tile : row_tile * columns + column_tile + 2]
            if only_positive and start == stop:
                continue
            block = scores_of(score, visual, texts.part(column_tile))
            block = block if block.dtype == torch.float64 else block.float()
            if not only_positive and block.sum().isnan():  # mostly false: then no single value needs to be looked at
                _refuse_nan(block, images.items[images.cuts[row_tile] :], texts.items[texts.cuts[column_tile] :])
            row = images.index[image[start:stop]] - images.cuts[row_tile]
            column = texts.index[caption[start:stop]] - texts.cuts[column_tile]
            yield block, (row_tile, column_tile), slice(start, stop), (row, column)


def _refuse_nan(block: Tensor, images: Tensor, texts: Tensor) -> None:
    for row, column in block.isnan().nonzero()[:1].tolist():
        raise DataError(
            f"the score of image {int(images[row])} and text {int(texts[column])} is NaN: the model or its features are broken."
        )


def _check(encoded: Encoded, ids: Tensor) -> None:
    if len(encoded) != len(ids):
        raise ShapeError(f"there are {len(encoded)} encoded items and {len(ids)} ids: give one id for each item.")
    if not len(ids):
        raise ShapeError("there is nothing to rank: no images or no texts were given.")


def _side(encoded: Encoded, ids: Tensor, tile: int) -> _Side:
    order = torch.argsort(ids, stable=True)
    keys = _keys(encoded)
    number: dict[bytes, int] = {}
    items: list[int] = []
    index = torch.empty(len(ids), dtype=torch.long)
    for item in order.tolist():
        if keys[item] not in number:
            number[keys[item]] = len(items)
            items.append(item)
        index[item] = number[keys[item]]
    num_tiles = -(-len(items) // tile)
    cuts = [len(items) * i // num_tiles for i in range(num_tiles + 1)]
    return _Side(encoded, torch.tensor(items), index, torch.bincount(index), cuts)


def _keys(encoded: Encoded) -> list[bytes]:
    """A key for each item; equal for items that are equal in every bit, whatever they are padded with zeros to."""
    digests = [hashlib.blake2b(digest_size=16) for _ in range(len(encoded))]

    def read(part: Tensor, items: Tensor) -> Tensor:
        for item, row in zip(items.tolist(), part.cpu().contiguous().reshape(len(part), -1).view(torch.uint8).numpy(), strict=True):
            content = row.tobytes().rstrip(b"\0")
            digests[item].update(len(content).to_bytes(8))
            digests[item].update(content)
        return part

    for items, piece in encoded.pieces():
        piece.map(partial(read, items=items))
    return [digest.digest() for digest in digests]


def _positive_pairs(image_ids: Tensor, text_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The positions (image, text) of all pairs with equal ids."""
    sorted_ids, order = torch.sort(text_ids, stable=True)
    start, stop = torch.searchsorted(sorted_ids, image_ids), torch.searchsorted(sorted_ids, image_ids, right=True)
    for what, lonely in (("image", start == stop), ("text", ~torch.isin(text_ids, image_ids))):
        if lonely.any():
            raise ShapeError(
                f"{what} {int(lonely.nonzero()[0])} belongs to no {'text' if what == 'image' else 'image'}: leave it out, it cannot be ranked."
            )
    number = stop - start
    image = torch.arange(len(image_ids)).repeat_interleave(number)
    offset = torch.arange(len(image)) - (number.cumsum(0) - number).repeat_interleave(number)
    return image, order[start[image] + offset]
