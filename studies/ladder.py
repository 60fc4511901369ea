"""Ranking coherence by training: Ladder against one level, and GradedVLC against VLC, on Flickr8k
and on synthetic scenes.

    VISAVIS_DATA=... python studies/ladder.py [--data flickr8k scenes] [--seeds 5] [--out
    runs/ladder]

The objectives of a pair differ only in themselves and in the scale of the relevance values:
quantiles for Ladder, whose thresholds are quantiles, and for GradedVLC. Printed for the test split:

- RSUM, and CS@K over the first captions of the images, by the relevance values of the training and
  by others
- nDCG@10 of long-tail queries over the first captions, by the same relevance values: the query's own
  item is not among the candidates
- on Flickr8k, Kendall's tau-b with the mean rating of three experts and with the crowd's share of
  yes
- on scenes, nDCG@10 of the long tail: queries with combinations of shape and color, or of two
  shapes and their relation, that no training scene has

Differences are paired by seed, with their 95 % interval and p of a t-test. Finished runs in the
folder are used again. Stopped ones resume.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import ttest_rel
from torch import Tensor

import visavis
from visavis.core.errors import RunError, VisavisError
from visavis.core.progress import NoProgress
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.synthetic import (
    HELD_OUT_COLORS,
    HELD_OUT_RELATIONS,
    CaptionFacts,
    SceneGraphs,
    write_synthetic_scenes,
)
from visavis.evaluation.metrics import coherent_scores, ndcg_at
from visavis.papers.relevance import CBoW, RelevanceEstimator, SceneRelevance, SentenceModel
from visavis.papers.relevance.human_agreement import rank_correlations, read_flickr8k_judgments
from visavis.papers.relevance.ranked_lists import ndcg_without_match
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import open_run, read_run_recipe, with_absolute_paths

Measures = dict[str, float]
# The seed of the scenes.
SCENE_SEED = 2027
NUM_SCENES: dict[str, Any] = {"num_train": 1000, "num_val": 200, "num_test": 500}
ONE_LEVEL = "one level"
LADDER = "Ladder"
PLAIN = "VLC"
GRADED = "GradedVLC"
GRADED_BETA_3 = "GradedVLC, beta 3"
OBJECTIVES: dict[str, str | None] = {
    ONE_LEVEL: "Ladder(margins=(0.2,), thresholds=(), betas=(1.0,), sampling='sum', reduction='mean')",
    # The objective of the recipe.
    LADDER: None,
    PLAIN: "GradedVLC(beta=0.0)",
    GRADED: "GradedVLC()",
    GRADED_BETA_3: "GradedVLC(beta=3.0)",
}
COMPARISONS = (
    (ONE_LEVEL, LADDER),
    (PLAIN, GRADED),
    (PLAIN, GRADED_BETA_3),
    (LADDER, GRADED_BETA_3),
)


@dataclass(frozen=True)
class Study:
    """Runs of a recipe with each objective, and the metrics of each.

    Attributes:
        recipe: Name of the recipe.
        estimators: Relevance estimators of the coherence. The first one is used in training.
        more: Further metrics of the test split, from the split and its scores ``[V, T]``.
        data: Folder of the data. None: the recipe's.
    """

    recipe: str
    estimators: tuple[RelevanceEstimator, ...]
    more: Callable[[Dataset, Tensor], Measures]
    data: Path | None = None

    def run(self, out: Path, seeds: int) -> dict[str, list[Measures]]:
        """The metrics of the runs of each objective, by seed."""
        shared_overrides: dict[str, Any] = {
            "training.threads": 1,
            "evaluation.sections": [],
        }  # coherence is measured below
        if self.data is not None:
            shared_overrides["data.path"] = str(self.data)
        measures_by_objective: dict[str, list[Measures]] = {}
        for seed in range(1, seeds + 1):
            for name, objective in OBJECTIVES.items():
                overrides = {
                    **shared_overrides,
                    **({} if objective is None else {"objective": objective}),
                    "seed": seed,
                }
                if name in (PLAIN, GRADED, GRADED_BETA_3):
                    overrides["phases.0.supervision"] = (
                        f"GradedSupervision(relevance={repr(self.estimators[0])!r})"
                    )
                run = train_once(
                    self.recipe,
                    overrides,
                    out / f"{self.recipe}-{re.sub('[ ,]+', '-', name).lower()}-{seed}",
                )
                measures = self.measure(run)
                measures_by_objective.setdefault(name, []).append(measures)
                sys.stdout.write(
                    f"{run.name}: {', '.join(f'{key} {value:.3f}' for key, value in measures.items())}\n"
                )
                sys.stdout.flush()
        return measures_by_objective

    def measure(self, run: Path) -> Measures:
        """All metrics of a run's best model on the test split."""
        recipe = read_run_recipe(run)
        data_module, matcher = open_run(run, recipe, NoProgress())
        data = data_module.data.split(recipe.evaluation.test)
        visual, text = data_module.encode(matcher, data)
        with torch.inference_mode():
            scores = matcher.score(visual, text).float()
        measures = {
            "RSUM": data_module.evaluate(
                matcher, recipe.evaluation.test, recipe.evaluation.protocol
            ).metrics["rsum"]
        }
        for estimator in self.estimators:
            measures |= coherence(data, scores, estimator)
        return measures | self.more(data, scores)


