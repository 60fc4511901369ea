"""The study: every objective of the catalog, and what the papers claim of them, in many short runs on Flickr8k.

    VISAVIS_DATA=... python studies/study.py [--only objectives sizes ...] [--workers 2] [--out runs/study]

An experiment is a few settings of the recipe ``study-flickr8k`` (half a minute of one core each) with some seeds. First each objective is
given the same small budget on validation, four tries with a seed of their own (``tuning``): two learning rates, and two values of what its
paper leaves to choose, or four rates where there is nothing to choose. All other experiments begin with what was best there. Some are of
another world with a recipe of its own (words from scratch, a model that attends, drawn scenes), where two rates are tried anew. The
test split is measured once a run and chooses nothing.

What a run came to is a line of ``docs/evidence/study/EXPERIMENT.jsonl``, and is not made again, here or elsewhere, unless that line is taken
out; so the study can be stopped at any time, by Ctrl-C, by a power cut, and goes on. A line holds the metrics of the best model on test,
CS@K by degrees of MiniLM among them; how validation RSUM and similarities went, epoch by epoch, and how far negatives spread at the end;
how many samples still contribute to the gradient at the end (``diagnose``); and how far its scores agree with people's.
``studies/claims.py`` reads all of it.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import tomllib
from collections.abc import Container, Iterator
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ladder import WORLD, with_people

import visavis
from visavis import storage
from visavis.comparison.jobs import Job, done
from visavis.comparison.workers import end_if_asked, pool_of
from visavis.data.scenes import write_scenes
from visavis.errors import VisavisError
from visavis.models import Matcher
from visavis.models.scoring import score_all
from visavis.progress import Silent
from visavis.runs.folder import open_run, recipe_of, with_whole_paths
from visavis.training.data_module import DataModule
from visavis.training.recipe_files import read_recipe
from visavis.training.run_files import RunFiles
from visavis.training.stopping import Stopped

PLAN = Path(__file__).with_suffix(".toml")
EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence" / "study"
RECIPE, SCENES, SPEC, RATE = "study-flickr8k", "study-scenes.toml", "phases.0.objective", "phases.0.optimizer.lr"
TUNING, TUNING_SEED = "tuning", 100
BATCHES, EPSILONS = 20, (0.01, 0.001, 0.1)
"""Training batches of 128 pairs on which contributing samples are counted, and the weights from which on one counts."""

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """Settings by name, each the overrides of a recipe. question: what they answer. seeds: of each setting."""

    name: str
    question: str
    settings: dict[str, Overrides]
    seeds: tuple[int, ...]

    @property
    def evidence(self) -> Path:
        return EVIDENCE / f"{self.name}.jsonl"

    @property
    def tunes(self) -> bool:
        """Whether its runs are only chosen from, by validation."""
        return self.seeds == (TUNING_SEED,)

    def known(self) -> list[dict[str, Any]]:
        """The lines of the runs that were made, as the experiment stands now."""
        lines = read_evidence(self.name)
        return [line for line in lines if line["seed"] in self.seeds and line["overrides"] == self.settings.get(line["setting"])]

    def missing(self) -> Iterator[tuple[str, int]]:
        made = {(line["setting"], line["seed"]) for line in self.known()}
        return ((name, seed) for seed in self.seeds for name in self.settings if (name, seed) not in made)


@dataclass(frozen=True)
class Run:
    """One run of an experiment, and where it is trained."""

    experiment: Experiment
    setting: str
    seed: int
    folder: Path

    def job(self) -> Job:
        overrides = {**self.experiment.settings[self.setting], "seed": self.seed}
        recipe = overrides.pop("recipe", RECIPE)
        named = PLAN.parent / recipe if recipe.endswith(".toml") else recipe
        if recipe == SCENES:
            overrides["data.path"] = str(scenes_in(self.folder.parent))
        return Job(self.setting, self.seed, with_whole_paths(read_recipe(named, overrides)).to_dict(), self.folder.absolute())


def scenes_in(out: Path) -> Path:
    """Where the study's scenes are drawn."""
    return out.absolute() / "scenes"


