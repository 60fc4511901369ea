"""Test undecided claims once more, with new runs of as many seeds as their power analysis asks for.

    VISAVIS_DATA=... python studies/confirm_claims.py [--workers 2] [--out runs/confirmation]

``docs/evidence/confirmation.toml`` has the claims and their seeds, which were fixed before the first
new run: the cheapest ones of ``claim_power.py``. No stored run has these seeds. The lines of the new
runs are in ``docs/evidence/study/EXPERIMENT-again.jsonl``. ``claims.py`` tests each claim with them
alone, corrected by Holm's method for the claims of this plan. Run the same command to resume.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from claim_power import ADDRESS_KEYS, settings_of
from study import EVIDENCE, Experiment, experiments, make

from visavis.core.errors import VisavisError

CONFIRMATION = EVIDENCE.parent / "confirmation.toml"
CLAIMS = EVIDENCE.parent / "claims.toml"
FIRST_SEED = 201
AGAIN = "-again"
"""End of the names of experiments with new runs."""


def planned_seeds() -> dict[str, int]:
    """Number of new seeds by claim."""
    seeds: dict[str, int] = tomllib.loads(CONFIRMATION.read_text())["seeds"]
    return seeds


def again(claim: Mapping[str, Any]) -> dict[str, Any]:
    """A claim with the new runs of its settings."""

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(part) for part in value]
        if isinstance(value, str) and "/" in value:
            experiment, setting = value.split("/", 1)
            return f"{experiment}{AGAIN}/{setting}"
        return value

    return {key: renamed(value) if key in ADDRESS_KEYS else value for key, value in claim.items()}


def new_experiments() -> Iterator[Experiment]:
    """The new runs of each setting, with the most seeds that a claim asks for."""
    seeds = dict[str, int]()
    planned = planned_seeds()
    for claim in tomllib.loads(CLAIMS.read_text())["claims"]:
        for address in settings_of(claim) if claim["name"] in planned else ():
            seeds[address] = max(seeds.get(address, 0), planned[claim["name"]])
    names = {address.split("/", 1)[0] for address in seeds}
    for experiment in experiments(names):
        for setting, overrides in experiment.settings.items():
            if count := seeds.get(f"{experiment.name}/{setting}", 0):
                yield Experiment(
                    f"{experiment.name}{AGAIN}",
                    experiment.question,
                    {setting: overrides},
                    tuple(range(FIRST_SEED, FIRST_SEED + count)),
                    experiment.counts_more,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/confirmation"))
    options = parser.parse_args()
    for number, experiment in enumerate(new_experiments()):
        make(experiment, options.workers, options.out / f"{number}")


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(f"confirm_claims: {error}")
    except KeyboardInterrupt:
        sys.exit("confirm_claims: stopped. Run the same command to resume.")
