"""CS@K and nDCG@K: whether the whole top K is ordered by graded relevance, not only its first item.

>>> scores, relevance = torch.tensor([[0.9, 0.8, 0.2]]), torch.tensor([[1.0, 0.2, 0.6]])
>>> [round(metric(scores, relevance, k=3).item(), 3) for metric in (coherent_scores, ndcg_at)]      # one pair of three is swapped
[0.333, 0.965]
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from visavis.errors import DataError, ShapeError
from visavis.metrics.declaration import Metric

Tau = Literal["a", "b"]


def coherent_scores(scores: Tensor, relevance: Tensor, *, k: int, tau: Tau = "b") -> Tensor:
    """CS@K ``[Q]``: Kendall's tau between the scores and the relevance of the K best-scored candidates of each query.

    Formula: tau-a = (concordant - discordant) / (K (K - 1) / 2); tau-b divides by sqrt((pairs with unequal scores) (pairs with
    unequal relevance)) instead; without ties they agree.
    scores, relevance: ``[Q, C]``; the query's own item counts too; K above C means C. tau-b is NaN where the scores or the
    relevance are constant in the top K: undefined, so that a mean over queries is NaN as well; tau-a is 0 there, by its formula.
    With one candidate both are undefined.
    Raises ShapeError where shapes differ, DataError where a score or a degree is not a number.
    Source: Zhou et al., Ladder loss (2020), section Coherent Score; its released code has tau-b.
    """
    from scipy.stats import kendalltau

    _check(scores, relevance)
    top, index = scores.topk(min(k, scores.shape[1]), dim=1)
    top, relevance = (side.cpu().double() for side in (top, relevance.gather(1, index)))
    if top.shape[1] < 2:
        return torch.full((len(top),), torch.nan, dtype=torch.float64)
    tau_b = torch.tensor([kendalltau(*pair).statistic for pair in zip(top.numpy(), relevance.numpy(), strict=True)], dtype=torch.float64)
    if tau == "b":
        return tau_b
    untied = (1 - _tied_share(top)) * (1 - _tied_share(relevance))
    return tau_b.nan_to_num() * untied.sqrt()


def ndcg_at(scores: Tensor, relevance: Tensor, *, k: int) -> Tensor:
    """nDCG@K ``[Q]``: see ``ndcg``; K above C means C."""
    return ndcg(scores, relevance)[:, min(k, scores.shape[1]) - 1]


def ndcg(scores: Tensor, relevance: Tensor) -> Tensor:
    """nDCG@1 to nDCG@C ``[Q, C]``: the relevance of the best-scored candidates, discounted by rank, over the highest value any order reaches.

    Formula: nDCG@K = sum_{j <= K} r_j / log2(j + 1), over the same sum for the candidates in the order of their relevance.
    scores, relevance: ``[Q, C]``, relevance at least 0. Of candidates with equal scores the least relevant comes first. NaN where no
    candidate has any relevance. Raises as ``coherent_scores`` does.
    Source: Järvelin and Kekäläinen, Cumulated gain-based evaluation of IR techniques (2002).
    """
    _check(scores, relevance)
    gains, order = relevance.double().sort(dim=1)
    by_score = gains.gather(1, scores.gather(1, order).sort(dim=1, descending=True, stable=True).indices)
    discount = torch.arange(2, scores.shape[1] + 2, dtype=torch.float64, device=scores.device).log2()
    return ((by_score / discount).cumsum(1) / (gains.flip(1) / discount).cumsum(1)).cpu()


def _tied_share(rows: Tensor) -> Tensor:
    """The share of pairs of equal values in each row ``[Q, K]``."""
    ordered = rows.sort(dim=1).values
    equal_before = torch.arange(rows.shape[1]) - torch.searchsorted(ordered, ordered)
    return equal_before.sum(1).double() / (rows.shape[1] * (rows.shape[1] - 1) / 2)


def _check(scores: Tensor, relevance: Tensor) -> None:
    if scores.shape != relevance.shape:
        raise ShapeError(f"relevance has shape {list(relevance.shape)}, expected that of the scores, {list(scores.shape)}.")
    for what, values, remedy in (
        ("scores", scores, "the model or its features are broken"),
        ("degrees", relevance, "correct the estimator of degrees"),
    ):
        for query in values.isnan().any(1).nonzero()[:1, 0].tolist():
            raise DataError(f"the {what} of query {query} hold NaN: {remedy}.")


def _coherent_scores_at(scores: Tensor, degrees: Tensor, ks: tuple[int, ...], tau: Tau) -> Tensor:
    top, index = scores.topk(max(ks), dim=1)
    degrees = degrees.gather(1, index)
    return torch.stack([coherent_scores(top, degrees, k=k, tau=tau) for k in ks], 1)


def _ndcg_at(scores: Tensor, degrees: Tensor, ks: tuple[int, ...]) -> Tensor:
    return ndcg(scores, degrees)[:, torch.tensor(ks) - 1]


def _coherent_score(name: str, tau: Tau, candidates: str) -> Metric:
    return Metric(
        name=name,
        label="CS@K",
        definition=f"coherent score: how far the order of the top K follows the degrees of relevance, a mean over the {{query}}s for which it is "
        f"defined; of {candidates}",
        formula=f"mean(Kendall's tau-{tau}(scores, degrees) over the K best-scored)",
        unit="correlation",
        reads="degrees",
        function=lambda scores, degrees, ks: _coherent_scores_at(scores, degrees, ks, tau),
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
COHERENT_SCORE, COHERENT_SCORE_PAPER = _coherent_score("cs_at_K", "b", _FIRST), _coherent_score("cs_at_K_paper", "a", _ALL)
NDCG, NDCG_PAPER = _discounted_gain("ndcg_at_K", _FIRST), _discounted_gain("ndcg_at_K_paper", _ALL)