def draw_scenes(folder: Path) -> None:
    """Draw them, unless they are there already; a folder of this name is whole."""
    if not folder.exists():
        with storage.replacing_folder(folder) as drawing:
            write_scenes(drawing, seed=WORLD)


def read_evidence(name: str) -> list[dict[str, Any]]:
    path = EVIDENCE / f"{name}.jsonl"
    return storage.read_json_lines(path, dict[str, Any]) if path.exists() else []


def experiments(only: Container[str]) -> Iterator[Experiment]:
    """Those of the plan, in its order, and before them what they begin with: each objective's best try, and its best rate in another world.

    The next is known only once the runs of the one before are made.
    """
    plan = tomllib.loads(PLAN.read_text())
    tries = {
        f"{name} | {spec} | {rate:g}": {SPEC: spec, RATE: rate, **entry.get("with", {})}
        for name, entry in plan["objectives"].items()
        for spec in entry["try"]
        for rate in entry.get("rates", plan["rates"])
    }
    tuning = Experiment(TUNING, "Which rate and which value of its own does each objective want?", tries, (TUNING_SEED,))
    yield tuning
    chosen = {"": best_tries(tuning)}
    for name, entry in plan["experiments"].items():
        if name not in only:
            continue
        world = entry.get("world", "")
        if world not in chosen:
            tuning = _tuning_in(world, plan["worlds"][world], chosen[""])
            yield tuning
            chosen[world] = best_tries(tuning)
        yield _experiment(name, entry, chosen[world], plan["always"] | plan["worlds"].get(world, {}).get("always", {}))


def _tuning_in(world: str, entry: dict[str, Any], chosen: dict[str, Overrides]) -> Experiment:
    """Rates, in a world with a recipe of its own, of objectives that are otherwise as they were best in the first."""
    tries = {
        f"{name} | {rate:g}": {**chosen[name], "recipe": entry["recipe"], RATE: rate} for name in entry["of"] for rate in entry["rates"]
    }
    return Experiment(f"{TUNING}-{world}", f"Which rate does each objective want in another world, {world}?", tries, (TUNING_SEED,))


def best_tries(tuning: Experiment) -> dict[str, Overrides]:
    """For each objective the overrides of its best try by validation."""
    best: dict[str, dict[str, Any]] = {}
    for line in tuning.known():
        name = line["setting"].split(" | ")[0]
        if "failure" not in line and (name not in best or line["validation_rsum"] > best[name]["validation_rsum"]):
            best[name] = line
    return {name: tuning.settings[line["setting"]] for name, line in best.items()}


def _experiment(name: str, entry: dict[str, Any], chosen: dict[str, Overrides], always: Overrides) -> Experiment:
    """of: objectives, each as it was best ("all": all of them). vary: what is changed, by name; ``times_rate`` multiplies the learning rate."""
    settings = {}
    for objective in chosen if entry["of"] == ["all"] else entry["of"]:
        for label, changes in entry.get("vary", {"": {}}).items():
            overrides = {**chosen[objective], **always, **changes}
            overrides[RATE] *= overrides.pop("times_rate", 1.0)
            settings[", ".join(filter(None, (objective if len(entry["of"]) > 1 or not label else "", label)))] = overrides
    return Experiment(name, entry["question"], settings, tuple(range(1, entry["seeds"] + 1)))


def made(run: Run) -> dict[str, Any]:
    """The line of a run: trained, or gone on with, and looked into."""
    job = run.job()
    outcome = done(job, Silent())
    line = {"setting": run.setting, "seed": run.seed, "overrides": run.experiment.settings[run.setting]}
    if outcome.failure:
        return {**line, "failure": outcome.failure}
    line |= {"validation_rsum": outcome.validation_rsum, "seconds": round(outcome.seconds, 1)}
    if not run.experiment.tunes:
        best = open_run(run.folder, recipe_of(run.folder), Silent())
        line |= {
            "metrics": rounded(outcome.numbers),
            "epochs": epochs_of(run.folder),
            "counts": counts_of(run.folder),
            **people_of(*best),
            **negatives_of(*best),
        }
    shutil.rmtree(run.folder)
    return line


