"""CS@K and nDCG@K: whether the whole top K is ordered by graded relevance, not only its first item.

>>> scores, relevance = torch.tensor([[0.9, 0.8, 0.2]]), torch.tensor([[1.0, 0.2, 0.6]])
>>> [round(metric(scores, relevance, k=3).item(), 3) for metric in (coherent_scores, ndcg_at)]      # one pair of three is swapped
[0.333, 0.965]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import on_float64_device, to_float64
from visavis.core.errors import ShapeError, SpecError
from visavis.core.fields import validate_int
from visavis.evaluation.metrics.ranking import NAN_SCORES, raise_on_invalid_row

Tau = Literal["a", "b"]
Semantics = Literal["reference", "paper"]

INVALID_GAINS = (
    "relevance of {}: expected finite values >= 0 for nDCG, got a negative or infinite one."
)

PAIRS_PER_BLOCK = 1 << 16
"""Rows are counted together up to this many pairs, whose arrays fit into the cache of a processor.
"""
MAX_BATCHED_LENGTH = 1024
"""Longest rows that are counted together. On longer ones, the algorithm of scipy saves more than
the 0.2 ms of a call.
"""


def coherent_scores(
    scores: Tensor, relevance: Tensor, *, k: int, tau: Tau = "b", semantics: Semantics = "paper"
) -> Tensor:
    """Compute CS@K: Kendall's tau between the scores and the relevance of the K best-scored
    candidates of each query.

    Args:
        scores: Scores of shape ``[Q, C]``. The item of the query itself counts too.
        relevance: Graded relevance of shape ``[Q, C]``.
        k: Cutoff. K above C means C.
        tau: Variant of Kendall's tau.
        semantics: How ties at the cutoff count, see below.

    Returns:
        CS@K of shape ``[Q]``. tau-b is NaN where scores or relevance are constant in the top K, so
        that a mean over queries is NaN too. tau-a is 0 there, by its formula. With one candidate
        both are undefined.

    Raises:
        SpecError: If ``k`` is below 1 or ``tau`` is unknown.
        ShapeError: If the shapes differ.
        DataError: If a value is NaN.

    Formula:
        tau-a: $2 (concordant - discordant) / (K (K - 1))$. tau-b: $(concordant - discordant) /
        sqrt(n_s n_r)$ with $n_s$ pairs of unequal scores and $n_r$ of unequal relevance. Without ties they agree.

    Ties:
        If more candidates have the K-th score than fit into the top K, a pair counts with the
        probability that both are in the top K when the tied ones are selected at random. No order
        of the candidates changes the result, and tau-a is its mean over all orders.

    Source:
        Zhou et al., Ladder loss (2020), section Coherent Score. Its released code has tau-b.

    Differs from:
        The paper does not define ties at the cutoff. ``semantics="reference"`` selects the
        candidates of the released code, ``numpy.argsort(scores)[::-1][:K]``: of tied ones mostly
        the later. That sort is not stable, so the result depends on their order and on numpy.
    """
    scores = scores.detach()
    relevance = relevance.detach()
    _check_graded(scores, relevance)
    k = validate_int(k, "k", minimum=1)
    if tau not in ("a", "b"):
        raise SpecError(f"tau: expected a or b, got {tau!r}.")
    return coherent_scores_at(scores, relevance, (k,), tau, semantics)[:, 0]


def ndcg_at(scores: Tensor, relevance: Tensor, *, k: int) -> Tensor:
    """Compute nDCG@K, see `ndcg`.

    Args:
        scores: Scores of shape ``[Q, C]``.
        relevance: Graded relevance of shape ``[Q, C]``, >= 0.
        k: Cutoff. K above C means C.

    Returns:
        nDCG@K of shape ``[Q]``.
    """
    k = validate_int(k, "k", minimum=1)
    return ndcg(scores, relevance)[:, min(k, scores.shape[1]) - 1]


def ndcg(scores: Tensor, relevance: Tensor) -> Tensor:
    """Compute nDCG@1 to nDCG@C: the relevance of the best-scored candidates, discounted by rank,
    over its maximum.

    Args:
        scores: Scores of shape ``[Q, C]``. Among candidates with equal scores the least relevant
            comes first.
        relevance: Graded relevance of shape ``[Q, C]``, >= 0.

    Returns:
        nDCG of shape ``[Q, C]``, NaN where no candidate has any relevance.

    Formula:
        $sum_{j <= K} r_j / log_2(j + 1)$, over the same sum for the candidates sorted by
        relevance.

    Source:
        Järvelin and Kekäläinen, Cumulated gain-based evaluation of IR techniques (2002).
    """
    scores = scores.detach()
    relevance = relevance.detach()
    _check_graded(scores, relevance)
    raise_on_invalid_row((relevance < 0) | relevance.isinf(), INVALID_GAINS.format("query {}"))
    scores = on_float64_device(scores)
    ascending, order = to_float64(relevance).sort(dim=1)  # [Q, C]
    # The sort by score is stable, so equal scores keep ascending relevance: the worst order.
    by_score = ascending.gather(
        1, scores.gather(1, order).sort(dim=1, descending=True, stable=True).indices
    )
    discount = torch.arange(
        2, scores.shape[1] + 2, dtype=torch.float64, device=scores.device
    ).log2()
    return ((by_score / discount).cumsum(1) / (ascending.flip(1) / discount).cumsum(1)).cpu()


def _check_graded(scores: Tensor, relevance: Tensor) -> None:
    """Check that both are ``[Q, C]``, and no value is NaN. A larger relevance would be gathered as
    if it belonged to the scores.
    """
    if scores.dim() != 2 or relevance.shape != scores.shape:
        raise ShapeError(
            f"scores, relevance: expected equal shapes [Q, C], got {list(scores.shape)} and "
            f"{list(relevance.shape)}."
        )
    raise_on_invalid_row(scores.isnan(), NAN_SCORES)
    raise_on_invalid_row(
        relevance.isnan(),
        "relevance of query {}: expected numbers, got NaN. Check the relevance estimator.",
    )


def coherent_scores_at(
    scores: Tensor, relevance: Tensor, ks: tuple[int, ...], tau: Tau, semantics: Semantics
) -> Tensor:
    """Compute CS@K for several K, ``[Q, len(ks)]``, see `coherent_scores`. Arguments are not checked."""
    # One topk serves all cutoffs.
    candidates = scores.shape[1]
    # one more than K shows a tie at the cutoff
    top, index = scores.topk(min(max(ks) + 1, candidates), dim=1)
    top_relevance = relevance.gather(1, index)
    by_cutoff = []
    for k in (min(k, candidates) for k in ks):
        values = _taus(top[:, :k], top_relevance[:, :k], tau)
        tied = (
            top[:, k] == top[:, k - 1]
            if 1 < k < candidates
            else torch.zeros(len(top), dtype=torch.bool)
        )
        # Few queries have a tie at the cutoff, so they are computed one by one.
        for query in tied.nonzero()[:, 0].tolist():
            values[query] = _CUTOFF_TIE_RULES[semantics](
                scores[query].cpu(), relevance[query].cpu(), k, tau
            )
        by_cutoff.append(values)
    return torch.stack(by_cutoff, 1)


def _taus(scores: Tensor, relevance: Tensor, tau: Tau) -> Tensor:
    """Kendall's tau of each row ``[Q, K]``."""
    from scipy.stats import kendalltau

    queries, length = scores.shape
    if length < 2 or not queries:
        return torch.full((queries,), torch.nan, dtype=torch.float64)
    scores = scores.cpu().double()
    relevance = relevance.cpu().double()
    if length > MAX_BATCHED_LENGTH:
        rows = zip(scores.numpy(), relevance.numpy(), strict=True)
        tau_b = torch.tensor([kendalltau(*row).statistic for row in rows], dtype=torch.float64)
    else:
        blocks = zip(
            *(values.split(max(1, PAIRS_PER_BLOCK // length)) for values in (scores, relevance)),
            strict=True,
        )
        tau_b = torch.from_numpy(
            np.concatenate([_taus_b(*(values.numpy() for values in block)) for block in blocks])
        )
    if tau == "b":
        return tau_b
    # tau-a and tau-b differ only in their denominators.
    untied = (1 - _tied_share(scores)) * (1 - _tied_share(relevance))
    return tau_b.nan_to_num() * untied.sqrt()


def _taus_b(scores: np.ndarray, relevance: np.ndarray) -> np.ndarray:
    """Kendall's tau-b of each row ``[Q, K]``, bit for bit equal to ``scipy.stats.kendalltau``."""
    by_relevance = np.lexsort((scores, relevance))  # by relevance, then by score
    scores, relevance = (
        np.take_along_axis(values, by_relevance, 1) for values in (scores, relevance)
    )
    same_score, same_relevance = (values[:, 1:] == values[:, :-1] for values in (scores, relevance))
    # A discordant pair is an inversion of this permutation.
    by_score = scores.argsort(1, kind="stable")
    ordered = np.take_along_axis(scores, by_score, 1)
    tied_scores = _tied_pairs(ordered[:, 1:] == ordered[:, :-1])
    tied_relevance = _tied_pairs(same_relevance)
    pairs = scores.shape[1] * (scores.shape[1] - 1) // 2
    tied_both = _tied_pairs(same_score & same_relevance)
    agreement = pairs - tied_scores - tied_relevance + tied_both - 2 * _inversions(by_score)
    with np.errstate(invalid="ignore", divide="ignore"):
        taus = agreement / np.sqrt(pairs - tied_scores) / np.sqrt(pairs - tied_relevance)
    return np.where((tied_scores < pairs) & (tied_relevance < pairs), taus.clip(-1, 1), np.nan)


def _tied_pairs(equals_previous: np.ndarray) -> np.ndarray:
    """Number of equal pairs ``[Q]`` of sorted rows, from whether each value after the first equals
    the one before it.
    """
    positions = np.arange(1, equals_previous.shape[1] + 1)
    # Start of the run of equal values that each position is in.
    starts = np.maximum.accumulate(np.where(equals_previous, 0, positions), axis=1)
    return (positions - starts).sum(1)


def _inversions(permutations: np.ndarray) -> np.ndarray:
    """Number of descending pairs ``[Q]`` of each permutation ``[Q, K]``."""
    queries, length = permutations.shape
    size = 1 << (length - 1).bit_length()  # the next power of two
    # The largest numbers at the end add no inversion.
    padding = np.broadcast_to(np.arange(length, size), (queries, size - length))
    values = np.concatenate([permutations, padding], 1).astype(np.int32)
    total = np.zeros(queries, np.int64)
    # Rows are split by the highest bit, which orders the pairs that differ in it. Each half is then
    # split by the next bit, until a block of 32 is compared at once.
    while size > 32:
        values = values.reshape(-1, size)
        size = size // 2
        high = (values & size) > 0
        total += (
            np.where(high, 0, high.cumsum(1, dtype=np.int32))
            .reshape(queries, -1)
            .sum(1, dtype=np.int64)
        )
        values = np.stack([values[~high].reshape(-1, size), values[high].reshape(-1, size)], 1)
    low = (values.reshape(-1, size) % size).astype(np.int8)  # [blocks, size]
    descending = (low[:, :, None] > low[:, None]) & np.triu(np.ones((size, size), bool))
    return total + np.count_nonzero(descending.reshape(queries, -1), axis=1)


def _tied_share(rows: Tensor) -> Tensor:
    """The share of pairs of equal values in each row ``[Q, K]``."""
    ordered = rows.sort(dim=1).values
    # Distance to the first equal value.
    equal_before = torch.arange(rows.shape[1]) - torch.searchsorted(ordered, ordered)
    return to_float64(equal_before.sum(1)) / (rows.shape[1] * (rows.shape[1] - 1) / 2)


def _expected_tau(scores: Tensor, relevance: Tensor, k: int, tau: Tau) -> Tensor:
    """Tau of one query ``[C]`` with every pair counted by the probability that both are in the top
    K.
    """
    cutoff_score = scores.topk(k).values[-1]
    above = scores > cutoff_score
    tied = scores == cutoff_score
    # candidates with the K-th score, and those that fit
    num_tied = int(tied.sum())
    num_tied_in_top = k - int(above.sum())
    both_above, both_candidates, both_tied = (
        _pair_counts(scores[group], relevance[group]) for group in (above, above | tied, tied)
    )
    one_tied = both_candidates - both_above - both_tied
    # Probabilities that one given candidate, and two given candidates, of the tied ones are in the
    # top K.
    one_in_top = num_tied_in_top / num_tied
    two_in_top = num_tied_in_top * (num_tied_in_top - 1) / (num_tied * (num_tied - 1))
    agreement, unequal_scores, unequal_relevance = (
        both_above + one_in_top * one_tied + two_in_top * both_tied
    )
    return agreement / (
        k * (k - 1) / 2 if tau == "a" else (unequal_scores * unequal_relevance).sqrt()
    )


def _pair_counts(scores: Tensor, relevance: Tensor) -> Tensor:
    """Numbers of pairs among candidates ``[N]``: concordant minus discordant, with unequal scores,
    with unequal relevance.
    """
    if len(scores) < 2:
        return torch.zeros(3, dtype=torch.float64)
    pairs = len(scores) * (len(scores) - 1) / 2
    shares = torch.cat(
        [
            _taus(scores[None], relevance[None], "a"),
            *(1 - _tied_share(row[None]) for row in (scores, relevance)),
        ]
    )
    return (pairs * shares).round()


def _released_tau(scores: Tensor, relevance: Tensor, k: int, tau: Tau) -> Tensor:
    """Tau of one query ``[C]`` over the candidates that the released code selects."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    # numpy's default sort is not stable. The released code has the same one.
    top = torch.from_numpy(np.argsort(scores.numpy())[::-1][:k].copy())
    return _taus(scores[None, top], relevance[None, top], tau)[0]


_CUTOFF_TIE_RULES: dict[Semantics, Callable[[Tensor, Tensor, int, Tau], Tensor]] = {
    "paper": _expected_tau,
    "reference": _released_tau,
}
