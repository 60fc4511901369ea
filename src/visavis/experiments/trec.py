"""Ranked lists and relevance judgments in TREC files, which ir_measures, ranx, trec_eval and others read.

A run file has a line ``query Q0 candidate rank score tag`` for each of the first ``MAX_CANDIDATES`` candidates of a query. A qrels file has a
line ``query 0 candidate relevance`` for each relevant candidate. R@K of this field is Success@K there (ranx: hit_rate@K) if K is at most
``MAX_CANDIDATES``. Metrics that need deeper ranks, such as the mean rank, cannot be computed from these files.

An image is named by its file, and the third caption of an image is ``name#2``, as in the lists of Flickr8k. Spaces are written ``%20``.
Readers sort by score and break ties by name. Here the less relevant of two equal candidates comes first, as everywhere in visavis. A score
that is not below the previous one is written as the next lower float32, so every reader restores this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from visavis import storage
from visavis.blocking import Score
from visavis.data.dataset import Dataset
from visavis.errors import RefusedOverwrite, ShapeError
from visavis.evaluation.protocols import Protocol, read_listed_positives
from visavis.evaluation.tiled_ranking import iter_score_rows
from visavis.memory_budget import MemoryLimit
from visavis.scoring import select_items
from visavis.targets import Targets
from visavis.types import Direction, Encoded

MAX_CANDIDATES = 100
"""Maximum number of candidates per query in a run file."""
MAX_SCORE = 1e30
"""Larger scores are clipped to this value, which still has a next lower float32."""


@dataclass(frozen=True, eq=False)
class TrecRankings:
    """The first candidates of the queries of one direction, and their relevant candidates.

    Attributes:
        order: Candidates, best first, shape ``[Q, K]``. −1 where there are no more.
        scores: Strictly falling float32 scores, shape ``[Q, K]``.
        relevant: Query, relevant candidate and relevance (an integer >= 1) of each pair, shape ``[P, 3]``.
        queries: Names of the queries.
        candidates: Names of the candidates.
    """

    order: np.ndarray
    scores: np.ndarray
    relevant: np.ndarray
    queries: tuple[str, ...]
    candidates: tuple[str, ...]

    @classmethod
    def from_scores(
        cls, scores: Tensor, relevance: Tensor, queries: Sequence[str], candidates: Sequence[str], top: int = MAX_CANDIDATES
    ) -> TrecRankings:
        """Rank candidates by a score matrix.

        Args:
            scores: Scores, shape ``[Q, C]``.
            relevance: Relevance as integers >= 0, shape ``[Q, C]``.
            queries: Names of the queries.
            candidates: Names of the candidates.
            top: Number of candidates per query.

        Returns:
            The rankings.

        Raises:
            ShapeError: If shapes and names do not fit together.
        """
        if not scores.shape == relevance.shape == (len(queries), len(candidates)):
            raise ShapeError(
                f"scores, relevance, names: expected one shape, queries x candidates, got {list(scores.shape)}, "
                f"{list(relevance.shape)} and {[len(queries), len(candidates)]}."
            )
        found = relevance.nonzero()
        relevant = torch.cat([found, relevance[found[:, 0], found[:, 1], None].long()], 1)
        order, values = top_candidates(scores, relevance, top)
        return cls(order.numpy(), values.numpy(), relevant.numpy(), escape_names(queries), escape_names(candidates))

    def run_lines(self, tag: str) -> Iterator[str]:
        """Yield the lines of a run file.

        Args:
            tag: Name of the run.

        Yields:
            One line per query and candidate.
        """
        (tag,) = escape_names([tag])
        for query, candidates, scores in zip(self.queries, self.order.tolist(), self.scores.tolist(), strict=True):
            for rank, (candidate, score) in enumerate(zip(candidates, scores, strict=True), 1):
                if candidate >= 0:
                    yield f"{query} Q0 {self.candidates[candidate]} {rank} {score:.9g} {tag}\n"

    def qrels_lines(self) -> Iterator[str]:
        """Yield the lines of a qrels file.

        Yields:
            One line per query and relevant candidate.
        """
        for query, candidate, relevance in self.relevant.tolist():
            yield f"{self.queries[query]} 0 {self.candidates[candidate]} {relevance}\n"


def top_candidates(scores: Tensor, relevance: Tensor, top: int = MAX_CANDIDATES) -> tuple[Tensor, Tensor]:
    """Select the best candidates of each query. Of candidates with equal scores, the less relevant comes first.

    Args:
        scores: Scores, shape ``[Q, C]``.
        relevance: Relevance, shape ``[Q, C]``.
        top: Number of candidates per query.

    Returns:
        Candidates and their strictly falling scores, shape ``[Q, top]`` each.
    """
    scores = scores.double()
    top = min(top, scores.shape[1])
    values, order = scores.topk(top, dim=1)
    values, order = _sorted(values, order, relevance.gather(1, order))
    tied = ((scores >= values[:, -1:]).sum(1) > top).nonzero()[:, 0]  # ties at the cutoff, which relevance decides
    if len(tied):
        everything = torch.arange(scores.shape[1]).expand(len(tied), -1)
        found = _sorted(scores[tied], everything, relevance[tied])
        values[tied], order[tied] = (part[:, :top] for part in found)
    values = values.clamp(-MAX_SCORE, MAX_SCORE).float()
    for column in range(1, top):
        below = torch.nextafter(values[:, column - 1], torch.tensor(-torch.inf))
        values[:, column] = torch.minimum(values[:, column], below)
    return order, values


def _sorted(scores: Tensor, candidates: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and candidates ``[Q, C]`` in descending order. Of equal scores the less relevant, then the earlier candidate comes first."""
    parts = [candidates, relevance, scores]
    for key in range(3):
        place = parts[key].argsort(dim=1, descending=key == 2, stable=True)
        parts = [part.gather(1, place) for part in parts]
    return parts[2], parts[0]


