"""Ranked lists and right answers in the files of TREC, which ir_measures, ranx, trec_eval and others read.

A run file has a line ``query Q0 candidate rank score tag`` for each of the first ``TOP`` candidates of a query, a file of right answers
(qrels) a line ``query 0 candidate relevance`` for each of them. R@K of this field is their Success@K (ranx: hit_rate@K), as long as K is at
most ``TOP``; anything that looks further down, such as a mean rank, cannot be had from these files.

An image goes by its name and the third caption of an image by ``name#2``, as in the lists of Flickr8k; spaces are written ``%20``. Readers
sort by score and break ties by name: where candidates score alike the less relevant one comes first, as everywhere here, and each score
that is not below the one before is written as the next lower number of 32 bits, so that every reader finds this very order.
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
from visavis.data.dataset import Dataset
from visavis.errors import RefusedOverwrite, ShapeError
from visavis.evaluation.blocks import scores_by_rows
from visavis.evaluation.positives import listed_positives
from visavis.evaluation.protocols import Protocol
from visavis.memory import Memory
from visavis.scoring import Score, pick
from visavis.targets import Targets
from visavis.types import Direction, Encoded

TOP = 100
"""Candidates of a query in a run file."""
LARGEST = 1e30
"""Scores beyond are written as this: a number that still has a next lower one."""


@dataclass(frozen=True, eq=False)
class RankedLists:
    """The first candidates of the queries of one direction, and what is relevant to them.

    order ``[Q, K]``: candidates, best first, and −1 where there are no more. scores ``[Q, K]``: float32, each lower than the one before.
    relevant ``[P, 3]``: a query, a candidate that is relevant to it, and how much, a whole number from 1. queries, candidates: their names.
    """

    order: np.ndarray
    scores: np.ndarray
    relevant: np.ndarray
    queries: tuple[str, ...]
    candidates: tuple[str, ...]

    @classmethod
    def of(cls, scores: Tensor, relevance: Tensor, queries: Sequence[str], candidates: Sequence[str], top: int = TOP) -> RankedLists:
        """Of a matrix of scores ``[Q, C]`` and one of relevance, whole numbers from 0. Raises ShapeError where they do not fit."""
        if not scores.shape == relevance.shape == (len(queries), len(candidates)):
            raise ShapeError(
                f"scores, relevance and names are of shapes {list(scores.shape)}, {list(relevance.shape)} and "
                f"{[len(queries), len(candidates)]}, expected one shape: queries x candidates."
            )
        found = relevance.nonzero()
        relevant = torch.cat([found, relevance[found[:, 0], found[:, 1], None].long()], 1)
        order, values = first_candidates(scores, relevance, top)
        return cls(order.numpy(), values.numpy(), relevant.numpy(), names(queries), names(candidates))

    def run_lines(self, tag: str) -> Iterator[str]:
        """The lines of a run file."""
        (tag,) = names([tag])
        for query, candidates, scores in zip(self.queries, self.order.tolist(), self.scores.tolist(), strict=True):
            for rank, (candidate, score) in enumerate(zip(candidates, scores, strict=True), 1):
                if candidate >= 0:
                    yield f"{query} Q0 {self.candidates[candidate]} {rank} {score:.9g} {tag}\n"

    def qrels_lines(self) -> Iterator[str]:
        """The lines of a file of right answers."""
        for query, candidate, relevance in self.relevant.tolist():
            yield f"{self.queries[query]} 0 {self.candidates[candidate]} {relevance}\n"


def first_candidates(scores: Tensor, relevance: Tensor, top: int = TOP) -> tuple[Tensor, Tensor]:
    """The best-scored candidates of each query and their strictly falling scores, ``[Q, top]`` each; of equal ones the less relevant first."""
    scores = scores.double()
    top = min(top, scores.shape[1])
    values, order = scores.topk(top, dim=1)
    values, order = _sorted(values, order, relevance.gather(1, order))
    tied = ((scores >= values[:, -1:]).sum(1) > top).nonzero()[:, 0]  # at the cut, where relevance says who is in
    if len(tied):
        everything = torch.arange(scores.shape[1]).expand(len(tied), -1)
        found = _sorted(scores[tied], everything, relevance[tied])
        values[tied], order[tied] = (part[:, :top] for part in found)
    values = values.clamp(-LARGEST, LARGEST).float()
    for column in range(1, top):
        below = torch.nextafter(values[:, column - 1], torch.tensor(-torch.inf))
        values[:, column] = torch.minimum(values[:, column], below)
    return order, values


def _sorted(scores: Tensor, candidates: Tensor, relevance: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and candidates ``[Q, C]``, the highest first; of equal ones the less relevant, then the earlier."""
    parts = [candidates, relevance, scores]
    for key in range(3):
        place = parts[key].argsort(dim=1, descending=key == 2, stable=True)
        parts = [part.gather(1, place) for part in parts]
    return parts[2], parts[0]


