"""Supervision by a teacher: the scores of another model for every pair of a batch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from visavis.core.encoded import Encoded
from visavis.core.errors import RecipeError, RunError
from visavis.core.fields import NonNegativeFloat, PositiveFloat, validate_fields
from visavis.data.dataset import Dataset
from visavis.data.loader import Batch, Loader
from visavis.losses.objectives import Distillation, Objective
from visavis.losses.targets import ANNOTATIONS, Annotation, Targets
from visavis.models.encoders.pretrained_files import (
    find_dual_encoder,
    find_embedding_model,
    model_files,
)
from visavis.training.supervision.base import PairSupervision, Supervision, TrainingContext


@dataclass(kw_only=True)
class DistillationSupervision(Supervision):
    """Pairs, and a teacher's score of every caption of a batch with every image.

    The loss is the phase's objective plus ``weight`` times `Distillation`. If the objective
    itself uses relevance, such as ``Distillation`` alone, ``Ladder`` or ``GradedVLC``, the scores
    are its relevance, and nothing is added. The validation loss is the objective alone.

    The teacher encodes the images without augmentation, once per phase.

    Attributes:
        teacher: Run, ensemble, or pretrained model, which encodes the data of the training. Or
            arrays for all images and captions of the data set in its order: a folder with the
            embeddings ``images.npy`` ``[images, D]`` and ``texts.npy`` ``[captions, D]``, whose
            cosines are the scores, or a file ``.npy`` of scores ``[images, captions]``.
        weight: Factor of the added loss, which has the reduction of the objective.
        tau: Temperature of the scores in the added loss.
        teacher_tau: Temperature of the teacher's scores in the added loss.
        by: "ids" or "position". See `PairSupervision`.

    Source:
        Hinton et al., Distilling the Knowledge in a Neural Network (2015).
    """

    path_fields: ClassVar[tuple[str, ...]] = ("teacher",)

    teacher: str = ""
    weight: NonNegativeFloat = 1.0
    tau: PositiveFloat = 0.025
    teacher_tau: PositiveFloat = 0.025
    by: Literal["ids", "position"] = "ids"

    def __post_init__(self) -> None:
        validate_fields(self)

    @property
    def _supplied(self) -> tuple[Annotation, ...]:
        return tuple(annotation for annotation in ANNOTATIONS if annotation.name == "relevance")

    def unused_annotations(self, objective: Objective) -> tuple[str, ...]:
        """Return none: an added objective uses the scores where the phase's own does not."""
        return ()

    def added_objective(self, objective: Objective) -> tuple[float, Objective] | None:
        """Add `Distillation` to an objective that uses no relevance. See
        `Supervision.added_objective`.
        """
        if "relevance" in objective.used_annotations:
            return None
        return self.weight, Distillation(
            tau=self.tau, teacher_tau=self.teacher_tau, reduction=objective.reduction
        )

    def check(self, train: Loader, validation: Loader) -> None:
        """Check that there is a teacher. See `Supervision.check`."""
        if not self.teacher:
            raise RecipeError(
                "DistillationSupervision: expected a teacher, got none. Set teacher='RUN'."
            )

    def files(self, data: Dataset) -> list[Path]:
        """List the arrays, or the weights of the teacher. See `Supervision.files`."""
        if not self.teacher:
            return []
        path = Path(self.teacher)
        if os.path.isfile(path):
            return [path]
        patterns = ("*.npy", "model/*", "*/model/*")  # arrays, a run, an ensemble
        files = (sorted(filter(os.path.isfile, path.glob(pattern))) for pattern in patterns)
        if found := next(filter(None, files), None):
            return found
        if not (find_dual_encoder(self.teacher) or find_embedding_model(self.teacher)):
            raise RunError(
                f"teacher: expected a run, an ensemble, a pretrained model, a folder with images.npy "
                f"and texts.npy, or a file of scores, got {self.teacher}. Name one of them."
            )
        return model_files(self.teacher)

    def begin_phase(self, context: TrainingContext, state: dict[str, Tensor]) -> None:
        """Open the teacher for both splits. See `Supervision.begin_phase`."""
        self._context = context
        self._scores = context.open_teacher(self.teacher)

    def targets(self, visual: Encoded, text: Encoded, batch: Batch) -> Targets:
        """Build targets with the teacher's scores. See `Supervision.targets`."""
        scores = self._scores[0 if self._context.is_training_batch(batch) else 1]

        def relevance(rows: Tensor, columns: Tensor) -> Tensor:
            return scores(rows.cpu(), columns.cpu()).to(rows.device)

        # Positions in the split, which are valid in all processes.
        return replace(
            PairSupervision(by=self.by).targets(visual, text, batch),
            relevance=relevance,
            rows=torch.from_numpy(batch.images),
            columns=torch.from_numpy(batch.captions),
        )
