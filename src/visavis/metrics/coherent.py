"""CS@K and nDCG@K: whether the whole top K is ordered by graded relevance, not only its first item.

>>> scores, relevance = torch.tensor([[0.9, 0.8, 0.2]]), torch.tensor([[1.0, 0.2, 0.6]])
>>> [round(metric(scores, relevance, k=3).item(), 3) for metric in (coherent_scores, ndcg_at)]      # one pair of three is swapped
[0.333, 0.965]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from visavis.errors import ShapeError
from visavis.metrics.arguments import FORMS, Semantics, Tau, checked, door, gains
from visavis.metrics.declaration import Metric


@checked
def coherent_scores(scores: Tensor, relevance: Tensor, *, k: int, tau: Tau = "b", semantics: Semantics = "paper") -> Tensor:
    """CS@K ``[Q]``: Kendall's tau between the scores and the relevance of the K best-scored candidates of each query.

    Formula: tau-a = (concordant - discordant) / (K (K - 1) / 2); tau-b divides by sqrt((pairs with unequal scores) (pairs with
    unequal relevance)) instead; without ties they agree.
    Ties at the cut: where more candidates score as the K-th does than the top K has room for, a pair counts with the probability that both
    are in the top K, if those that tie enter at random. No order of the candidates changes that, and tau-a is then its mean over all orders.
    scores, relevance: ``[Q, C]``; the query's own item counts too; K above C means C. tau-b is NaN where the scores or the
    relevance are constant in the top K: undefined, so that a mean over queries is NaN as well; tau-a is 0 there, by its formula.
    With one candidate both are undefined.
    Raises ShapeError where shapes differ, DataError where a score or a degree is not a number.
    Source: Zhou et al., Ladder loss (2020), section Coherent Score; its released code has tau-b.
    Differs from: the paper says nothing of ties at the cut. ``semantics="reference"`` takes the candidates that the released code takes,
    ``numpy.argsort(scores)[::-1][:K]``: of those that tie mostly the later ones, but that sort is not stable, so that their order and
    numpy's choice decide.
    """
    _fit(scores, relevance)
    return _coherent_scores_at(scores, relevance, (k,), tau, semantics)[:, 0]


@door(FORMS | {"relevance": gains})
def ndcg_at(scores: Tensor, relevance: Tensor, *, k: int) -> Tensor:
    """nDCG@K ``[Q]``: see ``ndcg``; K above C means C."""
    _fit(scores, relevance)
    return _ndcg_at(scores, relevance, (k,))[:, 0]


@door(FORMS | {"relevance": gains})
def ndcg(scores: Tensor, relevance: Tensor) -> Tensor:
    """nDCG@1 to nDCG@C ``[Q, C]``: the relevance of the best-scored candidates, discounted by rank, over the highest value any order reaches.

    Formula: nDCG@K = sum_{j <= K} r_j / log2(j + 1), over the same sum for the candidates in the order of their relevance.
    scores, relevance: ``[Q, C]``, relevance at least 0. Of candidates with equal scores the least relevant comes first. NaN where no
    candidate has any relevance. Raises as ``coherent_scores`` does, and DataError for a degree below 0.
    Source: Järvelin and Kekäläinen, Cumulated gain-based evaluation of IR techniques (2002).
    """
    _fit(scores, relevance)
    return _ndcg(scores, relevance)


def _ndcg(scores: Tensor, degrees: Tensor) -> Tensor:
    ascending, order = degrees.double().sort(dim=1)
    by_score = ascending.gather(1, scores.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
    discount = torch.arange(2, scores.shape[1] + 2, dtype=torch.float64, device=scores.device).log2()
    return ((by_score / discount).cumsum(1) / (ascending.flip(1) / discount).cumsum(1)).cpu()


def _fit(scores: Tensor, relevance: Tensor) -> None:
    if scores.shape != relevance.shape:
        raise ShapeError(f"relevance has shape {list(relevance.shape)}, expected that of the scores, {list(scores.shape)}.")


def _coherent_scores_at(scores: Tensor, degrees: Tensor, ks: tuple[int, ...], tau: Tau, semantics: Semantics) -> Tensor:
    """CS@K ``[Q, len(ks)]``. What ties within the top K may come in any order; where it ties at the cut, ``AT_THE_CUT`` says what counts."""
    candidates = scores.shape[1]
    top, index = scores.topk(min(max(ks) + 1, candidates), dim=1)
    near = degrees.gather(1, index)
    found = []
    for k in (min(k, candidates) for k in ks):
        values = _taus(top[:, :k], near[:, :k], tau)
        tied = top[:, k] == top[:, k - 1] if 1 < k < candidates else torch.zeros(len(top), dtype=torch.bool)
        for query in tied.nonzero()[:, 0].tolist():
            values[query] = AT_THE_CUT[semantics](scores[query].cpu(), degrees[query].cpu(), k, tau)
        found.append(values)
    return torch.stack(found, 1)


def _taus(scores: Tensor, degrees: Tensor, tau: Tau) -> Tensor:
    """Kendall's tau of each row ``[Q, K]``."""
    from scipy.stats import kendalltau

    scores, degrees = scores.cpu().double(), degrees.cpu().double()
    if scores.shape[1] < 2:
        return torch.full((len(scores),), torch.nan, dtype=torch.float64)
    tau_b = torch.tensor([kendalltau(*pair).statistic for pair in zip(scores.numpy(), degrees.numpy(), strict=True)], dtype=torch.float64)
    if tau == "b":
        return tau_b
    untied = (1 - _tied_share(scores)) * (1 - _tied_share(degrees))
    return tau_b.nan_to_num() * untied.sqrt()


