"""Example queries of a comparison: test captions sampled at random, and those that are hardest in
every seed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from visavis.core.encoded import Encoded
from visavis.core.progress import NoProgress, Progress
from visavis.data.dataset import Dataset
from visavis.evaluation.protocols import get_protocols, select_captions
from visavis.evaluation.query_ranks import read_query_ranks
from visavis.evaluation.trec import trec_rankings, write_trec
from visavis.losses.scoring import select_items
from visavis.models.base import Matcher, evaluation_mode
from visavis.models.inference import device_score, score_all_pairs
from visavis.research.experiments.comparison_result import Comparison
from visavis.research.experiments.grid import Setting
from visavis.research.experiments.jobs import RunOutcome
from visavis.training.recipes.recipe import Recipe
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.run_folder import RunFolder

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
        hardest: Captions of different images whose image has the highest mean rank over the seeds
            of the setting.
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
    recipe, test, (visual, text), matcher = _encode_test_split(best.folder)
    protocol = comparison.table.conditions.protocol
    ranks_of_runs = [
        read_query_ranks(RunFolder(run.folder).ranks)[protocol].text_ranks
        for run in comparison.runs(comparison.best)
    ]
    if any(len(ranks) != len(test.captions) for ranks in ranks_of_runs):
        return None
    mean_ranks = np.mean(ranks_of_runs, axis=0)
    sampled = np.random.default_rng(0).permutation(len(test.captions))[:num_queries]
    worst_first = np.argsort(-mean_ranks, kind="stable")
    # The position of the worst caption of each image.
    _, positions = np.unique(test.image_of[worst_first], return_index=True)
    hardest = worst_first[np.sort(positions)[:num_queries]]
    captions = torch.from_numpy(np.concatenate([sampled, hardest]))
    scores = score_all_pairs(matcher, visual, select_items(text, captions), recipe.memory or None)
    queries = [
        _example_query(test, int(caption), column, mean_ranks)
        for caption, column in zip(captions, scores.T, strict=True)
    ]
    return ExampleQueries(
        best.folder.name, test, tuple(queries[: len(sampled)]), tuple(queries[len(sampled) :])
    )


def write_trec_files(comparison: Comparison, progress: Progress) -> None:
    """Write TREC files of the best run of each choice into ``trec/`` of the comparison, unless they
    exist.

    Args:
        comparison: The comparison.
        progress: Receives the progress.
    """
    for number, setting in enumerate(comparison.selected):
        progress.update("lists", number, len(comparison.selected), 0)
        run = _best_run(comparison, setting)
        if os.path.exists(comparison.folder / "trec" / f"{run.folder.name}.i2t.run"):
            continue
        recipe, test, (visual, text), matcher = _encode_test_split(run.folder)
        [protocol] = [
            rules
            for rules in get_protocols(recipe.evaluation.protocols)
            if rules.name == comparison.table.conditions.protocol
        ]
        with evaluation_mode(matcher):
            lists = trec_rankings(
                visual, text, device_score(matcher), test, protocol, memory=recipe.memory or None
            )
        write_trec(comparison.folder / "trec", run.folder.name, lists)


def _best_run(comparison: Comparison, setting: Setting) -> RunOutcome:
    return max(comparison.runs(setting), key=lambda run: run.validation_rsum)


def _encode_test_split(run: Path) -> tuple[Recipe, Dataset, tuple[Encoded, Encoded], Matcher]:
    """The recipe of a run, its test split, the encoded split, and the model."""
    recipe = read_run_recipe(run)
    data_module, matcher = open_run(run, recipe, NoProgress())
    test = select_captions(
        data_module.data.split(recipe.evaluation.test), get_protocols(recipe.evaluation.protocols)
    )
    return recipe, test, data_module.encode(matcher, test), matcher


def _example_query(
    data: Dataset, caption: int, scores: torch.Tensor, ranks: Sequence[float]
) -> ExampleQuery:
    """The query of a caption, from its scores with all images and the ranks of all captions."""
    top_images = scores.argsort(descending=True, stable=True)[:NUM_IMAGES]
    images = tuple((int(image), scores[image].item()) for image in top_images)
    return ExampleQuery(
        data.captions[caption], int(data.image_of[caption]), float(ranks[caption]), images
    )
