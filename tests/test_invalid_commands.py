"""Commands with invalid values, sampled by seed: each ends within seconds with a result or one
error line.
"""

# ruff: noqa: SIM905, E501 - the words of a command line are easier to read as one text
from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from tests.fixtures.recipes import write_recipe

import visavis
from visavis import cli

LIMIT_S = 10

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes"),
    pytest.mark.filterwarnings("default"),  # a warning of a library does not end a command
]

NUMBERS = [
    "",
    *f"0 -1 nan inf -inf 1e999 1e-320 3.7 {'9' * 30} {2**63} 0x10 one ٣ 1_000 True".split(),
]
TEXTS = [
    "",
    " ",
    "\0",
    "a\0b",
    "\n",
    "--",
    "=",
    "a" * 5000,
    "../..",
    "~",
    "*",
    "[bold]",
    "\udcff",
    "\ud800",
    "🙂",
    "\x1b[2J",
    "{x}",
    "%s",
    "None",
]
PATHS = """{folder} {empty} {text} {bytes} {none} {pipe} {dangling} {loop} /dev/zero /dev/null {gone} {gone}/deep {text}/below {run} {run}/model
    {run}/run.toml {scenes} {scenes}/captions.jsonl {bert} {clip} {images} {recipe} {npy} {zeros} /proc/self/mem .""".split()
ALL_PATHS = [*PATHS, *TEXTS]
RUNS = [*ALL_PATHS, "nobody/nothing"]
ENCODERS = [*TEXTS, *"{bert} {clip} {folder} {text} {pipe} scenes small-cnn minilm".split()]
SPLITS = [*TEXTS, "train", "val", "tset"]
MEMORIES = [*NUMBERS, *"1B -1GiB 1e99GiB nanGiB 0GiB".split()]
SPECS = f"""VLC(gamma=-1) Unifid() TripletHN(margin=nan) {"VLC(" * 500} VLC(gamma={"9" * 400}) CBoW(removed_components=-1) SceneRelevance() CBoW __import__('os')
    SentenceModel(model='{{folder}}') CrossEncoder(model='{{bert}}') CoarseToFine(coarse='CBoW()') MatrixRelevance(path='{{pipe}}')""".split()
OVERRIDES = f"""
    seed=-1 seed={"9" * 40} training.batch_size=1e400 visual.encoder={{clip}} visual.encoder={{bert}} text.encoder={{clip}} visual.encoder='' text.encoder={{empty}}
    visual.features={{npy}} visual.features={{pipe}} visual.features={{bytes}} visual.features={{zeros}} model.embedding_dim=2000000000000 model.embedding_dim=0
    model.kind=Heads phases=[] phases.0.epochs=0 phases.0={{'a':1}} objective=VLC(gamma=1e308) objective=AOQ() name=../x name='a\\0b' name={"n" * 300}
    name='\\ud800' data.path={{text}} data.splits={{'train':3}} evaluation.protocol=cxc text.min_count=-5 a{".b" * 3000}=1 phases.0.optimizer.lr=1e308
    phases.0.optimizer.lr=nan phases.0.schedule.warmup=nan memory=0 training.threads=100000000000 training.threads=0 published=cocos x={"[" * 3000}
    phases.0.supervision=GradedSupervision(relevance='CBoW()') phases.0.supervision=NoisySupervision() evaluation.relevance=CBoW()""".split()
FLAG = None
FILTERS = {
    "path": [*TEXTS, "[", "%"],
    "kind": [*TEXTS, "video"],
    "after": [*TEXTS, *NUMBERS, "9999-12-31"],
    "before": ["0001-01-01", *NUMBERS],
}