def _tied_share(rows: Tensor) -> Tensor:
    """The share of pairs of equal values in each row ``[Q, K]``."""
    ordered = rows.sort(dim=1).values
    equal_before = torch.arange(rows.shape[1]) - torch.searchsorted(ordered, ordered)
    return equal_before.sum(1).double() / (rows.shape[1] * (rows.shape[1] - 1) / 2)


def _as_expected(scores: Tensor, degrees: Tensor, k: int, tau: Tau) -> Tensor:
    """Tau of one query ``[C]`` with every pair counted by the probability that both are in the top K."""
    cut = scores.topk(k).values[-1]
    inside, tied = scores > cut, scores == cut
    room, number = k - int(inside.sum()), int(tied.sum())
    surely, at_all, by_chance = (_pairs(scores[some], degrees[some]) for some in (inside, inside | tied, tied))
    counted = surely + room / number * (at_all - surely - by_chance) + room * (room - 1) / (number * (number - 1)) * by_chance
    agreeing, *unequal = counted
    return agreeing / (k * (k - 1) / 2 if tau == "a" else (unequal[0] * unequal[1]).sqrt())


def _pairs(scores: Tensor, degrees: Tensor) -> Tensor:
    """Numbers of pairs among candidates ``[N]``: concordant less discordant, with unequal scores, with unequal degrees."""
    if len(scores) < 2:
        return torch.zeros(3, dtype=torch.float64)
    pairs = len(scores) * (len(scores) - 1) / 2
    shares = torch.cat([_taus(scores[None], degrees[None], "a"), *(1 - _tied_share(row[None]) for row in (scores, degrees))])
    return (pairs * shares).round()


def _as_released(scores: Tensor, degrees: Tensor, k: int, tau: Tau) -> Tensor:
    """Tau of one query ``[C]`` over the candidates that the released code takes."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    top = torch.from_numpy(np.argsort(scores.numpy())[::-1][:k].copy())
    return _taus(scores[None, top], degrees[None, top], tau)[0]


AT_THE_CUT: dict[Semantics, Callable[[Tensor, Tensor, int, Tau], Tensor]] = {"paper": _as_expected, "reference": _as_released}


def _ndcg_at(scores: Tensor, degrees: Tensor, ks: tuple[int, ...]) -> Tensor:
    return _ndcg(scores, degrees)[:, torch.tensor(ks).clamp(max=scores.shape[1]) - 1]


def _coherent_score(name: str, tau: Tau, semantics: Semantics, candidates: str) -> Metric:
    return Metric(
        name=name,
        label="CS@K",
        definition=f"coherent score: how far the order of the top K follows the degrees of relevance, a mean over the {{query}}s for which it is "
        f"defined; of {candidates}",
        formula=f"mean(Kendall's tau-{tau}(scores, degrees) over the K best-scored)",
        unit="correlation",
        reads="degrees",
        function=lambda scores, degrees, ks: _coherent_scores_at(scores, degrees, ks, tau, semantics),
    )


def _discounted_gain(name: str, candidates: str) -> Metric:
    return Metric(
        name=name,
        label="nDCG@K",
        definition="discounted cumulative gain: the relevance in the top K, discounted by rank, over the highest possible, a mean over {query}s; of "
        + candidates,
        formula="mean(sum_{j <= K} degree_j/log2(j + 1) / the same in the order of the degrees)",
        unit="fraction",
        reads="degrees",
        function=_ndcg_at,
    )


_FIRST, _ALL = "the first caption of each image, as the released code of the Ladder loss", "all captions, as the text of the Ladder loss"
COHERENT_SCORE = _coherent_score("cs_at_K", "b", "reference", _FIRST)
COHERENT_SCORE_PAPER = _coherent_score("cs_at_K_paper", "a", "paper", _ALL)
NDCG, NDCG_PAPER = _discounted_gain("ndcg_at_K", _FIRST), _discounted_gain("ndcg_at_K_paper", _ALL)
