"""Ranking metrics: ranks of the positives of each query, recall at k, median and mean rank, average
precision and R-Precision.

``positive_ranks`` ``[Q, M]`` holds the rank of each positive of a query, best first, starting at 1.
M is the largest number of positives of a query, and shorter rows are padded with inf. Positives of
one query do not count against each other: the rank of the j-th best is j + the number of candidates
before it that are not positives.

Ties. A candidate with exactly the score of a positive comes before it ("pessimistic", the default:
a model that gives everything the same score scores nothing), after it (``"optimistic"``), or half
of each ("mean").

>>> scores = torch.tensor([[0.9, 0.8, 0.8, 0.1]])
>>> targets = Targets(query_ids=[0], candidate_ids=[1, 0, 2, 0])        # candidates 1 and 3 are positive
>>> positive_ranks(scores, targets).tolist(), positive_ranks(scores, targets, ties="mean").tolist()
([[3.0, 4.0]], [[2.5, 4.0]])

R@K is the share of queries with a correct item in the top K, as the vision-language literature
defines it. Information retrieval calls this success@K or hit@K. With several correct items it is
not recall.

>>> ranks = torch.tensor([1, 1, 2, 20])
>>> recall_at(ranks, 1), recall_at(ranks, 5), median_rank(ranks), mean_rank(ranks)
(0.5, 0.75, 1.0, 6.0)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from visavis.core.encoded import on_float64_device, to_float64
from visavis.core.errors import DataError, ShapeError
from visavis.core.fields import validate_int
from visavis.core.memory_budget import chunk_slices
from visavis.losses.targets import Targets

Ties = Literal["pessimistic", "mean", "optimistic"]
TIES_IN_WORDS = {
    "pessimistic": "ties count against the model",
    "mean": "ties count half",
    "optimistic": "ties count for the model",
}
"""The rules for equal scores, as results print them."""
Normalize = Literal["min_r_k", "hits"]

RSUM_CUTOFFS = (1, 5, 10)
"""Cutoffs of RSUM and of average recall, whose definition in the literature is R@1, R@5 and R@10 in
both directions.
"""
PAIRS_AT_ONCE = 5 * 2**18
"""Scores that are compared at once: the flags of more leave the processor's cache."""

NAN_SCORES = "scores of query {}: expected numbers, got NaN. Check the model and its features."


def positive_ranks(scores: Tensor, targets: Targets, *, ties: Ties = "pessimistic") -> Tensor:
    """Compute the ranks of all positives. Ignored pairs count neither as positives nor as other
    candidates.

    Args:
        scores: Scores of shape ``[Q, C]``, which may be any rows of a larger matrix.
        targets: Targets of the same shape.
        ties: How candidates with the score of a positive count.

    Returns:
        Ranks of shape ``[Q, M]``, float64.

    Raises:
        ShapeError: If the shapes differ or a query has no positive.
        DataError: If a score is NaN.
    """
    scores = scores.detach()
    if scores.shape != targets.shape:
        raise ShapeError(
            f"scores: expected shape {list(targets.shape)}, queries x candidates of the targets, "
            f"got {list(scores.shape)}."
        )
    raise_on_invalid_row(scores.isnan(), NAN_SCORES)
    if (moved := on_float64_device(scores)) is not scores:
        scores = moved
        targets = targets.to(moved.device)
    positive = targets.positive  # [Q, C]
    query, candidate = positive.nonzero(as_tuple=True)  # [P]
    for row in (~positive.any(1)).nonzero()[:1, 0].tolist():
        raise ShapeError(
            f"query {row}: expected at least one positive candidate, got none. Leave it out."
        )
    # Any scores can be padded with -inf and NaN.
    scores = scores if scores.dtype == torch.float64 else scores.float()
    positive_scores = pad_by_query(scores[query, candidate], query, len(scores))
    if targets.ignore is not None:
        # Every comparison with NaN is false.
        scores = scores.masked_fill(~(positive | targets.negative), torch.nan)
    num_before = count_before(scores, positive_scores, ties)
    return ranks_from_counts(num_before, positive_scores, positive.sum(1), ties)