def made_by_worker(run: Run) -> dict[str, Any]:
    """``made``, by a process that has nothing more to do once it was stopped, and all is saved."""
    try:
        line = made(run)
    except Stopped as stopped:
        os._exit(128 + stopped.by)
    end_if_asked()
    return line


def epochs_of(folder: Path) -> list[dict[str, float]]:
    """Validation RSUM and similarities of validation pairs, at every validation."""
    rows = storage.read_json_lines(RunFiles(folder).log, dict[str, Any])
    similarities = [f"{of}_{what}" for of in ("positive", "hardest_i2t", "hardest_t2i") for what in ("mean", "std")]
    kept = [*similarities, "gradient_i2t", "gradient_t2i"]
    return [rounded({"step": row["step"], "rsum": row["rsum"], **{name: row["val"][name] for name in kept}}) for row in rows]


def counts_of(folder: Path) -> dict[str, float]:
    """Contributing samples of the best model, by the first epsilon and, marked so, by the others; what the paper counts, not its code."""
    counts = [count for count in visavis.diagnose(folder, batches=BATCHES, epsilon=EPSILONS).counts if count.semantics == "paper"]
    own = {f"{name}_at_{count.epsilon:g}": count.mean[name] for count in counts[1:] for name in ("i2t_per_query", "t2i_per_query")}
    return rounded(counts[0].mean | own)


@torch.inference_mode()
def people_of(data_module: DataModule, matcher: Matcher) -> dict[str, float]:
    """Kendall's tau-b with the experts and with the crowd, over pairs that are not an image's own captions; none of drawn scenes."""
    evaluation = data_module.recipe.evaluation
    if evaluation.protocol != "flickr8k":
        return {}
    test = data_module.data.split(evaluation.test)
    return rounded(with_people(test, score_all(matcher, *data_module.encode(matcher, test)).float()))


@torch.inference_mode()
def negatives_of(data_module: DataModule, matcher: Matcher) -> dict[str, float]:
    """How far the scores of a query's wrong answers spread on the validation split: their deviation, its mean over queries of both sides."""
    split = data_module.validation
    scores = score_all(matcher, *data_module.encode(matcher, split)).double()
    wrong = torch.arange(len(split.images))[:, None] != torch.from_numpy(split.image_of)
    means = [(scores**power * wrong).sum(dim) / wrong.sum(dim) for dim in (0, 1) for power in (1, 2)]
    deviations = [(squares - mean**2).sqrt() for mean, squares in (means[:2], means[2:])]
    return rounded({"negative_std": torch.stack([deviation.mean() for deviation in deviations]).mean().item()})


def rounded(numbers: dict[str, Any]) -> dict[str, float]:
    """To five digits, which is more than two runs ever agree to."""
    return {name: float(f"{value:.5g}") for name, value in numbers.items() if not math.isnan(value)}


def make(experiment: Experiment, workers: int, out: Path) -> None:
    """Make the missing runs of an experiment, so many at once, and keep each as it ends."""
    runs = [
        Run(experiment, setting, seed, out / f"{experiment.name}-{list(experiment.settings).index(setting)}-{seed}")
        for setting, seed in experiment.missing()
    ]
    if not runs:
        return
    sys.stderr.write(f"{experiment.name}: {experiment.question} {len(runs)} runs\n")
    if any(overrides.get("recipe") == SCENES for overrides in experiment.settings.values()):
        draw_scenes(scenes_in(out))
    with pool_of(workers) as pool:
        for future in as_completed([pool.submit(made_by_worker, run) for run in runs]):
            line = future.result()
            storage.append_json_line(experiment.evidence, line)
            sys.stderr.write(f"  {line['setting']}, seed {line['seed']}: {line.get('failure') or line['validation_rsum']}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="experiments")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    options = parser.parse_args()
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    names = tomllib.loads(PLAN.read_text())["experiments"]
    for experiment in experiments(options.only or names):
        make(experiment, options.workers, options.out)


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"study: {error}")
    except KeyboardInterrupt:
        sys.exit("study: stopped; the same command goes on.")
