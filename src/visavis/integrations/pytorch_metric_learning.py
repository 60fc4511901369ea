"""MetricLoss, CrossBatchMemory and SelfSupervisedLoss: any objective with the interfaces of
pytorch-metric-learning.

>>> import torch
>>> from visavis.losses.objectives import TripletHN
>>> loss = MetricLoss(TripletHN())
>>> loss(torch.eye(4), torch.tensor([0, 0, 1, 1])).item()
1.600000023841858
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn

from visavis.core.encoded import Vectors
from visavis.core.errors import ShapeError, VisavisError, format_value
from visavis.core.process_group import select_process_group
from visavis.losses.objectives import Objective
from visavis.losses.pair_loss import LearnedScale, PairLoss, cosine
from visavis.losses.targets import Ids, PairwiseAnnotation, Targets, to_id_tensor


class MetricLoss(nn.Module):
    """Loss called as ``loss(embeddings, labels)``, or with ``ref_emb`` and ``ref_labels`` for two
    kinds of items.

    With ``reduction="half_mean"`` any objective has the magnitude of that library's losses, which
    are means. Sums, which retrieval papers train, are hundreds to thousands of times larger.

    Args:
        objective: An objective of the catalog.
        scale: See `PairLoss`.
        gather: See `PairLoss`.

    Differs from:
        pytorch-metric-learning, where references are never anchors: here both directions count.
        Tuples of a miner are not supported, because an objective selects its pairs itself.
    """

    def __init__(
        self,
        objective: Objective,
        scale: float | Tensor | LearnedScale | None = None,
        gather: bool | None = None,
    ) -> None:
        super().__init__()
        self.loss = PairLoss(objective, scale=scale, gather=gather)

    def forward(
        self,
        embeddings: Tensor,
        labels: Ids,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Ids | None = None,
        relevance: PairwiseAnnotation | None = None,
    ) -> Tensor:
        """Compute the loss of a batch.

        Args:
            embeddings: Embeddings of shape ``[N, D]``.
            labels: One label per item. Equal labels belong together.
            indices_tuple: Not supported.
            ref_emb: References of shape ``[M, D]``. Every pair counts, even if both are the same
                tensors. None: the items are compared with each other, and the pair of an item with
                itself is ignored.
            ref_labels: One label per reference.
            relevance: Graded relevance of items to items ``[N, N]``, or to references ``[N, M]``, for
                objectives such as Ladder.

        Returns:
            The loss, a scalar.

        Raises:
            MissingSupervision: If the objective needs relevance and gets none.
            VisavisError: If indices_tuple is given.
            ShapeError: If the lengths do not match, or one of ref_emb and ref_labels is missing.
        """
        if indices_tuple is not None:
            raise VisavisError(
                "indices_tuple: expected None, got the tuples of a miner. Leave it out: the "
                "objective selects its pairs itself."
            )
        if (ref_emb is None) != (ref_labels is None):
            raise ShapeError(
                "ref_emb, ref_labels: expected both, got one. Pass both, or neither to compare "
                "items with each other."
            )
        labels = to_id_tensor(labels, "labels")
        if ref_emb is None or ref_labels is None:
            return self_comparison_loss(self.loss, embeddings, labels, relevance=relevance)
        ref_labels = to_id_tensor(ref_labels, "ref_labels")
        validate_labels(labels, embeddings)
        validate_labels(ref_labels, ref_emb, "ref_labels", "ref_emb")
        if relevance is None:
            return self.loss(embeddings, ref_emb, labels, ref_labels)
        targets = Targets(query_ids=labels, candidate_ids=ref_labels, relevance=relevance)
        return self.loss(embeddings, ref_emb, targets=targets)


class SelfSupervisedLoss(nn.Module):
    """Loss of items and their augmented views, called as ``loss(embeddings, ref_emb)``. Row i of
    both belong together.

    Args:
        loss: The loss.
        symmetric: Whether items are also compared with items, and views with views.

    Differs from:
        pytorch-metric-learning with symmetric=False, where views are never anchors.
    """

    def __init__(self, loss: MetricLoss, symmetric: bool = True) -> None:
        super().__init__()
        self.loss = loss
        self.symmetric = symmetric

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
        """Compute the loss of a batch.

        Args:
            embeddings: Embeddings of shape ``[N, D]``.
            ref_emb: Embeddings of the views, shape ``[N, D]``.

        Returns:
            The loss, a scalar.

        Raises:
            ShapeError: If the lengths differ.
        """
        # Rows of two ranks must not have equal ids.
        first_id = (
            distributed.get_rank() << 32
            if distributed.is_available() and distributed.is_initialized()
            else 0
        )
        ids = first_id + torch.arange(len(embeddings))
        validate_labels(ids, ref_emb, "embeddings", "ref_emb")
        # Row i of both has the same id.
        if self.symmetric:
            return self.loss(torch.cat([embeddings, ref_emb]), ids.repeat(2))
        return self.loss(embeddings, ids, ref_emb=ref_emb, ref_labels=ids)


class CrossBatchMemory(nn.Module):
    """Loss of a batch as queries, with the latest items of all batches as candidates, detached.

    The batch enters the memory first. The pair of an item with itself is ignored. Over several
    ranks, the memory of each rank holds the items of all ranks, and the gradient is exact under the
    averaging of DistributedDataParallel.

    Args:
        loss: The loss.
        embedding_size: Number of dimensions.
        memory_size: Number of items in the memory.

    Differs from:
        pytorch-metric-learning, which also takes a miner. An objective selects its pairs itself.
    """

    embedding_memory: Tensor
    label_memory: Tensor
    num_seen: Tensor

    def __init__(self, loss: MetricLoss, embedding_size: int, memory_size: int = 1024) -> None:
        super().__init__()
        self.loss = loss
        self.register_buffer("embedding_memory", torch.zeros(memory_size, embedding_size))
        self.register_buffer("label_memory", torch.zeros(memory_size, dtype=torch.long))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.long))

    def forward(self, embeddings: Tensor, labels: Ids) -> Tensor:
        """Add a batch to the memory and compute its loss.

        Args:
            embeddings: Embeddings of shape ``[N, D]``.
            labels: One label per item.

        Returns:
            The loss, a scalar.

        Raises:
            ShapeError: If the lengths do not match, or the batch is larger than the memory.
        """
        labels = to_id_tensor(labels, "labels")
        pair_loss = self.loss.loss
        validate_labels(labels, embeddings)
        embeddings, labels = self._gather(embeddings, labels.to(embeddings.device))
        size = len(self.embedding_memory)
        if len(embeddings) > size:
            raise ShapeError(
                f"memory_size: expected at least the {len(embeddings)} items of a batch, got "
                f"{size}. Set a larger memory."
            )
        num_seen = int(self.num_seen)
        # A ring: the oldest items are overwritten.
        slots = (num_seen + torch.arange(len(embeddings), device=embeddings.device)) % size
        self.embedding_memory = self.embedding_memory.to(embeddings).index_copy(
            0, slots, embeddings.detach()
        )
        self.label_memory = self.label_memory.to(embeddings.device).index_copy(0, slots, labels)
        self.num_seen += len(embeddings)
        filled = slice(0, min(num_seen + len(embeddings), size))
        # [queries, candidates]: an item and itself in the memory.
        same = slots[:, None] == torch.arange(size, device=slots.device)[None, filled]
        targets = Targets(query_ids=labels, candidate_ids=self.label_memory[filled], ignore=same)
        logits = pair_loss.logits(cosine(embeddings, self.embedding_memory[filled]))
        terms = pair_loss.objective.terms(*pair_loss.objective.prepare(logits, targets))
        # Twice, as MetricLoss counts an item as a row and as a column.
        return pair_loss.objective.reduce(terms, terms)

    def _gather(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batches of all ranks. The gradient of this rank's items is scaled for the mean
        over ranks.
        """
        group = select_process_group(
            self.loss.loss.gather,
            embeddings.device,
            training=self.training,
            describe_batch=lambda: (
                f"CrossBatchMemory of {self.loss.loss.objective!r}, {embeddings.shape[1]} x "
                f"{embeddings.dtype}"
            ),
        )
        gathered, local_slice = group.all_gather_items(Vectors(embeddings.detach()))
        all_items: Any = gathered.vectors
        if group.world_size == 1:
            return embeddings, labels
        scaled = group.scale_for_ddp_mean(embeddings)
        # The values of the items, and the scaled gradient.
        exact = embeddings.detach() + (scaled - scaled.detach())
        return torch.cat(
            [all_items[: local_slice.start], exact, all_items[local_slice.stop :]]
        ), group.all_gather_rows(labels)


