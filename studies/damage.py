"""Damaged files: seeded mutations of runs, caches, encoders, data sets and recipes, and a command on each.

    VISAVIS_DATA=... python studies/damage.py [--mutations 2000] [--seed 1] [--jobs 2] [--out FOLDER]

Needs flickr8k and backbone under VISAVIS_DATA and takes about half an hour. First it makes the undamaged files: forty photographs of
Flickr8k with their captions, a real image encoder, a small text encoder, cached features, one finished run and two stopped ones (frozen
features, pixels). For each mutation they are copied, one file is damaged (bits, bytes, cuts, values of JSON and TOML, links, pipes,
devices, folders in a file's place), and a command runs in its own process. The outcomes are counted:

    same      the result of the undamaged files: the damage did not matter, the file was computed again, or another copy was used
    refused   an exit code other than 0 and an error message
    reported  another result, with a message that the undamaged files do not cause
    another   another result without a message, where no run or cache records the original data, encoder or recipe
    SILENT    another result without a message, although the run or the cache records the right one
    WORDLESS  an exit code other than 0 without a message
    TRACEBACK, HANG (over --limit seconds), DIED (by a signal)

Defects (in capitals) are printed in full, with the command. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from visavis.cli import main as visavis_main

sys.path.insert(0, str(Path(__file__).with_suffix("")))
from ways import damage
from world import build

TRACEBACK_EXIT_CODE = 70
DEFECTS = ("SILENT", "WORDLESS", "TRACEBACK", "HANG", "DIED")


@dataclass(frozen=True)
class Trial:
    """Files to damage, by patterns, and the command that runs then.

    Attributes:
        name: Name in the table.
        targets: Patterns of the files to damage.
        command: Arguments of visavis.
        run: Folder whose weights are the result. Empty: the result is the output of the command.
        is_unrecorded: Whether no run or cache records the original files.
    """

    name: str
    targets: tuple[str, ...]
    command: tuple[str, ...]
    run: str = ""
    is_unrecorded: bool = False


TRIALS = (
    Trial(
        "finished run, evaluated", ("runs/finished/**/*",), ("evaluate", "runs/finished", "--json")
    ),
    Trial(
        "finished run, searched",
        ("runs/finished/**/*",),
        ("search", "runs/finished", "a dog on the grass", "--json"),
    ),
    Trial(
        "finished run, diagnosed",
        ("runs/finished/**/*",),
        ("papers", "diagnose", "runs/finished", "--max-batches", "1", "--json"),
    ),
    Trial(
        "finished run, resumed",
        ("runs/finished/**/*",),
        ("train", "--resume", "runs/finished"),
        "runs/finished",
    ),
    Trial(
        "stopped run, resumed",
        ("runs/stopped/**/*",),
        ("train", "--resume", "runs/stopped"),
        "runs/stopped",
    ),
    Trial(
        "stopped run of pixels, resumed",
        ("runs/pixels/**/*",),
        ("train", "--resume", "runs/pixels"),
        "runs/pixels",
    ),
    Trial(
        "data of a stopped run",
        ("photos/*",),
        ("train", "--resume", "runs/stopped"),
        "runs/stopped",
    ),
    Trial(
        "data of a stopped run of pixels",
        ("photos/*",),
        ("train", "--resume", "runs/pixels"),
        "runs/pixels",
    ),
    Trial(
        "encoders of a stopped run",
        ("encoders/**/*",),
        ("train", "--resume", "runs/stopped"),
        "runs/stopped",
    ),
    Trial(
        "encoders of a finished run", ("encoders/**/*",), ("evaluate", "runs/finished", "--json")
    ),
    Trial(
        "cache of a stopped run",
        ("cache/**/*",),
        ("train", "--resume", "runs/stopped"),
        "runs/stopped",
    ),
    Trial(
        "cache of a new run",
        ("cache/**/*",),
        ("train", "frozen.toml", "--out", "runs/new"),
        "runs/new",
    ),
    Trial("data, checked", ("photos/*",), ("data", "check", "photos"), is_unrecorded=True),
    Trial(
        "data of a new run",
        ("photos/*",),
        ("train", "pixels.toml", "epochs=1", "--skip-bad", "--out", "runs/new"),
        "runs/new",
        True,
    ),
    Trial(
        "encoders, cached again",
        ("encoders/**/*",),
        ("features", "photos", "--text", "encoders/text", "--out", "stores"),
        is_unrecorded=True,
    ),
    Trial(
        "recipe",
        ("frozen.toml",),
        ("train", "frozen.toml", "epochs=1", "--out", "runs/new"),
        "runs/new",
        True,
    ),
)


@dataclass(frozen=True)
class Outcome:
    code: int | None
    message: str
    result: str
    seconds: float


def attempt(world: Path, trial: Trial, limit: float) -> Outcome:
    """Run the command of a trial in a fork of this process, which has imported all modules."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        err = Path(folder) / "err"
        started = time.perf_counter()
        code = _forked(lambda: _run_command(world, trial, out, err), limit)
        seconds = time.perf_counter() - started
        message = err.read_text(errors="replace")
        printed = out.read_text(errors="replace")
    return Outcome(code, message, _weights(world / trial.run) if trial.run else printed, seconds)


def _run_command(world: Path, trial: Trial, out: Path, err: Path) -> None:
    os.chdir(world)
    os.environ["VISAVIS_CACHE"] = str(world / "cache")
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["visavis", *trial.command]
    visavis_main()


