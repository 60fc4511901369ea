"""Graded relevance of runs: agreement with human judgments, and coherence of ranked lists."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from visavis import storage, supervision
from visavis.data.dataset import Dataset
from visavis.data.dataset_reader import find_source
from visavis.errors import DataError, RunError, VisavisError, format_value
from visavis.graded.estimators.base import CaptionAggregation, ImageRelevance, RelevanceEstimator
from visavis.graded.estimators.catalog import CATALOG
from visavis.graded.human_agreement import HumanAgreement, find_human_judgments, measure_agreement, relevance_of_pairs
from visavis.graded.list_statistics import Ranker, RelevanceBands, measure_lists
from visavis.graded.ranked_lists import RankedListComparison, choose_queries, query_lists
from visavis.memory_budget import MemoryLimit
from visavis.models.inference import device_score, score_indexed_pairs
from visavis.progress import Progress
from visavis.recipes.recipe import Recipe
from visavis.runs.open_run import open_run, read_run_recipe
from visavis.spec import parse, validate_seed

CHECKED_CAPTIONS = 128
"""Number of captions whose relevance values are checked before ranked lists are compared."""


@torch.inference_mode()
def measure_run_agreement(folders: Sequence[Path], data: str | None, relevance: str | None, progress: Progress) -> list[HumanAgreement]:
    """Measure the agreement of the best models of runs with human judgments of the test split.

    Args:
        folders: Run folders.
        data: Data set with the judgments. Default: that of the runs.
        relevance: Spec of a relevance estimator to measure, too. The relevance to an image is that to its first caption.
        progress: Receives the progress.

    Returns:
        Agreement for each kind of judgments, on all pairs and without own captions of the images.

    Raises:
        DataError: If the data set has no judgments, or if they are damaged.
        RunError: If no run is given, or if runs have different data.
    """
    if not folders:
        raise RunError("runs: expected at least one run folder, got none.")
    estimator = parse(relevance, CATALOG) if relevance else None
    scores: dict[str, dict[str, np.ndarray]] = {}
    fingerprint = ""
    for folder in folders:
        recipe = read_run_recipe(folder, data)
        data_module, matcher = open_run(folder, recipe, progress)
        split = data_module.data.split(recipe.evaluation.test)
        if fingerprint and split.fingerprint != fingerprint:
            raise RunError(f"{folder}: expected the data set of {folders[0]}, got another one. Pass the judged data set with --data.")
        fingerprint = split.fingerprint
        judgments = find_human_judgments(find_source(recipe.data.path), split)
        visual, text = data_module.encode(matcher, split)
        for each in judgments:
            pairs = torch.from_numpy(each.images), torch.from_numpy(each.captions)
            pair_scores = score_indexed_pairs(matcher, visual, text, *pairs, memory=recipe.memory or None)
            scores.setdefault(each.kind, {})[str(folder)] = pair_scores.double().numpy()
        progress.message(f"{folder}: scored {sum(len(each.images) for each in judgments):,} judged pairs")
    if estimator is not None:
        image_relevance = estimator.for_dataset(split)
        for each in judgments:
            scores[each.kind][f"relevance by {estimator!r}"] = relevance_of_pairs(each, image_relevance)
    return [agreement for each in judgments for agreement in measure_agreement(each, scores[each.kind])]


def compare_ranked_lists(
    runs: Sequence[Path],
    relevance: str,
    *,
    caption_aggregation: CaptionAggregation,
    queries: int | Sequence[str],
    top: int,
    irrelevant_share: float,
    split: str | None,
    data: str | None,
    seed: int,
    out: str | Path | None,
    memory: MemoryLimit,
    progress: Progress,
) -> RankedListComparison:
    """Rank one split with the best model of every run, and measure how coherent the lists are.

    Args:
        runs: Run folders, or pretrained CLIP or SigLIP models.
        relevance: Spec of the relevance estimator, such as ``"CBoW()"``.
        caption_aggregation: How the captions of an image are combined.
        queries: Number of images, and of captions, to show. Or captions and names of images.
        top: Length of the lists.
        irrelevant_share: Share of all candidates below which a candidate counts as irrelevant.
        split: Split to rank. Default: the test split of the first run.
        data: Data set to rank instead of the runs' own.
        seed: Seed of the sampled queries and of the random baseline.
        out: New folder of the report. Default: ``runs/coherence-<n>``.
        memory: Memory for blocks of scores. Default: the recipe's.
        progress: Receives the progress.

    Returns:
        Statistics of each run and of a random order, and the lists of the chosen queries.

    Raises:
        DataError: If the estimator gives the same relevance to all pairs.
        RunError: If the runs rank different images or captions.
        SpecError: If the estimator or ``irrelevant_share`` is invalid.
        VisavisError: If ``top``, ``caption_aggregation`` or a query is invalid.
    """
    if top < 1:
        raise VisavisError(f"top: expected an integer >= 1, got {top}. Set the length of the lists.")
    validate_seed(seed)
    if caption_aggregation not in get_args(CaptionAggregation):
        expected = " or ".join(map(repr, get_args(CaptionAggregation)))
        raise VisavisError(f"caption_aggregation: expected {expected}, got {format_value(caption_aggregation)}.")
    with storage.create_output_folder(out, "runs/coherence") as folder:
        bands, estimator = RelevanceBands(irrelevant_share), parse(relevance, CATALOG)
        recipes = [read_run_recipe(run, data, memory) for run in runs]
        split = split or recipes[0].evaluation.test
        names = _names(runs)
        opened = [_open(run, name, recipe, split, progress) for run, name, recipe in zip(runs, names, recipes, strict=True)]
        ranked_data = opened[0][1]
        for run, (_, other) in zip(runs, opened, strict=True):
            if other.fingerprint != ranked_data.fingerprint:
                raise RunError(
                    f"{run}: expected split {split} of {ranked_data.name}, which {runs[0]} ranks, got another split {split} of {other.name}. "
                    "Compare runs that rank the same images and captions, or pass --data."
                )
        chosen = choose_queries(queries, ranked_data, seed)
        image_relevance = estimator.for_dataset(ranked_data, caption_aggregation)
        _check_relevance_varies(image_relevance, ranked_data)
        rankers = [ranker for ranker, _ in opened]
        with_random = (*rankers, Ranker.random(ranked_data, seed))
        memory = recipes[0].memory or None
        return RankedListComparison(
            folder=folder,
            data=ranked_data,
            estimator=estimator,
            caption_aggregation=caption_aggregation,
            top=top,
            bands=bands,
            rankers=with_random,
            trained_on_estimator=tuple(name for name, recipe in zip(names, recipes, strict=True) if _trained_on(recipe, estimator)),
            statistics=measure_lists(with_random, estimator, image_relevance, ranked_data, bands, top, progress, memory),
            queries=tuple(query_lists(*query, rankers, image_relevance, ranked_data, bands, top, memory) for query in chosen),
        )


def _check_relevance_varies(relevance: ImageRelevance, data: Dataset) -> None:
    """Raise DataError if the relevance of the first captions to all images is equal or NaN."""
    values = relevance(torch.arange(len(data.images)), torch.arange(min(CHECKED_CAPTIONS, len(data.captions))))
    if not values.min() < values.max():
        raise DataError(
            f"relevance of the captions of {data.name}: expected different values, got only values from {values.min():g} to {values.max():g}. "
            "Choose another estimator with --relevance."
        )


def _open(run: Path, name: str, recipe: Recipe, split: str, progress: Progress) -> tuple[Ranker, Dataset]:
    data_module, matcher = open_run(run, recipe, progress)
    data = data_module.data.split(split)
    trained_with = recipe.phases[-1].objective if recipe.phases else "zero-shot"
    return Ranker(name, trained_with, *data_module.encode(matcher, data), device_score(matcher)), data


def _names(runs: Sequence[Path]) -> list[str]:
    """The names of the folders, or their paths if two have the same name."""
    names = [run.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run) for run in runs]


def _trained_on(recipe: Recipe, estimator: RelevanceEstimator) -> bool:
    """Whether a phase of the training used this estimator."""
    supervisions = (parse(phase.supervision, supervision.CATALOG) for phase in recipe.phases)
    specs = [each.relevance for each in supervisions if isinstance(each, supervision.GradedSupervision)]
    return estimator in (parse(text, CATALOG) for text in specs)
