"""Coherence by training: Ladder against its own special case of one level, GradedVLC against VLC, on Flickr8k and on drawn scenes.

    VISAVIS_DATA=... python studies/ladder.py [--data flickr8k scenes] [--seeds 5] [--out runs/ladder]

They differ in the objective alone, and in the scale of the degrees: shares for Ladder, whose thresholds are quantiles, as they are for
GradedVLC. Printed for the test split: RSUM; CS@K, first captions of the images, by the degrees trained with and by others; on Flickr8k
Kendall's tau-b with the mean rating of three experts and with the crowd's share of yes; on scenes nDCG@10 of the long tail, queries with
combinations of shape and color, or of two shapes and their relation, that no training scene has. Differences are paired by seed, with
their 95 % interval and p of a t-test. Runs in the folder are used again; one that was stopped goes on.
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
from visavis.data.dataset import Dataset
from visavis.data.reading import find_file
from visavis.data.scenes import Facts, SceneGraphs, held_out_colors, held_out_relations, write_scenes
from visavis.degrees import CBoW, Degrees, SceneDegrees, SentenceModel
from visavis.errors import RunError, VisavisError
from visavis.evaluation.human_judgements import read_judgements
from visavis.evaluation.rank_correlation import correlate
from visavis.metrics import coherent_scores, ndcg_at
from visavis.progress import Silent
from visavis.runs.folder import open_run, recipe_of, with_whole_paths
from visavis.training.recipe_files import read_recipe

Measures = dict[str, float]
WORLD = 2027  # the seed of the scenes
NUM_SCENES = {"num_train": 1000, "num_val": 200, "num_test": 500}
ONE_LEVEL, LADDER, PLAIN, GRADED, MORE = "one level", "Ladder", "VLC", "GradedVLC", "GradedVLC, beta 3"
OBJECTIVES: dict[str, str | None] = {
    ONE_LEVEL: "Ladder(margins=(0.2,), thresholds=(), betas=(1.0,), sampling='sum', reduction='mean')",
    LADDER: None,  # the recipe's own
    PLAIN: "GradedVLC(beta=0.0)",
    GRADED: "GradedVLC()",
    MORE: "GradedVLC(beta=3.0)",
}
COMPARED = ((ONE_LEVEL, LADDER), (PLAIN, GRADED), (PLAIN, MORE), (LADDER, MORE))


@dataclass(frozen=True)
class Study:
    """Runs of a recipe with each objective, and what is measured of each.

    degrees: by which coherence is told, those of the training first. more: further measures of the test split, from it and the
    scores ``[V, T]``.
    """

    recipe: str
    degrees: tuple[Degrees, ...]
    more: Callable[[Dataset, Tensor], Measures]
    data: Path | None = None

    def run(self, out: Path, seeds: int) -> dict[str, list[Measures]]:
        """For each objective the measures of its runs, by seed."""
        fixed: dict[str, Any] = {"training.threads": 1, "evaluation.degrees": ""}  # coherence is measured below
        if self.data is not None:
            fixed["data.path"] = str(self.data)
        found: dict[str, list[Measures]] = {}
        for seed in range(1, seeds + 1):
            for name, objective in OBJECTIVES.items():
                overrides = {**fixed, **({} if objective is None else {"objective": objective}), "seed": seed}
                if name in (PLAIN, GRADED, MORE):
                    overrides["phases.0.supervision"] = f"GradedSupervision(degrees={repr(self.degrees[0])!r})"
                run = trained(self.recipe, overrides, out / f"{self.recipe}-{re.sub('[ ,]+', '-', name).lower()}-{seed}")
                measures = self.measure(run)
                found.setdefault(name, []).append(measures)
                sys.stdout.write(f"{run.name}: {', '.join(f'{key} {value:.3f}' for key, value in measures.items())}\n")
                sys.stdout.flush()
        return found

    def measure(self, run: Path) -> Measures:
        """All about a run's best model on the test split."""
        recipe = recipe_of(run)
        data_module, matcher = open_run(run, recipe, Silent())
        data = data_module.data.split(recipe.evaluation.test)
        visual, text = data_module.encode(matcher, data)
        with torch.inference_mode():
            scores = matcher.score(visual, text).float()
        found = {"RSUM": data_module.evaluate(matcher, recipe.evaluation.test, recipe.evaluation.protocol).metrics["rsum"]}
        for degrees in self.degrees:
            found |= coherence(data, scores, degrees)
        return found | self.more(data, scores)


