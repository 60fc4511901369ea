"""Ranked lists and relevance judgments in TREC files, which ir_measures, ranx, trec_eval and others
read.

A run file has a line ``query Q0 candidate rank score tag`` for each of the first ``MAX_CANDIDATES``
candidates of a query. A qrels file has a line ``query 0 candidate relevance`` for each relevant
candidate. R@K of this field is Success@K there (ranx: hit_rate@K) if K is at most
``MAX_CANDIDATES``. Metrics that need deeper ranks, such as the mean rank, cannot be computed from
these files.

An image is named by its file, and the third caption of an image is ``name#2``, as in the lists of
Flickr8k. Spaces are written ``%20``. Readers sort by score and break ties by name. Here the less
relevant of two equal candidates comes first, as everywhere in visavis. A score that is not below
the previous one is written as the next lower float32, so every reader restores this order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.blocking import Score
from visavis.core.encoded import Direction, Encoded
from visavis.core.errors import RefusedOverwrite
from visavis.core.memory_budget import MemoryLimit
from visavis.evaluation.metrics.catalog import DIRECTION_ROLES
from visavis.evaluation.tiled_ranking import iter_score_rows, stack_rows
from visavis.losses.scoring import select_items
from visavis.losses.targets import Targets

MAX_CANDIDATES = 100
"""Maximum number of candidates per query in a run file."""
MAX_SCORE = 1e30
"""Larger scores are clipped to this value, which still has a next lower float32."""


@dataclass(frozen=True, eq=False)
class TrecRankings:
    """The first candidates of the queries of one direction, and their relevant candidates.

    Attributes:
        order: Candidates, best first, shape ``[Q, K]``. Padded with -1.
        scores: Strictly falling float32 scores, shape ``[Q, K]``.
        relevant: Query, relevant candidate and relevance (an integer >= 1) of each pair, shape
            ``[P, 3]``.
        queries: Names of the queries, without white space.
        candidates: Names of the candidates, without white space.
    """

    order: np.ndarray
    scores: np.ndarray
    relevant: np.ndarray
    queries: tuple[str, ...]
    candidates: tuple[str, ...]


def top_candidates(
    scores: Tensor, relevance: Tensor, top: int = MAX_CANDIDATES
) -> tuple[Tensor, Tensor]:
    """Select the best candidates of each query ``[Q, top]``, with strictly falling scores. Of
    candidates with equal scores, the less relevant comes first.
    """
    scores = scores.double()  # exact for float32
    top = min(top, scores.shape[1])
    values, order = scores.topk(top, dim=1)  # [Q, top]
    values, order = _sort_candidates(values, order, relevance.gather(1, order))
    # Relevance decides ties at the cutoff.
    tied = ((scores >= values[:, -1:]).sum(1) > top).nonzero()[:, 0]
    if len(tied):
        # Only for these queries the whole row is sorted.
        all_candidates = torch.arange(scores.shape[1]).expand(len(tied), -1)
        all_values, full_order = _sort_candidates(scores[tied], all_candidates, relevance[tied])
        values[tied] = all_values[:, :top]
        order[tied] = full_order[:, :top]
    values = values.clamp(-MAX_SCORE, MAX_SCORE).float()
    for column in range(1, top):
        # Strictly falling, or readers would break ties by name.
        below = torch.nextafter(values[:, column - 1], torch.tensor(-torch.inf))
        values[:, column] = torch.minimum(values[:, column], below)
    return order, values


def _sort_candidates(
    scores: Tensor, candidates: Tensor, relevance: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores and candidates ``[Q, C]`` in descending order. Of equal scores the less relevant, then
    the earlier candidate comes first.
    """
    order = torch.from_numpy(np.lexsort((candidates.numpy(), relevance.numpy(), -scores.numpy())))
    return scores.gather(1, order), candidates.gather(1, order)


