"""Captions, scores and ranks of the splits of a run, by which an index of its model is calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from visavis.core.progress import NoProgress, Progress
from visavis.evaluation.query_ranks import QueryRanks
from visavis.losses.corrections import Correction
from visavis.models.inference import score_all_pairs
from visavis.models.retriever import Retriever
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.evaluate_runs import EvaluationOptions, evaluate_runs
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
        """Read the captions of a split."""
        data_module, _ = open_run(self.run, self._recipe, progress or NoProgress())
        return data_module.data.split(split).captions

    def scores(
        self, split: str, embedding_dim: int = 0, progress: Progress | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Compute the scores of all captions of a split with all of its images, as an index does,
        and whether both belong together. Both have the shape [texts, images].
        """
        data_module, matcher = open_run(self.run, self._recipe, progress or NoProgress())
        data = data_module.data.split(split)
        visual, text = data_module.encode(matcher, data)
        if matcher.late_interaction is None:
            model = Retriever(matcher, data_module.processor).truncated_to(embedding_dim)
            scores = model.to_unit_rows(text) @ model.to_unit_rows(visual).T
        else:
            scores = score_all_pairs(matcher, visual, text).T
        image_of = np.asarray(data.image_of)
        return scores.numpy(), image_of[:, None] == np.arange(len(data.images))

    def query_ranks(
        self,
        split: str,
        correction: Correction | None,
        bank: Sequence[str],
        progress: Progress | None = None,
    ) -> QueryRanks:
        """Rank the images of a split for its captions, under the protocol ``plain``."""
        options = EvaluationOptions(
            protocol="plain", split=split, sections=(), correction=correction, bank=bank
        )
        return evaluate_runs([self.run], options, progress or NoProgress()).query_ranks
