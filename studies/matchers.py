"""Matchers on Flickr8k: one frozen image encoder, word embeddings trained from scratch, the same
training time for each.

    VISAVIS_DATA=... python studies/matchers.py [--minutes 40] [--seeds 3] [--only "VSE++ mean"
    MaxSim ...] [--workers 2] [--out runs/matchers]

All read the 7x7 grid of MobileNetV2 (run ``python tools/mobilenet_folder.py`` once). Its features
are computed once and cached. All use the same learned words: vectors of 300, with ``--dropout``,
through a GRU of 512. The GRU is bidirectional if a matcher keeps or averages its states, and
forward if the matcher takes the last one. Matrices are multiplied in bfloat16 if the processor has
instructions for it, and a line of the output reports that.

A run trains for as many steps as fit into the minutes, by its own pace, which is measured first.
The minutes are processor time of one core, which is up to half as long again next to other
programs. The learning rate falls to 0 at their end. Validations on 200 images (one per epoch, at
least four) and the test take additional time. Rates are close to those of the papers, which train
far longer. ``--rates 3e-4 1e-3 3e-3 --minutes 4`` tries others and prints the validation RSUM of
each.

Each run has its own folder and process. Stopped runs resume. The result of a finished run is a line
of ``docs/evidence/matchers.jsonl``. Such a run is not made again, here or on another machine,
unless that line is removed. Prints a JSON line for each new run, then a table: test RSUM of the
best validation (mean and standard deviation over seeds), the difference to the mean-pooled VSE++
(95 % interval by seed), milliseconds (of one core) to find a text among 1,000 images, and the peak
memory of the process.

``--test-images 200`` tests all on the first 200 images of the split and their captions, for scores
that take a millisecond per pair (SGR). This test is easier, and its lines and its table state that.
Trained models are not trained again for it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from noise import with_interval

from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.models import Matcher
from visavis.models.device import has_native_bfloat16
from visavis.models.inference import score_all_pairs
from visavis.training.evaluation.ranked_split import first_images
from visavis.training.recipes.data_module import DataModule
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.open_run import open_run, read_run_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.supervision import PairSupervision
from visavis.training.train_step import TrainStep
from visavis.training.trainer import Trainer
from visavis.training.training_run import prepare_training

RECIPE = Path(__file__).with_suffix(".toml")
EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence" / "matchers.jsonl"
OBJECTIVES = {"Unified": "Unified(margin=0.2, gamma=50)", "TripletHN": "TripletHN(margin=0.2)"}
VALIDATIONS = 4
WARM = 2
TIMED = 8
QUERIES = 30
TEST_IMAGES = 1000
"""Number of images of the whole test split."""
KEEP_FREED_MEMORY = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**34),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
}
"""Without this setting, large tensors return to Linux after each step, and a third of the time is
spent on getting their pages again.
"""


@dataclass(frozen=True)
class Candidate:
    """A matcher of the study, and its learning rate with each objective.

    Attributes are those of the recipe. ``dropout`` is the name of the setting for dropout of
    learned words. ``batch_size`` is in pairs, with fewer pairs for matchers whose pairs are costly.
    """

    model: str
    rates: dict[str, float]
    dropout: str = "dropout"
    batch_size: int = 128


CANDIDATES = {
    "VSE++ mean": Candidate(
        "VSE++(embedding_dim=512, bidirectional=True, word_pool='mean', region_pool='mean')",
        {"Unified": 1e-3, "TripletHN": 1e-3},
    ),
    "VSE++ GRU": Candidate(
        "VSE++(embedding_dim=512, region_pool='mean')", {"Unified": 1e-3, "TripletHN": 1e-3}
    ),
    "VSEInfinity": Candidate(
        "VSEInfinity(embedding_dim=512)",
        {"Unified": 1e-3, "TripletHN": 1e-3},
        dropout="word_dropout",
    ),
    "VSRN": Candidate("VSRN(embedding_dim=512)", {"Unified": 1e-3, "TripletHN": 1e-3}),
    "VSRN, decoder": Candidate(
        "VSRN(embedding_dim=512, generation=1)", {"Unified": 1e-3, "TripletHN": 1e-3}
    ),
    "MaxSim": Candidate("MaxSim(embedding_dim=512)", {"Unified": 1e-3, "TripletHN": 1e-3}),
    "SCAN t2i": Candidate(
        "SCAN(embedding_dim=512, direction='t2i', inverse_temperature=9)",
        {"Unified": 1e-3, "TripletHN": 5e-4},
    ),
    "SCAN i2t": Candidate(
        "SCAN(embedding_dim=512, direction='i2t', inverse_temperature=4)",
        {"Unified": 1e-3, "TripletHN": 5e-4},
    ),
    "BFAN": Candidate("BFAN(embedding_dim=512)", {"Unified": 1e-3, "TripletHN": 5e-4}),
    "SAF": Candidate(
        "SGRAF(embedding_dim=512, num_regions=49, similarity_module='SAF')",
        {"Unified": 5e-4, "TripletHN": 5e-4},
        batch_size=64,
    ),
    "SGR": Candidate(
        "SGRAF(embedding_dim=512, num_regions=49, similarity_module='SGR')",
        {"Unified": 5e-4, "TripletHN": 2e-4},
        batch_size=64,
    ),
}
PLAIN = "VSE++ mean"
"""The baseline of all differences."""


@dataclass(frozen=True)
class Job:
    """One training: matcher, objective, learning rate, seed, minutes, and the images of its test."""

    name: str
    objective: str
    rate: float
    seed: int
    minutes: float
    dropout: float
    test_images: int
    out: Path

    @property
    def folder(self) -> Path:
        parts = (
            self.name,
            self.objective,
            f"{self.rate:g}",
            f"{self.minutes:g}min",
            f"dropout{self.dropout:g}",
            str(self.seed),
        )
        return (
            self.out / "-".join(parts).replace(",", "").replace(" ", "-").replace("+", "p").lower()
        )

    @property
    def measured(self) -> Path:
        return self.folder / f"study-{self.test_images}.json"

    def settings(self) -> dict[str, Any]:
        return {"matcher": self.name} | {
            key: value for key, value in vars(self).items() if key not in ("name", "out")
        }

    def overrides(self) -> dict[str, Any]:
        candidate = CANDIDATES[self.name]
        return {
            "model": f"{candidate.model[:-1]}, {candidate.dropout}={self.dropout:g})",
            "objective": OBJECTIVES[self.objective],
            "phases.0.optimizer.lr": self.rate,
            "training.batch_size": candidate.batch_size,
            "training.threads": 1,
            "seed": self.seed,
        }


def train(job: Job) -> None:
    """Train and test, then measure time and memory, and write the result to the run folder."""
    trainer = trained(job)
    trainer.matcher.load_state_dict(trainer.best)
    tested = first_images(trainer.data_module.data.split("test"), job.test_images)
    steps = trainer.state.step
    storage.write_json(
        job.measured,
        {
            **job.settings(),
            "precision": "bfloat16" if has_native_bfloat16(torch.device("cpu")) else "float32",
            "steps": steps,
            "pairs": steps * CANDIDATES[job.name].batch_size,
            "validation_rsum": trainer.state.best_rsum,
            "test_rsum": trainer.data_module.evaluate(trainer.matcher, tested).metrics["rsum"],
            "query_ms": milliseconds_a_query(job.folder),
            "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        },
    )


def try_rate(job: Job) -> None:
    """Train without a test, and write the validation RSUM."""
    storage.write_json(
        job.measured, {**job.settings(), "validation_rsum": trained(job).state.best_rsum}
    )


def trained(job: Job) -> Trainer:
    """Train to the end. A stopped run resumes."""
    files = RunFolder(job.folder)
    if not files.recipe.exists():
        storage.write_toml(
            files.recipe, read_recipe(RECIPE, job.overrides() | steps_within(job)).to_dict()
        )
    trainer = Trainer(*prepare_training(read_run_recipe(job.folder)), files)
    if not trainer.resume():
        trainer.start()
    trainer.run()
    return trainer


def steps_within(job: Job) -> dict[str, Any]:
    """Epochs and batches per epoch that fit into the minutes, by the pace of a few steps. At least
    four epochs.
    """
    recipe = read_recipe(RECIPE, job.overrides())
    data_module, matcher = prepare_training(recipe)
    loader = data_module.loader(data_module.data.split("train"))
    seconds = list(paces(data_module, matcher))
    steps = max(VALIDATIONS, int(60 * job.minutes / statistics.median(seconds)))
    epochs = max(VALIDATIONS, -(-steps // loader.num_batches))
    return {"epochs": epochs, "training.batches_per_epoch": steps // epochs}


def paces(data_module: DataModule, matcher: Matcher) -> Iterator[float]:
    """The processor seconds of some training steps, after the first ones."""
    phase = data_module.recipe.phases[0]
    step = TrainStep(matcher, phase, data_module.recipe)
    started = time.process_time()
    for batch in data_module.loader(data_module.data.split("train")).epoch(1):
        step.backward(batch, PairSupervision().targets)
        step.step(1.0)
        if batch.index >= WARM:
            yield time.process_time() - started
        if batch.index + 1 == WARM + TIMED:
            return
        started = time.process_time()


def milliseconds_a_query(run: Path) -> float:
    """The median time to encode a test caption and score it with 1,000 encoded images."""
    recipe = read_run_recipe(run)
    data_module, matcher = open_run(run, recipe, NoProgress())
    test = data_module.data.split("test")
    visual, _ = data_module.encode(matcher, test)
    seconds = []
    with torch.inference_mode():
        for caption in test.captions[:: len(test.captions) // QUERIES]:
            started = time.process_time()
            score_all_pairs(
                matcher, visual, matcher.encode_text(data_module.processor.process_texts([caption]))
            )[:, 0].argsort(descending=True)
            seconds.append(time.process_time() - started)
    return round(1000 * statistics.median(seconds), 2)


def results(jobs: list[Job], workers: int, *extra_options: str) -> list[dict[str, Any]]:
    """The result of each run, in the order of the jobs. Unfinished ones are trained, each in its
    own process.
    """
    stored = (
        storage.read_json_lines(EVIDENCE, dict[str, Any])
        if EVIDENCE.exists() and not extra_options
        else []
    )
    rows = [
        next((row for row in stored if job.settings().items() <= row.items()), None) for job in jobs
    ]
    new = [job for job, row in zip(jobs, rows, strict=True) if row is None]
    with ThreadPoolExecutor(workers) as pool:
        new_rows = {}
        for job, row in zip(
            new, pool.map(partial(result, extra_options=extra_options), new), strict=True
        ):
            new_rows[job] = row
            if not extra_options:
                storage.append_json_line(EVIDENCE, row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    return [row or new_rows[job] for job, row in zip(jobs, rows, strict=True)]


def result(job: Job, extra_options: Sequence[str]) -> dict[str, Any]:
    """The result of a run, which is trained in its own process unless it is finished."""
    if not job.measured.exists():
        sys.stderr.write(f"{job.folder.name} ...\n")
        values = (
            "--name",
            job.name,
            "--objective",
            job.objective,
            "--rate",
            job.rate,
            "--seed",
            job.seed,
        )
        common = (
            "--minutes",
            job.minutes,
            "--dropout",
            job.dropout,
            "--test-images",
            job.test_images,
            "--out",
            job.out,
        )
        command = [sys.executable, __file__, *map(str, (*values, *common)), *extra_options]
        subprocess.run(command, check=True, env=os.environ | KEEP_FREED_MEMORY)
    return storage.read_json(job.measured, dict[str, Any])


def table(rows: list[dict[str, Any]]) -> str:
    """One row per matcher and objective, all of one test. The RSUM is followed by the number of
    images if the test is smaller.
    """
    heads = (
        "matcher",
        "objective",
        "test RSUM",
        f"above {PLAIN}",
        "steps",
        "pairs seen",
        "time per query",
        "memory",
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    images = rows[0]["test_images"]
    for objective in dict.fromkeys(run["objective"] for run in rows):
        objective_rows = [run for run in rows if run["objective"] == objective]
        plain = {run["seed"]: run["test_rsum"] for run in objective_rows if run["matcher"] == PLAIN}
        for name in dict.fromkeys(run["matcher"] for run in objective_rows):
            runs = [run for run in objective_rows if run["matcher"] == name]
            above = [
                run["test_rsum"] - plain[run["seed"]]
                for run in runs
                if run["seed"] in plain and name != PLAIN
            ]
            mean = {
                key: statistics.mean(run[key] for run in runs)
                for key in ("steps", "pairs", "query_ms", "peak_gb")
            }
            cells = (
                name,
                objective,
                spread([run["test_rsum"] for run in runs])
                + ("" if images == TEST_IMAGES else f" ({images} images)"),
                with_interval(above) if above else "",
                f"{mean['steps']:,.0f}",
                f"{mean['pairs']:,.0f}",
                f"{mean['query_ms']:.1f} ms",
                f"{mean['peak_gb']:.1f} GB",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def table_of_rates(rows: list[dict[str, Any]]) -> str:
    """The validation RSUM of each matcher and objective at each rate, the best in bold."""
    rates = sorted({run["rate"] for run in rows})
    lines = [f"| | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (len(rates) + 1) + "|"]
    for key in dict.fromkeys((run["matcher"], run["objective"]) for run in rows):
        values = {
            run["rate"]: run["validation_rsum"]
            for run in rows
            if (run["matcher"], run["objective"]) == key
        }
        cells = [
            ("**{:.1f}**" if values.get(rate) == max(values.values()) else "{:.1f}").format(
                values[rate]
            )
            for rate in rates
        ]
        lines.append(f"| {', '.join(key)} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f}" + (
        f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes",
        type=float,
        default=40.0,
        help="Training time of each run, in minutes of one core.",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, default=list(CANDIDATES))
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.4,
        help="Dropout of the learned word vectors, in every matcher.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/matchers"))
    parser.add_argument(
        "--workers", type=int, default=1, help="Number of parallel runs, of one core and 4 GB each."
    )
    parser.add_argument(
        "--test-images",
        type=int,
        default=TEST_IMAGES,
        help="Test only on this number of images, the first ones.",
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        help="Learning rates to try on validation, instead of the chosen ones.",
    )
    for hidden, kind in (("name", str), ("objective", str), ("rate", float), ("seed", int)):
        parser.add_argument(f"--{hidden}", type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--trying", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    common = {
        "minutes": options.minutes,
        "dropout": options.dropout,
        "test_images": options.test_images,
        "out": options.out,
    }
    if options.name:
        torch.set_num_threads(1)
        (try_rate if options.trying else train)(
            Job(options.name, options.objective, options.rate, options.seed, **common)
        )
        return
    jobs = [
        Job(name, objective, rate, seed, **common)
        for seed in range(1, (1 if options.rates else options.seeds) + 1)
        for objective in options.objectives
        for name in options.only
        for rate in options.rates or [CANDIDATES[name].rates[objective]]
    ]
    sys.stdout.write(
        table_of_rates(results(jobs, options.workers, "--trying"))
        if options.rates
        else table(results(jobs, options.workers))
    )


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"matchers: {error}")
