"""How good is the choice of ``visavis compare --minutes``, and is its stated regret true?

    python studies/timed_choice.py --world scenes|clips|children|dogs [--flickr8k DIR] [--share 0.5]
    [--repetitions 20] [--candidates 16] [--seed 77] [--out runs/timed-choice]

Worlds: 300 synthetic scenes and 400 synthetic clips of a seed, with 150 of each for validation and
450 for tests, and the images of Flickr8k whose captions name a topic, with their frozen features: 700
for the training, 200 for validation and 600 for tests. Test metrics are means over three folds, whose
galleries are as large as the one of validation. The choice was developed on the world children, and
on scenes and clips of seed 77.

The truth is a full grid: every candidate at five learning rates a factor of 2 apart with one seed,
then at its best rate on validation with three further seeds, and the best five of these with six. The
regret of a choice is the best mean test RSUM of the grid minus the mean of the chosen setting at its
rate, over the same six seeds. A part of it is luck of the test images, which no selection on
validation avoids. So the setting that the grid itself selects on validation is compared, too. Each
seed draws its own validation images.

A repetition is a choice with other seeds and a time that is a share of the time of the full grid on
two workers. Its trainings are real. Their times are simulated by the number of steps, so that the
load of the machine does not matter. No two choices share a training. Random search takes the best on
validation of random settings at random rates in the same time, all with the validation split of the
data. It has one training of each setting and rate, whose seed nothing else has.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import operator
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import RecipeError, VisavisError
from visavis.core.progress import NoProgress
from visavis.data.synthetic import write_synthetic_clips, write_synthetic_scenes
from visavis.evaluation import protocols
from visavis.research.experiments.candidates import candidate_objectives
from visavis.research.experiments.grid import Setting
from visavis.research.experiments.jobs import Job, RunOutcome, run_job
from visavis.research.experiments.regret import Finalist, Regret, estimate_regret
from visavis.research.experiments.run_comparison import (
    ExperimentPlan,
    plan_comparison,
    prepare_settings,
)
from visavis.research.experiments.screening import SCREENING_FILE, Screening
from visavis.research.experiments.tuning import with_rate
from visavis.training.recipes.files import read_recipe

FACTORS = (1 / 4, 1 / 2, 1.0, 2.0, 4.0)
GRID_SEEDS = (101,)
TRUE_SEEDS = tuple(range(103, 109))
FIRST_TRUE_SEEDS = TRUE_SEEDS[:3]
NUM_LEADERS = 5
RANDOM_SEEDS = (301,)
SEEDS_PER_REPETITION = 1000
WORKERS = 2
START_S, STEP_S = 0.3, 0.04
"""Simulated seconds of a training before its first step, and of a step."""
TOPICS = {
    "children": {
        "boy",
        "boys",
        "girl",
        "girls",
        "child",
        "children",
        "kid",
        "kids",
        "baby",
        "toddler",
    },
    "dogs": {"dog", "dogs", "puppy", "puppies"},
}
"""Words of the captions of a part of Flickr8k."""
SPLITS = {"train": 700, "val": 200, "test": 600}
"""Images of a part of Flickr8k."""
FOLDS = protocols.Protocol(
    name="folds",
    description="three folds, each with a gallery as large as the one of validation",
    folds=3,
)


def write_topic(topic: str, source: Path, folder: Path) -> None:
    """Write the images of Flickr8k of which most captions name a topic, with their features. More
    of them than in the published split are for tests.
    """
    content = json.loads((source / "flickr8k" / "dataset_flickr8k.json").read_text())
    features = np.load(source / "backbone" / "flickr8k_mobilenet_v2_pool_fp16.npy", mmap_mode="r")
    rows = [
        row
        for row, image in enumerate(content["images"])
        if sum(bool(TOPICS[topic] & set(one["raw"].lower().split())) for one in image["sentences"])
        >= 3
    ]
    rows = [int(row) for row in np.random.default_rng(0).permutation(rows)[: sum(SPLITS.values())]]
    splits = [split for split, count in SPLITS.items() for _ in range(count)]
    images = [
        content["images"][row] | {"imgid": number, "split": split}
        for number, (row, split) in enumerate(zip(rows, splits, strict=True))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "features.npy", features[rows])
    (folder / f"dataset_{topic}.json").write_text(json.dumps({"dataset": topic, "images": images}))


def world_recipe(
    world: str, data: Path, flickr8k: Path | None, seed: int
) -> tuple[str, dict[str, Any]]:
    """Write the data of a world unless it exists, and return its recipe and overrides."""
    overrides: dict[str, Any] = {"data.path": str(data), "training.threads": 1}
    if world == "scenes":
        if not data.exists():
            write_synthetic_scenes(
                data, num_train=300, num_val=150, num_test=450, captions_per_image=3, seed=seed
            )
        return "demo", overrides | {"epochs": 12}
    if world == "clips":
        if not data.exists():
            write_synthetic_clips(data, num_train=400, num_val=150, num_test=450, seed=seed)
        return "synthetic-clips/ce-appearance", overrides | {"epochs": 5}
    if not data.exists():
        if flickr8k is None:
            raise RecipeError(f"--flickr8k: expected a folder for the world {world}.")
        write_topic(world, flickr8k, data)
    overrides |= {"visual.features": str(data / "features.npy"), "evaluation.protocol": "plain"}
    return "study-flickr8k", overrides | {"epochs": 6}


def open_world(options: argparse.Namespace) -> ExperimentPlan:
    """Write the data of a world, and plan its candidates."""
    data = options.out / options.world / "data"
    recipe, overrides = world_recipe(options.world, data, options.flickr8k, options.seed)
    protocols.CATALOG = (*protocols.CATALOG, FOLDS)
    overrides |= {"evaluation.protocol": FOLDS.name}
    objectives = candidate_objectives()[: options.candidates]
    return plan_comparison(
        read_recipe(recipe, overrides), (objectives, [], []), 0, minutes=1.0, tune=True
    )


class StoredTrainings:
    """Trainings whose results are kept in a file, and a clock that they advance."""

    def __init__(self, folder: Path, batches: int):
        self.folder = folder
        self.batches = batches
        self.file = folder / "trainings.jsonl"
        self.now = 0.0
        self.results = dict[str, dict[str, Any]]()
        if self.file.exists():
            lines = self.file.read_text().splitlines()
            self.results = {entry["key"]: entry for entry in map(json.loads, lines)}

    def clock(self) -> float:
        """Simulated time in seconds."""
        return self.now

    def train(self, values: dict[str, Any], name: str, seed: int) -> dict[str, Any]:
        """Result of a training with a seed, which is stored or made now."""
        values = values | {"seed": seed}
        key = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
        if key not in self.results:
            run = self.folder / "runs" / key
            job = Job(name, seed, values, run, keeps_model=bool(values["evaluation"]["test"]))
            outcome = run_job(job, NoProgress())
            rsum = None if outcome.metrics is None else outcome.metrics["rsum"]
            failed = bool(outcome.failure)
            self.results[key] = {
                "key": key,
                "validation": None if failed else outcome.validation_rsum,
                "test": rsum,
                "failure": outcome.failure,
            }
            if run.exists():
                storage.remove_folder(run)
            storage.append_json_line(self.file, self.results[key])
        return self.results[key]

    def seconds(self, values: dict[str, Any]) -> float:
        """Simulated seconds of a training."""
        epochs = sum(phase["epochs"] for phase in values["phases"])
        batches = values["training"].get("batches_per_epoch") or self.batches
        return START_S + STEP_S * epochs * batches

    def jobs_runner(self, repetition: int) -> Any:
        """A runner of jobs for one repetition, which maps their seeds to those of its own."""

        def run_jobs(jobs: Sequence[Job]) -> Iterator[RunOutcome]:
            for job in jobs:
                seed = first_seed(repetition) + job.seed % 100
                result = self.train(job.recipe_values, job.setting, seed)
                seconds = self.seconds(job.recipe_values)
                # A single training uses one worker.
                self.now += seconds / min(WORKERS, len(jobs))
                validation = result["validation"]
                yield RunOutcome(
                    job.setting,
                    job.seed,
                    job.folder,
                    float("nan") if validation is None else validation,
                    seconds=seconds - START_S,
                    job_seconds=seconds,
                    failure=result["failure"],
                )

        return run_jobs


def first_seed(repetition: int) -> int:
    """First seed of a repetition. No two repetitions share a training."""
    return SEEDS_PER_REPETITION * (repetition + 1)


class Truth:
    """Means of a full grid.

    Attributes:
        best: Best mean test RSUM of a candidate at its best rate on validation.
        selected: Mean test RSUM of the candidate that the grid selects on validation.
        seconds: Time of the grid on one worker.
    """

    def __init__(self, plan: ExperimentPlan, trainings: StoredTrainings):
        self.plan = plan
        self.trainings = trainings
        self.seconds = 0.0
        means = dict[str, float]()
        factors = dict[str, float]()
        for setting in plan.settings:
            validation = {
                factor: self._mean(setting, factor, GRID_SEEDS, "validation") for factor in FACTORS
            }
            factor = max(validation, key=lambda one: validation[one])
            means[setting.name] = self._mean(setting, factor, FIRST_TRUE_SEEDS, "test")
            factors[setting.name] = factor
            count = len(FACTORS) * len(GRID_SEEDS) + len(FIRST_TRUE_SEEDS)
            self.seconds += count * trainings.seconds(setting.recipe_values)
            print(
                f"{setting.name}: rate x {factor:g}, test RSUM {means[setting.name]:.1f}",
                flush=True,
            )
        leaders = sorted(plan.settings, key=lambda one: -means[one.name])[:NUM_LEADERS]
        self.best = max(self.test(setting, factors[setting.name]) for setting in leaders)
        for setting in leaders:
            factor = factors[setting.name]
            on_validation = self._mean(setting, factor, TRUE_SEEDS, "validation")
            on_test = self.test(setting, factor)
            print(f"{setting.name}, all seeds: validation {on_validation:.1f}, test {on_test:.1f}")
        best = max(
            plan.settings,
            key=lambda one: self._mean(one, factors[one.name], FIRST_TRUE_SEEDS, "validation"),
        )
        self.selected = self.test(best, factors[best.name])
        print(f"Selected on validation: {best.name}, test RSUM {self.selected:.1f}", flush=True)

    def test(self, setting: Setting, factor: float) -> float:
        """Mean test RSUM of a setting at a rate."""
        return self._mean(setting, factor, TRUE_SEEDS, "test")

    def _mean(self, setting: Setting, factor: float, seeds: Sequence[int], key: str) -> float:
        results = [
            self.trainings.train(with_rate(setting, factor).recipe_values, setting.name, seed)
            for seed in seeds
        ]
        values = [result[key] for result in results if result[key] is not None]
        return statistics.fmean(values) if len(values) == len(results) else float("-inf")


def choose(
    plan: ExperimentPlan,
    batches: dict[str, int],
    trainings: StoredTrainings,
    minutes: float,
    repetition: int,
) -> tuple[Setting, float, Regret | None, float]:
    """One choice: the setting, the factor of its rate, its stated regret, and the minutes spent."""
    folder = trainings.folder / f"repetition-{repetition}"
    if (folder / SCREENING_FILE).exists():
        storage.remove_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    trainings.now = 0.0
    screening = Screening(
        folder,
        plan.settings,
        batches,
        60 * minutes,
        WORKERS,
        trainings.jobs_runner(repetition),
        NoProgress(),
        started=0.0,
        clock=trainings.clock,
    )
    finalists, rates = screening.finalists()
    factors = {rate.setting: rate.factor for rate in rates}
    validation = defaultdict[str, dict[int, float]](dict)
    test = defaultdict[str, dict[int, float]](dict)

    def train(settings: Sequence[Setting], seeds: int) -> list[RunOutcome]:
        outcomes = []
        for seed in range(1, seeds + 1):
            for setting in settings:
                factor = factors[setting.name]
                values = with_rate(setting, factor).recipe_values
                seconds = trainings.seconds(values)
                if seed not in test[setting.name]:
                    own_seed = first_seed(repetition) + 200 + seed
                    result = trainings.train(values, setting.name, own_seed)
                    trainings.now += seconds / WORKERS
                    validation[setting.name][seed] = result["validation"]
                    test[setting.name][seed] = result["test"]
                outcomes.append(RunOutcome(setting.name, seed, folder, job_seconds=seconds))
        return outcomes

    screening.confirm(finalists, 1, train)
    state = screening.state
    assert state.schedule is not None
    last = state.stages[-1].finalists
    choice = max(last, key=lambda name: statistics.fmean(validation[name].values()))
    confirmed = {
        name: Finalist(factors[name], validation[name], test[name]) for name in state.finalists
    }
    regret = estimate_regret(confirmed, choice, state.screened, state.schedule)
    setting = next(one for one in plan.settings if one.name == choice)
    return setting, factors[choice], regret, trainings.now / 60


def random_search(
    plan: ExperimentPlan, trainings: StoredTrainings, minutes: float, repetition: int
) -> tuple[Setting, float]:
    """The best on validation of random settings at random rates in the same time."""
    random = np.random.default_rng(repetition)
    trainings.now = 0.0
    best: tuple[float, Setting, float] | None = None
    drawn = list(itertools.product(plan.settings, FACTORS, RANDOM_SEEDS))
    for number in random.permutation(len(drawn)):
        setting, factor, seed = drawn[number]
        values = with_rate(setting, factor).recipe_values
        # Its results of all seeds are compared, so they have the same validation images.
        values["evaluation"]["random_validation"] = False
        trainings.now += trainings.seconds(values) / WORKERS
        if trainings.now > 60 * minutes:
            break
        result = trainings.train(values, setting.name, seed)
        if result["validation"] is not None and (best is None or result["validation"] > best[0]):
            best = (result["validation"], setting, factor)
    assert best is not None
    return best[1], best[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", choices=("scenes", "clips", *TOPICS), default="scenes")
    parser.add_argument("--flickr8k", type=Path, help="folder with flickr8k and backbone")
    parser.add_argument("--seed", type=int, default=77, help="of the data of scenes and clips")
    parser.add_argument(
        "--regret-of",
        nargs=2,
        metavar=("SETTING", "FACTOR"),
        help="print only the regret of a setting at a factor of its rate",
    )
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--out", type=Path, default=Path("runs/timed-choice"))
    options = parser.parse_args()
    plan = open_world(options)
    batches = {name: one.batches for name, one in prepare_settings(plan, NoProgress()).items()}
    trainings = StoredTrainings(options.out / options.world, next(iter(batches.values())))
    truth = Truth(plan, trainings)
    minutes = options.share * truth.seconds / WORKERS / 60
    print(
        f"best of the grid {truth.best:.1f}, {truth.seconds / WORKERS / 60:.1f} minutes on two workers"
    )
    if options.regret_of is not None:
        name, factor = options.regret_of
        setting = next(one for one in plan.settings if one.name == name)
        true_regret = truth.best - truth.test(setting, float(factor))
        print(f"{name} at x {factor}: regret {true_regret:.1f}")
        return
    rows = []
    for repetition in range(options.repetitions):
        setting, factor, regret, spent = choose(plan, batches, trainings, minutes, repetition)
        chosen = truth.test(setting, factor)
        random = truth.test(*random_search(plan, trainings, minutes, repetition))
        rows.append((chosen, random, regret, spent / minutes))
        stated = "unknown" if regret is None else f"{regret.expected:.1f} ({regret.interval})"
        print(
            f"{repetition + 1:2d}: {setting.name} at x {factor:g}, regret {truth.best - chosen:.1f}, "
            f"stated {stated}, random search {truth.best - random:.1f}, {spent / minutes:.0%} of "
            f"{minutes:.1f} minutes",
            flush=True,
        )
    # The grid's own best has an error: a choice can be better than it.
    known = [
        (max(truth.best - chosen, 0.0), regret)
        for chosen, _, regret, _ in rows
        if regret is not None
    ]
    covered = np.mean([true in regret.interval for true, regret in known])
    mean_stated = np.mean([regret.expected for _, regret in known])
    chosen = statistics.fmean(row[0] for row in rows)
    random = statistics.fmean(row[1] for row in rows)
    better, equal = (
        statistics.fmean(is_so(row[0], row[1]) for row in rows)
        for is_so in (operator.gt, operator.eq)
    )
    print(
        f"\n{options.world}, {len(rows)} choices: mean regret {truth.best - chosen:.2f}, "
        f"{truth.selected - chosen:.2f} to what the grid selects on validation. Random search "
        f"{truth.best - random:.2f}. Better than it in {better:.0%}, equal in {equal:.0%}. Stated in "
        f"{len(known)}: mean {mean_stated:.2f}, the interval covers {covered:.0%}. Time "
        f"{min(row[3] for row in rows):.0%} to {max(row[3] for row in rows):.0%}."
    )


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"timed_choice: {error}")
