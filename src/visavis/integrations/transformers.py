"""TrainerLoss: any objective as the ``compute_loss_func`` of ``transformers.Trainer``, for dual
encoders such as CLIP.

``Trainer(model, TrainingArguments(..., label_names=["labels"]),
compute_loss_func=TrainerLoss(Unified(reduction="half_mean")))``
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from visavis.core.errors import ShapeError, SpecError, format_value
from visavis.integrations.pytorch_metric_learning import validate_labels
from visavis.losses.objectives import Objective
from visavis.losses.pair_loss import PairLoss
from visavis.losses.targets import to_id_tensor


class TrainerLoss:
    """Loss called as ``loss(outputs, labels, num_items_in_batch)``, on the embeddings in the
    outputs of a model.

    A batch needs a column ``labels`` of ids. Equal ids belong together: number the rows if each
    pair is unique. Name the column in ``TrainingArguments(label_names=["labels"])``, otherwise
    Trainer drops it and evaluates without a loss. With gradient accumulation, the loss of a step is
    the mean over its batches, weighted by their size.

    Args:
        objective: An objective of the catalog.
        logit_scale: ``model.logit_scale``, the logarithm of a scale. An objective with a
            temperature then learns it. It is saved and resumed with the model.
        gather: See `PairLoss`.
        image_embeds: Name of the image embeddings in the outputs, one row per pair.
        text_embeds: Name of the text embeddings.

    Raises:
        SpecError: If logit_scale is not a floating-point tensor of one element.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        logit_scale: nn.Parameter | None = None,
        gather: bool | None = None,
        image_embeds: str = "image_embeds",
        text_embeds: str = "text_embeds",
    ) -> None:
        if logit_scale is not None and not (
            isinstance(logit_scale, Tensor)
            and logit_scale.numel() == 1
            and logit_scale.is_floating_point()
        ):
            raise SpecError(
                "logit_scale: expected model.logit_scale, the logarithm of a scale, got "
                f"{format_value(logit_scale)}. Pass this parameter."
            )
        self.loss = PairLoss(objective, scale=None if logit_scale is None else 1.0, gather=gather)
        self.logit_scale = logit_scale
        self.names = (image_embeds, text_embeds)

    def __call__(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Compute the loss of a batch.

        Args:
            outputs: Outputs of the model.
            labels: One id per pair.
            num_items_in_batch: Number of pairs of the step, with gradient accumulation.

        Returns:
            The loss, a scalar.

        Raises:
            ShapeError: If labels or embeddings are missing or do not match.
        """
        if labels is None:
            raise ShapeError(
                "labels: expected one id per row, got none. Add a column labels and set "
                "TrainingArguments(label_names=['labels'])."
            )
        ids = to_id_tensor(labels, "labels")
        embeddings = []
        named = outputs if isinstance(outputs, Mapping) else {}
        for name in self.names:
            if not isinstance(named.get(name), Tensor):
                available = ", ".join(named) or f"a {type(outputs).__name__}"
                raise ShapeError(
                    f"{name}: expected embeddings in the outputs of the model, got {available}. "
                    "Set TrainerLoss(image_embeds=, text_embeds=)."
                )
            validate_labels(ids, named[name], embeddings_name=name)
            embeddings.append(named[name])
        # Evaluation runs without gradient. It must not gather over ranks.
        self.loss.train(torch.is_grad_enabled())
        value = self.loss(
            *embeddings, ids, scale=None if self.logit_scale is None else self.logit_scale.exp()
        )
        if distributed.is_available() and distributed.is_initialized():
            value = value + sum(zero.to(value) for zero in _zero_terms(outputs))
        # Trainer sums the losses of the batches of a step.
        return value if num_items_in_batch is None else value * len(labels) / num_items_in_batch


def _zero_terms(outputs: Any) -> Iterator[Tensor]:
    """Yield a 0 on the graph of each output, because DistributedDataParallel waits for a gradient
    of every parameter behind one.
    """
    if isinstance(outputs, Tensor):
        if outputs.requires_grad:
            yield outputs[..., :0].sum() if outputs.dim() else 0 * outputs
    elif isinstance(outputs, Mapping | tuple | list):
        for part in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _zero_terms(part)
