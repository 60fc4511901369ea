"""Captions, scores and ranks of the splits of a run, by which an index of its model is calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visavis.core.progress import NoProgress, Progress
from visavis.evaluation.query_ranks import QueryRanks
from visavis.losses.corrections import Correction
from visavis.models.inference import score_all_pairs
from visavis.models.retriever import Retriever
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.evaluate_runs import evaluate_runs
from visavis.training.runs.open_run import open_run, read_run_recipe


class RunSplits:
    """The splits of the data of a run, and the best model of the run on them.

    Args:
        run: Run folder.
    """

    def __init__(self, run: Path):
        self.run = run

    @cached_property
    def _recipe(self) -> Recipe:
        return read_run_recipe(self.run)

    @property
    def validation_split(self) -> str:
        """Name of the validation split."""
        return self._recipe.evaluation.validation

    def captions(self, split: str, progress: Progress | None = None) -> Sequence[str]:
        """Read the captions of a split.

        Args:
            split: Name of the split.
            progress: Receives progress.

        Returns:
            The captions.

        Raises:
            DataError: If there is no such split.
        """
        data_module, _ = open_run(self.run, self._recipe, progress or NoProgress())
        return data_module.data.split(split).captions

    def scores(
        self, split: str, embedding_dim: int = 0, progress: Progress | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the scores of all captions of a split with all of its images.

        Args:
            split: Name of the split.
            embedding_dim: Matryoshka dimension of the vectors. 0: all dimensions.
            progress: Receives progress.

        Returns:
            Scores as an index computes them, and whether caption and image belong together, both of
            shape ``[texts, images]``.

        Raises:
            DataError: If there is no such split.
        """
        data_module, matcher = open_run(self.run, self._recipe, progress or NoProgress())
        data = data_module.data.split(split)
        visual, text = data_module.encode(matcher, data)
        if matcher.late_interaction is None:
            model = Retriever(matcher, data_module.processor).truncated_to(embedding_dim)
            scores = model.to_unit_rows(text) @ model.to_unit_rows(visual).T
        else:
            scores = score_all_pairs(matcher, visual, text).T
        image_of = torch.from_numpy(data.image_of)
        return scores, image_of[:, None] == torch.from_numpy(np.arange(len(data.images)))

    def query_ranks(
        self,
        split: str,
        correction: Correction | None,
        bank: Sequence[str],
        progress: Progress | None = None,
    ) -> QueryRanks:
        """Rank the images of a split for its captions, under the protocol ``plain``.

        Args:
            split: Name of the split.
            correction: Correction of the scores. None: there is none.
            bank: Texts that the correction learns from.
            progress: Receives progress.

        Returns:
            The ranks.

        Raises:
            DataError: If there is no such split, or the bank is empty.
        """
        result = evaluate_runs(
            [self.run],
            "plain",
            split,
            None,
            progress or NoProgress(),
            (),
            correction=correction,
            bank=bank,
        )
        return result.query_ranks