def _forked(work: Callable[[], None], limit: float) -> int | None:
    """The exit code of a function in its own process. TRACED if it raised, None if it took longer
    than the limit.
    """
    deadline = time.perf_counter() + limit
    process = os.fork()
    if process == 0:
        code = 0
        try:
            work()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - as a process would print it and exit
            traceback.print_exc()
            code = TRACEBACK_EXIT_CODE
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    while time.perf_counter() < deadline:
        ended_process, status = os.waitpid(process, os.WNOHANG)
        if ended_process:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _weights(run: Path) -> str:
    """Checksums of the weights of a run's best model."""
    try:
        tensors = sorted(load_file(run / "model" / "model.safetensors").items())
    except (OSError, SafetensorError):
        return "not readable"
    return hashlib.sha256(
        b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in tensors)
    ).hexdigest()


def classify_outcome(trial: Trial, outcome: Outcome, undamaged_outcome: Outcome) -> str:
    if outcome.code is None:
        return "HANG"
    if outcome.code < 0:
        return "DIED"
    if "Traceback" in outcome.message or outcome.code == TRACEBACK_EXIT_CODE:
        return "TRACEBACK"
    if outcome.code != 0:
        return (
            "refused"
            if re.search(r"^visavis: .", outcome.message, re.MULTILINE)
            or trial.command[0] == "data"
            else "WORDLESS"
        )
    if outcome.result == undamaged_outcome.result:
        return "same"
    if _sentences(outcome) - _sentences(undamaged_outcome):
        return "reported"
    return "another" if trial.is_unrecorded else "SILENT"


def _sentences(outcome: Outcome) -> set[str]:
    return {
        re.sub(r"[\d.,]+", "0", line)
        for line in outcome.message.splitlines()
        if not re.search(r"\d/\d|%|epoch|phase|collapse|chance", line)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=10.0)
    parser.add_argument(
        "--only", default="", help="Run only trials whose names start with this text."
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.out = (args.out or Path(tempfile.mkdtemp(prefix="damage-"))).resolve()
    torch.set_num_threads(1)
    trials = [trial for trial in TRIALS if trial.name.startswith(args.only)]
    with ProcessPoolExecutor(args.jobs, get_context("fork")) as pool:
        jobs = [pool.submit(_work, job, trials, args) for job in range(args.jobs)]
        rows = [row for job in jobs for row in job.result()]
    kinds = ("same", "refused", "reported", "another", *DEFECTS)
    print(
        f"{len(rows):,} mutations, seed {args.seed}\n{'':34}"
        + "".join(f"{kind:>11}" for kind in kinds)
    )
    for name in [trial.name for trial in trials] + [""]:
        counts = Counter(verdict for trial, verdict in rows if name in ("", trial))
        print(f"{name or 'total':34}" + "".join(f"{counts[kind]:11}" for kind in kinds))
    return int(any(verdict in DEFECTS for _, verdict in rows))


def _work(job: int, trials: list[Trial], args: argparse.Namespace) -> list[tuple[str, str]]:
    """The mutations of one job, as names of trials and outcomes."""
    world = args.out / f"world-{job}"
    undamaged = args.out / f"undamaged-{job}"
    if _forked(lambda: build(world), 600) != 0:
        raise SystemExit("The undamaged files could not be created.")
    shutil.copytree(world, undamaged, symlinks=True)
    undamaged_outcomes = {
        trial.name: _run_trial(world, undamaged, trial, 60)[1] for trial in trials
    }
    for name, outcome in undamaged_outcomes.items():
        assert outcome.code == 0, f"{name}: {outcome.message}"
    rows = []
    for number in range(job, args.mutations, args.jobs):
        trial = trials[number // args.jobs % len(trials)]
        description, outcome = _run_trial(
            world, undamaged, trial, args.limit, random.Random(f"{args.seed} {number}")
        )
        verdict = classify_outcome(trial, outcome, undamaged_outcomes[trial.name])
        rows.append((trial.name, verdict))
        if verdict in DEFECTS:
            last_lines = "\n        ".join(outcome.message.strip().splitlines()[-12:])
            print(
                f"{number} {verdict}: {description}, visavis {' '.join(trial.command)} "
                f"({outcome.seconds:.1f} s)\n        {last_lines}",
                flush=True,
            )
    return rows


def _run_trial(
    world: Path, undamaged: Path, trial: Trial, limit: float, rng: random.Random | None = None
) -> tuple[str, Outcome]:
    """Copy the undamaged files, damage one unless ``rng`` is None, and run the command."""
    shutil.rmtree(world, ignore_errors=True)
    shutil.copytree(undamaged, world, symlinks=True)
    description = "nothing"
    if rng is not None:
        files = sorted(
            file for pattern in trial.targets for file in world.glob(pattern) if file.is_file()
        )
        file_kinds = sorted({(file.parent, file.suffix) for file in files})
        # Choose a kind of file first: otherwise the forty photographs would hide the single list of
        # captions.
        file_kind = rng.choice(file_kinds)
        file = rng.choice([file for file in files if (file.parent, file.suffix) == file_kind])
        description = f"{file.relative_to(world)}: {damage(file, rng)}"
    return description, attempt(world, trial, limit)


if __name__ == "__main__":
    sys.exit(main())