def trec_rankings(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    protocol: Protocol,
    *,
    top: int = MAX_CANDIDATES,
    memory: MemoryLimit = None,
) -> dict[Direction, TrecRankings]:
    """Rank both directions as ``evaluate_dataset`` does under one protocol.

    Args:
        visual: Encoded images of ``data``, in its order.
        text: Encoded captions of ``data``, in its order.
        score: Score function.
        data: The data set.
        protocol: The protocol.
        top: Number of candidates per query.
        memory: Memory for blocks of scores.

    Returns:
        Rankings by direction.
    """
    images = [image.name for image in data.images]
    captions = [""] * len(data.captions)
    for image, own in zip(images, data.captions_of, strict=True):
        for place, caption in enumerate(own.tolist()):
            captions[caption] = f"{image}#{place}"
    sides = (visual, images), (text, captions)
    return {
        way: _joined([_one_way(sides, score, *part, way, top, memory) for part in parts], *(sides if way == "i2t" else sides[::-1]))
        for way, parts in _parts(data, protocol).items()
    }


RankedPart = tuple[Tensor, Tensor, Targets]
"""Positions of queries and of candidates in the data, and their targets."""
NamedItems = tuple[Encoded, list[str]]


def _parts(data: Dataset, protocol: Protocol) -> dict[Direction, list[RankedPart]]:
    """Queries, candidates and targets that are ranked together: all, each fold, or the listed positives."""
    ids = torch.arange(len(data.images)), torch.from_numpy(data.image_of)
    protocol.validate(*ids)
    if protocol.positives_file:
        of_images, of_texts = read_listed_positives(protocol, data)
        everything = tuple(torch.arange(len(side)) for side in ids)
        return {
            "i2t": [(of_images.queries, everything[1], of_images.targets)],
            "t2i": [(of_texts.queries, everything[0], of_texts.targets)],
        }
    folds = protocol.split_folds(*ids)
    return {
        "i2t": [(rows, columns, Targets(query_ids=ids[0][rows], candidate_ids=ids[1][columns])) for rows, columns in folds],
        "t2i": [(columns, rows, Targets(query_ids=ids[1][columns], candidate_ids=ids[0][rows])) for rows, columns in folds],
    }


