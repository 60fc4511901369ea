"""The study: every objective of the catalog, and the claims of the papers, in many short runs on
Flickr8k.

    VISAVIS_DATA=... python studies/study.py [--only objectives sizes ...] [--workers 2] [--out
    runs/study]

An experiment is a set of settings of the recipe ``study-flickr8k`` (half a minute of one core each)
with some seeds. First, each objective gets the same small budget on validation, four tries with a
seed that is used nowhere else (``tuning``): two learning rates and two values of what its paper
leaves open, or four rates if nothing is open. All other experiments start with the best of these.
Some use another recipe (word embeddings trained from scratch, a cross-attention model, synthetic
scenes), for which two rates are tried again. The test split is measured once per run and chooses
nothing.

The result of a run is a line of ``docs/evidence/study/EXPERIMENT.jsonl``. Such a run is not made
again, here or elsewhere, unless that line is removed. So you can stop the study at any time, by
Ctrl-C or a power cut, and it resumes. A line holds

- the metrics of the best model on test, including CS@K by relevance values of MiniLM
- validation RSUM and similarities by epoch, and the standard deviation of the negatives at the end
- how many samples still contribute to the gradient at the end (``diagnose``). Some experiments
  also count by other definitions (``counts_more``)
- how well its scores agree with human ratings
- the instructions of the processor and the version of torch, on which the last bits depend
  (``studies/drift.py``)

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
from ladder import SCENE_SEED, human_agreement

import visavis
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.data.synthetic import write_synthetic_scenes
from visavis.models import Matcher
from visavis.models.inference import score_all_pairs
from visavis.papers.diagnostics.contribution_analysis import ContributionCount
from visavis.research.experiments.jobs import Job, exit_if_stopping, process_pool, run_job
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import open_run, read_run_recipe, with_absolute_paths
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped

PLAN = Path(__file__).with_suffix(".toml")
EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence" / "study"
RECIPE = "study-flickr8k"
SCENES = "study-scenes.toml"
SPEC = "phases.0.objective"
RATE = "phases.0.optimizer.lr"
TUNING, TUNING_SEED = "tuning", 100
BATCHES = 20
EPSILONS = (0.01, 0.001, 0.1)
"""Number of training batches of 128 pairs on which contributing samples are counted, and the
weights from which on a sample counts.
"""
EVERY_TRIPLET = "Triplet(margin=3.0)"
"""An objective that counts all triplets, because cosines differ by 2 at most."""

Overrides = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """Settings by name, each the overrides of a recipe.

    Attributes:
        name: Name of the experiment.
        question: The question that it answers.
        settings: Overrides by name of the setting.
        seeds: Seeds of each setting.
        counts_more: Whether its runs also count by other definitions, see `more_counts_of`.
    """

    name: str
    question: str
    settings: dict[str, Overrides]
    seeds: tuple[int, ...]
    counts_more: bool = False

    @property
    def evidence(self) -> Path:
        return EVIDENCE / f"{self.name}.jsonl"

    @property
    def tunes(self) -> bool:
        """Whether its runs are only for choosing, by validation."""
        return self.seeds == (TUNING_SEED,)

    def finished_lines(self) -> list[dict[str, Any]]:
        """The lines of finished runs that match the current settings of the experiment."""
        lines = read_evidence(self.name)
        return [
            line
            for line in lines
            if line["seed"] in self.seeds
            and line["overrides"] == self.settings.get(line["setting"])
        ]

    def missing_runs(self) -> Iterator[tuple[str, int]]:
        finished_keys = {(line["setting"], line["seed"]) for line in self.finished_lines()}
        return (
            (name, seed)
            for seed in self.seeds
            for name in self.settings
            if (name, seed) not in finished_keys
        )


@dataclass(frozen=True)
class Run:
    """One run of an experiment, and its folder."""

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
        return Job(
            self.setting,
            self.seed,
            with_absolute_paths(read_recipe(named, overrides)).to_dict(),
            self.folder.absolute(),
        )


def scenes_in(out: Path) -> Path:
    """The folder of the study's synthetic scenes."""
    return out.absolute() / "scenes"


def write_scenes_once(folder: Path) -> None:
    """Generate the scenes unless the folder exists. An existing folder is complete."""
    if not folder.exists():
        with storage.atomic_folder(folder) as drawing:
            write_synthetic_scenes(drawing, seed=SCENE_SEED)


def read_evidence(name: str) -> list[dict[str, Any]]:
    path = EVIDENCE / f"{name}.jsonl"
    return storage.read_json_lines(path, dict[str, Any]) if path.exists() else []


