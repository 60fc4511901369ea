"""Any objective as the ``compute_loss_func`` of ``transformers.Trainer``, for models of two towers such as CLIP.

``Trainer(model, TrainingArguments(..., label_names=["labels"]), compute_loss_func=TrainerLoss(Unified()), ...)``
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from visavis.engine import PairLoss
from visavis.errors import ShapeError
from visavis.objectives import Objective
from visavis.targets import as_ids


class TrainerLoss:
    """``loss(outputs, labels, num_items_in_batch)``: from the embeddings in a model's outputs, and ids as labels.

    objective: any of the catalog. logit_scale: ``model.logit_scale`` lets an objective with a temperature learn it: cosines
    are multiplied by its exponential. image_embeds, text_embeds: the names of the two embeddings in the outputs, one row
    each for a pair.

    A batch needs a column ``labels`` of ids: equal ids belong together; number the rows where each pair stands alone.
    Name it in ``TrainingArguments(label_names=["labels"])``, or Trainer drops the column and evaluates without a loss. With
    accumulated gradients, the loss of a step is the mean over its batches, weighted by their size. Raises ShapeError.
    """

    def __init__(
        self,
        objective: Objective,
        *,
        logit_scale: nn.Parameter | None = None,
        image_embeds: str = "image_embeds",
        text_embeds: str = "text_embeds",
    ) -> None:
        self.objective = objective
        self.logit_scale = logit_scale
        self.names = (image_embeds, text_embeds)
        self._loss()  # refuses what does not fit before the training begins

    def __call__(self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        if labels is None:
            raise ShapeError(
                "TrainerLoss got no labels: give each row an id in a column labels, and TrainingArguments(label_names=['labels'])."
            )
        images, texts = (self._embeddings(outputs, name) for name in self.names)
        loss = self._loss().train(torch.is_grad_enabled())  # evaluation runs without gradient and gathers nothing from other processes
        value = loss(images, texts, as_ids(labels, "labels"))
        return value if num_items_in_batch is None else value * len(labels) / num_items_in_batch

    def _loss(self) -> PairLoss:
        return PairLoss(self.objective, scale=None if self.logit_scale is None else self.logit_scale.exp())

    def _embeddings(self, outputs: Any, name: str) -> Tensor:
        if not isinstance(outputs, Mapping) or not isinstance(embeddings := outputs.get(name), Tensor):
            known = ", ".join(outputs) if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
            raise ShapeError(
                f"the model's outputs have no {name}, but {known}: name its embeddings, TrainerLoss(image_embeds=, text_embeds=)."
            )
        return embeddings