# A valid command, and invalid values of its options. A number is the index of an argument, "" is
# one more argument.
# fmt: off
COMMANDS = {
    "doctor": ("doctor", {"--json": FLAG, "--jsn": FLAG}),
    "catalog": ("catalog recipes", {1: [*TEXTS, "objective"], "--json": FLAG}),
    "demo": ("demo --out {scenes}", {"--out": [*"{run} {text} {pipe} {dangling} {loop} /dev/null/x /proc/x {text}/x a\0b".split(), "n" * 300]}),
    "data check": ("data check {scenes}", {2: ALL_PATHS, "--all": FLAG, "--json": FLAG}),
    "features": ("features {scenes} --visual scenes --out stores", {
        1: ALL_PATHS, "--visual": ENCODERS, "--text": ENCODERS, "--granularity": SPLITS, "--text-granularity": ["words", "regions"], "--crops": [*NUMBERS, "10"],
        "--out": PATHS, "--skip-bad": FLAG, "--json": FLAG}),
    "papers convert": ("papers convert {bytes} --text-encoder {bert} --out made", {1: ALL_PATHS, "--text-encoder": ENCODERS, "--image-size": NUMBERS, "--out": ALL_PATHS, "--json": FLAG}),
    "train": ("train {recipe} --data {scenes} --out run", {
        1: [*ALL_PATHS, "demo/x", "cocos-flickr8k"], "": OVERRIDES, "--data": ALL_PATHS, "--out": ALL_PATHS, "--resume": RUNS, "--json": FLAG}),
    "evaluate": ("evaluate {run}", {
        1: RUNS, "": RUNS, "--protocol": [*TEXTS, "plain", "coco-1k-5fold", "flickr8k"], "--split": SPLITS, "--data": ALL_PATHS, "--relevance": SPECS,
        "--trec": PATHS, "--memory": MEMORIES, "--json": FLAG}),
    "papers evaluate": ("papers evaluate {run}", {
        2: RUNS, "--published": [*TEXTS, "unified/2/clip-coco"], "--average": FLAG, "--split": SPLITS, "--memory": MEMORIES, "--json": FLAG}),
    "papers diagnose": ("papers diagnose {run} --max-batches 1", {
        1: RUNS, "--objective": SPECS, "--checkpoint": [*TEXTS, *NUMBERS, "start", "last"], "--epsilon": NUMBERS, "--max-batches": NUMBERS, "--data": ALL_PATHS,
        "--out": ALL_PATHS, "--memory": MEMORIES, "--json": FLAG}),
    "papers anatomy": ("papers anatomy VLC() --out {run}", {1: SPECS, "": SPECS, "--json": FLAG}),  # an existing folder: rejected
    "search": ("search {run} red", {1: RUNS, 2: [*TEXTS, "red " * 9999], "--collection": ALL_PATHS, "--top": NUMBERS, "--json": FLAG}),
    "index": ("index {run} {images} --out made", {
        1: RUNS, 2: ALL_PATHS, "--out": PATHS, "--store": "{text} {none} /dev/null/x s3:// ftp://x \0 {run}/run.toml vectors".split(), "--moment-seconds": NUMBERS,
        "--embedding-dim": NUMBERS, "--workers": [*NUMBERS, *TEXTS, "ray:0", "ray:x"], "--device": TEXTS, "--json": FLAG}),
    "search INDEX": ("search {index} red", {
        1: RUNS, 2: [*TEXTS, "red " * 9999], "--image": ALL_PATHS, "--like": [*TEXTS, "0.png"], "--without": TEXTS, "--collection": ALL_PATHS,
        "--filter": [*TEXTS, "a=b", "duplicates=show", "duplicates=x", *(f"{name}={value}" for name, values in FILTERS.items() for value in values)],
        "--rerank": RUNS, "--top": NUMBERS, "--json": FLAG}),
    "classify": ("classify {index} {images}/1.png {text}", {
        1: RUNS, 2: ALL_PATHS, 3: ALL_PATHS, "--templates": ALL_PATHS, "--top": NUMBERS, "--memory": MEMORIES, "--json": FLAG}),
    "indexes evaluate": ("indexes evaluate {index} {text}", {2: RUNS, 3: ALL_PATHS, "--store": ALL_PATHS, "--memory": MEMORIES, "--json": FLAG}),
    "indexes export-votes": ("indexes export-votes {index} --out made.jsonl", {2: RUNS, "--out": PATHS, "--json": FLAG}),
    "indexes use-queries": ("indexes use-queries {index} {text}", {2: RUNS, 3: RUNS, "--json": FLAG}),
    "indexes list-queries": ("indexes list-queries {index}", {2: RUNS, "--json": FLAG}),
    "indexes restore-queries": ("indexes restore-queries {index}", {2: RUNS, "--json": FLAG}),
    "indexes calibrate": ("indexes calibrate {index} captions", {2: RUNS, 3: ["collection", *TEXTS], "--json": FLAG}),
    "indexes correct": ("indexes correct {index} CSL", {2: RUNS, 3: [*SPECS, *TEXTS], "--bank": ALL_PATHS, "--memory": MEMORIES, "--json": FLAG}),
    "indexes compress": ("indexes compress {index} 2KB", {2: RUNS, 3: MEMORIES, "--memory": MEMORIES, "--json": FLAG}),
    "indexes move": ("indexes move {index} {text}", {2: RUNS, 3: ALL_PATHS, "--model": RUNS, "--json": FLAG}),
    "serve": ("serve {index} --port {busy}", {  # a busy port: no server keeps running
        1: RUNS, "": RUNS, "--host": [*TEXTS, "0.0.0.0", "::1", "nobody.invalid"], "--token": TEXTS, "--votes": FLAG}),
    "mcp": ("mcp {index} --store {folder}", {  # not the store of the index: no server keeps running
        1: RUNS, "": RUNS, "--votes": FLAG}),
    "explain": ("explain {run} {images}/1.png red", {
        1: RUNS, 2: [*ALL_PATHS, "{images}/9.png"], 3: [*TEXTS, "red " * 9999], "--out": PATHS, "--json": FLAG}),
    "papers coherence": ("papers coherence {run} --relevance SceneRelevance() --queries 1", {
        1: RUNS, "--relevance": SPECS, "--caption-aggregation": ["paired", *TEXTS], "--queries": [*NUMBERS, *TEXTS], "--top": NUMBERS, "--irrelevant-share": NUMBERS,
        "--split": SPLITS, "--data": ALL_PATHS, "--seed": NUMBERS, "--out": ALL_PATHS, "--memory": MEMORIES, "--json": FLAG}),
    "papers agreement": ("papers agreement {run}", {1: RUNS, "--data": ALL_PATHS, "--relevance": SPECS, "--json": FLAG}),
    "papers relevance": ("papers relevance --estimator SceneRelevance()", {"--estimator": [*SPECS, *TEXTS], "--json": FLAG}),
    "papers relevance thresholds": ("papers relevance thresholds {scenes} --estimator SceneRelevance() --num-pairs 100", {
        2: ALL_PATHS, "--estimator": SPECS, "--caption-aggregation": ["max", *TEXTS], "--num-pairs": NUMBERS, "--out": ALL_PATHS, "--json": FLAG}),
    "papers relevance fit": ("papers relevance fit --out fitted --model {bert} --epochs 1 --batch-size 2", {
        "--out": ALL_PATHS, "--kind": ["cross", *TEXTS], "--model": ENCODERS, "--epochs": [number for number in NUMBERS if len(number) < 9], "--lr": NUMBERS,
        "--batch-size": NUMBERS, "--seed": NUMBERS, "--json": FLAG}),
}
# fmt: on


