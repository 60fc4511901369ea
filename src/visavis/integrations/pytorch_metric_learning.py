"""MetricLoss: any objective with the interface of the losses of pytorch-metric-learning.

>>> import torch
>>> from visavis.objectives import TripletHN
>>> loss = MetricLoss(TripletHN())
>>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).item()
1.600000023841858
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from visavis.errors import ShapeError, VisavisError, format_value
from visavis.objectives import Objective
from visavis.pair_loss import LearnedScale, PairLoss
from visavis.targets import Ids, Targets, to_id_tensor


class MetricLoss(nn.Module):
    """Loss called as ``loss(embeddings, labels)``, or with ``ref_emb`` and ``ref_labels`` for two kinds of items.

    With ``reduction="half_mean"`` any objective has the magnitude of that library's losses, which are means. Sums, which
    retrieval papers train, are hundreds to thousands of times larger.

    Args:
        objective: An objective of the catalog.
        scale: See `PairLoss`.
        gather: See `PairLoss`.

    Differs from:
        pytorch-metric-learning, where references are never anchors: here both directions count. Tuples of a miner are not
        supported, because an objective selects its pairs itself.
    """

    def __init__(self, objective: Objective, scale: float | Tensor | LearnedScale | None = None, gather: bool | None = None) -> None:
        super().__init__()
        self.loss = PairLoss(objective, scale=scale, gather=gather)

    def forward(
        self,
        embeddings: Tensor,
        labels: Ids,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Ids | None = None,
    ) -> Tensor:
        """Compute the loss of a batch.

        Args:
            embeddings: Embeddings of shape ``[N, D]``.
            labels: One label per item. Equal labels belong together.
            indices_tuple: Not supported.
            ref_emb: References of shape ``[M, D]``. Every pair counts, even if both are the same tensors. None: the items are
                compared with each other, and the pair of an item with itself is ignored.
            ref_labels: One label per reference.

        Returns:
            The loss, a scalar.

        Raises:
            VisavisError: If indices_tuple is given.
            ShapeError: If the lengths do not match, or one of ref_emb and ref_labels is missing.
        """
        if indices_tuple is not None:
            raise VisavisError(
                "indices_tuple: expected None, got the tuples of a miner. Leave it out: the objective selects its pairs itself."
            )
        if (ref_emb is None) != (ref_labels is None):
            raise ShapeError("ref_emb, ref_labels: expected both, got one. Pass both, or neither to compare items with each other.")
        labels = to_id_tensor(labels, "labels")
        if ref_emb is None or ref_labels is None:
            return self_comparison_loss(self.loss, embeddings, labels)
        ref_labels = to_id_tensor(ref_labels, "ref_labels")
        validate_labels(labels, embeddings)
        validate_labels(ref_labels, ref_emb, "ref_labels", "ref_emb")
        return self.loss(embeddings, ref_emb, labels, ref_labels)


def self_comparison_loss(loss: PairLoss, embeddings: Tensor, labels: Tensor) -> Tensor:
    """Compute a loss with the items as queries and as candidates. The pair of an item with itself is ignored.

    Args:
        loss: The loss.
        embeddings: Embeddings of shape ``[N, D]``.
        labels: One label per item.

    Returns:
        The loss, a scalar.
    """
    validate_labels(labels, embeddings)
    return loss(embeddings, embeddings, targets=Targets(query_ids=labels, candidate_ids=labels, ignore=_is_same_item))


def validate_labels(labels: Tensor, embeddings: Tensor, labels_name: str = "labels", embeddings_name: str = "embeddings") -> None:
    """Check that there is one label per embedding.

    Args:
        labels: Labels of shape ``[N]``.
        embeddings: Embeddings of shape ``[N, D]``.
        labels_name: Name of the labels, for error messages.
        embeddings_name: Name of the embeddings.

    Raises:
        ShapeError: If the embeddings are not a matrix or the lengths differ.
    """
    if not isinstance(embeddings, Tensor) or embeddings.dim() != 2:
        raise ShapeError(f"{embeddings_name}: expected a tensor [N, D], got {format_value(embeddings)}.")
    if len(labels) != len(embeddings):
        raise ShapeError(f"{labels_name}: expected {len(embeddings)}, one per row of {embeddings_name}, got {len(labels)}.")


def _is_same_item(rows: Tensor, columns: Tensor) -> Tensor:
    """Whether the query is the candidate, bool ``[Q, C]``."""
    return rows[:, None] == columns
