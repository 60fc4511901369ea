"""The ranks of the right candidates of a query among all others: every ranking metric is computed from them.

``places`` ``[Q, M]`` holds the position of each of a query's positives, best first, counted from 1; M is the largest
number of positives of a query, and shorter rows are filled with inf. Positives of one query do not count against each
other: the j-th best has the place j + the number of candidates before it that are *not* positives.

Ties. A candidate that scores exactly as a positive does comes before it ("pessimistic", the default: a model that
gives everything the same score scores nothing), behind it ("optimistic"), or half of each ("mean").

>>> scores = torch.tensor([[0.9, 0.8, 0.8, 0.1]])
>>> targets = Targets(query_ids=[0], candidate_ids=[1, 0, 2, 0])        # candidates 1 and 3 are right
>>> places(scores, targets).tolist(), places(scores, targets, ties="mean").tolist()
([[3.0, 4.0]], [[2.5, 4.0]])
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from visavis.errors import ShapeError
from visavis.metrics.arguments import Normalize, Ties, checked
from visavis.targets import Targets


@checked
def places(scores: Tensor, targets: Targets, *, ties: Ties = "pessimistic") -> Tensor:
    """The places ``[Q, M]`` (float64) of all positives in ``scores [Q, C]``, which may be any rows of a larger matrix.

    Ignored pairs count neither as positives nor as other candidates. Raises ShapeError where shapes do not fit or a query has no positive,
    DataError where a score is not a number.
    """
    if scores.shape != targets.shape:
        raise ShapeError(f"scores have shape {list(scores.shape)}, expected {list(targets.shape)}: queries x candidates of the targets.")
    positive, negative = targets.positive, targets.negative
    query, candidate = positive.nonzero(as_tuple=True)
    scores = scores if scores.dtype == torch.float64 else scores.float()
    own = by_query(scores[query, candidate], query, len(scores))
    others = scores.masked_fill(~negative, torch.nan)  # every comparison with NaN is false
    flags = torch.empty_like(others)  # 0 and 1 in the dtype of the scores: several times faster than bool
    before = own.new_zeros(own.shape, dtype=torch.float64)
    for step in steps(ties):
        for slot in range(own.shape[1]):
            before[:, slot] += step(others, own[:, slot, None], out=flags).sum(1) / len(steps(ties))
    return place(before, positive.sum(1))


@checked
def ranks(scores: Tensor, targets: Targets, *, ties: Ties = "pessimistic") -> Tensor:
    """The rank ``[Q]`` of the best positive of each query, from 1: 1 + the number of other candidates that come before it.

    Whole numbers (int64), except with ``ties="mean"`` (float64). Raises as ``places`` does.
    """
    return best(places(scores, targets, ties=ties), ties)


def best(places: Tensor, ties: Ties = "pessimistic") -> Tensor:
    """The ranks ``[Q]`` in ``places [Q, M]``."""
    return places[:, 0] if ties == "mean" else places[:, 0].long()


@checked
def average_precision(places: Tensor) -> Tensor:
    """Average precision (AP) ``[Q]``: the mean, over a query's positives, of the precision where each stands.

    Formula: ``(1 / |P|) sum_{i in P} R_P(i) / R(i)``, where R(i) is the rank of a positive among all candidates, R_P(i) among
    positives: ``(1 / R) sum_j j / place_j`` with the j-th positive at place_j. The objective SmoothAP is one minus this, its ranks
    smoothed. With one positive it is 1 / rank.
    """
    return _precision(places).sum(1) / places.isfinite().sum(1)


@checked
def average_precision_at(places: Tensor, k: int, *, normalize: Normalize = "min_r_k") -> Tensor:
    """AP@K ``[Q]``: the sum of precisions at the positives in the top K, divided by min(R, K) or by their number.

    normalize: "min_r_k" is the standard, R the number of the query's positives. "hits" divides by the number of positives in the top
    K (0 where there is none), as the code of COCOS (Bleeker and de Rijke, 2022) does: much larger, as missed positives cost nothing.
    """
    in_top_k = places <= k
    divisor = places.isfinite().sum(1).clamp(max=k) if normalize == "min_r_k" else in_top_k.sum(1).clamp(min=1)
    return (_precision(places) * in_top_k).sum(1) / divisor


@checked
def average_precision_at_r(places: Tensor) -> Tensor:
    """AP@R ``[Q]``: average precision over the top R only, R the number of the query's positives (ECCV Caption, 2022)."""
    number = places.isfinite().sum(1)
    return (_precision(places) * (places <= number[:, None])).sum(1) / number


@checked
def r_precision(places: Tensor) -> Tensor:
    """R-Precision ``[Q]``: the share of a query's R positives that stand in its top R."""
    number = places.isfinite().sum(1)
    return (places <= number[:, None]).double().sum(1) / number


def by_query(scores: Tensor, query: Tensor, num_queries: int) -> Tensor:
    """Scores of positive pairs ``[P]``, with the query of each, as rows of queries ``[Q, M]``: best first, filled with -inf.

    Raises ShapeError for a query without positives.
    """
    number = torch.bincount(query, minlength=num_queries)
    if not number.all():
        raise ShapeError(f"query {int((number == 0).nonzero()[0])} has no positive candidate: leave such queries out.")
    order = torch.argsort(scores, descending=True)
    order = order[torch.argsort(query[order], stable=True)]
    slot = torch.arange(len(query), device=query.device) - (number.cumsum(0) - number).repeat_interleave(number)
    rows = scores.new_full((num_queries, int(number.max()) if num_queries else 1), -torch.inf)
    rows[query[order], slot] = scores[order]
    return rows


def place(before: Tensor, number: Tensor) -> Tensor:
    """Places from the number of other candidates before each positive ``[Q, M]`` and the number of positives ``[Q]``."""
    slot = torch.arange(1, before.shape[1] + 1, device=before.device)
    return (before + slot).masked_fill(slot > number[:, None], torch.inf)


def steps(ties: Ties) -> tuple[Callable[..., Tensor], ...]:
    """The comparisons whose mean says whether another candidate comes before a positive."""
    return {"pessimistic": (torch.ge,), "optimistic": (torch.gt,), "mean": (torch.ge, torch.gt)}[ties]


def _precision(places: Tensor) -> Tensor:
    return torch.arange(1, places.shape[1] + 1, device=places.device) / places