@pytest.fixture(scope="module")
def paths(tmp_path_factory, dual_encoders, few_scenes, tiny_run):
    """Folders, files, links and pipes that values refer to."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("odd")
    shutil.copytree(few_scenes, root / "data" / "scenes")
    shutil.copytree(tiny_run, root / "run")
    write_recipe(root / "recipe.toml")
    for name in ("folder", "empty", "images"):
        (root / name).mkdir()
    (root / "folder" / "letter.txt").write_text("dear")
    for number in range(3):
        Image.new("RGB", (40, 30 + number), "red").save(root / "images" / f"{number}.png")
    (root / "text").write_text("hello\nworld\n")
    (root / "bytes").write_bytes(bytes(range(256)) * 9)
    (root / "none").write_bytes(b"")
    os.mkfifo(root / "pipe")
    (root / "dangling").symlink_to(root / "nowhere")
    (root / "loop.toml").symlink_to(root / "loop.toml")
    np.save(root / "npy.npy", np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32))
    np.save(root / "zeros.npy", np.zeros((24, 0), np.float32))
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "circle", "blue"]
    (root / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    transformers.BertModel(
        transformers.BertConfig(**small, vocab_size=8, max_position_embeddings=16)
    ).save_pretrained(root / "bert")
    transformers.utils.logging.enable_progress_bar()
    transformers.BertTokenizer(str(root / "vocab.txt")).save_pretrained(root / "bert")
    (root / "data" / "stsb").mkdir()
    for split in ("train", "dev", "test"):
        rows = "".join(
            f"{score}\ta red circle\ta blue {'circle' * (score > 2)}\n" for score in range(6)
        )
        (root / "data" / "stsb" / f"sts-{split}.tsv").write_text(
            "score\tsentence1\tsentence2\n" + rows
        )
    visavis.index(root / "run", root / "images", out=root / "index")
    names = (
        "folder",
        "index",
        "empty",
        "images",
        "text",
        "bytes",
        "none",
        "pipe",
        "dangling",
        "run",
        "bert",
        "gone",
    )
    others = {
        "scenes": root / "data" / "scenes",
        "loop": root / "loop.toml",
        "recipe": root / "recipe.toml",
        "npy": root / "npy.npy",
        "zeros": root / "zeros.npy",
        "clip": dual_encoders / "clip",
    }
    busy = socket.create_server(("127.0.0.1", 0))
    others["busy"] = busy.getsockname()[1]
    yield {name: str(root / name) for name in names} | {
        name: str(path) for name, path in others.items()
    }
    busy.close()


def invalid_command(name, rng):
    """A command in which one to three values are invalid."""
    arguments, options = COMMANDS[name]
    command, keys = arguments.split(), list(options)
    for key in rng.sample(keys, min(len(keys), rng.choice([1, 1, 2, 3]))):
        if isinstance(key, int):
            command[key] = rng.choice(options[key])
        elif options[key] is FLAG:
            command.append(key)
        elif key in command:
            command[command.index(key) + 1] = rng.choice(options[key])
        else:
            command += [*filter(None, [key]), rng.choice(options[key])]
    return command


class TooLong(BaseException):
    """A command exceeded its time limit."""


def outcome(command, monkeypatch, capfd):
    """The exit code, stdout and stderr of a command. An unexpected exception is given instead of
    the exit code.
    """

    def stop(*_):
        raise TooLong

    monkeypatch.setattr(sys, "argv", ["visavis", *command])
    capfd.readouterr()
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:  # noqa: BLE001 - an unexpected exception is a finding
        code = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    out, err = capfd.readouterr()
    return code, out, err


def problem(command, code, out, err):
    """What is wrong with the end of a command, or None."""
    if code not in (0, 1, 2):
        return f"{code}"
    if "Traceback" in err:
        return "a traceback"
    if code == 1 and command[0] != "doctor" and command[:2] != ["data", "check"]:
        last = err.strip().splitlines()[-1] if err.strip() else ""
        if not last.startswith("visavis: ") or len(last) < 20 or len(last) > 7000:
            return f"not an error line: {last[:200]}"
    if "--json" in command and code == 0:
        json.loads(out)
    return None


def sweep(name, count, paths, monkeypatch, capfd, tmp_path):
    rng, findings = random.Random(name), []
    monkeypatch.setenv("VISAVIS_DATA", os.path.dirname(paths["scenes"]))
    for number in range(count):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        command = invalid_command(name, rng)
        for placeholder, path in paths.items():
            command = [part.replace(f"{{{placeholder}}}", path) for part in command]
        code, out, err = outcome(command, monkeypatch, capfd)
        if finding := problem(command, code, out, err):
            findings.append(f"{[part[:80] for part in command]}: {finding}")
    assert not findings, "\n".join(findings)


@pytest.mark.parametrize("name", COMMANDS)
def test_invalid_commands_end_with_one_line(name, paths, monkeypatch, capfd, tmp_path):
    sweep(name, 8, paths, monkeypatch, capfd, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", COMMANDS)
def test_many_invalid_commands_end_with_one_line(name, paths, monkeypatch, capfd, tmp_path):
    sweep(name, 80, paths, monkeypatch, capfd, tmp_path)
