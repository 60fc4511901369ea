"""Coherent score: does the whole top K follow the graded relevance, not only its first place? (Ladder loss, 2020)"""

from __future__ import annotations

import torch
from torch import Tensor

from visavis.errors import ShapeError


def coherent_scores(scores: Tensor, relevance: Tensor, *, k: int) -> Tensor:
    """CS@K ``[Q]``: Kendall's tau-b between the scores and the relevance of the K best-scored candidates of each query.

    scores, relevance: ``[Q, C]``; the query's own item counts too; K above C means C. NaN where the scores or the
    relevance are constant in the top K: undefined, so that a mean over queries is NaN as well.
    """
    from scipy.stats import kendalltau

    if scores.shape != relevance.shape:
        raise ShapeError(f"relevance has shape {list(relevance.shape)}, expected that of the scores, {list(scores.shape)}.")
    top, index = scores.topk(min(k, scores.shape[1]), dim=1)
    pairs = zip(top.cpu().numpy(), relevance.gather(1, index).cpu().numpy(), strict=True)
    return torch.tensor([kendalltau(*pair).statistic for pair in pairs], dtype=torch.float64)