def coherence(data: Dataset, scores: Tensor, estimator: RelevanceEstimator) -> Measures:
    """CS@100, CS@1000 and nDCG@10 without a match, in both directions over the first captions: means
    over the queries for which they are defined.
    """
    first = torch.tensor([captions[0] for captions in data.captions_of])
    relevance = estimator.for_dataset(data)(torch.arange(len(data.images)), first)
    scores = scores[:, first]
    name = type(estimator).__name__
    directions = {"i2t": (scores, relevance), "t2i": (scores.T, relevance.T)}
    measures = {
        f"CS@{k} {direction} {name}": float(coherent_scores(*values, k=k).nanmean())
        for k in (100, min(1000, len(first)))
        for direction, values in directions.items()
    }
    own = torch.eye(len(first), dtype=torch.bool)
    for direction, values in directions.items():
        order = values[0].argsort(dim=1, descending=True, stable=True)
        gains = ndcg_without_match(order, values[1], own)
        measures[f"nDCG@10 {direction} without a match {name}"] = float(gains.nanmean())
    return measures


def train_once(recipe: str, overrides: dict[str, Any], folder: Path) -> Path:
    """The folder of a finished run. A finished run is used again, a stopped run resumes, a new run
    starts.
    """
    if not (folder / "run.toml").exists():
        visavis.train(recipe, out=folder, overrides=overrides)
    elif read_run_recipe(folder) != with_absolute_paths(read_recipe(recipe, overrides)):
        raise RunError(
            f"{folder}: contains a run of another recipe. Choose another folder with --out."
        )
    elif not (folder / "result.json").exists():
        visavis.train(resume=folder)
    return folder


def human_agreement(data: Dataset, scores: Tensor) -> Measures:
    """Kendall's tau-b with human judgments of images and captions of the test split, without an
    image's own captions.
    """
    correlations = {}
    for kind, title in (("expert", "tau with the experts"), ("crowd", "tau with the crowd")):
        judgments = read_flickr8k_judgments(kind, resolve_path("flickr8k"), data)
        is_other_caption = ~judgments.is_own_caption
        images = judgments.images[is_other_caption]
        captions = judgments.captions[is_other_caption]
        correlations[title] = rank_correlations(
            scores[images, captions].numpy(),
            judgments.ratings[is_other_caption],
            images,
            resamples=0,
        )["kendall"].value
    return correlations


def long_tail_ndcg(data: Dataset, scores: Tensor) -> Measures:
    """nDCG@10 of the scenes with a held-out combination, and of the captions that state one."""
    truth = SceneRelevance().for_dataset(data)(
        torch.arange(len(data.images)), torch.arange(len(data.captions))
    )
    graphs = graphs_of(data)
    images = torch.tensor([graphs.scenes[i].has_held_out_combination for i in data.image_rows])
    captions = torch.tensor([states_held_out(graphs.facts[i]) for i in data.caption_rows])
    return {
        "nDCG@10 i2t long tail": float(ndcg_at(scores[images], truth[images], k=10).mean()),
        "nDCG@10 t2i long tail": float(ndcg_at(scores.T[captions], truth.T[captions], k=10).mean()),
    }


def graphs_of(data: Dataset) -> SceneGraphs:
    location = data.images[0].location
    assert location is not None
    return SceneGraphs.open(location.path.parent.parent)


def states_held_out(facts: CaptionFacts) -> bool:
    """Whether a caption states a combination that no training scene has."""
    combinations = [(mention.get("shape"), mention.get("color")) for mention in facts.mentions]
    relations = [(combinations[a][0], name, combinations[b][0]) for a, name, b in facts.relations]
    return any(combination in HELD_OUT_COLORS for combination in combinations) or any(
        relation in HELD_OUT_RELATIONS for relation in relations
    )


def table(runs: dict[str, list[Measures]], baseline: str, changed: str) -> str:
    """One row per metric: means and standard deviations over seeds of two objectives, and the
    difference paired by seed.
    """
    lines = [
        f"| test | {baseline} | {changed} | difference, 95 % interval | p |",
        "|---|---|---|---|---|",
    ]
    for name in runs[baseline][0]:
        digits = 1 if name == "RSUM" else 3
        before, after = (
            np.array([run[name] for run in runs[objective]]) for objective in (baseline, changed)
        )
        cells = [
            f"{values.mean():.{digits}f} ± {values.std(ddof=1):.{digits}f}"
            for values in (before, after)
        ]
        test = ttest_rel(after, before)
        low, high = test.confidence_interval()
        difference = (
            f"{(after - before).mean():+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
        )
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {difference} | {test.pvalue:.2g} |")
    return "\n".join(lines)


def scenes(folder: Path) -> Path:
    """The synthetic scenes of the study, generated once."""
    return (
        folder if folder.exists() else write_synthetic_scenes(folder, **NUM_SCENES, seed=SCENE_SEED)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", nargs="+", choices=("flickr8k", "scenes"), default=("flickr8k", "scenes")
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/ladder"))
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: expected at least 2, to compute differences between runs.")
    studies = {
        "flickr8k": lambda: Study(
            "ladder-heads-flickr8k", (SentenceModel(), CBoW()), human_agreement
        ),
        "scenes": lambda: Study(
            "ladder-scenes",
            (SceneRelevance(),),
            long_tail_ndcg,
            scenes(options.out / "scenes").resolve(),
        ),
    }
    for name in options.data:
        study = studies[name]()
        runs = study.run(options.out, options.seeds)
        for pair in COMPARISONS:
            sys.stdout.write(f"\n{study.recipe}, {options.seeds} seeds\n\n{table(runs, *pair)}\n\n")


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"ladder: {error}")
