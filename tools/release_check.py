"""Check of a release: wheel and sdist are built, and the wheel works in an empty environment,
outside the repository.

Called by ``make release-check``. It needs the package index for the build and the installation.
Each step prints its duration.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
WHEEL_FILES = (
    "visavis/py.typed",
    "visavis/training/recipes/shipped/demo.toml",
    "visavis/research/reports/templates/base.html.j2",
    "visavis/retrieval/server/web_ui/index.html",
    "visavis/models/encoders/weights/scene_encoder.safetensors",
)
SDIST_FILES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "constraints.txt",
    "src/visavis/__init__.py",
    "tests/conftest.py",
)
MAX_WHEEL_MB, MAX_SDIST_MB = 5, 10
LOSSES = "from visavis import PairLoss, parse; import torch; print(PairLoss(parse('Unified()'))(torch.eye(3), torch.eye(3)))"
"""A program that needs no extra."""
TRAIN_COMMANDS = (
    "visavis --version",
    "visavis demo --out demo",
    "visavis data scenes --num-train 200 --num-val 40 --num-test 40 --size 64 --out scenes",
    "visavis train --data scenes --out run epochs=2",
    "visavis evaluate run",
)
SEARCH_COMMANDS = (
    "visavis index run scenes/images --out index",
    "visavis search index circle --top 3",
)
"""Commands that need the extra ``train``, and the extra ``search``."""


def main() -> None:
    """Build the release and try it. The exit code is not 0 if a step fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        default=PROJECT / "dist",
        help="folder for wheel and sdist, which is emptied",
    )
    out = parser.parse_args().out
    for old in (*out.glob("visavis-*.whl"), *out.glob("visavis-*.tar.gz")):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="visavis-release-") as folder:
        run(
            "build",
            [sys.executable, "-m", "build", "--outdir", str(out), str(PROJECT)],
            Path(folder),
        )
        (wheel,) = out.glob("*.whl")
        (sdist,) = out.glob("*.tar.gz")
        check_contents(wheel, sdist)
        environment = Path(folder) / "venv"
        work = Path(folder) / "work"
        work.mkdir()
        venv.create(environment, with_pip=True)
        install = [
            str(environment / "bin" / "python"),
            "-m",
            "pip",
            "install",
            "-q",
            "-c",
            str(PROJECT / "constraints.txt"),
        ]
        for extra, commands in (
            ("", ()),
            ("[train]", TRAIN_COMMANDS),
            ("[search]", SEARCH_COMMANDS),
        ):
            run(f"install visavis{extra}", [*install, f"{wheel}{extra}"], work)
            size = sum(file.lstat().st_size for file in environment.rglob("*") if file.is_file())
            print(f"size of the environment: {size / 1e6:,.0f} MB")
            run("losses", [str(environment / "bin" / "python"), "-c", LOSSES], work)
            for command in commands:
                program, *arguments = command.split()
                run(command, [str(environment / "bin" / program), *arguments], work)


def check_contents(wheel: Path, sdist: Path) -> None:
    """Check the files and the size of wheel and sdist.

    Args:
        wheel: The wheel.
        sdist: The source archive.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    missing = [name for name in WHEEL_FILES if name not in names]
    foreign = [name for name in names if not name.startswith(("visavis/", "visavis-"))]
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    missing += [name for name in SDIST_FILES if name not in members]
    foreign += [
        name for name in members if name.startswith(("shared/", "runs/", "site/", ".venv/"))
    ]
    large = [
        file.name
        for file, limit in ((wheel, MAX_WHEEL_MB), (sdist, MAX_SDIST_MB))
        if file.stat().st_size > limit * 1e6
    ]
    if missing or foreign or large:
        sys.exit(
            f"wheel and sdist: missing files {missing}, unexpected files {foreign}, too large "
            f"{large}."
        )
    print(
        f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB. {sdist.name}: "
        f"{sdist.stat().st_size / 1e6:.1f} MB"
    )


def run(title: str, command: list[str], folder: Path) -> None:
    """Run a step without the variables of this environment, and print its duration.

    Args:
        title: Title of the step.
        command: Program and arguments.
        folder: Current directory.
    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "VISAVIS"))
    }
    variables |= {"VISAVIS_CACHE": str(folder / "cache")}
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    print(f"{time.perf_counter() - started:6.1f} s  {title}", flush=True)
    if done.returncode:
        sys.exit(
            f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}\n{title} failed with exit code "
            f"{done.returncode}."
        )


main()