def self_comparison_loss(
    loss: PairLoss,
    embeddings: Tensor,
    labels: Tensor,
    relevance: PairwiseAnnotation | None = None,
) -> Tensor:
    """Compute a loss with items ``[N, D]`` as queries and as candidates. Relevance: ``[N, N]``."""
    validate_labels(labels, embeddings)
    targets = Targets(
        query_ids=labels,
        candidate_ids=labels,
        # The pair of an item with itself, bool [Q, C].
        ignore=lambda rows, columns: rows[:, None] == columns,
        relevance=relevance,
    )
    return loss(embeddings, embeddings, targets=targets)


def validate_labels(
    labels: Tensor,
    embeddings: Tensor,
    labels_name: str = "labels",
    embeddings_name: str = "embeddings",
) -> None:
    """Check that there is one label ``[N]`` per embedding ``[N, D]``."""
    if not isinstance(embeddings, Tensor) or embeddings.dim() != 2:
        raise ShapeError(
            f"{embeddings_name}: expected a tensor [N, D], got {format_value(embeddings)}. Pass "
            "one vector per item."
        )
    if len(labels) != len(embeddings):
        raise ShapeError(
            f"{labels_name}: expected {len(embeddings)}, one per row of {embeddings_name}, got "
            f"{len(labels)}. Pass equal lengths."
        )
