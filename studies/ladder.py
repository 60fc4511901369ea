"""Coherence by training: Ladder against its own special case of one level, on Flickr8k and on drawn scenes with true degrees.

    VISAVIS_DATA=... python studies/ladder.py [--data flickr8k scenes] [--seeds 5] [--out runs/ladder]

Both differ in the objective of the last phase alone. Printed for the test split: RSUM; CS@K, first captions of the images, by the degrees
trained with and by others; on Flickr8k Kendall's tau-b with the mean rating of three experts and with the crowd's share of yes; on scenes
nDCG@10 of the long tail, queries with combinations of shape and color, or of two shapes and their relation, that no training scene has.
The difference is paired by seed, with its 95 % interval and p of a t-test. Runs in the folder are used again; one that was stopped goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau, ttest_rel
from torch import Tensor

import visavis
from visavis.data.dataset import Dataset
from visavis.data.reading import find_file
from visavis.data.scenes import SceneGraphs, held_out_colors, held_out_relations, write_scenes
from visavis.errors import RunError, VisavisError
from visavis.metrics import coherent_scores
from visavis.supervision.graded import CBoW, Degrees, SceneDegrees, SentenceModel
from visavis.training.recipe import read_recipe
from visavis.training.running import open_run, recipe_of, with_whole_paths
from visavis.watch import Silent

Measures = dict[str, float]
WORLD = 2027  # the seed of the scenes; the recipes were chosen on another world
NUM_SCENES = {"num_train": 2000, "num_val": 500, "num_test": 1000}
ONE_LEVEL = "TripletHN(margin=0.2)"


@dataclass(frozen=True)
class Study:
    """Runs of a recipe, as it is and with another last objective, and what is measured of each."""

    recipe: str
    data: Path | None
    measures: Callable[[Dataset, Tensor], Measures]

    def run(self, out: Path, seeds: int) -> dict[str, list[Measures]]:
        """For each objective the measures of its runs, by seed."""
        last = len(read_recipe(self.recipe).phases) - 1
        found: dict[str, list[Measures]] = {}
        for seed in range(1, seeds + 1):
            for name, objective in (("one level", {f"phases.{last}.objective": ONE_LEVEL}), ("Ladder", {})):
                overrides = {**objective, "seed": seed} | ({"data.path": str(self.data)} if self.data else {})
                folder = trained(self.recipe, overrides, out / f"{self.recipe}-{name.replace(' ', '-').lower()}-{seed}")
                found.setdefault(name, []).append(self.measure(folder))
            told = "; ".join(f"{name} {', '.join(f'{key} {value[-1][key]:.3f}' for key in value[-1])}" for name, value in found.items())
            sys.stdout.write(f"seed {seed}: {told}\n")
        return found

    def measure(self, folder: Path) -> Measures:
        """RSUM and all else of a run's best model on the test split."""
        recipe = recipe_of(folder)
        material, matcher = open_run(folder, recipe, Silent())
        data = material.data.split(recipe.evaluation.test)
        visual, text = material.encode(matcher, data)
        with torch.inference_mode():
            scores = matcher.score(visual, text).float()
        rsum = material.evaluate(matcher, recipe.evaluation.test, recipe.evaluation.protocol).metrics["rsum"]
        return {"RSUM": rsum, **self.measures(data, scores)}


def trained(recipe: str, overrides: dict[str, Any], folder: Path) -> Path:
    """The folder of a finished run: used again, gone on with, or begun."""
    if not (folder / "run.toml").exists():
        visavis.train(recipe, out=folder, overrides=overrides)
    elif recipe_of(folder) != with_whole_paths(read_recipe(recipe, overrides)):
        raise RunError(f"{folder} holds a run of another recipe: name another folder with --out.")
    elif not (folder / "result.json").exists():
        visavis.train(folder, resume=True)
    return folder


def coherence(data: Dataset, scores: Tensor, degrees: Degrees, name: str, ks: tuple[int, ...]) -> Measures:
    """CS@K both ways over the first captions of the images, by some degrees; means over the queries where it is defined."""
    images = torch.arange(len(data.images))
    first = torch.tensor([captions[0] for captions in data.captions_of])
    relevance, scores = degrees.between(data)(images, first), scores[:, first]
    return {
        f"CS@{k} {way} {name}": float(coherent_scores(one, by, k=k).nanmean())
        for k in ks
        for way, one, by in (("i2t", scores, relevance), ("t2i", scores.T, relevance.T))
    }


def of_flickr8k(data: Dataset, scores: Tensor) -> Measures:
    estimators = (("sentences", SentenceModel()), ("CBoW", CBoW()))
    found = [coherence(data, scores, degrees, name, (100, 1000)) for name, degrees in estimators]
    image = {entry.name: i for i, entry in enumerate(data.images)}
    for name, file, rating in (("experts", "ExpertAnnotations.txt", mean_rating), ("crowd", "CrowdFlowerAnnotations.txt", share_of_yes)):
        rows = [line.split("\t") for line in find_file(f"flickr8k/{file}").read_text().splitlines()]
        pairs = [(image[row[0]], data.captions_of[image[row[1].split("#")[0]]][int(row[1].split("#")[1])]) for row in rows]
        model = [float(scores[pair]) for pair in pairs]
        found.append({f"tau with {name}": float(kendalltau(model, [rating(row[2:]) for row in rows]).statistic)})
    return {key: value for part in found for key, value in part.items()}


def mean_rating(values: list[str]) -> float:
    return sum(map(int, values)) / len(values)


def share_of_yes(values: list[str]) -> float:
    return float(values[0])


def of_scenes(data: Dataset, scores: Tensor) -> Measures:
    place = data.images[0].bytes
    assert place is not None
    graphs = SceneGraphs.open(place.path.parent.parent)
    images, captions = torch.arange(len(data.images)), torch.arange(len(data.captions))
    truth = SceneDegrees().between(data)(images, captions)
    rare_images = torch.tensor([graphs.scenes[i].held_out for i in data.image_rows])
    rare_captions = torch.tensor([states_held_out(graphs.facts[i]) for i in data.caption_rows])
    return {
        **coherence(data, scores, SceneDegrees(), "truth", (100, 1000)),
        "nDCG@10 i2t long tail": ndcg(scores[rare_images], truth[rare_images]),
        "nDCG@10 t2i long tail": ndcg(scores.T[rare_captions], truth.T[rare_captions]),
    }


def states_held_out(facts: Facts) -> bool:
    """Whether a caption states a combination that no training scene has."""
    things = [(mention.get("shape"), mention.get("color")) for mention in facts.mentions]
    relations = [(things[a][0], name, things[b][0]) for a, name, b in facts.relations]
    return any(thing in held_out_colors for thing in things) or any(one in held_out_relations for one in relations)


def table(runs: dict[str, list[Measures]]) -> str:
    """A row a measure: means and deviations over seeds, and the difference paired by seed."""
    one, ladder = runs.values()
    lines = ["| test | one level | Ladder | difference, 95 % interval | p |", "|---|---|---|---|---|"]
    for name in one[0]:
        digits = 1 if name == "RSUM" else 3
        before, after = (np.array([run[name] for run in side]) for side in (one, ladder))
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
        "flickr8k": lambda: Study("ladder-heads-flickr8k", None, of_flickr8k),
        "scenes": lambda: Study("ladder-scenes", scenes(options.out / "scenes").resolve(), of_scenes),
    }
    for name in options.data:
        study = studies[name]()
        runs = study.run(options.out, options.seeds)
        sys.stdout.write(f"\n{study.recipe}, {options.seeds} seeds\n\n{table(runs)}\n\n")


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"ladder: {error}")