def experiments(only: Container[str]) -> Iterator[Experiment]:
    """The experiments of the plan in order, each after the ones it depends on: the tuning of
    objectives and of rates.

    The next experiment is known only after the runs of the previous one.
    """
    plan = tomllib.loads(PLAN.read_text())
    tries = {
        f"{name} | {spec} | {rate:g}": {
            SPEC: spec,
            RATE: rate,
            **dict.fromkeys(entry.get("more_rates", ()), rate),
            **entry.get("with", {}),
        }
        for name, entry in plan["objectives"].items()
        for spec in entry["try"]
        for rate in entry.get("rates", plan["rates"])
    }
    tuning = Experiment(
        TUNING,
        "Which rate and which parameter value are best for each objective?",
        tries,
        (TUNING_SEED,),
    )
    yield tuning
    best_overrides_of = {"": best_tries(tuning)}
    only_named = {name for name, entry in plan["objectives"].items() if entry.get("only_named")}
    for name, entry in plan["experiments"].items():
        if name not in only:
            continue
        world = entry.get("world", "")
        if world not in best_overrides_of:
            tuning = _tuning_in(world, plan["worlds"][world], best_overrides_of[""])
            yield tuning
            best_overrides_of[world] = best_tries(tuning)
        # An experiment of all objectives leaves out objectives that are marked only_named.
        best_by_objective = {
            objective: overrides
            for objective, overrides in best_overrides_of[world].items()
            if objective not in only_named or objective in entry["of"]
        }
        yield _experiment(
            name,
            entry,
            best_by_objective,
            plan["always"] | plan["worlds"].get(world, {}).get("always", {}),
        )


def _tuning_in(
    world: str, entry: dict[str, Any], best_overrides: dict[str, Overrides]
) -> Experiment:
    """The learning rates of objectives with another recipe, with their other settings as they were
    best with the first.
    """
    tries = {
        f"{name} | {rate:g}": {**best_overrides[name], "recipe": entry["recipe"], RATE: rate}
        for name in entry["of"]
        for rate in entry["rates"]
    }
    return Experiment(
        f"{TUNING}-{world}",
        f"Which rate is best for each objective with the recipe {world}?",
        tries,
        (TUNING_SEED,),
    )


def best_tries(tuning: Experiment) -> dict[str, Overrides]:
    """The overrides of the best try of each objective, by validation."""
    best: dict[str, dict[str, Any]] = {}
    for line in tuning.finished_lines():
        name = line["setting"].split(" | ")[0]
        if "failure" not in line and (
            name not in best or line["validation_rsum"] > best[name]["validation_rsum"]
        ):
            best[name] = line
    return {name: tuning.settings[line["setting"]] for name, line in best.items()}


def _experiment(
    name: str, entry: dict[str, Any], best_overrides: dict[str, Overrides], always: Overrides
) -> Experiment:
    """An experiment of the plan. ``of`` lists objectives or "all". ``vary`` lists changes by name.
    ``times_rate`` multiplies the learning rate. ``counts_more`` counts by other definitions, too.
    """
    settings = {}
    for objective in best_overrides if entry["of"] == ["all"] else entry["of"]:
        for label, changes in entry.get("vary", {"": {}}).items():
            overrides = {**best_overrides[objective], **always, **changes}
            overrides[RATE] *= overrides.pop("times_rate", 1.0)
            settings[
                ", ".join(
                    filter(None, (objective if len(entry["of"]) > 1 or not label else "", label))
                )
            ] = overrides
    seeds = tuple(range(1, entry["seeds"] + 1))
    return Experiment(name, entry["question"], settings, seeds, entry.get("counts_more", False))


