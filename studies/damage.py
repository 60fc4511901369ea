"""What happens to damaged files? Seeded mutations of runs, caches, towers, data sets and recipes, and a command on each.

    VISAVIS_DATA=... python studies/damage.py [--mutations 2000] [--seed 1] [--jobs 2] [--out FOLDER]

needs flickr8k and backbone under VISAVIS_DATA; about half an hour. Forty photographs of Flickr8k with their captions, a real image
encoder, a small text encoder, cached features, one finished run and two stopped ones (frozen features; pixels) are made once. For
each mutation they are copied, one file is damaged (bits, bytes, cuts, values of JSON and TOML, links, pipes, devices, folders in a
file's place), and a command runs in a process of its own. It counts what came of it:

    same      the result is that of undamaged files: what was damaged did not matter, was made anew, or another copy was taken
    refused   an exit code other than 0 and a sentence
    said      another result, and a sentence that the undamaged files do not bring
    another   another result in silence of a *fresh* look at the data, the encoder or the recipe, for which nothing else is known
    SILENT    another result in silence, where the run or the cache knew better
    WORDLESS  an exit code other than 0 without a sentence
    TRACEBACK, HANG (over --limit seconds), DIED (by a signal)

What counts as a defect (in capitals) is printed whole, with the command. The exit code is 1 if there is one.
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

TRACED = 70
BAD = ("SILENT", "WORDLESS", "TRACEBACK", "HANG", "DIED")


@dataclass(frozen=True)
class Trial:
    """Files to damage, by patterns, and the command to run then. fresh: nothing tells the command what the files should be.

    run: the folder whose weights are the result; none: the command's output is.
    """

    name: str
    targets: tuple[str, ...]
    command: tuple[str, ...]
    run: str = ""
    fresh: bool = False


TRIALS = (
    Trial("finished run, evaluated", ("runs/finished/**/*",), ("evaluate", "runs/finished", "--json")),
    Trial("finished run, searched", ("runs/finished/**/*",), ("search", "runs/finished", "a dog on the grass", "--json")),
    Trial("finished run, diagnosed", ("runs/finished/**/*",), ("diagnose", "runs/finished", "--batches", "1", "--json")),
    Trial("finished run, resumed", ("runs/finished/**/*",), ("train", "--resume", "runs/finished"), "runs/finished"),
    Trial("stopped run, resumed", ("runs/stopped/**/*",), ("train", "--resume", "runs/stopped"), "runs/stopped"),
    Trial("stopped run of pixels, resumed", ("runs/pixels/**/*",), ("train", "--resume", "runs/pixels"), "runs/pixels"),
    Trial("data of a stopped run", ("photos/*",), ("train", "--resume", "runs/stopped"), "runs/stopped"),
    Trial("data of a stopped run of pixels", ("photos/*",), ("train", "--resume", "runs/pixels"), "runs/pixels"),
    Trial("encoders of a stopped run", ("towers/**/*",), ("train", "--resume", "runs/stopped"), "runs/stopped"),
    Trial("encoders of a finished run", ("towers/**/*",), ("evaluate", "runs/finished", "--json")),
    Trial("cache of a stopped run", ("cache/**/*",), ("train", "--resume", "runs/stopped"), "runs/stopped"),
    Trial("cache of a new run", ("cache/**/*",), ("train", "frozen.toml", "--out", "runs/new"), "runs/new"),
    Trial("data, checked", ("photos/*",), ("data", "check", "photos"), fresh=True),
    Trial("data of a new run", ("photos/*",), ("train", "pixels.toml", "epochs=1", "--skip-bad", "--out", "runs/new"), "runs/new", True),
    Trial("encoders, cached anew", ("towers/**/*",), ("features", "photos", "--text", "towers/text", "--out", "stores"), fresh=True),
    Trial("recipe", ("frozen.toml",), ("train", "frozen.toml", "epochs=1", "--out", "runs/new"), "runs/new", True),
)


@dataclass(frozen=True)
class Outcome:
    code: int | None
    said: str
    result: str
    seconds: float


def attempt(world: Path, trial: Trial, limit: float) -> Outcome:
    """Run the command of a trial in a fork of this process, which has imported everything."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        started = time.perf_counter()
        code = _forked(lambda: _run_command(world, trial, out, err), limit)
        seconds = time.perf_counter() - started
        said, printed = err.read_text(errors="replace"), out.read_text(errors="replace")
    return Outcome(code, said, _weights(world / trial.run) if trial.run else printed, seconds)


def _run_command(world: Path, trial: Trial, out: Path, err: Path) -> None:
    os.chdir(world)
    os.environ["VISAVIS_CACHE"] = str(world / "cache")
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["visavis", *trial.command]
    visavis_main()