def _one_way(
    sides: tuple[NamedItems, NamedItems],
    score: Score,
    queries: Tensor,
    candidates: Tensor,
    targets: Targets,
    way: Direction,
    top: int,
    memory: MemoryLimit,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Order, scores and relevant pairs by position in the data, and the queries."""
    picked = (queries, candidates) if way == "i2t" else (candidates, queries)
    visual, text = (select_items(side[0], rows) for side, rows in zip(sides, picked, strict=True))
    orders, values, relevant = [], [], []
    for rows, block in iter_score_rows(visual, text, score, way, memory=memory):
        positive = targets[rows].positive
        order, scores = top_candidates(block, positive.byte(), top)
        query, candidate = positive.nonzero(as_tuple=True)
        orders.append(candidates[order])
        values.append(scores)
        relevant.append(torch.stack([query + rows.start, candidates[candidate], torch.ones_like(query)], 1))
    return torch.cat(orders).numpy(), torch.cat(values).numpy(), torch.cat(relevant).numpy(), queries


def _joined(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]], asked: NamedItems, answering: NamedItems) -> TrecRankings:
    """The folds of one direction as one ranking."""
    before = np.cumsum([0, *(len(order) for order, *_ in parts)])
    width = max(order.shape[1] for order, *_ in parts)

    def stacked(place: int, filled: float) -> np.ndarray:
        rows = [part[place] for part in parts]
        return np.concatenate([np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=filled) for row in rows])

    return TrecRankings(
        stacked(0, -1),
        stacked(1, -np.inf),
        np.concatenate([relevant + np.array([start, 0, 0]) for (*_, relevant, _), start in zip(parts, before[:-1], strict=True)]),
        escape_names([asked[1][query] for *_, queries in parts for query in queries.tolist()]),
        escape_names(answering[1]),
    )


def write_trec(folder: str | Path, tag: str, lists: dict[Direction, TrecRankings]) -> list[Path]:
    """Write ``TAG.i2t.run`` and ``TAG.t2i.run``, and the ``i2t.qrels`` and ``t2i.qrels`` that all runs on the same queries share.

    Args:
        folder: Folder of the files.
        tag: Name of the run.
        lists: Rankings by direction.

    Returns:
        Paths of the files.

    Raises:
        RefusedOverwrite: If a run file of this tag, or qrels of other queries, exist.
    """
    folder = Path(folder)
    stem = re.sub(r"[^\w.+=-]+", "_", tag)
    runs = {way: storage.require_new_file(folder / f"{stem}.{way}.run") for way in lists}
    qrels = {folder / f"{way}.qrels": "".join(of_way.qrels_lines()) for way, of_way in lists.items()}
    for path, content in qrels.items():
        if path.exists() and storage.read_text(path) != content:
            raise RefusedOverwrite(f"{path} holds judgments of other queries. Nothing was changed. Choose another folder.")
    for path, content in qrels.items():
        storage.write_text(path, content)
    for way, of_way in lists.items():
        storage.write_text(runs[way], "".join(of_way.run_lines(tag)))
    return [*runs.values(), *qrels]


def escape_names(texts: Sequence[str]) -> tuple[str, ...]:
    """Replace white space in names.

    Args:
        texts: The names.

    Returns:
        Names without white space.

    Example:
        >>> escape_names(["two dogs.jpg", "100%"])
        ('two%20dogs.jpg', '100%25')
    """
    return tuple(re.sub(r"[\s%]", lambda match: quote(match[0]), name) for name in texts)