class RankedPart(NamedTuple):
    """Items that are ranked together: all of them, or a fold.

    Attributes:
        queries: Positions of the queries, shape ``[Q]``.
        candidates: Positions of the candidates, shape ``[C]``.
        targets: Which candidates are relevant, ``[Q, C]``.
    """

    queries: Tensor
    candidates: Tensor
    targets: Targets


def trec_rankings(
    visual: Encoded,
    text: Encoded,
    score: Score,
    names: Mapping[str, Sequence[str]],
    parts: Mapping[Direction, Sequence[RankedPart]],
    *,
    top: int = MAX_CANDIDATES,
    memory: MemoryLimit = None,
) -> dict[Direction, TrecRankings]:
    """Rank the candidates of each part, with the names of the images ("image") and texts ("text")."""
    escaped = {kind: escape_names(of_kind) for kind, of_kind in names.items()}
    rankings: dict[Direction, TrecRankings] = {}
    for direction, ranked_parts in parts.items():
        roles = DIRECTION_ROLES[direction]
        orders = list[Tensor]()
        values = list[Tensor]()
        relevant = list[Tensor]()
        ranked = list[int]()
        for queries, candidates, targets in ranked_parts:
            rows, columns = (queries, candidates) if direction == "i2t" else (candidates, queries)
            blocks = iter_score_rows(
                select_items(visual, rows),
                select_items(text, columns),
                score,
                direction,
                memory=memory,
            )
            for block_rows, block in blocks:
                positive = targets[block_rows].positive
                order, scores = top_candidates(block, positive.byte(), top)
                query, candidate = positive.nonzero(as_tuple=True)  # within the block and the part
                orders.append(candidates[order])
                values.append(scores)
                relevant.append(
                    torch.stack(
                        [query + len(ranked), candidates[candidate], torch.ones_like(query)], 1
                    )
                )
                ranked += queries[block_rows].tolist()
        rankings[direction] = TrecRankings(
            stack_rows(orders, -1).numpy(),
            stack_rows(values, -torch.inf).numpy(),
            torch.cat(relevant).numpy(),
            tuple(escaped[roles["query"]][query] for query in ranked),
            escaped[roles["candidate"]],
        )
    return rankings


def write_trec(folder: str | Path, tag: str, lists: dict[Direction, TrecRankings]) -> list[Path]:
    """Write ``TAG.i2t.run`` and ``TAG.t2i.run``, and the ``i2t.qrels`` and ``t2i.qrels`` that all
    runs on the same queries share.
    """
    folder = Path(folder)
    stem = re.sub(r"[^\w.+=-]+", "_", tag)
    (run_tag,) = escape_names([tag])
    runs = dict[Path, str]()
    qrels = dict[Path, str]()
    for direction, rankings in lists.items():
        rows = zip(rankings.queries, rankings.order.tolist(), rankings.scores.tolist(), strict=True)
        lines = [
            f"{query} Q0 {rankings.candidates[candidate]} {rank} {score:.9g} {run_tag}\n"
            for query, candidates, scores in rows
            for rank, (candidate, score) in enumerate(zip(candidates, scores, strict=True), 1)
            if candidate >= 0
        ]
        runs[folder / f"{stem}.{direction}.run"] = "".join(lines)
        qrels[folder / f"{direction}.qrels"] = "".join(
            f"{rankings.queries[query]} 0 {rankings.candidates[candidate]} {relevance}\n"
            for query, candidate, relevance in rankings.relevant.tolist()
        )
    # Equal files are of this call, which was stopped before: it writes the others.
    new = {
        path: content
        for path, content in (runs | qrels).items()
        if not os.path.exists(path) or storage.read_text(path) != content
    }
    for path in new:
        if path in qrels and os.path.exists(path):
            raise RefusedOverwrite(
                f"{path} holds judgments of other queries. Nothing was changed. Choose another "
                "folder."
            )
        storage.require_new_file(path)
    for path, content in new.items():
        storage.save_new_file(path, partial(storage.write_text, content=content))
    return [*runs, *qrels]


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