def coherence(data: Dataset, scores: Tensor, degrees: Degrees) -> Measures:
    """CS@100 and CS@1000, or of all, both ways over the first captions of the images; means over the queries for which it is defined."""
    first = torch.tensor([captions[0] for captions in data.captions_of])
    relevance, scores = degrees.between(data)(torch.arange(len(data.images)), first), scores[:, first]
    return {
        f"CS@{k} {way} {type(degrees).__name__}": float(coherent_scores(one, by, k=k).nanmean())
        for k in (100, min(1000, len(first)))
        for way, one, by in (("i2t", scores, relevance), ("t2i", scores.T, relevance.T))
    }


def trained(recipe: str, overrides: dict[str, Any], folder: Path) -> Path:
    """The folder of a finished run: used again, gone on with, or begun."""
    if not (folder / "run.toml").exists():
        visavis.train(recipe, out=folder, overrides=overrides)
    elif recipe_of(folder) != with_whole_paths(read_recipe(recipe, overrides)):
        raise RunError(f"{folder} holds a run of another recipe: name another folder with --out.")
    elif not (folder / "result.json").exists():
        visavis.train(resume=folder)
    return folder


def with_people(data: Dataset, scores: Tensor) -> Measures:
    """Kendall's tau-b with what people said of images and captions of the test split, captions written for the image left out."""
    found = {}
    for kind, title in (("expert", "tau with the experts"), ("crowd", "tau with the crowd")):
        said = read_judgements(kind, find_file("flickr8k"), data)
        others = ~said.own
        images, captions = said.images[others], said.captions[others]
        found[title] = correlate(scores[images, captions].numpy(), said.ratings[others], images, resamples=0)["kendall"].value
    return found


def of_long_tail(data: Dataset, scores: Tensor) -> Measures:
    """nDCG@10 of the scenes with a held-out combination, and of the captions that state one."""
    truth = SceneDegrees().between(data)(torch.arange(len(data.images)), torch.arange(len(data.captions)))
    graphs = graphs_of(data)
    images = torch.tensor([graphs.scenes[i].held_out for i in data.image_rows])
    captions = torch.tensor([states_held_out(graphs.facts[i]) for i in data.caption_rows])
    return {
        "nDCG@10 i2t long tail": float(ndcg_at(scores[images], truth[images], k=10).mean()),
        "nDCG@10 t2i long tail": float(ndcg_at(scores.T[captions], truth.T[captions], k=10).mean()),
    }


def graphs_of(data: Dataset) -> SceneGraphs:
    place = data.images[0].bytes
    assert place is not None
    return SceneGraphs.open(place.path.parent.parent)


def states_held_out(facts: Facts) -> bool:
    """Whether a caption states a combination that no training scene has."""
    things = [(mention.get("shape"), mention.get("color")) for mention in facts.mentions]
    relations = [(things[a][0], name, things[b][0]) for a, name, b in facts.relations]
    return any(thing in held_out_colors for thing in things) or any(one in held_out_relations for one in relations)


def table(runs: dict[str, list[Measures]], one: str, other: str) -> str:
    """A row a measure: means and deviations over seeds of two objectives, and the difference paired by seed."""
    lines = [f"| test | {one} | {other} | difference, 95 % interval | p |", "|---|---|---|---|---|"]
    for name in runs[one][0]:
        digits = 1 if name == "RSUM" else 3
        before, after = (np.array([run[name] for run in runs[side]]) for side in (one, other))
        cells = [f"{side.mean():.{digits}f} ± {side.std(ddof=1):.{digits}f}" for side in (before, after)]
        test = ttest_rel(after, before)
        low, high = test.confidence_interval()
        difference = f"{(after - before).mean():+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {difference} | {test.pvalue:.2g} |")
    return "\n".join(lines)


def scenes(folder: Path) -> Path:
    """The drawn scenes of the study; drawn once."""
    return folder if folder.exists() else write_scenes(folder, **NUM_SCENES, seed=WORLD)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=("flickr8k", "scenes"), default=("flickr8k", "scenes"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/ladder"))
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: differences between runs need two seeds or more")
    studies = {
        "flickr8k": lambda: Study("ladder-heads-flickr8k", (SentenceModel(), CBoW()), with_people),
        "scenes": lambda: Study("ladder-scenes", (SceneDegrees(),), of_long_tail, scenes(options.out / "scenes").resolve()),
    }
    for name in options.data:
        study = studies[name]()
        runs = study.run(options.out, options.seeds)
        for pair in COMPARED:
            sys.stdout.write(f"\n{study.recipe}, {options.seeds} seeds\n\n{table(runs, *pair)}\n\n")


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"ladder: {error}")
