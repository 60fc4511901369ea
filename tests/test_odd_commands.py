"""Commands nobody means: every verb with odd values, drawn by seed. Each ends soon, and in one sentence or in a result."""

# ruff: noqa: SIM905 - words of a command line read best as one
from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis import cli
from visavis.data.scenes import write_scenes

RECIPE = """
name = "tiny"
visual = { tower = "scenes", view = "pooled" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSE++", width = 8, word_width = 4 }
training = { batch_size = 8, probe_batches = 1, threads = 1 }
phases = [{ epochs = 1, objective = "VLC()" }]
"""
LIMIT_S = 10

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes"),
    pytest.mark.filterwarnings("default"),  # a warning of a library is no end of a command
]

NUMBERS = ["", *f"0 -1 nan inf -inf 1e999 1e-320 3.7 {'9' * 30} {2**63} 0x10 one ٣ 1_000 True".split()]
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
    {run}/run.toml {scenes} {scenes}/captions.jsonl {bert} {clip} {pictures} {recipe} {npy} {zeros} /proc/self/mem .""".split()
PLACES = [*PATHS, *TEXTS]
RUNS = [*PLACES, "nobody/nothing"]
TOWERS = [*TEXTS, *"{bert} {clip} {folder} {text} {pipe} scenes small-cnn minilm".split()]
SPLITS = [*TEXTS, "train", "val", "tset"]
MEMORIES = [*NUMBERS, *"1B -1GiB 1e99GiB nanGiB 0GiB".split()]
SPECS = f"""VLC(gamma=-1) Unifid() TripletHN(margin=nan) {"VLC(" * 500} VLC(gamma={"9" * 400}) CBoW(common=-1) SceneDegrees() CBoW __import__('os')
    SentenceModel(model='{{folder}}') CrossEncoder(model='{{bert}}') CoarseToFine(coarse='CBoW()') GivenDegrees(path='{{pipe}}')""".split()
OVERRIDES = f"""
    seed=-1 seed={"9" * 40} training.batch_size=1e400 visual.tower={{clip}} visual.tower={{bert}} text.tower={{clip}} visual.tower='' text.tower={{empty}}
    visual.features={{npy}} visual.features={{pipe}} visual.features={{bytes}} visual.features={{zeros}} model.width=2000000000000 model.width=0
    model.kind=Heads phases=[] phases.0.epochs=0 phases.0={{'a':1}} objective=VLC(gamma=1e308) objective=AOQ() name=../x name='a\\0b' name={"n" * 300}
    name='\\ud800' data.path={{text}} data.splits={{'train':3}} evaluation.protocol=cxc text.min_count=-5 a{".b" * 3000}=1 phases.0.optimizer.lr=1e308
    phases.0.optimizer.lr=nan phases.0.schedule.warmup=nan memory=0 training.threads=100000000000 training.threads=0 published=cocos x={"[" * 3000}
    phases.0.supervision=GradedSupervision(degrees='CBoW()') phases.0.supervision=NoisySupervision() evaluation.degrees=CBoW()""".split()
FLAG = None

# The arguments of a command that works, and the odd values of its options; a number stands for the argument of that place, "" for one more.
# fmt: off
VERBS = {
    "doctor": ("doctor", {"--json": FLAG, "--jsn": FLAG}),
    "catalog": ("catalog recipes", {1: [*TEXTS, "objective"], "--json": FLAG}),
    "demo": ("demo --out {scenes}", {"--out": [*"{run} {text} {pipe} {dangling} {loop} /dev/null/x /proc/x {text}/x a\0b".split(), "n" * 300]}),
    "data check": ("data check {scenes}", {2: PLACES, "--all": FLAG, "--json": FLAG}),
    "features": ("features {scenes} --visual scenes --out stores", {
        1: PLACES, "--visual": TOWERS, "--text": TOWERS, "--view": SPLITS, "--text-view": ["words", "grid"], "--crops": [*NUMBERS, "10"],
        "--out": PATHS, "--skip-bad": FLAG, "--json": FLAG}),
    "convert": ("convert {bytes} --text {bert} --out made", {1: PLACES, "--text": TOWERS, "--image-size": NUMBERS, "--out": PLACES, "--json": FLAG}),
    "train": ("train {recipe} --data {scenes} --out run", {
        1: [*PLACES, "demo/x", "cocos-flickr8k"], "": OVERRIDES, "--data": PLACES, "--out": PLACES, "--resume": RUNS, "--json": FLAG}),
    "evaluate": ("evaluate {run}", {
        1: RUNS, "": RUNS, "--protocol": [*TEXTS, "plain", "coco-1k-5fold", "flickr8k"], "--split": SPLITS, "--data": PLACES, "--degrees": SPECS,
        "--semantics": ["paper", *TEXTS], "--average": FLAG, "--memory": MEMORIES, "--json": FLAG}),
    "diagnose": ("diagnose {run} --batches 1", {
        1: RUNS, "--objective": SPECS, "--at": [*TEXTS, *NUMBERS, "start", "last"], "--epsilon": NUMBERS, "--batches": NUMBERS, "--data": PLACES,
        "--out": PLACES, "--memory": MEMORIES, "--json": FLAG}),
    "anatomy": ("anatomy VLC() --out {run}", {1: SPECS, "": SPECS, "--json": FLAG}),  # refused: nothing is drawn
    "search": ("search {run} red", {1: RUNS, 2: [*TEXTS, "red " * 9999], "--in": PLACES, "--top": NUMBERS, "--memory": MEMORIES, "--json": FLAG}),
    "index": ("index {run} {pictures} --out made", {
        1: RUNS, 2: PLACES, "--out": PATHS, "--store": "{text} {none} /dev/null/x s3:// ftp://x \0 {run}/run.toml vectors".split(), "--moments": NUMBERS,
        "--width": NUMBERS, "--curve": FLAG, "--engine": TEXTS, "--workers": NUMBERS, "--device": TEXTS, "--memory": MEMORIES, "--json": FLAG}),
    "search INDEX": ("search {index} red", {
        1: RUNS, 2: [*TEXTS, "red " * 9999], "--image": PLACES, "--like": [*TEXTS, "0.png"], "--without": TEXTS, "--in": PLACES,
        "--path": [*TEXTS, "[", "%"], "--kind": [*TEXTS, "video"], "--after": [*TEXTS, *NUMBERS, "9999-12-31"], "--before": ["0001-01-01", *NUMBERS],
        "--metadata": [*TEXTS, "a=b"], "--no-fold": FLAG, "--rerank": RUNS, "--model": RUNS, "--top": NUMBERS, "--memory": MEMORIES, "--json": FLAG}),
    "label": ("label {index} {pictures}/1.png {text}", {
        1: RUNS, 2: PLACES, 3: PLACES, "--model": RUNS, "--top": NUMBERS, "--memory": MEMORIES, "--json": FLAG}),
    "judged": ("judged {index} {text}", {1: RUNS, 2: PLACES, "--model": RUNS, "--memory": MEMORIES, "--json": FLAG}),
    "serve": ("serve {index} --port {busy}", {  # where another listens: no page stays open
        1: RUNS, "": RUNS, "--host": [*TEXTS, "0.0.0.0", "::1", "nobody.invalid"], "--token": TEXTS, "--judgements": PATHS}),
    "explain": ("explain {run} {pictures}/1.png red", {
        1: RUNS, 2: [*PLACES, "{pictures}/9.png"], 3: [*TEXTS, "red " * 9999], "--out": PATHS, "--json": FLAG}),
    "coherence": ("coherence {run} --degrees SceneDegrees() --queries 1", {
        1: RUNS, "--degrees": SPECS, "--image": ["own", *TEXTS], "--queries": [*NUMBERS, *TEXTS], "--top": NUMBERS, "--irrelevant": NUMBERS,
        "--split": SPLITS, "--data": PLACES, "--seed": NUMBERS, "--out": PLACES, "--memory": MEMORIES, "--json": FLAG}),
    "agreement": ("agreement {run}", {1: RUNS, "--data": PLACES, "--degrees": SPECS, "--json": FLAG}),
    "relevance": ("relevance --degrees SceneDegrees()", {"--degrees": [*SPECS, *TEXTS], "--json": FLAG}),
    "relevance thresholds": ("relevance thresholds {scenes} --degrees SceneDegrees() --pairs 100", {
        2: PLACES, "--degrees": SPECS, "--image": ["best", *TEXTS], "--pairs": NUMBERS, "--picture": PLACES, "--json": FLAG}),
    "relevance fit": ("relevance fit --out fitted --model {bert} --epochs 1 --batch-size 2", {
        "--out": PLACES, "--kind": ["cross", *TEXTS], "--model": TOWERS, "--epochs": [number for number in NUMBERS if len(number) < 9], "--lr": NUMBERS,
        "--batch-size": NUMBERS, "--seed": NUMBERS, "--json": FLAG}),
}
# fmt: on


@pytest.fixture(scope="module")
def places(tmp_path_factory, dual_encoders):
    """What odd values name: real folders, files, links and pipes."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("odd")
    scenes = write_scenes(root / "data" / "scenes", num_train=12, num_val=4, num_test=4, captions_per_image=2, size=32)
    (root / "recipe.toml").write_text(RECIPE)
    visavis.train(root / "recipe.toml", data=scenes, out=root / "run")
    for name in ("folder", "empty", "pictures"):
        (root / name).mkdir()
    (root / "folder" / "letter.txt").write_text("dear")
    for number in range(3):
        Image.new("RGB", (40, 30 + number), "red").save(root / "pictures" / f"{number}.png")
    (root / "text").write_text("hello\nworld\n")
    (root / "bytes").write_bytes(bytes(range(256)) * 9)
    (root / "none").write_bytes(b"")
    os.mkfifo(root / "pipe")
    (root / "dangling").symlink_to(root / "nowhere")
    (root / "loop.toml").symlink_to(root / "loop.toml")
    np.save(root / "npy.npy", np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32))
    np.save(root / "zeros.npy", np.zeros((20, 0), np.float32))
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "circle", "blue"]
    (root / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    transformers.BertModel(transformers.BertConfig(**small, vocab_size=8, max_position_embeddings=16)).save_pretrained(root / "bert")
    transformers.utils.logging.enable_progress_bar()
    transformers.BertTokenizer(str(root / "vocab.txt")).save_pretrained(root / "bert")
    (root / "data" / "stsb").mkdir()
    for split in ("train", "dev", "test"):
        rows = "".join(f"{score}\ta red circle\ta blue {'circle' * (score > 2)}\n" for score in range(6))
        (root / "data" / "stsb" / f"sts-{split}.tsv").write_text("score\tsentence1\tsentence2\n" + rows)
    visavis.index(root / "run", root / "pictures", out=root / "index")
    names = ("folder", "index", "empty", "pictures", "text", "bytes", "none", "pipe", "dangling", "run", "bert", "gone")
    own = {
        "scenes": scenes,
        "loop": root / "loop.toml",
        "recipe": root / "recipe.toml",
        "npy": root / "npy.npy",
        "zeros": root / "zeros.npy",
        "clip": dual_encoders / "clip",
    }
    busy = socket.create_server(("127.0.0.1", 0))
    own["busy"] = busy.getsockname()[1]
    yield {name: str(root / name) for name in names} | {name: str(path) for name, path in own.items()}
    busy.close()


def odd_command(verb, chance):
    """A command of this verb, in which one to three values are odd."""
    arguments, options = VERBS[verb]
    command, names = arguments.split(), list(options)
    for name in chance.sample(names, min(len(names), chance.choice([1, 1, 2, 3]))):
        if isinstance(name, int):
            command[name] = chance.choice(options[name])
        elif options[name] is FLAG:
            command.append(name)
        elif name in command:
            command[command.index(name) + 1] = chance.choice(options[name])
        else:
            command += [*filter(None, [name]), chance.choice(options[name])]
    return command


class TooLong(BaseException):
    """A command takes longer than it may."""


def outcome(command, monkeypatch, capfd):
    """The exit code of a command and what it said on stderr, or what it should never end in."""

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
    except BaseException as error:  # noqa: BLE001 - this is what is looked for
        code = f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    out, err = capfd.readouterr()
    return code, out, err


def problem(command, code, out, err):
    """What is wrong with the end of a command; None if nothing is."""
    if code not in (0, 1, 2):
        return f"{code}"
    if "Traceback" in err:
        return "a traceback"
    if code == 1 and command[0] != "doctor" and command[:2] != ["data", "check"]:
        last = err.strip().splitlines()[-1] if err.strip() else ""
        if not last.startswith("visavis: ") or len(last) < 20 or len(last) > 7000:
            return f"no sentence: {last[:200]}"
    if "--json" in command and code == 0:
        json.loads(out)
    return None


def sweep(verb, count, places, monkeypatch, capfd, tmp_path):
    chance, wrong = random.Random(verb), []
    monkeypatch.setenv("VISAVIS_DATA", os.path.dirname(places["scenes"]))
    for number in range(count):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        command = odd_command(verb, chance)
        for name, path in places.items():
            command = [part.replace(f"{{{name}}}", path) for part in command]
        code, out, err = outcome(command, monkeypatch, capfd)
        if found := problem(command, code, out, err):
            wrong.append(f"{[part[:80] for part in command]}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("verb", VERBS)
def test_odd_commands_end_in_a_sentence(verb, places, monkeypatch, capfd, tmp_path):
    sweep(verb, 8, places, monkeypatch, capfd, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verb", VERBS)
def test_many_odd_commands_end_in_a_sentence(verb, places, monkeypatch, capfd, tmp_path):
    sweep(verb, 80, places, monkeypatch, capfd, tmp_path)
