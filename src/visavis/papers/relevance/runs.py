"""Graded relevance of runs: agreement with human judgments, and coherence of ranked lists."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from visavis.core.errors import DataError, RunError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import find_source
from visavis.models.inference import device_score, score_indexed_pairs
from visavis.papers.relevance.base import ImageRelevance, RelevanceEstimator
from visavis.papers.relevance.catalog import named_estimator, parse_estimator
from visavis.papers.relevance.human_agreement import (
    HumanAgreement,
    find_human_judgments,
    measure_agreement,
    relevance_of_pairs,
)
from visavis.papers.relevance.ranked_lists import Ranker
from visavis.papers.relevance.supervision import GradedSupervision
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.open_run import open_run, read_run_recipe

CHECKED_CAPTIONS = 128
"""Number of captions whose relevance values are checked before ranked lists are compared."""


@torch.inference_mode()
def measure_run_agreement(
    folders: Sequence[Path], data: str | None, relevance: str | None, progress: Progress
) -> list[HumanAgreement]:
    """Measure the agreement of the best models of runs, and of a relevance estimator, with human
    judgments of the test split.
    """
    estimator = named_estimator(relevance) if relevance else None
    # Scores of the judged pairs by kind of judgments and run.
    scores: dict[str, dict[str, np.ndarray]] = {}
    fingerprint = ""
    for folder in folders:
        recipe = read_run_recipe(folder, data)
        data_module, matcher = open_run(folder, recipe, progress)
        split = data_module.data.split(recipe.evaluation.test)
        if fingerprint and split.fingerprint != fingerprint:
            raise RunError(
                f"{folder}: expected the data set of {folders[0]}, got another one. Pass the "
                "judged data set with --data."
            )
        fingerprint = split.fingerprint
        judgments = find_human_judgments(find_source(recipe.data.path), split)
        visual, text = data_module.encode(matcher, split)
        for rated in judgments:
            pairs = torch.from_numpy(rated.images), torch.from_numpy(rated.captions)
            pair_scores = score_indexed_pairs(
                matcher, visual, text, *pairs, memory=recipe.memory or None
            )
            scores.setdefault(rated.kind, {})[str(folder)] = pair_scores.double().numpy()
        progress.message(
            f"{folder}: scored {sum(len(rated.images) for rated in judgments):,} judged pairs"
        )
    if estimator is not None:
        image_relevance = estimator.for_dataset(split)
        for rated in judgments:
            scores[rated.kind][f"relevance by {estimator!r}"] = relevance_of_pairs(
                rated, image_relevance
            )
    return [
        agreement
        for rated in judgments
        for agreement in measure_agreement(rated, scores[rated.kind])
    ]


def open_rankers(
    runs: Sequence[Path],
    split: str | None,
    data: str | None,
    memory: MemoryLimit,
    progress: Progress,
) -> tuple[list[Ranker], Dataset, list[Recipe]]:
    """Open the best model of every run as a ranker of one split, by default the first run's test
    split. Return the rankers, the split, and the recipes.
    """
    recipes = [read_run_recipe(run, data, memory) for run in runs]
    split = split or recipes[0].evaluation.test
    names = [os.path.basename(os.path.realpath(run)) for run in runs]
    # Folders of one name in several places are named by their paths.
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    rankers = []
    datasets = []
    for run, name, recipe in zip(runs, names, recipes, strict=True):
        data_module, matcher = open_run(run, recipe, progress)
        datasets.append(data_module.data.split(split))
        trained_with = repr(recipe.phases[-1].objective) if recipe.phases else "zero-shot"
        rankers.append(
            Ranker(
                name,
                trained_with,
                *data_module.encode(matcher, datasets[-1]),
                device_score(matcher),
            )
        )
    for run, dataset in zip(runs, datasets, strict=True):
        if dataset.fingerprint != datasets[0].fingerprint:
            raise RunError(
                f"{run}: expected split {split} of {datasets[0].name}, which {runs[0]} ranks, got "
                f"another split {split} of {dataset.name}. "
                "Compare runs that rank the same images and captions, or pass --data."
            )
    return rankers, datasets[0], recipes


def check_relevance_varies(relevance: ImageRelevance, data: Dataset) -> None:
    """Raise DataError if the relevance of the first captions to all images is equal, or NaN."""
    values = relevance(
        torch.arange(len(data.images)), torch.arange(min(CHECKED_CAPTIONS, len(data.captions)))
    )
    if not values.min() < values.max():
        raise DataError(
            f"relevance: expected different values, got only values from {values.min():g} to "
            f"{values.max():g} for {data.name}. "
            "Choose another estimator with --relevance."
        )


def trained_on(recipe: Recipe, estimator: RelevanceEstimator) -> bool:
    """Return whether a phase of the training used an estimator."""
    return any(
        isinstance(phase.supervision, GradedSupervision)
        and parse_estimator(phase.supervision.relevance) == estimator
        for phase in recipe.phases
    )
