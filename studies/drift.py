"""Drift of the study: retrain a sample of its stored runs, and test whether the results still
agree.

    VISAVIS_DATA=... python studies/drift.py [--experiment objectives] [--settings AOQ NCR Unified
    VLC] [--seeds 3]

A run with the same code, seed and processor gives the same bits. Another processor has other
instructions, which change the last bits of products. A training amplifies them: after 351 steps the
validation RSUM differs by several points. So single values cannot be compared between processors,
but their means can. For each setting, stored and retrained runs of the same seeds are compared by a
paired t-test over seeds, corrected for the number of settings. The exit code is 1 if a setting has
drifted, which means that the code has changed its results.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from study import PLAN, Experiment, Run, experiments, read_evidence

from visavis.core.errors import VisavisError
from visavis.core.progress import NoProgress
from visavis.evaluation.statistics import SIGNIFICANCE_LEVEL, PairedTest, holm, paired_tests
from visavis.research.experiments.jobs import run_job

SETTINGS = ("Unified", "VLC", "AOQ", "NCR")


def find_experiment(name: str) -> Experiment:
    """Return an experiment of the plan."""
    found = next(
        (experiment for experiment in experiments([name]) if experiment.name == name), None
    )
    if found is None:
        raise VisavisError(
            f"--experiment: expected an experiment of {PLAN.name}, got {name}. Name one of them."
        )
    return found


def compare_setting(experiment: Experiment, setting: str, seeds: int, out: Path) -> PairedTest:
    """Retrain the first seeds of a setting and compare them with the stored runs."""
    stored = {
        line["seed"]: line["validation_rsum"]
        for line in read_evidence(experiment.name)
        if line["setting"] == setting
    }
    if len(stored) < seeds:
        raise VisavisError(
            f"--settings: expected {seeds} stored runs of {setting} in {experiment.evidence}, got "
            f"{len(stored)}. Name another."
        )
    retrained = {}
    for seed in sorted(stored)[:seeds]:
        outcome = run_job(
            Run(experiment, setting, seed, out / f"{setting}-{seed}".replace("/", "-")).job(),
            NoProgress(),
        )
        if outcome.failure:
            raise VisavisError(f"{setting}, seed {seed}: {outcome.failure}")
        retrained[seed] = outcome.validation_rsum
        sys.stdout.write(
            f"  {setting}, seed {seed}: stored {stored[seed]:.1f}, retrained "
            f"{retrained[seed]:.1f}\n"
        )
        sys.stdout.flush()
    return paired_tests(
        {"retrained": retrained, "stored": {seed: stored[seed] for seed in retrained}}
    )[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiment", default="objectives")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/drift"))
    options = parser.parse_args()
    experiment = find_experiment(options.experiment)
    sys.stdout.write(
        f"Processor: {torch.backends.cpu.get_cpu_capability()} instructions, torch "
        f"{torch.__version__}\n"
    )
    tests = {
        setting: compare_setting(experiment, setting, options.seeds, options.out)
        for setting in options.settings
    }
    p_values = dict(
        zip(
            tests, holm([1.0 if test.p is None else test.p for test in tests.values()]), strict=True
        )
    )
    for setting, test in tests.items():
        described = replace(test, adjusted_p=p_values[setting], tests=len(tests)).describe(
            "validation RSUM"
        )
        sys.stdout.write(f"{setting}: {described}\n")
    return int(any(p <= SIGNIFICANCE_LEVEL for p in p_values.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except VisavisError as error:
        sys.exit(f"drift: {error}")
