"""Norms of the gradients of an optimizer step on their way: at the scores, at the embeddings after
and before normalization, and at the parameters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from visavis.core.encoded import Encoded
from visavis.core.process_group import ProcessGroup
from visavis.losses.pair_loss import PairLoss
from visavis.losses.targets import Targets
from visavis.models.base import observe_embeddings

ENCODERS = ("visual", "text")
QUERY_NORM = "scores_per_query"


class EncodedBatch(NamedTuple):
    """What the loss of a batch reads.

    Attributes:
        visual: Encoded images.
        text: Encoded texts.
        targets: Their targets.
    """

    visual: Encoded
    text: Encoded
    targets: Targets


def is_recorded(step: int, num_steps: int, every: int) -> bool:
    """Whether the gradients of an optimizer step are recorded.

    Args:
        step: First batch of the optimizer step, counted over the run.
        num_steps: Number of its batches.
        every: Steps between records. 0: none.

    Returns:
        Whether one of the batches is a multiple of ``every``.

    Example:
        >>> [step for step in range(0, 12, 2) if is_recorded(step, 2, every=5)]
        [0, 4, 10]
    """
    return every > 0 and -step % every < num_steps


class GradientNorms:
    """Norms of the gradients of one optimizer step, over all of its batches and processes.

    Names: ``scores``: norm over the scores of both directions. ``scores_per_query``: mean over
    queries of the norm of the gradient of a query's own loss terms. ``<encoder>_normalized``: norm
    over the normalized embeddings of a batch. ``<encoder>_tangent``: its component orthogonal to
    the embeddings. ``<encoder>_embedding``: norm over the embeddings before normalization, as the
    backward pass computes it. ``<part>_parameters``: norm over the parameters of a part, before
    clipping.

    The first four are those of the objective, in float32. The others include all losses of the
    training.

    Args:
        group: Processes that train together.
        loss_scale: Factor of float16 in gradients of the backward pass.
    """

    def __init__(self, group: ProcessGroup, loss_scale: float):
        self.group = group
        # The loss multiplies gradients by the number of processes, whose mean is then formed.
        self.factor = 1 / (loss_scale * group.world_size)
        self.parts = defaultdict[str, list[Tensor]](list)  # norms of this process
        self.query_norms: list[Tensor] = []
        self.parameters: dict[str, float] = {}
        self.batch: EncodedBatch | None = None

    def observe(self, encoder: str) -> AbstractContextManager[None]:
        """Observe the gradient of the embeddings that an encoder computes within a block."""

        def add_norm(gradient: Tensor) -> None:
            self.parts[f"{encoder}_embedding"].append(vector_norm(gradient) * self.factor)

        def add_hook(rows: Tensor) -> None:
            if rows.requires_grad:
                rows.register_hook(add_norm)

        return observe_embeddings(add_hook)

    def add_batch(self, loss: PairLoss, factor: float) -> None:
        """Add the gradients at the scores and at the normalized embeddings of the batch."""
        assert self.batch is not None
        gradients = loss.score_gradients(*self.batch)
        for norms, weight in zip(gradients.query_norms, gradients.term_weights, strict=True):
            self.parts["scores"].append(vector_norm(norms) * (weight * factor))
            self.query_norms.append(norms)
        for encoder, vectors in zip(ENCODERS, gradients.vectors or (), strict=False):
            for name, gradient in vectors._asdict().items():
                self.parts[f"{encoder}_{name}"].append(vector_norm(gradient) * factor)
        self.batch = None

    def summarize(self) -> dict[str, float]:
        """Sum over batches and processes. {} if a norm is not finite, as where float16 overflows."""
        names = sorted(self.parts)
        sums = [torch.stack(self.parts[name]).cpu().double().square().sum() for name in names]
        queries = torch.cat([torch.zeros(0), *(each.cpu() for each in self.query_norms)]).double()
        totals = self.group.all_reduce_sum(
            torch.tensor(
                [*map(float, sums), float(queries.sum()), len(queries)],
                dtype=torch.float64,
            )
        ).tolist()
        norms = {name: math.sqrt(total) for name, total in zip(names, totals, strict=False)}
        if totals[-1]:
            norms[QUERY_NORM] = totals[-2] / totals[-1]
        norms |= self.parameters
        return norms if all(map(math.isfinite, norms.values())) else {}


def mean_norms(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average the norms that the records of all steps have."""
    names = [name for name in records[0] if all(name in record for record in records)]
    return {
        name: sum(record[name] for record in records) / len(records)
        for name in names
        if name != "step"
    }
