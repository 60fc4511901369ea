"""Any objective as the ``compute_loss_func`` of ``transformers.Trainer``, for models of two towers such as CLIP.

``Trainer(model, TrainingArguments(..., label_names=["labels"]), compute_loss_func=TrainerLoss(Unified(reduction="half_mean")))``
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from visavis.engine import PairLoss
from visavis.errors import ShapeError, SpecError, in_the_words_of
from visavis.integrations.metric_learning import check_one_each
from visavis.objectives import Objective
from visavis.targets import as_ids


class TrainerLoss:
    """``loss(outputs, labels, num_items_in_batch)``: from the embeddings in a model's outputs, and ids as labels.

    objective: any of the catalog. logit_scale: ``model.logit_scale`` lets an objective with a temperature learn it: cosines
    are multiplied by its exponential; it is saved and resumed with the model. gather: as for PairLoss. image_embeds, text_embeds: the
    names of the two embeddings in the outputs, one row each for a pair.

    A batch needs a column ``labels`` of ids: equal ids belong together; number the rows where each pair stands alone.
    Name it in ``TrainingArguments(label_names=["labels"])``, or Trainer drops the column and evaluates without a loss. With
    accumulated gradients, the loss of a step is the mean over its batches, weighted by their size. Raises ShapeError, SpecError.
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
            isinstance(logit_scale, Tensor) and logit_scale.numel() == 1 and logit_scale.is_floating_point()
        ):
            raise SpecError(f"TrainerLoss got logit_scale={logit_scale!r}, expected model.logit_scale, the logarithm of a scale.")
        with in_the_words_of("TrainerLoss", "PairLoss"), in_the_words_of("TrainerLoss(logit_scale=)", "PairLoss(scale=)"):
            self.loss = PairLoss(objective, scale=None if logit_scale is None else 1.0, gather=gather)
        self.logit_scale = logit_scale
        self.names = (image_embeds, text_embeds)

    def __call__(self, outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        if labels is None:
            raise ShapeError(
                "TrainerLoss got no labels: give each row an id in a column labels, and TrainingArguments(label_names=['labels'])."
            )
        images, texts = (self._embeddings(outputs, name) for name in self.names)
        self.loss.train(torch.is_grad_enabled())  # evaluation runs without gradient and gathers nothing from other processes
        with in_the_words_of("TrainerLoss", "PairLoss"):
            ids = as_ids(labels, "labels")
            for items, name in zip((images, texts), self.names, strict=True):
                check_one_each(ids, items, items=name)
            value = self.loss(images, texts, ids, scale=None if self.logit_scale is None else self.logit_scale.exp())
        if distributed.is_available() and distributed.is_initialized():
            value = value + sum(zero.to(value) for zero in nothing_of(outputs))
        return value if num_items_in_batch is None else value * len(labels) / num_items_in_batch

    def _embeddings(self, outputs: Any, name: str) -> Tensor:
        if not isinstance(outputs, Mapping) or not isinstance(embeddings := outputs.get(name), Tensor):
            known = ", ".join(outputs) if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
            raise ShapeError(
                f"the model's outputs have no {name}, but {known}: name its embeddings, TrainerLoss(image_embeds=, text_embeds=)."
            )
        return embeddings


def nothing_of(outputs: Any) -> Iterator[Tensor]:
    """A 0 on the graph of each output: DDP waits for a gradient of every parameter that has a part in any of them."""
    if isinstance(outputs, Tensor):
        if outputs.requires_grad:
            yield outputs[..., :0].sum() if outputs.dim() else 0 * outputs
    elif isinstance(outputs, Mapping | tuple | list):
        for part in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from nothing_of(part)
