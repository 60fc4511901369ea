"""Measure how heavy the code of src is: python tools/measure_code.py [--static].

Prints a table per package, then how much of the code three tasks run and what each command imports:
a loss of 1,024 pairs, a training up to its first optimizer step, and a search. A function counts
once, however often it runs, and not if it runs only while a module is imported. ``--static`` reads
the files only.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
COLUMNS = ("files", "lines", "statements", "functions", "used once", "raise", "comments")
WIDTHS = {"src": 88, "tests": 140}
"""Lines are counted at these widths, so that the project's own width does not change the counts."""

RECORDER = """
import json, sys, threading
functions = set()
def is_importing(frame):
    while frame := frame.f_back:
        if frame.f_code.co_name == "<module>" and "/visavis/" in frame.f_code.co_filename:
            return True
def record(frame, event, argument):
    code = frame.f_code
    key = (code.co_filename, code.co_firstlineno, code.co_name)
    if event == "call" and "/visavis/" in code.co_filename and code.co_name[0] != "<":
        if key not in functions and not is_importing(frame):
            functions.add(key)
def start():
    threading.setprofile(record)
    sys.setprofile(record)
def stop():
    sys.setprofile(None)
    threading.setprofile(None)
    modules = [name for name in sys.modules if name == "visavis" or name.startswith("visavis.")]
    files = {file for file, *_ in functions}
    print(json.dumps([len(functions), len(files), len(modules)]), file=sys.stderr)
"""
COMMAND = """
import atexit
atexit.register(stop)
sys.argv = ["visavis", *{arguments}]
start()
from visavis.cli import main
main()
"""
FIRST_STEP = """
import os
from torch.optim.optimizer import register_optimizer_step_pre_hook
def leave(*_):
    stop()
    os._exit(0)
register_optimizer_step_pre_hook(leave)
"""
LOSS = """
import torch
from visavis import PairLoss
from visavis.objectives import Unified
loss = PairLoss(Unified())
images, texts = torch.randn(2, 1024, 64).requires_grad_()
start()
loss(images, texts)
stop()
"""
SCENES = """
import sys
from visavis.data.synthetic import write_synthetic_scenes
write_synthetic_scenes(sys.argv[1], num_train=64, num_val=10, num_test=10, seed=1)
"""


def documentation(tree: ast.AST) -> list[ast.Expr]:
    """Statements that are only a text."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def formatted_copy(name: str, folder: Path) -> Path:
    """Copy a folder of the project, with the lines that the formatter alone would choose."""
    copy = folder / name
    shutil.copytree(PROJECT / name, copy, ignore=shutil.ignore_patterns("__pycache__"))
    rules = ["--isolated", "--config=format.skip-magic-trailing-comma=true"]
    command = [sys.executable, "-m", "ruff", "format", "--quiet", *rules]
    subprocess.run([*command, f"--line-length={WIDTHS[name]}", str(copy)], check=True)
    return copy


def measure_file(path: Path) -> Counter[str]:
    """Counts of one file, without its private functions."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    nodes, texts = list(ast.walk(tree)), documentation(tree)
    documented = {line for node in texts for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = enumerate(text.splitlines(), 1)
    code = [line.strip() for number, line in lines if number not in documented]
    comments = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(type:|noqa)", token.string)
    ]
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return Counter(
        {
            "files": 1,
            "lines": sum(bool(line) and not line.startswith("#") for line in code),
            "statements": sum(isinstance(node, ast.stmt) for node in nodes) - len(texts),
            "functions": sum(isinstance(node, functions) for node in nodes),
            "raise": sum(isinstance(node, ast.Raise) for node in nodes),
            "comments": len(comments),
        }
    )


def count_used_once(paths: list[Path]) -> Counter[str]:
    """Private functions whose name occurs only once besides their definitions, per package."""
    uses, definitions = Counter[str](), list[tuple[str, str]]()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("_") and not node.name.startswith("__"):
                    definitions.append((package_of(path), node.name))
            elif isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    return Counter(package for package, name in definitions if uses[name] == 1)


def package_of(path: Path) -> str:
    """Name of the package or module at the top."""
    parts = path.parts
    return parts[len(parts) - parts[::-1].index("visavis")].removesuffix(".py")


def print_table(folder: Path) -> None:
    """Print the counts per package, and of the whole."""
    paths = sorted((formatted_copy("src", folder) / "visavis").rglob("*.py"))
    counts = dict[str, Counter[str]]()
    for path in paths:
        counts.setdefault(package_of(path), Counter()).update(measure_file(path))
    for package, number in count_used_once(paths).items():
        counts[package]["used once"] = number
    whole = sum(counts.values(), Counter[str]())
    print(f"{'':14}" + "".join(f"{column:>12}" for column in COLUMNS))
    for package, row in [*sorted(counts.items()), ("all", whole)]:
        print(f"{package:14}" + "".join(f"{row[column]:12,}" for column in COLUMNS))
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if "layers" in contract)
    print(f"comment lines per line of code: {whole['comments'] / whole['lines']:.3f}")
    print(f"packages and modules at the top: {len(counts)}, layers: {len(layers)}")
    tests = [measure_file(path) for path in formatted_copy("tests", folder).rglob("*.py")]
    lines, statements = (sum(test[column] for test in tests) for column in ("lines", "statements"))
    print(f"tests: {len(tests)} files, {lines:,} lines of code, {statements:,} statements")


def run_recorded(program: str, folder: Path) -> tuple[int, int, int]:
    """Run a program. Returns its functions, their files, and the imported modules of ours."""
    done = subprocess.run(
        [sys.executable, "-c", RECORDER + program],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    if done.returncode or not done.stderr.strip():
        raise SystemExit(f"A measured program failed:\n{done.stderr}")
    functions, files, modules = json.loads(done.stderr.strip().splitlines()[-1])
    return functions, files, modules


def print_tasks(folder: Path) -> None:
    """Print what runs in three tasks, and what commands import."""
    subprocess.run([sys.executable, "-c", SCENES, "scenes"], check=True, cwd=folder)
    train = ["train", "demo", "--data", "scenes", "phases.0.epochs=1", "--out"]
    print(f"\n{'task':32}{'functions':>12}{'files':>8}{'modules':>9}")
    tasks = {
        "PairLoss of 1,024 pairs": LOSS,
        "train demo to the first step": FIRST_STEP + COMMAND.format(arguments=[*train, "half"]),
        "train demo": COMMAND.format(arguments=[*train, "run"]),
        "index RUN FOLDER": COMMAND.format(
            arguments=["index", "run", "scenes/images", "--out", "index"]
        ),
        "search INDEX": COMMAND.format(arguments=["search", "index", "a red circle"]),
        "evaluate RUN": COMMAND.format(arguments=["evaluate", "run"]),
        "data check DATA": COMMAND.format(arguments=["data", "check", "scenes"]),
        "catalog objectives": COMMAND.format(arguments=["catalog", "objectives"]),
        "--help": COMMAND.format(arguments=["--help"]),
    }
    for name, program in tasks.items():
        functions, files, modules = run_recorded(program, folder)
        print(f"{name:32}{functions:12,}{files:8,}{modules:9,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--static", action="store_true", help="read the files only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print_table(Path(folder))
        if not options.static:
            print_tasks(Path(folder))


if __name__ == "__main__":
    main()
