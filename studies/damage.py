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
    TRACEBACK, HANG (over --limit seconds), DIED (by a signal)

The last four lines are printed whole, with the command. The exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tomli_w
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

import visavis
from visavis.cli import main as visavis_main
from visavis.data import open_dataset
from visavis.progress import Silent, TrainingStep
from visavis.training.trainer import Stopped

TRACED = 70
BAD = ("SILENT", "TRACEBACK", "HANG", "DIED")
RECIPE = """
name = "small"
seed = 3
data = {{ path = "{photos}" }}
visual = {visual}
text = {text}
model = {model}
training = {{ batch_size = 8, threads = 1, checkpoint_s = 0, probe_batches = 1 }}

[[phases]]
epochs = 4
objective = "VLC(gamma=20)"
optimizer = {{ name = "AdamW", lr = 1e-3 }}
"""


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


class StopAt(Silent):
    """Presses Ctrl-C after so many steps."""

    def __init__(self, last: int):
        self.left = last

    def step(self, step: TrainingStep) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def build(folder: Path) -> None:
    """The undamaged world."""
    os.environ["VISAVIS_CACHE"] = str(folder / "cache")
    folder.mkdir(parents=True)
    os.chdir(folder)
    data = open_dataset("flickr8k").split("train")
    (folder / "photos").mkdir()
    images = []
    for i, split in enumerate(["train"] * 24 + ["val"] * 8 + ["test"] * 8):
        image = data.images[i]
        assert image.bytes is not None
        (folder / "photos" / image.name).write_bytes(image.bytes.read())
        images.append({"filename": image.name, "split": split, "sentences": [{"raw": data.captions[c]} for c in data.captions_of[i][:3]]})
    (folder / "photos" / "dataset.json").write_text(json.dumps({"images": images}, indent=1))
    tool = Path(__file__).resolve().parents[1] / "tools" / "mobilenet_folder.py"
    subprocess.run([sys.executable, tool, "--out", folder / "towers" / "visual"], check=True, capture_output=True)
    words = sorted({word for image in images for sentence in image["sentences"] for word in re.findall(r"\w+", sentence["raw"].lower())})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *words]))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=len(words) + 7))
    bert.save_pretrained(folder / "towers" / "text")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder / "towers" / "text")
    frozen = '{{ tower = "{}", view = "pooled" }}'
    recipes = {
        "frozen": (
            frozen.format("towers/visual"),
            frozen.format("towers/text"),
            '{ kind = "Heads", width = 32, hidden = 48, dropout = 0.1 }',
        ),
        "pixels": ('{ tower = "small-cnn", view = "pixels" }', "{ min_count = 1 }", '{ kind = "VSE++", width = 16, word_width = 8 }'),
    }
    for name, (visual, text, model) in recipes.items():
        (folder / f"{name}.toml").write_text(RECIPE.format(photos="photos", visual=visual, text=text, model=model))
    visavis.train("frozen.toml", out="runs/finished", progress=Silent())
    for recipe, name in (("frozen.toml", "stopped"), ("pixels.toml", "pixels")):
        try:
            visavis.train(recipe, out=f"runs/{name}", progress=StopAt(14))
        except Stopped:
            continue


def damage(file: Path, draw: random.Random) -> str:
    """Damage one file; what was done."""
    content = file.read_bytes()
    place = draw.randrange(len(content) or 1)

    def bit() -> None:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :] if content else b"\0")

    def some_bytes() -> None:
        file.write_bytes(content[:place] + draw.randbytes(draw.randint(1, 16)) + content[place + draw.randint(0, 16) :])

    def linked(to: Path) -> None:
        file.unlink()
        file.symlink_to(to)

    def pipe() -> None:
        file.unlink()
        os.mkfifo(file)

    def folder() -> None:
        file.unlink()
        file.mkdir()

    def sparse() -> None:
        with open(file, "r+b") as target:
            target.truncate(40 * 2**30)

    ways: dict[str, Callable[[], object]] = {
        "one bit": bit,
        "some bytes": some_bytes,
        "cut": lambda: file.write_bytes(content[:place]),
        "longer": lambda: file.write_bytes(content + draw.randbytes(20)),
        "zeros": lambda: file.write_bytes(content[:place] + bytes(min(64, len(content) - place)) + content[place + 64 :]),
        "empty": lambda: file.write_bytes(b""),
        "removed": file.unlink,
        "a folder": folder,
        "a pipe": pipe,
        "a link to itself": lambda: linked(file),
        "a device": lambda: linked(Path("/dev/zero")),
        "40 GB": sparse,
        "a mark in front": lambda: file.write_bytes(b"\xef\xbb\xbf" + content),
        "another file": lambda: file.write_bytes(
            draw.choice(sorted(other for other in file.parent.iterdir() if other.is_file())).read_bytes()
        ),
    }
    changed = _with_odd_value(file, content, draw) if file.suffix in (".json", ".jsonl", ".toml") and draw.random() < 0.6 else None
    if changed is not None:
        file.write_bytes(changed[1])
        return changed[0]
    name = draw.choices(list(ways), [4, 4, 3] + [1] * (len(ways) - 3))[0]
    ways[name]()
    return name


ODD = (
    None,
    True,
    -1,
    0,
    3,
    0.5,
    1e308,
    float("nan"),
    10**30,
    "",
    "\x1b[31m",
    "..",
    "x" * 100_000,
    [],
    [[]],
    {},
    {"a": 1},
    ["a", 1],
    "CLIP",
)


def _with_odd_value(file: Path, content: bytes, draw: random.Random) -> tuple[str, bytes] | None:
    """A JSON or TOML file with one value replaced or left out."""
    lines = content.splitlines() if file.suffix == ".jsonl" else [content]
    number = draw.randrange(len(lines) or 1)
    try:
        value = tomllib.loads(content.decode()) if file.suffix == ".toml" else json.loads(lines[number])
    except (ValueError, IndexError):
        return None
    places = list(_places(value))
    if not places:
        return None
    holder, key = draw.choice(places)
    odd = draw.choice(ODD)
    what = f"{key} = {odd!r:.30}"
    if draw.random() < 0.25:
        del holder[key]
        what = f"without {key}"
    else:
        holder[key] = odd
    try:
        written = tomli_w.dumps(value) if file.suffix == ".toml" else json.dumps(value)
    except (TypeError, ValueError):
        return None
    lines[number] = written.encode()
    return what, b"\n".join(lines) + b"\n"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a value, as what holds it and the key or index there."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)


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
        return "refused"
    if found.result == usual.result:
        return "same"
    if _sentences(found) - _sentences(usual):
        return "said"
    return "another" if trial.fresh else "SILENT"


def _sentences(outcome: Outcome) -> set[str]:
    return {re.sub(r"[\d.,]+", "0", line) for line in outcome.said.splitlines() if not re.search(r"\d/\d|%|epoch|phase", line)}


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
