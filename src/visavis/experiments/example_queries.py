"""Example queries of a comparison: test captions sampled at random, and those that are hardest in every seed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from visavis.data.dataset import Dataset
from visavis.evaluation.protocols import get_protocols, select_captions
from visavis.evaluation.results import read_query_ranks
from visavis.evaluation.trec import trec_rankings, write_trec
from visavis.experiments.comparison_result import Comparison
from visavis.experiments.grid import Setting
from visavis.experiments.jobs import RunOutcome
from visavis.models.base import Matcher, evaluation_mode
from visavis.models.inference import device_score, score_all_pairs
from visavis.progress import NoProgress, Progress
from visavis.recipes.recipe import Recipe
from visavis.runs.open_run import open_run, read_run_recipe
from visavis.runs.run_folder import RunFolder
from visavis.scoring import select_items
from visavis.types import Encoded

NUM_IMAGES = 5
"""Number of images shown per query."""


@dataclass(frozen=True)
class ExampleQuery:
    """A caption and the first images for it.

    Attributes:
        text: The caption.
        target_image: Index of the image that the caption describes.
        target_rank: Rank of that image, as the mean over seeds.
        images: Index and score of the first images.
    """

    text: str
    target_image: int
    target_rank: float
    images: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class ExampleQueries:
    """Example queries of one run.

    Attributes:
        run: Name of the run.
        data: The split that was searched.
        random: Captions sampled at random.
        hardest: Captions of different images whose image has the highest mean rank over the seeds of the setting.
    """

    run: str
    data: Dataset
    random: tuple[ExampleQuery, ...]
    hardest: tuple[ExampleQuery, ...]


def example_queries(comparison: Comparison, num_queries: int = 4) -> ExampleQueries | None:
    """Collect example queries of the best run of the best setting, chosen on validation.

    Args:
        comparison: The comparison.
        num_queries: Number of random and of hardest queries.

    Returns:
        The queries, or None if the protocol does not rank the image of every caption.
    """
    best = _best_run(comparison, comparison.best)
    recipe, test, (visual, text), matcher = _encoded(best.folder)
    protocol = comparison.table.conditions.protocol
    ranks = [read_query_ranks(RunFolder(one.folder).ranks)[protocol].text_ranks for one in comparison.runs(comparison.best)]
    if any(len(of_run) != len(test.captions) for of_run in ranks):
        return None
    mean = np.mean(ranks, axis=0)
    drawn = np.random.default_rng(0).permutation(len(test.captions))[:num_queries]
    # The hardest captions of different images.
    by_rank = np.argsort(-mean, kind="stable")
    hardest = by_rank[np.sort(np.unique(test.image_of[by_rank], return_index=True)[1])[:num_queries]]
    chosen = torch.from_numpy(np.concatenate([drawn, hardest]))
    scores = score_all_pairs(matcher, visual, select_items(text, chosen), recipe.memory or None)
    found = [_answered(test, int(caption), column, mean) for caption, column in zip(chosen, scores.T, strict=True)]
    return ExampleQueries(best.folder.name, test, tuple(found[: len(drawn)]), tuple(found[len(drawn) :]))


def write_trec_files(comparison: Comparison, progress: Progress) -> None:
    """Write TREC files of the best run of each choice into ``trec/`` of the comparison, unless they exist.

    Args:
        comparison: The comparison.
        progress: Receives the progress.
    """
    for number, setting in enumerate(comparison.selected):
        progress.update("lists", number, len(comparison.selected), 0)
        run = _best_run(comparison, setting)
        if os.path.exists(comparison.folder / "trec" / f"{run.folder.name}.i2t.run"):
            continue
        recipe, test, (visual, text), matcher = _encoded(run.folder)
        [protocol] = [rules for rules in get_protocols(recipe.evaluation.protocols) if rules.name == comparison.table.conditions.protocol]
        with evaluation_mode(matcher):
            lists = trec_rankings(visual, text, device_score(matcher), test, protocol, memory=recipe.memory or None)
        write_trec(comparison.folder / "trec", run.folder.name, lists)


def _best_run(comparison: Comparison, setting: Setting) -> RunOutcome:
    return max(comparison.runs(setting), key=lambda one: one.validation_rsum)


def _encoded(run: Path) -> tuple[Recipe, Dataset, tuple[Encoded, Encoded], Matcher]:
    """The recipe of a run, its test split, the encoded split, and the model."""
    recipe = read_run_recipe(run)
    data_module, matcher = open_run(run, recipe, NoProgress())
    test = select_captions(data_module.data.split(recipe.evaluation.test), get_protocols(recipe.evaluation.protocols))
    return recipe, test, data_module.encode(matcher, test), matcher


def _answered(data: Dataset, caption: int, scores: torch.Tensor, ranks: Sequence[float]) -> ExampleQuery:
    first = scores.argsort(descending=True, stable=True)[:NUM_IMAGES]
    images = tuple((int(image), scores[image].item()) for image in first)
    return ExampleQuery(data.captions[caption], int(data.image_of[caption]), float(ranks[caption]), images)
