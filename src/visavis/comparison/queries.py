"""What a compared model finds: test captions drawn at random, and those that are hardest for it in every seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from visavis.comparison.jobs import Outcome
from visavis.comparison.result import Comparison
from visavis.comparison.settings import Setting
from visavis.comparison.trec import ranked_lists, write_trec
from visavis.data.dataset import Dataset
from visavis.evaluation.of_data import read_by
from visavis.evaluation.protocols import all_named
from visavis.evaluation.ranks import read_ranks
from visavis.models.base import Matcher, evaluating
from visavis.models.scoring import score_all, score_from_cpu
from visavis.progress import Progress, Silent
from visavis.runs.folder import open_run, recipe_of
from visavis.scoring import pick
from visavis.training.recipe import Recipe
from visavis.training.run_files import RunFiles
from visavis.types import Encoded

SHOWN = 5
"""Images of a query."""


@dataclass(frozen=True)
class Answered:
    """A caption and the first images for it: (number of the image, score). own: the image that it was written for. rank: of that."""

    text: str
    own: int
    rank: float
    images: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Answers:
    """What one run answers. drawn: captions drawn at random, whatever came of them. hardest: those whose own image is ranked last, by the mean
    over all seeds of the same setting, of different images.
    """

    run: str
    data: Dataset
    drawn: tuple[Answered, ...]
    hardest: tuple[Answered, ...]


def answers(comparison: Comparison, number: int = 4) -> Answers | None:
    """Of the best setting's best run by validation. None where the protocol ranks no image of its own for every caption."""
    best = _best_run(comparison, comparison.best)
    recipe, test, (visual, text), matcher = _encoded(best.folder)
    protocol = comparison.table.rules.protocol
    ranks = [read_ranks(RunFiles(one.folder).ranks)[protocol].text_ranks for one in comparison.runs(comparison.best)]
    if any(len(of_run) != len(test.captions) for of_run in ranks):
        return None
    mean = np.mean(ranks, axis=0)
    drawn = np.random.default_rng(0).permutation(len(test.captions))[:number]
    hardest = _of_different_images(np.argsort(-mean, kind="stable"), test, number)
    chosen = torch.from_numpy(np.concatenate([drawn, hardest]))
    scores = score_all(matcher, visual, pick(text, chosen), recipe.memory or None)
    found = [_answered(test, int(caption), column, mean) for caption, column in zip(chosen, scores.T, strict=True)]
    return Answers(best.folder.name, test, tuple(found[: len(drawn)]), tuple(found[len(drawn) :]))


def write_lists(comparison: Comparison, progress: Progress) -> None:
    """TREC files of the best run of each choice by validation, in ``trec/`` of its folder, unless they are there."""
    for number, setting in enumerate(comparison.chosen):
        progress.work("lists", number, len(comparison.chosen), 0)
        run = _best_run(comparison, setting)
        if (comparison.folder / "trec" / f"{run.folder.name}.i2t.run").exists():
            continue
        recipe, test, (visual, text), matcher = _encoded(run.folder)
        [protocol] = [rules for rules in all_named(recipe.evaluation.protocols) if rules.name == comparison.table.rules.protocol]
        with evaluating(matcher):
            lists = ranked_lists(visual, text, score_from_cpu(matcher), test, protocol, memory=recipe.memory or None)
        write_trec(comparison.folder / "trec", run.folder.name, lists)


def _best_run(comparison: Comparison, setting: Setting) -> Outcome:
    return max(comparison.runs(setting), key=lambda one: one.validation_rsum)


def _encoded(run: Path) -> tuple[Recipe, Dataset, tuple[Encoded, Encoded], Matcher]:
    """The recipe of a run, its test split, that encoded, and its model."""
    recipe = recipe_of(run)
    data_module, matcher = open_run(run, recipe, Silent())
    test = read_by(data_module.data.split(recipe.evaluation.test), all_named(recipe.evaluation.protocols))
    return recipe, test, data_module.encode(matcher, test), matcher


def _of_different_images(captions: np.ndarray, data: Dataset, number: int) -> np.ndarray:
    """The first captions, one an image."""
    _, first = np.unique(data.image_of[captions], return_index=True)
    return captions[np.sort(first)[:number]]


def _answered(data: Dataset, caption: int, scores: torch.Tensor, ranks: Sequence[float]) -> Answered:
    first = scores.argsort(descending=True, stable=True)[:SHOWN]
    images = tuple((int(image), scores[image].item()) for image in first)
    return Answered(data.captions[caption], int(data.image_of[caption]), float(ranks[caption]), images)