def ranked_lists(
    visual: Encoded, text: Encoded, score: Score, data: Dataset, protocol: Protocol, *, top: int = TOP, memory: Memory = None
) -> dict[Direction, RankedLists]:
    """Both directions of what ``evaluate_data`` ranks by one protocol: encoded images and captions, those of ``data`` in its order.

    memory: of blocks of scores. Raises as the evaluation does.
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


Part = tuple[Tensor, Tensor, Targets]
"""Positions of queries and of candidates in the data, and the targets of these."""
Side = tuple[Encoded, list[str]]


def _parts(data: Dataset, protocol: Protocol) -> dict[Direction, list[Part]]:
    """What is ranked against what: all at once, fold by fold, or as it is listed."""
    ids = torch.arange(len(data.images)), torch.from_numpy(data.image_of)
    protocol.check(*ids)
    if protocol.positives:
        of_images, of_texts = listed_positives(protocol, data)
        everything = tuple(torch.arange(len(side)) for side in ids)
        return {
            "i2t": [(of_images.queries, everything[1], of_images.targets)],
            "t2i": [(of_texts.queries, everything[0], of_texts.targets)],
        }
    folds = protocol.split(*ids)
    return {
        "i2t": [(rows, columns, Targets(query_ids=ids[0][rows], candidate_ids=ids[1][columns])) for rows, columns in folds],
        "t2i": [(columns, rows, Targets(query_ids=ids[1][columns], candidate_ids=ids[0][rows])) for rows, columns in folds],
    }


def _one_way(
    sides: tuple[Side, Side],
    score: Score,
    queries: Tensor,
    candidates: Tensor,
    targets: Targets,
    way: Direction,
    top: int,
    memory: Memory,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]:
    """Order, scores and relevant pairs by position in the data, and the queries."""
    picked = (queries, candidates) if way == "i2t" else (candidates, queries)
    visual, text = (pick(side[0], rows) for side, rows in zip(sides, picked, strict=True))
    orders, values, relevant = [], [], []
    for rows, block in scores_by_rows(visual, text, score, way, memory=memory):
        positive = targets[rows].positive
        order, scores = first_candidates(block, positive.byte(), top)
        query, candidate = positive.nonzero(as_tuple=True)
        orders.append(candidates[order])
        values.append(scores)
        relevant.append(torch.stack([query + rows.start, candidates[candidate], torch.ones_like(query)], 1))
    return torch.cat(orders).numpy(), torch.cat(values).numpy(), torch.cat(relevant).numpy(), queries


def _joined(parts: list[tuple[np.ndarray, np.ndarray, np.ndarray, Tensor]], asked: Side, answering: Side) -> RankedLists:
    """Folds one after the other."""
    before = np.cumsum([0, *(len(order) for order, *_ in parts)])
    width = max(order.shape[1] for order, *_ in parts)

    def stacked(place: int, filled: float) -> np.ndarray:
        rows = [part[place] for part in parts]
        return np.concatenate([np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=filled) for row in rows])

    return RankedLists(
        stacked(0, -1),
        stacked(1, -np.inf),
        np.concatenate([relevant + np.array([start, 0, 0]) for (*_, relevant, _), start in zip(parts, before[:-1], strict=True)]),
        names([asked[1][query] for *_, queries in parts for query in queries.tolist()]),
        names(answering[1]),
    )


def write_trec(folder: str | Path, tag: str, lists: dict[Direction, RankedLists]) -> list[Path]:
    """``TAG.i2t.run`` and ``TAG.t2i.run`` in a folder, beside ``i2t.qrels`` and ``t2i.qrels``, which all runs on the same queries share.

    Raises RefusedOverwrite where a run file of that tag stands already, or right answers to other queries.
    """
    folder = Path(folder)
    stem = re.sub(r"[^\w.+=-]+", "_", tag)
    runs = {way: storage.new_file(folder / f"{stem}.{way}.run") for way in lists}
    qrels = {folder / f"{way}.qrels": "".join(of_way.qrels_lines()) for way, of_way in lists.items()}
    for path, content in qrels.items():
        if path.exists() and storage.read_text(path) != content:
            raise RefusedOverwrite(f"{path} holds right answers to other queries; nothing was changed: name another folder.")
    for path, content in qrels.items():
        storage.write_text(path, content)
    for way, of_way in lists.items():
        storage.write_text(runs[way], "".join(of_way.run_lines(tag)))
    return [*runs.values(), *qrels]


def names(of: Sequence[str]) -> tuple[str, ...]:
    """Names without white space.

    >>> names(["two dogs.jpg", "100%"])
    ('two%20dogs.jpg', '100%25')
    """
    return tuple(re.sub(r"[\s%]", lambda found: quote(found[0]), name) for name in of)
