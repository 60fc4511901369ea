"""Any objective, called as the losses of pytorch-metric-learning are.

>>> import torch
>>> from visavis.objectives import TripletHN
>>> loss = MetricLoss(TripletHN())
>>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).item()
1.600000023841858
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from visavis.engine import LearnedScale, PairLoss
from visavis.errors import ShapeError, VisavisError, in_the_words_of, shown
from visavis.objectives import Objective
from visavis.targets import Ids, Targets, as_ids


class MetricLoss(nn.Module):
    """``loss(embeddings, labels)``, or ``loss(embeddings, labels, ref_emb=, ref_labels=)`` for two kinds of items.

    objective, scale, gather: as for PairLoss. embeddings ``[N, D]``, labels ``[N]``: equal labels belong together. Without ref_emb
    the items are compared with each other; the pair of an item with itself is ignored. With ref_emb ``[M, D]`` and ref_labels ``[M]``
    every pair counts, also where both are the same tensors. Returns a scalar. Raises ShapeError, SpecError.
    Advice: ``reduction="half_mean"`` brings any objective to the magnitude of that library's losses, which are means; the sums that
    papers of retrieval train are hundreds to thousands of times larger.
    Differs from: pytorch-metric-learning, where references are never anchors: here both directions count. A miner's tuples
    are refused, since an objective selects its pairs itself.
    """

    def __init__(self, objective: Objective, scale: float | Tensor | LearnedScale | None = None, gather: bool | None = None) -> None:
        super().__init__()
        with in_the_words_of("MetricLoss", "PairLoss"):
            self.loss = PairLoss(objective, scale=scale, gather=gather)

    def forward(
        self,
        embeddings: Tensor,
        labels: Ids,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Ids | None = None,
    ) -> Tensor:
        if indices_tuple is not None:
            raise VisavisError("MetricLoss got a miner's indices_tuple: leave it out, the objective itself chooses the pairs it pushes.")
        if (ref_emb is None) != (ref_labels is None):
            raise ShapeError("MetricLoss got one of ref_emb and ref_labels: give both, or neither to compare items with each other.")
        with in_the_words_of("MetricLoss", "PairLoss"):
            labels = as_ids(labels, "labels")
            if ref_emb is None or ref_labels is None:
                return compared_with_each_other(self.loss, embeddings, labels)
            ref_labels = as_ids(ref_labels, "ref_labels")
            check_one_each(labels, embeddings)
            check_one_each(ref_labels, ref_emb, "ref_labels", "ref_emb")
            return self.loss(embeddings, ref_emb, labels, ref_labels)


def compared_with_each_other(loss: PairLoss, embeddings: Tensor, labels: Tensor) -> Tensor:
    """The loss with the items as queries and as candidates; an item with itself is neither positive nor negative."""
    check_one_each(labels, embeddings)
    return loss(embeddings, embeddings, targets=Targets(query_ids=labels, candidate_ids=labels, ignore=same_item))


def check_one_each(labels: Tensor, embeddings: Tensor, name: str = "labels", items: str = "embeddings") -> None:
    if not isinstance(embeddings, Tensor) or embeddings.dim() != 2:
        raise ShapeError(f"{items} are {shown(embeddings)}, expected a tensor [N, D].")
    if len(labels) != len(embeddings):
        raise ShapeError(f"{len(labels)} {name} for {len(embeddings)} {items}: give one label for each.")


def same_item(rows: Tensor, columns: Tensor) -> Tensor:
    """Bool ``[Q, C]``: the query is the candidate."""
    return rows[:, None] == columns