def train_and_measure(run: Run) -> dict[str, Any]:
    """Train a run, or resume it, and return its line."""
    job = run.job()
    outcome = run_job(job, NoProgress())
    line = {
        "setting": run.setting,
        "seed": run.seed,
        "overrides": run.experiment.settings[run.setting],
    }
    if outcome.failure:
        return {**line, "failure": outcome.failure}
    line |= {"validation_rsum": outcome.validation_rsum, "seconds": round(outcome.seconds, 1)}
    line |= {"processor": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    if not run.experiment.tunes:
        best = open_run(run.folder, read_run_recipe(run.folder), NoProgress())
        line |= {
            "metrics": rounded(outcome.measured_metrics),
            "epochs": epochs_of(run.folder),
            "counts": counts_of(run.folder)
            | (more_counts_of(run.folder) if run.experiment.counts_more else {}),
            **human_agreement_of(*best),
            **negative_std_of(*best),
        }
    shutil.rmtree(run.folder)
    return line


def train_in_worker(run: Run) -> dict[str, Any]:
    """``train_and_measure`` in a worker process, which exits after a stop signal once everything is
    saved.
    """
    try:
        line = train_and_measure(run)
    except Stopped as stopped:
        os._exit(128 + stopped.signal)
    exit_if_stopping()
    return line


def epochs_of(folder: Path) -> list[dict[str, float]]:
    """Validation RSUM and similarities of validation pairs, at every validation."""
    rows = storage.read_json_lines(RunFolder(folder).log, dict[str, Any])
    similarities = [
        f"{kind}_{statistic}"
        for kind in ("positive", "hardest_i2t", "hardest_t2i")
        for statistic in ("mean", "std")
    ]
    names = [*similarities, "gradient_i2t", "gradient_t2i"]
    return [
        rounded(
            {"step": row["step"], "rsum": row["rsum"], **{name: row["val"][name] for name in names}}
        )
        for row in rows
    ]


def counts_of(folder: Path) -> dict[str, float]:
    """Contributing samples of the best model as the paper counts them, for each epsilon. The first
    epsilon has no suffix.
    """
    counts = paper_counts(folder, epsilon=EPSILONS)
    counts_at_epsilon = {
        f"{name}_at_{count.epsilon:g}": count.mean[name]
        for count in counts[1:]
        for name in ("i2t_per_query", "t2i_per_query")
    }
    return rounded(counts[0].mean | counts_at_epsilon)


def more_counts_of(folder: Path) -> dict[str, float]:
    """Counts that other definitions give: the triplets of the untrained model that an objective
    moves, in percent, and the triplets of SmoothAP by eqs. 12 and 13 of COCOS as printed.
    """
    moved, every = paper_counts(folder, checkpoint="start", objective=EVERY_TRIPLET)
    (printed,) = paper_counts(folder, with_slope=True)
    triplets_at_start = {
        f"{name}_at_start": 100 * moved.mean[name] / every.mean[name]
        for name in ("i2t_per_query", "t2i_per_query")
    }
    printed_counts = {
        f"{name}_with_slope": printed.mean[name] for name in ("i2t_per_moved", "t2i_per_moved")
    }
    return rounded(triplets_at_start | printed_counts)


def paper_counts(folder: Path, **options: Any) -> list[ContributionCount]:
    """Contributing samples as the paper counts them, by objective and epsilon."""
    counts = visavis.papers_diagnose(folder, max_batches=BATCHES, **options).counts
    return [count for count in counts if count.semantics == "paper"]


@torch.inference_mode()
def human_agreement_of(data_module: DataModule, matcher: Matcher) -> dict[str, float]:
    """Kendall's tau-b with the experts and with the crowd, without an image's own captions. Empty
    for synthetic scenes.
    """
    evaluation = data_module.recipe.evaluation
    if evaluation.protocol != "flickr8k":
        return {}
    test = data_module.data.split(evaluation.test)
    return rounded(
        human_agreement(test, score_all_pairs(matcher, *data_module.encode(matcher, test)).float())
    )


@torch.inference_mode()
def negative_std_of(data_module: DataModule, matcher: Matcher) -> dict[str, float]:
    """Standard deviation of a query's negatives on the validation split, averaged over the queries
    of both directions.
    """
    split = data_module.validation
    scores = score_all_pairs(matcher, *data_module.encode(matcher, split)).double()
    wrong = torch.arange(len(split.images))[:, None] != torch.from_numpy(split.image_of)
    means = [
        (scores**power * wrong).sum(dim) / wrong.sum(dim) for dim in (0, 1) for power in (1, 2)
    ]
    deviations = [(squares - mean**2).sqrt() for mean, squares in (means[:2], means[2:])]
    return rounded(
        {"negative_std": torch.stack([deviation.mean() for deviation in deviations]).mean().item()}
    )


def rounded(numbers: dict[str, Any]) -> dict[str, float]:
    """Values with five digits, more than any two runs agree on."""
    return {name: float(f"{value:.5g}") for name, value in numbers.items() if not math.isnan(value)}


def make(experiment: Experiment, workers: int, out: Path) -> None:
    """Make the missing runs of an experiment with ``workers`` processes, and write each line when
    it finishes.
    """
    runs = [
        Run(
            experiment,
            setting,
            seed,
            out / f"{experiment.name}-{list(experiment.settings).index(setting)}-{seed}",
        )
        for setting, seed in experiment.missing_runs()
    ]
    if not runs:
        return
    sys.stderr.write(f"{experiment.name}: {experiment.question} {len(runs)} runs\n")
    if any(overrides.get("recipe") == SCENES for overrides in experiment.settings.values()):
        write_scenes_once(scenes_in(out))
    with process_pool(workers) as pool:
        for future in as_completed([pool.submit(train_in_worker, run) for run in runs]):
            line = future.result()
            storage.append_json_line(experiment.evidence, line)
            sys.stderr.write(
                f"  {line['setting']}, seed {line['seed']}: "
                f"{line.get('failure') or line['validation_rsum']}\n"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="Names of experiments.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/study"))
    options = parser.parse_args()
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    names = tomllib.loads(PLAN.read_text())["experiments"]
    for experiment in experiments(options.only or names):
        make(experiment, options.workers, options.out)


if __name__ == "__main__":
    # Workers do not import the main script. They find the classes and functions of a run under the
    # name of this module.
    import study

    try:
        study.main()
    except VisavisError as error:
        sys.exit(f"study: {error}")
    except KeyboardInterrupt:
        sys.exit("study: stopped. Run the same command to resume.")
