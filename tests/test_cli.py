"""Command line: JSON or a table on stdout, errors on one line, exit codes, and nothing left behind
after an error.
"""

import asyncio
import contextlib
import ctypes
import gc
import inspect
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from tests.fixtures.recipes import recipe_text, write_recipe
from tests.platforms import posix
from tests.processes import Command
from typer.testing import CliRunner

import visavis
from visavis import cli
from visavis.api.catalog_entries import docstring_arguments, docstring_commands
from visavis.cli import commands, console, help_texts, logs, terminal
from visavis.cli.terminal import ENDING_SIGNALS
from visavis.core import errors
from visavis.core.progress import TrainingStep
from visavis.data.dataset_reader import open_dataset
from visavis.data.images import decode_image
from visavis.data.synthetic import write_synthetic_scenes
from visavis.papers.relevance import runs as graded_runs

RECIPE = recipe_text({}, {})  # two phases


ALL_COMMANDS = commands.COMMANDS | commands.registered_commands()


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path / "tiny.toml", {}, {})


@pytest.fixture
def call(monkeypatch, capfd, tmp_path):
    """``visavis ARGUMENTS`` in an empty folder: exit code, stdout, stderr. An exception that is not
    an error line fails the test.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["visavis", *map(str, arguments)])
        capfd.readouterr()
        try:
            cli.main()
        except SystemExit as end:
            return (end.code or 0, *capfd.readouterr())
        return (0, *capfd.readouterr())

    return run


@pytest.fixture
def own_run(tiny_run, tmp_path_factory):
    """A run that a command may write to, as ``--resume`` does."""
    return shutil.copytree(tiny_run, tmp_path_factory.mktemp("runs") / "run")


INVALID_OVERRIDES = [
    # unknown keys at every level: the error has the nearest valid name
    ("sed=1", r"sed\b.*seed"),
    ("data.paht='x'", r"paht\b.*path"),
    ("visual.encodr='x'", r"encodr\b.*encoder"),
    ("visual.tower='x'", r"visual\.tower"),
    ("text.mincount=1", r"mincount\b.*min_count"),
    ("training.batchsize=4", r"batchsize\b.*batch_size"),
    ("evaluation.protocl='plain'", r"protocl\b.*protocol"),
    ("phases.0.epoch=4", r"phases\.0\.epoch\b.*epochs"),
    ("phases.1.optimizer.l=4", r"phases\.1\.optimizer\.l\b.*lr"),
    ("phases.0.schedule.warm_up=0.1", r"warm_up\b.*warmup"),
    ("model.embeding_dim=4", r"embeding_dim\b.*embedding_dim"),
    ("wholly.other=1", r"wholly\b.*data"),
    # wrong types and values out of range
    ("training.batch_size=many", r"training\.batch_size\b.*many"),
    ("training.batch_size=1", r"training\.batch_size\b.*\b1\b"),
    ("training.captions_per_image=0", r"training\.captions_per_image\b.*0"),
    ("training.clip_norm=-1", r"training\.clip_norm\b.*-1"),
    ("training.device=gpu", r"training\.device\b.*(gpu.*cuda|cuda.*gpu)"),
    ("training.checkpoint_s=1e999", r"training\.checkpoint_s\b.*inf"),
    ("seed=-1", r"seed\b.*-1"),
    (f"seed={2**63}", r"seed\b.*9223372036854775808"),
    ("seed=None", r"seed\b.*None"),
    ("name=a/b", r"name\b.*a/b"),
    ("phases.0.epochs=0", r"phases\.0\.epochs\b.*0"),
    ("phases.0.optimizer.lr=0", r"phases\.0\.optimizer\.lr\b.*0"),
    ("phases.0.schedule.warmup=1", r"phases\.0\.schedule\.warmup\b.*1"),
    ("phases.0.initial_weights=first", r"phases\.0\.initial_weights\b.*(first.*best|best.*first)"),
    ("phases=3", r"phases\b.*3"),
    ("training=3", r"training\b.*3"),
    ("phases.0.epochs=True", r"phases\.0\.epochs\b.*True"),
    ("training.batch_size=1e3", r"training\.batch_size\b.*1000\.0"),
    ("training.clip_norm=True", r"training\.clip_norm\b.*True"),
    ("training.autocast=1", r"training\.autocast\b.*auto"),
    ("training.autocast=fast", r"training\.autocast\b.*(fast.*auto|auto.*fast)"),
    ("phases.0.optimizer.lr=-1e-3", r"phases\.0\.optimizer\.lr\b.*-0\.001"),
    ("phases.0.optimizer={'lr': 1e999}", r"phases\.0\.optimizer\b"),
    ("phases.0.optimizer.lr_multipliers={'text': -1}", r"lr_multipliers\.text\b.*-1"),
    ("phases.0.optimizer.lr_multipliers={'text': 0}", r"lr_multipliers\.text\b.*0"),
    ("phases.0.schedule.factor=-1", r"phases\.0\.schedule\.factor\b.*-1"),
    ("phases.0.schedule.milestones=[1.5]", r"milestones\.0\b.*1\.5"),
    ("model.embedding_dim=wide", r"embedding_dim\b.*wide"),
    ("model.embedding_dim=0", r"VSE\+\+.*embedding_dim\b.*0"),
    ("model.embedding_dim=1000000000000", r"embedding_dim\b.*4,294,967,295, got 1000000000000"),
    ("model.dropout=1.0", r"VSE\+\+.*dropout\b.*1\.0"),
    ("model.region_pool=min", r"region_pool\b.*min"),
    # overrides of an unknown form
    ("training.batch_size", r"training\.batch_size.*key=value|key=value.*training\.batch_size"),
    ("=3", r"key=value"),
    ("phases.2.epochs=3", r"phases\.2\.epochs"),
    ("phases.x.epochs=3", r"phases\.x\.epochs"),
    ("phases.0=3", r"phases\.0\b"),
    ("name.x=3", r"name\.x\b"),
    ("epochs=3", r"epochs\b.*phases\.0\.epochs"),
    # unknown names
    ("objective=Unifid()", r"Unifid\b.*Unified"),
    ("objective='VLC(gama=3)'", r"gama\b.*gamma"),
    ("objective='VLC(gamma=-3)'", r"gamma\b.*-3"),
    ("objective=import os", r"import os.*Name\("),
    ("phases.0.supervision=PairSupervison()", r"PairSupervison\b.*PairSupervision"),
    (
        "phases.0.optimizer.name=Adamax",
        r"phases\.0\.optimizer\.name\b.*(Adamax.*AdamW|AdamW.*Adamax)",
    ),
    ("phases.1.trainable=['txt']", r"txt\b.*text"),
    ("phases.1.optimizer.lr_multipliers={'visuals': 2}", r"visuals\b.*visual"),
    ("model.kind=VSE+", r"VSE\+'.*VSE\+\+"),
    ("model.kind=[1]", r"model\.kind\b.*\[1\]"),
    ("evaluation.protocol=flickr8", r"flickr8'.*flickr8k"),
    ("evaluation.protocol=flickr8k", r"flickr8k\b.*1,?000\b.*8\b"),
    ("evaluation.validation=dev", r"dev\b"),
    ("evaluation.test=tset", r"tset\b.*test"),
    ("visual.encoder=no-such-encoder", r"no-such-encoder\b.*config\.json"),
    ("visual.crops=3", r"visual\.crops\b.*3"),
    ("visual.augment=true", r"visual\.augment\b.*pixels"),
    ("text.granularity=words", r"text\.granularity\b.*tokens"),
    ("text.encoder=minilm", r"text\.granularity\b.*tokens"),
    ("text.min_count=0", r"text\.min_count\b.*0"),
    ("text.min_count=1000000", r"1,?000,?000\b.*text\.min_count|text\.min_count\b.*1,?000,?000"),
    ("visual.features=gone.npy", r"gone\.npy"),
    ("data.path=gone", r"gone\b"),
    ("data.path=5", r"data\.path\b.*5"),
    ("data.path=''", r"data\.path|--data"),
]
"""Overrides of a valid recipe, and the essential part of their error."""


def failed_start(result, pattern, folder, files):
    """What is wrong with a command that should end in one error line and leave only the named
    files. None if nothing is.
    """
    code, out, err = result
    last = err.strip().splitlines()[-1] if err.strip() else ""
    if (code, out) != (1, "") or "Traceback" in err or not last.startswith("visavis: "):
        return f"exit code {code}, stdout {out[:99]!r}, stderr {err[-300:]!r}"
    if not re.search(pattern, last):
        return f"{last!r} does not match {pattern!r}"
    remaining = sorted(path.name for path in folder.iterdir())
    return None if remaining == files else f"the folder has {remaining}"


def assert_failed_start(result, pattern, folder, files):
    problem = failed_start(result, pattern, folder, files)
    assert problem is None, problem


def test_an_override_occurs_once(call, recipe, few_scenes, tmp_path):
    """A shell expands unquoted braces, so that the last shard would be the only one."""
    result = call(
        "train", recipe, "--data", few_scenes, "data.stream=a-0.tar", "data.stream=a-1.tar"
    )
    pattern = (
        r"data\.stream: expected one value, got a-0\.tar and a-1\.tar\. .* quotes around braces"
    )
    assert_failed_start(result, pattern, tmp_path, ["tiny.toml"])


def test_train_rejects_invalid_overrides(call, recipe, few_scenes, tmp_path):
    problems = {}
    for override, pattern in INVALID_OVERRIDES:
        data = () if override.startswith("data.path") else ("--data", few_scenes)
        if problem := failed_start(
            call("train", recipe, override, *data), pattern, tmp_path, ["tiny.toml"]
        ):
            problems[override] = problem
    assert not problems, "\n".join(
        f"{override}: {problem}" for override, problem in problems.items()
    )


def test_train_rejects_invalid_recipe_files(call, recipe, few_scenes, tmp_path):
    for content, pattern in [
        ("name = ", r"tiny\.toml.*TOML.*Invalid value"),
        ("name = 'a'\nname = 'b'", r"tiny\.toml.*TOML.*overwrite"),
        ("name = '\xff'", r"tiny\.toml.*UTF-8"),
        ("", r"tiny\.toml.*name\b"),
        (
            "name = 'x'\nvisual = { encoder = 'scenes' }\nmodel = { kind = 'VSE++' }\nphases = []",
            r"phases\b.*\[\]",
        ),
        (RECIPE.replace("VLC()", "VLC("), r"'VLC\('"),
        (RECIPE + "\n[trainig]\nx = 1", r"trainig\b.*training"),
        (RECIPE.replace("epochs = 1", "epochs = 1979-05-27"), r"phases\.0\.epochs\b.*date"),
    ]:
        recipe.write_bytes(content.encode("latin-1"))
        assert_failed_start(
            call("train", recipe, "--data", few_scenes), pattern, tmp_path, ["tiny.toml"]
        )


def test_train_suggests_the_nearest_recipe(call, tmp_path):
    assert_failed_start(
        call("train", "heads-flickr8"), r"heads-flickr8\b.*heads-flickr8k\b", tmp_path, []
    )
    assert_failed_start(call("train", "gone.toml"), r"gone\.toml\b.*No such file", tmp_path, [])


def test_train_requires_data(call, recipe, few_scenes, tmp_path):
    assert_failed_start(call("train", recipe), r"data\.path|--data", tmp_path, ["tiny.toml"])
    write_recipe(recipe, data={"path": str(few_scenes)})
    assert_failed_start(
        call("train", recipe, "--data", ""), r"data\.path|--data", tmp_path, ["tiny.toml"]
    )


def test_train_rejects_data_that_is_set_twice(call, recipe, few_scenes, tmp_path):
    for path in ("5", "''", "scenes"):
        result = call("train", recipe, f"data.path={path}", "--data", few_scenes)
        assert_failed_start(
            result,
            r"data\.path is set twice: --data .*scenes and data\.path=",
            tmp_path,
            ["tiny.toml"],
        )


def test_train_rejects_features_with_nan(call, recipe, few_scenes, tmp_path):
    np.save(tmp_path / "features.npy", np.full((24, 6), np.nan, np.float32))
    for out in ((), ("--out", tmp_path / "run")):
        result = call("train", recipe, "visual.features=features.npy", "--data", few_scenes, *out)
        assert_failed_start(
            result, r"row 0 of \S*features\.npy.*finite", tmp_path, ["features.npy", "tiny.toml"]
        )


def test_train_rejects_features_of_other_images(call, recipe, few_scenes, tmp_path):
    np.save(tmp_path / "features.npy", np.zeros((7, 6), np.float32))
    result = call("train", recipe, "visual.features=features.npy", "--data", few_scenes)
    assert_failed_start(result, r"features\.npy.*24", tmp_path, ["features.npy", "tiny.toml"])


def test_train_takes_a_batch_larger_than_the_data(call, recipe, few_scenes, tmp_path):
    code, _, err = call(
        "train",
        recipe,
        "training.batch_size=1000",
        "--data",
        few_scenes,
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert code == 0, err
    log = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in log] == [0, 1, 2]


def test_train_never_overwrites_files_of_the_user(call, recipe, few_scenes, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    result = call("train", recipe, "--data", few_scenes, "--out", tmp_path / "mine")
    assert_failed_start(result, r"mine\b.*empty", tmp_path, ["mine", "tiny.toml"])
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_main_exits_with_shell_code_on_signal(call, monkeypatch, number, default_sighup):
    monkeypatch.setattr(cli, "build_app", lambda _: lambda: signal.raise_signal(number))
    assert call() == (128 + number, "", f"visavis: ended by {number.name}.\n")
    assert signal.getsignal(number) is signal.SIG_DFL


def _in_finalizer(stop):
    class Finalized:
        def __del__(self):
            stop()

    Finalized()


def _in_collection(stop):
    def callback(phase, _):
        if phase == "start":
            gc.callbacks.remove(callback)
            stop()

    gc.callbacks.append(callback)
    gc.collect()


def _in_callback_of_c(stop):
    ctypes.CFUNCTYPE(None)(stop)()


def _in_event_loop(stop):
    async def run():
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        asyncio.get_running_loop().call_soon(stop)
        await asyncio.sleep(0.01)

    asyncio.run(run())


def _before_suppress(stop):
    with contextlib.suppress(BaseException):
        stop()


def _before_return_in_finally(stop):
    try:
        stop()
    finally:
        return  # noqa: B012


def _before_another_error(stop):
    try:
        stop()
    except BaseException as error:
        raise ValueError("unreadable") from error


def _before_an_error_is_stored(stop):
    stored = []
    try:
        stop()
    except BaseException as error:  # noqa: BLE001
        stored.append(error)
    raise SystemExit(0)


@posix
@pytest.mark.parametrize("number", ENDING_SIGNALS)
@pytest.mark.parametrize(
    "lose",
    [
        _in_finalizer,
        _in_collection,
        _in_callback_of_c,
        _in_event_loop,
        _before_suppress,
        _before_return_in_finally,
        _before_another_error,
        _before_an_error_is_stored,
    ],
)
def test_lost_signal_ends_the_command(call, monkeypatch, number, lose, default_sighup):
    """Python or a library drops the exception of the signal, and the command continues."""

    def run(_):
        lose(lambda: signal.raise_signal(number))
        time.sleep(20)

    monkeypatch.setattr(cli, "build_app", lambda _: partial(run, None))
    assert call() == (128 + number, "", f"visavis: ended by {number.name}.\n")


@posix
def test_repeated_signal_does_not_interrupt_cleanup(call, monkeypatch, tmp_path):
    """Also where the cleanup handles another exception."""

    def run():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            with contextlib.suppress(OSError):
                (tmp_path / "missing").unlink()
            time.sleep(4 * terminal.RAISE_AGAIN_S)
            (tmp_path / "saved").touch()

    monkeypatch.setattr(cli, "build_app", lambda _: run)
    assert call()[0] == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()


@posix
def test_lost_signal_reaches_the_handler_of_a_training_once(call, monkeypatch):
    received = []

    def run():
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: received.append(signal.SIGTERM))
        time.sleep(8 * terminal.RAISE_AGAIN_S)

    monkeypatch.setattr(cli, "build_app", lambda _: run)
    assert call()[0] == 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert len(received) == 1


@posix
def test_signal_in_an_import_of_an_extension_waits_for_its_end(call, monkeypatch):
    """C++ code would end the process with another exit code."""
    ended = []

    def run():
        monkeypatch.setattr(terminal, "_is_importing_extension", lambda _: not ended)
        signal.raise_signal(signal.SIGTERM)
        ended.append(True)
        time.sleep(20)

    monkeypatch.setattr(cli, "build_app", lambda _: run)
    assert call() == (128 + signal.SIGTERM, "", "visavis: ended by SIGTERM.\n")
    assert ended


@posix
@pytest.mark.slow
@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_signal_at_any_moment_ends_the_command(tiny_run, tmp_path, number):
    """Imports, reading, computing and writing: the exit code is always that of the signal, and no
    file with a final name remains.
    """
    for milliseconds in range(100, 5000, 300):
        out = tmp_path / str(milliseconds)
        # Under nohup, the tests ignore SIGHUP and would pass this on.
        program = (
            f"import signal; signal.signal({int(number)}, signal.SIG_DFL); "
            "from visavis.cli import main; main()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program, "export", str(tiny_run), "--out", str(out)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        try:
            process.wait(milliseconds / 1000)
            process.stderr.close()
            break
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        # Before the handlers are installed, the signal itself ends Python.
        assert process.returncode in (128 + number, -number), (milliseconds, errors)
        assert b"Exception ignored" not in errors
        if process.returncode > 0 and b"export" not in errors:
            assert not out.exists()


@posix
def test_train_reports_a_folder_that_is_not_writable(call, recipe, few_scenes, tmp_path):
    code, out, err = call("train", recipe, "--data", few_scenes, "--out", "/proc/nowhere/run")
    assert (code, out) == (1, "")
    assert err.strip().splitlines()[-1].startswith("visavis: /proc/nowhere")


def test_train_rejects_damaged_data_without_skip_bad(call, recipe, few_scenes, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(few_scenes, data)
    lines = (data / "captions.jsonl").read_text().splitlines()
    (data / "captions.jsonl").write_text(
        "\n".join([lines[0].replace('"captions": [', '"captions": ["", '), *lines[1:]]) + "\n"
    )
    assert_failed_start(
        call("train", recipe, "--data", data), r"1 x empty caption", tmp_path, ["data", "tiny.toml"]
    )
    code, out, err = call(
        "train", recipe, "--data", data, "--skip-bad", "--out", tmp_path / "run", "--json"
    )
    assert code == 0
    assert json.loads(out)["run"] == str(tmp_path / "run")
    assert "0 of 24 images and 1 of 49 captions" in err


@pytest.mark.parametrize(
    "command",
    [("papers", "relevance", "thresholds"), ("data", "audit"), ("compare", "demo", "--data")],
)
def test_broken_data_names_commands_that_can_skip(call, tmp_path, command):
    (tmp_path / "captions.csv").write_text("filename,caption\na.png,a dog\na.png,\n")
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    code, _, err = call(*command, tmp_path)
    advice = re.search(
        r"pass --skip-bad to `visavis (\w+)`, `(\w+)` or `(data \w+)`, or data\.skip_bad=true to "
        r"`(\w+)` or `(papers \w+)`",
        err,
    )
    assert code == 1 and advice, err
    helps = [call(*name.split(), "--help")[1] for name in advice.groups()]
    assert ["--skip-bad" in text for text in helps] == [True, True, True, False, False]
    assert all("KEY=VALUE" in text for text in helps[3:])


def test_data_check_without_training_images(call, tmp_path):
    (tmp_path / "captions.csv").write_text("filename,caption,split\na.png,a dog,test\n")
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    code, out, _ = call("data", "check", tmp_path)
    assert code == 0
    assert "OK for evaluation. Training needs images in split train." in out


def test_data_check_prints_first_findings_of_each_kind(call, tmp_path):
    missing = [f"{number:02d}.jpg" for number in range(12)]
    rows = "".join(f"{name},a dog\n" for name in missing)
    (tmp_path / "captions.csv").write_text(f"filename,caption\n{rows}12.jpg,a cat\n12.jpg,\n")
    code, out, _ = call("data", "check", tmp_path)
    assert code == 1
    assert [name for name in missing if f"{name}: " in out] == missing[:5]
    assert "missing image (13)" in out
    assert "... and 8 more: --all lists them" in out
    assert "captions.csv:15: " in out, "a finding of the other kind"
    _, out, _ = call("data", "check", tmp_path, "--all")
    assert all(f"{name}: " in out for name in missing)
    assert "more:" not in out
    _, out, _ = call("data", "check", tmp_path, "--json")
    assert (
        len(
            [
                finding
                for finding in json.loads(out)["findings"]
                if finding["kind"] == "missing image"
            ]
        )
        == 13
    )


COMMANDS = {
    "doctor": "doctor",
    "check": "data check {scenes}",
    "features": "features {scenes} --visual scenes --out stores",
    "train": "train tiny.toml --data {scenes} --out new",
    "resume": "train --resume {run}",
    "evaluate": "evaluate {run}",
    "graded": "evaluate {run} --section Coherence(relevance='SceneRelevance()',semantics='paper')",
    "diagnose": "papers diagnose {run} --objective TripletHN --objective NTXent(tau=0.2)",
    "search": "search {run} red",
    "coherence": "papers coherence {run} --relevance SceneRelevance() --queries 1 --out seen",
    "catalog": "catalog",
    "recipes": "catalog recipes",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_json_option_prints_one_object(call, recipe, own_run, few_scenes, name):
    code, out, err = call(*COMMANDS[name].format(run=own_run, scenes=few_scenes).split(), "--json")
    assert out.count("\n") == 1, err
    content = json.loads(out)
    assert isinstance(content, dict)
    assert code == (name == "doctor" and not all(check["ok"] for check in content.values()))


@pytest.mark.parametrize(
    "name",
    [
        "check",
        "evaluate",
        "graded",
        "diagnose",
        "search",
        "features",
        "resume",
        "coherence",
        "catalog",
    ],
)
def test_commands_print_text_without_json_option(call, own_run, few_scenes, name):
    code, out, err = call(*COMMANDS[name].format(run=own_run, scenes=few_scenes).split())
    assert code == 0, err
    assert out.strip()
    assert not out.startswith("{")


def test_catalog_prints_one_line_per_recipe(call):
    _, recipes, _ = call("catalog", "recipes")
    assert re.search(r"^  heads-flickr8k  \S", recipes, re.MULTILINE)
    assert "formula" not in recipes
    _, objectives, _ = call("catalog", "objectives")
    assert re.search(
        r"^  TripletHN\n      \S.*\n(      .*\n)*      formula: ", objectives, re.MULTILINE
    )


def test_train_prints_a_long_run_folder_on_one_line(call, own_run):
    code, out, _ = call("train", "--resume", own_run)
    assert code == 0
    assert f"Run folder: {own_run}\n" in out
    assert "RSUM" in out


@posix
@pytest.mark.slow
def test_json_and_progress_bars_do_not_mix(few_scenes, tmp_path, monkeypatch):
    """stderr is a terminal, so that bars are drawn. stdout is a pipe."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    import pty

    reader, terminal = pty.openpty()
    monkeypatch.chdir(tmp_path)
    for name, value in {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    output = []

    def read_terminal():
        # Linux raises OSError at the end of a terminal
        with contextlib.suppress(OSError):
            while piece := os.read(reader, 65536):
                output.append(piece)

    thread = threading.Thread(target=read_terminal)
    thread.start()
    command = Command(
        tmp_path / "output",
        "train",
        "tiny.toml",
        "--data",
        few_scenes,
        "--out",
        "run",
        "--json",
        messages=Path(os.ttyname(terminal)),
    )
    assert command.wait(60) == 0
    out = command.output.read_bytes()
    os.close(terminal)
    thread.join()
    os.close(reader)
    assert b"epoch" in b"".join(output), "a bar was drawn"
    assert out.count(b"\n") == 1
    assert json.loads(out)["run"] == "run"


@pytest.mark.parametrize("as_json", [False, True])
def test_commands_report_missing_inputs_on_one_line(call, tmp_path, as_json):
    for command, pattern in [
        ("evaluate gone", r"gone\b.*run\.toml"),
        ("papers diagnose gone", r"gone\b.*run\.toml"),
        ("papers agreement gone", r"gone\b.*run\.toml"),
        ("search gone dog", r"gone\b"),
        ("papers coherence gone", r"gone\b.*run\.toml"),
        ("train --resume gone", r"gone\b"),
        ("features gone --visual scenes", r"gone\b"),
        ("data check gone", r"gone\b"),
        ("catalog recipies", r"recipies\b.*recipes"),
        ("catalog layouts", r"layouts\b.*formats"),
    ]:
        assert_failed_start(call(*command.split(), *["--json"] * as_json), pattern, tmp_path, [])


def test_evaluation_commands_reject_invalid_options(call, tiny_run, tmp_path):
    for command, options, pattern in [
        ("evaluate", ["--protocol", "flickr8"], r"flickr8'.*flickr8k"),
        ("evaluate", ["--protocol", "flickr30k"], r"flickr30k\b.*1,?000\b.*8\b"),
        ("evaluate", ["--split", "tset"], r"tset\b.*test"),
        ("evaluate", ["--data", "gone"], r"gone\b"),
        ("evaluate", ["--protocol", "cxc"], r"cxc\b.*5,?000\b.*8\b"),
        (
            "evaluate",
            ["--section", "Coherence(relevance='SceneRelevnce()')"],
            r"SceneRelevnce\b.*SceneRelevance",
        ),
        ("papers agreement", [], r"ExpertAnnotations\.txt"),
        ("papers coherence", ["--relevance", "SceneRelevance()", "--seed", "-1"], r"seed\b.*-1"),
        ("papers diagnose", ["--max-batches", "0"], r"\b0\b"),
        ("papers diagnose", ["--objective", "VLC(gama=3)"], r"gama\b.*gamma"),
    ]:
        assert_failed_start(call(*command.split(), tiny_run, *options), pattern, tmp_path, [])


def test_option_with_choices_lists_them(call, tiny_run):
    code, _, err = call("papers", "coherence", tiny_run, "--caption-aggregation", "worst")
    assert code == 2
    assert "is not one of" in err
    assert "Traceback" not in err


def test_unknown_options_suggest_the_nearest(call):
    for command, name in [
        ("train heads-flickr8k --ressume x", "--resume"),
        ("evalute x", "evaluate"),
        ("serve x --tokn y", "--token"),
    ]:
        code, _, err = call(*command.split())
        assert code == 2
        assert name in err
        assert "Traceback" not in err


def test_agreement_correlates_runs_with_judgments(
    call, tiny_run, few_scenes, tmp_path, monkeypatch
):
    # 20 bootstrap samples instead of 1,000
    monkeypatch.setattr(
        graded_runs, "measure_agreement", partial(graded_runs.measure_agreement, resamples=20)
    )
    data = write_synthetic_scenes(
        tmp_path / "data", num_train=2, num_val=1, num_test=12, captions_per_image=2, size=32
    )
    names = [image.name for image in open_dataset(data).split("test").images]
    pairs = [f"{image}\t{other}#{k}" for image in names for other in names for k in (0, 1)]
    answers = [(1 + k % 4, 1 + (k + k // 5) % 4, 1 + (k + k // 7) % 4) for k in range(len(pairs))]
    expert = "".join(
        f"{pair}\t{a}\t{b}\t{c}\n" for pair, (a, b, c) in zip(pairs, answers, strict=True)
    )
    crowd = "".join(f"{pair}\t0\t{k % 3}\t2\n" for k, pair in enumerate(pairs))
    (data / "ExpertAnnotations.txt").write_text(expert)
    (data / "CrowdFlowerAnnotations.txt").write_text(crowd)
    code, out, err = call("papers", "agreement", tiny_run, tiny_run, "--data", data, "--json")
    assert code == 0, err
    results = json.loads(out)["agreement"]
    assert [
        (result["judgments"], result["includes_own_captions"], result["pairs"])
        for result in results
    ] == [
        ("expert", True, 288),
        ("expert", False, 264),
        ("crowd", True, 288),
        ("crowd", False, 264),
    ]
    code, out, err = call(
        "papers", "agreement", tiny_run, "--data", data, "--relevance", "SceneRelevance()"
    )
    assert code == 0, err
    assert "each expert with the mean of the other two" in out
    assert "SceneRelevance() minus the first" in out
    other = shutil.copytree(tiny_run, tmp_path / "other")
    (other / "run.toml").write_text(
        (other / "run.toml").read_text().replace(str(few_scenes), str(data))
    )
    assert_failed_start(
        call("papers", "agreement", other, tiny_run),
        r"run\b.*other\b.*--data",
        tmp_path,
        ["data", "other"],
    )


def test_train_reports_graded_metrics_of_the_recipe(call, recipe, few_scenes, tmp_path):
    code, out, err = call(
        "train",
        recipe,
        "evaluation.sections=Coherence(relevance='SceneRelevance()')",
        "--data",
        few_scenes,
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert code == 0, err
    trained = json.loads(out)
    assert trained["relevance"] == "SceneRelevance()"
    assert -1 <= trained["i2t_cs_at_8"] <= 1
    assert (
        json.loads((tmp_path / "run" / "result.json").read_text())["i2t_cs_at_8_undefined"]
        == trained["i2t_cs_at_8_undefined"]
    )
    code, out, _ = call("evaluate", tmp_path / "run", "--json")
    assert json.loads(out)["i2t_cs_at_8"] == trained["i2t_cs_at_8"]


def test_features_requires_an_encoder(call, few_scenes, tmp_path):
    assert_failed_start(call("features", few_scenes), "Pass --visual or --text", tmp_path, [])


def test_evaluate_reports_a_run_without_model(call, tiny_run, tmp_path):
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "run.toml").write_text((tiny_run / "run.toml").read_text())
    assert_failed_start(call("evaluate", tmp_path / "young"), "young.*model", tmp_path, ["young"])


def test_search_reports_images_that_cannot_be_read(call, tiny_run, tmp_path):
    Image.new("RGB", (40, 40), "red").save(tmp_path / "red.png")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    code, out, err = call("search", tiny_run, "something red", "--collection", tmp_path, "--json")
    assert code == 0
    content = json.loads(out)
    assert content["query"] == "something red"
    assert [hit["name"] for hit in content["hits"]] == ["red.png"]
    assert "broken.png" in err


def test_commands_take_a_pretrained_model_as_run(call, few_scenes, dual_encoders):
    code, out, _ = call("evaluate", dual_encoders / "clip", "--data", few_scenes, "--json")
    assert code == 0
    assert json.loads(out)["rsum"] == pytest.approx(
        visavis.evaluate(dual_encoders / "clip", data=few_scenes).to_json()["rsum"]
    )
    code, out, _ = call(
        "search", dual_encoders / "siglip", "a red circle", "--collection", few_scenes, "--json"
    )
    assert code == 0
    assert len(json.loads(out)["hits"]) == 5
    code, out, err = call("evaluate", dual_encoders / "clip")
    assert (code, out) == (1, "")
    assert "--data" in err


def test_progress_bars_print_lines_to_a_log(monkeypatch, capsys):
    step = TrainingStep(
        phase=0,
        phases=1,
        epoch=2,
        epochs=14,
        step=3,
        steps=10,
        loss=0.5,
        rsum=250.12,
        pairs_per_second=900,
        seconds_left=250,
    )
    with console.ProgressBars() as progress:
        progress.training_step(step)
        monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.0)
        progress.update("features", 512, 8000, 90.0)
        progress.training_step(step)
        progress.training_step(replace(step, data_wait_share=0.34))
    lines = capsys.readouterr().err.splitlines()
    start = "epoch 3/14: loss 0.5  RSUM 250.1  900 pairs/s"
    waiting = f"{start}  34% waiting for data  4 min 10 s left"
    assert lines == ["features: 512/8,000  90/s", f"{start}  4 min 10 s left", waiting]


@pytest.mark.parametrize("name", ALL_COMMANDS)
def test_help_has_no_python_types(name):
    result = CliRunner().invoke(cli.app, [*commands.command_words(name), "--help"])
    assert not re.search(r"<class|list\[|<(str|int|float|bool)>", result.output)


@pytest.mark.parametrize("name", ALL_COMMANDS)
def test_help_shows_examples_that_parse(name):
    lines = (
        CliRunner().invoke(cli.app, [*commands.command_words(name), "--help"]).output.splitlines()
    )
    examples = [line.strip() for line in lines[lines.index("  Examples:") + 1 :]]
    assert examples
    assert examples == docstring_commands(getattr(visavis, name))
    for example in examples:
        program, *arguments = shlex.split(example)
        assert program == "visavis"
        context = typer.main.get_command(cli.app).make_context("visavis", arguments)
        while arguments := [*context._protected_args, *context.args]:
            found, command, rest = context.command.resolve_command(context, arguments)
            context = command.make_context(found, rest, parent=context)
        assert tuple(context.command_path.split()[1:]) == commands.command_words(name)


@pytest.mark.parametrize("group", ["", "data", "indexes", "papers", "papers relevance"])
def test_help_has_each_command_on_one_whole_line(group, monkeypatch):
    """In a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(cli.app, [*group.split(), "--help"]).output.splitlines()
    inside = map(commands.command_words, ALL_COMMANDS)
    outer = tuple(group.split())
    names = {words[len(outer)] for words in inside if words[: len(outer)] == outer != words}
    shown = {line.split()[0]: line for line in lines if line[:2] == "  " and line[2:3].islower()}
    assert set(shown) >= names
    assert not [line for line in shown.values() if "..." in line or line[-1] != "."]
    assert max(map(len, lines)) <= 80


def test_help_fits_two_screens_and_first_page_has_few_entries(monkeypatch):
    """In a terminal of 80 columns with 50 lines."""
    monkeypatch.setenv("COLUMNS", "80")
    assert sum(map(len, help_texts.PANELS.values())) <= 18
    for name in ALL_COMMANDS:
        words = commands.command_words(name)
        lines = CliRunner().invoke(cli.app, [*words, "--help"]).output.splitlines()
        assert len(lines) <= 100, name


def test_help_lists_each_command_in_one_panel():
    output = CliRunner().invoke(cli.app, ["--help"]).output
    listed = re.findall(r"^  (\w+) ", output.partition("Start:")[2], re.MULTILINE)
    panels = [name for names in help_texts.PANELS.values() for name in names]
    assert (
        sorted(listed)
        == sorted(panels)
        == sorted({commands.command_words(name)[0] for name in ALL_COMMANDS})
    )
    assert not [panel for panel in help_texts.PANELS if f"{panel}:" not in output.splitlines()]


def test_moved_commands_name_their_new_words(call):
    for old, new in help_texts.MOVED.items():
        expected = f"visavis: {old}: expected its new name. Run visavis {new}.\n"
        assert call(*old.split(), "x", "--json") == (1, "", expected)
        if "--" in old:
            assert call(*f"{old}=x".split(), "x")[2] == expected
        command = re.split(r" --|,", new)[0].split()
        code, out, _ = call(*command, "--help")
        assert code == 0
        assert set(re.findall(r"--[a-z-]+", new)) <= set(re.findall(r"--[a-z-]+", out))


def test_version_option_prints_the_version(call):
    assert call("--version") == (0, f"visavis {visavis.__version__}\n", "")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"_VISAVIS_COMPLETE": "source_bash"},
            "complete -o default -F _visavis_completion visavis",
        ),
        (
            {
                "_VISAVIS_COMPLETE": "complete_bash",
                "COMP_WORDS": "visavis pap",
                "COMP_CWORD": "1",
            },
            "papers",
        ),
        (
            {
                "_VISAVIS_COMPLETE": "complete_bash",
                "COMP_WORDS": "visavis train --o",
                "COMP_CWORD": "2",
            },
            "--out",
        ),
    ],
)
def test_shells_complete_commands_and_options(variables, words):
    program = "import sys; sys.argv = ['visavis']; from visavis.cli import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert words in process.stdout.splitlines()


def test_commands_that_write_files_name_them_with_out():
    """A parameter with the new file or folder is called ``out``, and it is an option."""
    for name, command in ALL_COMMANDS.items():
        function = getattr(visavis, name)
        for key, text in docstring_arguments(function).items():
            parameter = inspect.signature(function).parameters[key]
            if key == "out":
                assert parameter.kind is parameter.KEYWORD_ONLY or "out" in command.options
            else:
                assert not text.startswith(("New ", "Folder for ")) or text.startswith(
                    "New location"
                ), (name, key)


def test_quiet_option_prints_results_only(call, recipe, few_scenes):
    code, out, err = call("train", recipe, "--data", few_scenes, "--out", "run", "--quiet")
    assert (code, err) == (0, "")
    assert "RSUM" in out
    assert (
        call("evaluate", "run", "-q", "-v")[2]
        == "visavis: --verbose, --quiet: expected at most one, got both. Remove one of them.\n"
    )


def test_verbose_option_prints_the_computation_path(call, recipe, few_scenes):
    code, _, err = call("train", recipe, "--data", few_scenes, "--out", "run", "-v")
    assert code == 0
    assert re.search(
        r"^debug: visavis\.losses\.pair_loss\.pair_loss: VLC\(.*: the graph of one matrix of 8 x 8 scores",
        err,
        re.MULTILINE,
    )
    assert re.search(r"^debug: visavis\.data\.dataset_reader: .*: format ", err, re.MULTILINE)
    assert not logging.getLogger("visavis").isEnabledFor(logging.DEBUG)


@pytest.mark.filterwarnings("default")
def test_warnings_and_log_are_one_line_on_stderr(capfd):
    with logs.log_to_stderr():
        logging.getLogger("visavis.core.storage.cache").warning("%s is damaged.", "cache\n\x1b[2J")
        logging.getLogger("visavis.core.storage.cache").debug("hidden")
        errors.warn("No pair is negative.")
    assert (
        capfd.readouterr().err
        == "warning: cache\\n\\x1b[2J is damaged.\nwarning: No pair is negative.\n"
    )


@pytest.mark.filterwarnings("always")
def test_warnings_of_pillow_are_debug_messages(capfd):
    """The photo has damaged metadata, and Pillow warns without its name."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\1\0")
    for verbose in (False, True):
        with logs.log_to_stderr(verbose=verbose):
            assert decode_image(file.getvalue(), "photo.jpg").size == (8, 8)
        assert ("Corrupt EXIF data" in capfd.readouterr().err) == verbose


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("training.epochs=2", "did you mean phases.0.epochs=2?"),
        ("training.epoch=2", "did you mean phases.0.epochs=2?"),
        ("training.objective='VLC()'", "did you mean objective='VLC()'?"),
        ("lr=0.1", "did you mean phases.0.optimizer.lr=0.1?"),
        ("batch_size=3", "did you mean training.batch_size=3?"),
        ("training.batchsize=3", "did you mean batch_size?"),
    ],
)
def test_unknown_key_suggests_a_valid_one(call, recipe, override, suggestion):
    assert call("train", recipe, override)[2].endswith(f"is not a key of recipes: {suggestion}\n")


def test_epochs_in_a_section_suggests_the_short_key(call):
    assert "did you mean epochs=2?" in call("train", "demo", "training.epochs=2")[2]


def test_help_begins_with_the_commands_of_a_first_day():
    from typer.main import get_command
    from typer.testing import CliRunner

    shown = CliRunner().invoke(cli.app, ["--help"]).output
    first = shown.partition("Start:")[2].split("\n\n")[0]
    words = [line.split()[0] for line in first.splitlines() if line.startswith("  ")]
    assert words == ["index", "search", "serve", "train", "evaluate"]
    assert all(shown.count(f"\n  {name} ") == 1 for name in get_command(cli.app).commands)