def _forked(work: Callable[[], None], limit: float) -> int | None:
    """The exit code of a function as a process of its own; TRACED if it raised, None if it took longer than the limit."""
    until = time.perf_counter() + limit
    process = os.fork()
    if process == 0:
        code = 0
        try:
            work()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # noqa: BLE001 - what a process would print and end with
            traceback.print_exc()
            code = TRACED
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    while time.perf_counter() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def _weights(run: Path) -> str:
    """What identifies the weights of a run's best model."""
    try:
        tensors = sorted(load_file(run / "model" / "model.safetensors").items())
    except (OSError, SafetensorError):
        return "none that can be read"
    return hashlib.sha256(b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in tensors)).hexdigest()


def judge(trial: Trial, found: Outcome, usual: Outcome) -> str:
    if found.code is None:
        return "HANG"
    if found.code < 0:
        return "DIED"
    if "Traceback" in found.said or found.code == TRACED:
        return "TRACEBACK"
    if found.code != 0:
        return "refused" if re.search(r"^visavis: .", found.said, re.MULTILINE) or trial.command[0] == "data" else "WORDLESS"
    if found.result == usual.result:
        return "same"
    if _sentences(found) - _sentences(usual):
        return "said"
    return "another" if trial.fresh else "SILENT"


def _sentences(outcome: Outcome) -> set[str]:
    return {
        re.sub(r"[\d.,]+", "0", line) for line in outcome.said.splitlines() if not re.search(r"\d/\d|%|epoch|phase|collapse|chance", line)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=10.0)
    parser.add_argument("--only", default="", help="trials whose names begin so")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.out = (args.out or Path(tempfile.mkdtemp(prefix="damage-"))).resolve()
    torch.set_num_threads(1)
    trials = [trial for trial in TRIALS if trial.name.startswith(args.only)]
    with ProcessPoolExecutor(args.jobs, get_context("fork")) as pool:
        jobs = [pool.submit(_work, job, trials, args) for job in range(args.jobs)]
        rows = [row for job in jobs for row in job.result()]
    kinds = ("same", "refused", "said", "another", *BAD)
    print(f"{len(rows):,} mutations, seed {args.seed}\n{'':34}" + "".join(f"{kind:>11}" for kind in kinds))
    for name in [trial.name for trial in trials] + [""]:
        counts = Counter(verdict for trial, verdict in rows if name in ("", trial))
        print(f"{name or 'in all':34}" + "".join(f"{counts[kind]:11}" for kind in kinds))
    return int(any(verdict in BAD for _, verdict in rows))


def _work(job: int, trials: list[Trial], args: argparse.Namespace) -> list[tuple[str, str]]:
    """One job's share of the mutations: names of trials and verdicts."""
    world, undamaged = args.out / f"world-{job}", args.out / f"undamaged-{job}"
    if _forked(lambda: build(world), 600) != 0:
        raise SystemExit("the undamaged files could not be made")
    shutil.copytree(world, undamaged, symlinks=True)
    usual = {trial.name: _tried(world, undamaged, trial, 60)[1] for trial in trials}
    for name, outcome in usual.items():
        assert outcome.code == 0, f"{name}: {outcome.said}"
    rows = []
    for number in range(job, args.mutations, args.jobs):
        trial = trials[number // args.jobs % len(trials)]
        what, found = _tried(world, undamaged, trial, args.limit, random.Random(f"{args.seed} {number}"))
        verdict = judge(trial, found, usual[trial.name])
        rows.append((trial.name, verdict))
        if verdict in BAD:
            last = "\n        ".join(found.said.strip().splitlines()[-12:])
            print(f"{number} {verdict}: {what}; visavis {' '.join(trial.command)} ({found.seconds:.1f} s)\n        {last}", flush=True)
    return rows


def _tried(world: Path, undamaged: Path, trial: Trial, limit: float, draw: random.Random | None = None) -> tuple[str, Outcome]:
    """A fresh copy of the undamaged files, one of them damaged unless ``draw`` is None, and what the command made of it."""
    shutil.rmtree(world, ignore_errors=True)
    shutil.copytree(undamaged, world, symlinks=True)
    what = "nothing"
    if draw is not None:
        files = sorted(file for pattern in trial.targets for file in world.glob(pattern) if file.is_file())
        kinds = sorted({(file.parent, file.suffix) for file in files})
        kind = draw.choice(kinds)  # forty photographs shall not hide the one list beside them
        file = draw.choice([file for file in files if (file.parent, file.suffix) == kind])
        what = f"{file.relative_to(world)}: {damage(file, draw)}"
    return what, attempt(world, trial, limit)


if __name__ == "__main__":
    sys.exit(main())
