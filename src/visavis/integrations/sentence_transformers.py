"""Any objective as a loss for SentenceTransformerTrainer.

``SentenceTransformerTrainer(model, args, train_dataset=..., loss=VisavisLoss(model, Unified()))``
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from visavis.engine import PairLoss
from visavis.errors import ShapeError
from visavis.integrations.metric_learning import compared_with_each_other
from visavis.objectives import Objective
from visavis.targets import as_ids

NOBODY = torch.iinfo(torch.int64).min  # the id of negatives, which belong to no anchor


class VisavisLoss(nn.Module):
    """A loss for models of sentence-transformers, in both directions, of texts, images or any other inputs they encode.

    model: the SentenceTransformer. objective, scale: as for PairLoss (scale = 1 / temperature); an ``nn.Parameter`` is trained.
    The columns of the dataset, in order: (anchor, positive), then any number of columns of negatives, which are candidates
    of every anchor and never queries; or one column alone with labels. A column ``label`` holds ids, whole numbers: rows of
    equal id belong together. Without it, each anchor belongs to its own positive. Scores are cosines.
    Raises ShapeError.
    """

    def __init__(self, model: nn.Module, objective: Objective, scale: float | Tensor | None = None) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self.loss = PairLoss(objective, scale=scale)

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        self.loss.train(self.model.training)  # the trainer switches the model alone
        anchors, *others = [self.model(features)["sentence_embedding"] for features in sentence_features]
        ids = None if labels is None else as_ids(labels, "labels")
        if not others:
            if ids is None:
                raise ShapeError("VisavisLoss got one column without labels: add a column of positives, or a column label of ids.")
            return compared_with_each_other(self.loss, anchors, ids)
        positives, *negatives = others
        if not negatives:
            return self.loss(anchors, positives, ids)
        extra = torch.cat(negatives)
        return self.loss(anchors, positives, ids, extra_texts=extra, extra_text_ids=[NOBODY] * len(extra))

    def get_config_dict(self) -> dict[str, Any]:
        """The loss as model cards describe it."""
        scale = self.loss.scale
        return {
            "objective": repr(self.objective),
            "scale": scale.item() if isinstance(scale, Tensor) else scale,
            "similarity_fct": "cos_sim",
        }

    @property
    def citation(self) -> str:
        """A BibTeX entry for the source of the objective."""
        source = re.search(r"Source: (.*?)(?=\n[A-Z][a-z ]+:|\Z)", inspect.getdoc(type(self.objective)) or "", re.DOTALL)
        note = f"Objective {self.objective!r}" + (f"; source: {' '.join(source[1].split())}" if source else "")
        return f"\n@misc{{visavis,\n    title = {{visavis: vision-language retrieval}},\n    note = {{{note}}},\n}}\n"