def count_before(
    scores: Tensor,
    positive_scores: Tensor,
    ties: Ties,
    *,
    copies: Tensor | None = None,
    buffer: Tensor | None = None,
) -> Tensor:
    """Count the candidates before each positive, ``[Q, M]``. All ranks are such counts, of one matrix
    ``[Q, C]`` or summed over blocks of its columns. A NaN score is not a candidate.
    """
    comparisons = {
        "pessimistic": (torch.ge,),
        "optimistic": (torch.gt,),
        "mean": (torch.ge, torch.gt),
    }[ties]
    # Half precision is exact in float32, so ties stay ties.
    dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
    num_before = torch.zeros_like(positive_scores.T, dtype=dtype)  # [M, Q]
    for part in chunk_slices(len(scores), max(1, PAIRS_AT_ONCE // max(1, scores.shape[1]))):
        block = scores[part].to(dtype)
        # 0 and 1 in the dtype of the scores: several times faster than bool.
        flags = torch.empty_like(block) if buffer is None else buffer[part]
        # One positive of each query at a time: [Q, C] instead of [Q, M, C].
        for slot, compare in product(range(positive_scores.shape[1]), comparisons):
            compare(block, positive_scores[part, slot, None], out=flags)
            if copies is not None:
                flags *= copies
            num_before[slot, part] += flags.sum(1)
    return num_before.T / len(comparisons)


def ranks_from_counts(
    num_before: Tensor, positive_scores: Tensor, num_positives: Tensor, ties: Ties
) -> Tensor:
    """Compute ranks ``[Q, M]`` from the number of candidates before each positive, other positives
    included. They are padded with inf.
    """
    slot = torch.arange(1, num_before.shape[1] + 1, device=num_before.device)
    is_padding = slot > num_positives[:, None]
    own_scores = positive_scores.masked_fill(is_padding, torch.nan)
    own_before = count_before(own_scores, positive_scores, ties)
    # The j-th best positive has j - 1 positives before it, which do not count against it.
    ranks = num_before.double() - own_before.double() + slot
    return ranks.masked_fill(is_padding, torch.inf)


def best_ranks(scores: Tensor, targets: Targets, *, ties: Ties = "pessimistic") -> Tensor:
    """Compute the rank of the best positive: 1 + the number of other candidates before it.

    Args:
        scores: Scores of shape ``[Q, C]``.
        targets: Targets of the same shape.
        ties: How candidates with the score of a positive count.

    Returns:
        Ranks of shape ``[Q]``, int64, or float64 with ``ties="mean"``.
    """
    return best_rank_column(positive_ranks(scores, targets, ties=ties), ties)


def best_rank_column(positive_ranks: Tensor, ties: Ties) -> Tensor:
    """Select the rank of the best positive, ``[Q]``, an integer unless ties count as a mean."""
    return positive_ranks[:, 0] if ties == "mean" else positive_ranks[:, 0].long()


def average_precision(positive_ranks: Tensor) -> Tensor:
    """Compute average precision (AP): the mean over the positives of a query of the precision at
    their ranks.

    Args:
        positive_ranks: Ranks of shape ``[Q, M]``.

    Returns:
        AP of shape ``[Q]``.

    Formula:
        $(1 / |P|) sum_{i in P} R_P(i) / R(i)$, where $R(i)$ is the rank of a positive among all
        candidates and $R_P(i)$ among positives: $(1 / R) sum_j j / rank_j$ with the j-th positive
        at $rank_j$. The objective SmoothAP is one minus this with smoothed ranks. With one positive
        it is $1 / rank$.
    """
    check_positive_ranks(positive_ranks)
    return _precision(positive_ranks).sum(1) / positive_ranks.isfinite().sum(1)


def average_precision_at(
    positive_ranks: Tensor, k: int, *, normalize: Normalize = "min_r_k"
) -> Tensor:
    """Compute AP@K: the sum of precisions at the positives in the top K, normalized.

    Args:
        positive_ranks: Ranks of shape ``[Q, M]``.
        k: Cutoff.
        normalize: "min_r_k" divides by min(R, K), the standard, with R the number of positives of
            the query. "hits" divides by the number of positives in the top K (0 without any), as
            the code of COCOS (Bleeker and de Rijke, 2022) does. It is much larger, because missed
            positives cost nothing.

    Returns:
        AP@K of shape ``[Q]``.
    """
    check_positive_ranks(positive_ranks)
    k = validate_int(k, "k", minimum=1)
    in_top_k = positive_ranks <= k  # [Q, M]
    divisors = {
        "min_r_k": positive_ranks.isfinite().sum(1).clamp(max=k),
        "hits": in_top_k.sum(1).clamp(min=1),
    }
    return (_precision(positive_ranks) * in_top_k).sum(1) / divisors[normalize]


def average_precision_at_r(positive_ranks: Tensor) -> Tensor:
    """Compute AP@R: average precision over the top R, with R the number of positives of the query.

    Args:
        positive_ranks: Ranks of shape ``[Q, M]``.

    Returns:
        AP@R of shape ``[Q]``.

    Source:
        ECCV Caption (2022).
    """
    check_positive_ranks(positive_ranks)
    num_positives = positive_ranks.isfinite().sum(1)
    return (_precision(positive_ranks) * (positive_ranks <= num_positives[:, None])).sum(
        1
    ) / num_positives


def r_precision(positive_ranks: Tensor) -> Tensor:
    """Compute R-Precision: the share of the R positives of a query that are in its top R.

    Args:
        positive_ranks: Ranks of shape ``[Q, M]``.

    Returns:
        R-Precision of shape ``[Q]``.
    """
    check_positive_ranks(positive_ranks)
    num_positives = positive_ranks.isfinite().sum(1)
    return to_float64(positive_ranks <= num_positives[:, None]).sum(1) / num_positives


def map_at_k(positive_ranks: Tensor, k: int) -> float:
    """Compute mAP@K, divided by min(R, K): the standard form.

    Args:
        positive_ranks: Ranks of shape ``[Q, M]``.
        k: Cutoff.

    Returns:
        A fraction.
    """
    return float(average_precision_at(positive_ranks, k).mean())


def map_at_k_hits(positive_ranks: Tensor, k: int) -> float:
    """Compute mAP@K, divided by the number of positives in the top K: the convention of the COCOS
    code.

    Args:
        positive_ranks: Ranks of shape ``[Q, M]``.
        k: Cutoff.

    Returns:
        A fraction.
    """
    return float(average_precision_at(positive_ranks, k, normalize="hits").mean())


def pad_by_query(scores: Tensor, query: Tensor, num_queries: int) -> Tensor:
    """Arrange the scores of positive pairs ``[P]`` as rows of queries ``[Q, M]``, best first, padded
    with -inf.
    """
    counts = torch.bincount(query, minlength=num_queries)  # [Q]
    # Two sorts: by query, and within a query by score, because the second one is stable.
    order = torch.argsort(scores, descending=True)
    order = order[torch.argsort(query[order], stable=True)]
    # Position of each pair within its query.
    slot = torch.arange(len(query), device=query.device) - (
        counts.cumsum(0) - counts
    ).repeat_interleave(counts)
    rows = scores.new_full((num_queries, int(counts.max()) if num_queries else 1), -torch.inf)
    rows[query[order], slot] = scores[order]
    return rows


def check_positive_ranks(ranks: Tensor, name: str = "positive_ranks") -> None:
    """Check that ranks ascend from 1 for each of at least one query, padded with inf. Precision at
    other numbers is a number too.
    """
    if ranks.dim() != 2 or not ranks.numel():
        raise ShapeError(
            f"{name}: expected the ranks of at least one query with a positive, shape [Q, M], got "
            f"shape {list(ranks.shape)}."
        )
    slots = torch.arange(1, ranks.shape[1] + 1, device=ranks.device)  # [M], from 1
    # Each metric checks its ranks, so valid ones take the short way. No comparison with NaN is true.
    if (
        (ranks >= slots).all()
        and (ranks[:, 1:] >= ranks[:, :-1]).all()
        and ranks[:, 0].amax() < torch.inf
    ):
        return
    # The j-th best positive has at least rank j.
    invalid = (
        ~(ranks >= slots) | (ranks < ranks.roll(1, 1)) & (slots > 1) | ranks.isinf() & (slots == 1)
    )
    for query in invalid.any(1).nonzero()[:1, 0].tolist():
        start = ", ".join(f"{rank:g}" for rank in ranks[query, :3].tolist())
        raise DataError(
            f"{name} of query {query}: expected ascending ranks >= 1, then inf, got {start}. "
            "Compute them with positive_ranks."
        )


def raise_on_invalid_row(
    is_invalid: Tensor, message: str, row_numbers: Sequence[int] | Tensor | None = None
) -> None:
    """Raise an error for the first row with an invalid element."""
    for row in is_invalid.any(1).nonzero()[:1, 0].tolist():
        raise DataError(message.format(row if row_numbers is None else int(row_numbers[row])))


def _precision(positive_ranks: Tensor) -> Tensor:
    return (
        torch.arange(1, positive_ranks.shape[1] + 1, device=positive_ranks.device) / positive_ranks
    )


def recall_at(ranks: Tensor, k: int) -> float:
    """Compute R@K: the share of queries whose best positive is among the top K.

    Args:
        ranks: Rank of the best positive of each query, shape ``[Q]``, starting at 1.
        k: Cutoff.

    Returns:
        A fraction.
    """
    _check_ranks(ranks)
    k = validate_int(k, "k", minimum=1)
    return float(to_float64(ranks <= k).mean())


def recall_at_mean_ties(ranks: Tensor, k: int) -> float:
    """Compute R@K as the code of CE and MMT counts ranks that are means over ties, ``ties="mean"``.

    Args:
        ranks: Rank of the best positive of each query, shape ``[Q]``, starting at 1.
        k: Cutoff.

    Returns:
        A fraction.

    Formula:
        With ranks from 0, a hit is 0 at $K = 1$, and anything below $K$ at $K > 1$. A mean rank of
        4.5 is therefore a hit at $K = 5$, whereas `recall_at` requires at most $K - 1$. For integer
        ranks both are equal.

    Source:
        Liu et al., Use what you have (collaborative experts, 2019), its released code. Gabeur et
        al., Multi-modal Transformer (2020).
    """
    _check_ranks(ranks)
    k = validate_int(k, "k", minimum=1)
    # A mean rank of K + 0.5 is a hit for K > 1.
    return float(to_float64(ranks == 1 if k == 1 else ranks < k + 1).mean())


def median_rank(ranks: Tensor) -> float:
    """Compute MedR as published results define it: floor(median of the ranks from 0) + 1.

    Args:
        ranks: Rank of the best positive of each query, shape ``[Q]``, starting at 1.

    Returns:
        The median rank.
    """
    _check_ranks(ranks)
    # The published code floors the median of ranks from 0.
    return math.floor(torch.quantile(to_float64(ranks) - 1, 0.5)) + 1.0


def mean_rank(ranks: Tensor) -> float:
    """Compute the mean rank.

    Args:
        ranks: Rank of the best positive of each query, shape ``[Q]``, starting at 1.

    Returns:
        The mean rank.
    """
    _check_ranks(ranks)
    return float(to_float64(ranks).mean())


def _check_ranks(ranks: Tensor) -> None:
    """Check that there is one rank for each of at least one query. A mean over anything else is a
    number, but no metric.
    """
    if ranks.dim() != 1 or not len(ranks):
        raise ShapeError(
            f"ranks: expected the rank of the best positive of each query, shape [Q], got shape "
            f"{list(ranks.shape)}. Compute them with best_ranks."
        )
    # Each metric checks its ranks, so valid ones take the short way. No comparison with NaN is true.
    if ranks.amin() >= 1 and ranks.amax() < torch.inf:
        return
    for query in (~((ranks >= 1) & ranks.isfinite())).nonzero()[:1, 0].tolist():
        raise DataError(
            f"ranks of query {query}: expected a rank >= 1, got {ranks[query].item()}. Compute "
            "them with best_ranks."
        )


def random_recall(num_candidates: int, num_positives: int, k: int) -> float:
    """Compute the probability that a random order has a positive in its top K: $1 - C(n - c, K) /
    C(n, K)$.
    """
    return (
        1 - math.comb(num_candidates - num_positives, k) / math.comb(num_candidates, k)
        if k < num_candidates
        else 1.0
    )


def random_rsum(captions_per_image: Sequence[int]) -> tuple[float, float]:
    """Compute the RSUM of a random order: its mean, and an upper bound of its standard deviation."""
    # A query counts 1 for each K of 1, 5, 10 with a hit in its top K.
    images = len(captions_per_image)
    captions = sum(captions_per_image)
    # Number of candidates, of positives, and of the queries that have as many. An image without
    # captions is only a candidate.
    image_queries = [
        (captions, positives, count)
        for positives, count in Counter(captions_per_image).items()
        if positives
    ]
    text_queries = [(images, 1, captions)]
    mean = std = 0.0
    for queries in (image_queries, text_queries):
        # Queries of one direction are independent.
        total = sum(count for *_, count in queries)
        variance = 0.0
        for candidates, positives, count in queries:
            r1, r5, r10 = (random_recall(candidates, positives, k) for k in RSUM_CUTOFFS)
            expected = r1 + r5 + r10
            mean += 100 * count * expected / total
            # A query counts 3 with probability r1, 2 with r5 - r1, and 1 with r10 - r5.
            variance += count * (9 * r1 + 4 * (r5 - r1) + (r10 - r5) - expected**2)
        # The correlation of the two directions is at most 1, so the sum is an upper bound.
        std += 100 * math.sqrt(variance) / total
    return mean, std
