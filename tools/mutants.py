"""Mutation testing: insert faults into the source, one at a time, and run the tests on each.

    pip install cosmic-ray && python tools/mutants.py [--count 40] [--seed 1] [--near] [--only
    NUMBER ...]

A position of src/visavis is sampled among all to which an operator of cosmic-ray applies
(arithmetic, comparisons, booleans, numbers, loops, exceptions, decorators), then one of these
operators. Annotations are excluded, because a fault there changes nothing. The tests of the same
package run first, then the others (without the long ones), in a copy of the last commit, until one
fails. Each mutant is printed with the first test that fails. Explain each surviving mutant or add a
test for it.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cosmic_ray.ast
from cosmic_ray import mutating, plugins

PROJECT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 1800
TESTED_BY = {
    "runs": "training",
    "supervision": "training",
    "blocking": "measured_cost",
    "api": "cli",
}
"""Package whose tests test another package."""


@dataclass(frozen=True)
class Mutant:
    """One fault: the file in the project, the operator's name, and which of its occurrences."""

    file: Path
    operator: str
    occurrence: int

    def code(self, source: str) -> str:
        return (
            mutating.mutate_code(source, plugins.get_operator(self.operator)(), self.occurrence)
            or source
        )


def sample_mutants(count: int, seed: int) -> Iterator[Mutant]:
    """Mutants that differ from the source in more than annotations."""
    rng = random.Random(seed)
    mutants = mutants_by_position()
    keys = sorted(mutants)
    rng.shuffle(keys)
    for key in keys:
        mutant = rng.choice(mutants[key])
        source = (PROJECT / mutant.file).read_text(encoding="utf-8")
        try:
            differs = _without_annotations(source) != _without_annotations(mutant.code(source))
        except SyntaxError:  # raised by operators that do not support a syntax form
            continue
        if differs:
            yield mutant
            count -= 1
        if count == 0:
            return


def mutants_by_position() -> dict[tuple[str, Any, Any], list[Mutant]]:
    """The mutants by their position in the source."""
    mutants: dict[tuple[str, Any, Any], list[Mutant]] = defaultdict(list)
    operators = {name: plugins.get_operator(name) for name in plugins.operator_names()}
    for path in sorted((PROJECT / "src" / "visavis").rglob("*.py")):
        nodes = list(
            cosmic_ray.ast.ast_nodes(cosmic_ray.ast.get_ast(path.read_text(encoding="utf-8")))
        )
        for name, operator in operators.items():
            if operator.arguments():
                continue
            positions = [
                position for node in nodes for position in operator().mutation_positions(node)
            ]
            for occurrence, (start, end) in enumerate(positions):
                mutants[str(path), start, end].append(
                    Mutant(path.relative_to(PROJECT), name, occurrence)
                )
    return mutants


def _without_annotations(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
    return ast.dump(tree)


def first_failure(copy: Path, package_tests: list[str], *, everywhere: bool) -> str:
    """The first test that fails on the code in the copy, or "" if all pass.

    The tests of the fault's package run first. With ``everywhere``, all others follow. A failing
    test must fail again alone. Otherwise it is excluded and the others continue, because a test
    that fails only after others does not detect the fault.
    """
    left_out: list[str] = []
    for paths in ([package_tests] if package_tests else []) + (
        [["tests", "src/visavis"]] if everywhere else []
    ):
        while failed := _run(
            copy,
            "-n",
            "auto",
            "--dist",
            "loadfile",
            *(f"--deselect={test}" for test in left_out),
            *paths,
        ):
            if "::" not in failed or _run(copy, failed):
                return failed
            left_out.append(failed)
    return ""


def _run(copy: Path, *arguments: str) -> str:
    """The first test that fails, or another error."""
    options = [
        "-x",
        "-q",
        "--timeout",
        "120",
        "-p",
        "no:cacheprovider",
        "-m",
        "not long and not timing and not site",
    ]
    command = [sys.executable, "-m", "pytest", *options]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    try:
        process = subprocess.run(
            [*command, *arguments],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"timeout after {TIMEOUT_S} s"
    if process.returncode in (0, 5):  # 5: no tests collected
        return ""
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", process.stdout, re.MULTILINE)
    return failed[0] if failed else (process.stdout + process.stderr).strip().splitlines()[-1]


def tests_of_package(file: Path) -> list[str]:
    """The tests of a file's package."""
    parts = file.relative_to("src/visavis").with_suffix("").parts
    folder = PROJECT / "tests" / TESTED_BY.get(parts[0], parts[0])
    names = {parts[0], parts[-1], TESTED_BY.get(parts[0], parts[0])}
    return [str(folder.relative_to(PROJECT))] * folder.is_dir() + sorted(
        {
            str(path.relative_to(PROJECT))
            for name in names
            for path in (PROJECT / "tests").glob(f"test_{name}*.py")
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", type=int, nargs="*", help="Numbers of the mutants to try. Default: all."
    )
    parser.add_argument(
        "--near", action="store_true", help="Run only the tests of the same package."
    )
    args = parser.parse_args()
    survivors = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "--quiet", "--shared", PROJECT, copy], check=True)
        for number, mutant in enumerate(sample_mutants(args.count, args.seed)):
            if args.only and number not in args.only:
                continue
            tried += 1
            source = (copy / mutant.file).read_text(encoding="utf-8")
            code = mutant.code(source)
            (copy / mutant.file).write_text(code, encoding="utf-8")
            failed = first_failure(copy, tests_of_package(mutant.file), everywhere=not args.near)
            (copy / mutant.file).write_text(source, encoding="utf-8")
            survivors += not failed
            changes = [
                line
                for line in difflib.unified_diff(
                    source.splitlines(), code.splitlines(), n=0, lineterm=""
                )
                if line[:2] != "--"
            ]
            print(f"{number} {mutant.file}: {'caught by ' + failed if failed else 'SURVIVED'}")
            print(
                "\n".join(f"    {line}" for line in changes if not line.startswith("+++")),
                flush=True,
            )
    print(f"{tried - survivors} of {tried} caught, seed {args.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
