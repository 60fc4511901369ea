"""Terminals that cannot show everything, readers that leave, names that steer a terminal, numbers that JSON does not know."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from PIL import Image

import visavis
from visavis import cli
from visavis.cli.terminal import print_json
from visavis.data.scenes import write_scenes

RECIPE = """
name = "tiny"
visual = { tower = "scenes", view = "pooled" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSE++", width = 8, word_width = 4 }
training = { batch_size = 8, probe_batches = 1, threads = 1 }
phases = [{ epochs = 1, objective = "VLC()" }]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    data = write_scenes(folder / "scenes", num_train=12, num_val=4, num_test=4, captions_per_image=2, size=32)
    (folder / "tiny.toml").write_text(RECIPE)
    visavis.train(folder / "tiny.toml", data=data, out=folder / "run")
    return folder / "run"


@pytest.fixture
def call(monkeypatch, tmp_path):
    """``visavis ARGUMENTS`` in an empty folder, its output encoded as a terminal has it: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, encoding="utf-8"):
        streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)]
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr(sys, "argv", ["visavis", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        return (code, *(stream.buffer.getvalue().decode(encoding) for stream in streams))

    return call


@pytest.mark.parametrize(
    "command",
    ["doctor", "catalog", "evaluate {run}", "diagnose {run} --objective TripletHN", "coherence {run} --degrees SceneDegrees() --queries 1"],
)
@pytest.mark.parametrize("json_too", [False, True])
def test_a_terminal_without_utf_8_shows_what_it_can(call, run, command, json_too):
    code, out, err = call(*command.format(run=run).split(), *["--json"] * json_too, encoding="ascii")
    assert code == 0 or command == "doctor", err
    assert out.strip()
    assert not json_too or isinstance(json.loads(out), dict)


def test_json_in_ascii_says_what_it_says_in_utf_8(call):
    in_ascii, in_unicode = (json.loads(call("catalog", "--json", encoding=encoding)[1]) for encoding in ("ascii", "utf-8"))
    assert in_ascii == in_unicode


of_linux = pytest.mark.skipif(sys.platform != "linux", reason="names of files that other systems do not allow")
STEERING = "\x1b[2J\x9b31m\x07"


@of_linux
def test_names_never_steer_the_terminal(call, run, tmp_path):
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (40, 40), "red").save(tmp_path / "pictures" / f"{STEERING}.png")
    (tmp_path / "pictures" / f"{STEERING}broken.png").write_bytes(b"\x89PNG")
    code, out, err = call("search", run, "red", "--in", tmp_path / "pictures")
    assert code == 0, err
    assert r"\x1b[2J\x9b31m\x07.png" in out
    assert r"\x1b[2J\x9b31m\x07broken.png" in err
    for said in (out, err, *call("evaluate", f"gone{STEERING}\n")[1:], *call("search", run, "red", "--in", "pictures", "--json")[1:]):
        assert not set(STEERING[:1] + STEERING[4:5] + STEERING[-1]) & set(said)
    hits = json.loads(call("search", run, "red", "--in", "pictures", "--json")[1])["hits"]
    assert hits[0]["name"] == f"{STEERING}.png"


def test_an_error_is_one_line_whatever_a_name_holds(call):
    code, out, err = call("evaluate", "gone\nvisavis: all is well")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1


@of_linux
def test_a_name_that_is_no_text_is_shown(call, tmp_path):
    name = os.fsdecode(b"gone\xff")
    code, _, err = call("evaluate", name)
    assert code == 1
    assert r"gone\udcff" in err


def test_numbers_that_json_does_not_know_are_null(capsys):
    print_json({"mean": float("nan"), "all": [1.5, float("inf"), (float("-inf"), "NaN")], "by": {"k": float("nan")}})
    assert capsys.readouterr().out == '{"mean": null, "all": [1.5, null, [null, "NaN"]], "by": {"k": null}}\n'


def test_a_recipe_may_begin_with_a_byte_order_mark(call, run, tmp_path):
    (tmp_path / "tiny.toml").write_bytes(b"\xef\xbb\xbf" + RECIPE.encode())
    code, out, err = call("train", "tiny.toml", "--data", run.parent / "scenes", "--out", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["run"] == "run"


@pytest.mark.skipif(sys.platform == "win32", reason="a shell with pipefail")
@pytest.mark.parametrize("command", ["catalog", "catalog --json"])
def test_a_reader_that_leaves_ends_the_command_without_a_word(command):
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "visavis", *command.split()], stdout=writing, stderr=subprocess.PIPE, env=environment, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("error", "sentence"), [(MemoryError("8 GiB"), "the memory is not enough: 8 GiB; take less"), (KeyboardInterrupt(), "")]
)
def test_what_no_verb_can_help_ends_in_a_sentence(call, monkeypatch, error, sentence):
    def fail():
        raise error

    monkeypatch.setattr("visavis.verbs.doctor", fail)
    code, out, err = call("doctor")
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert out == ""
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("users", "then"), [(None, "1"), ("0", "0")])
def test_large_pages_are_asked_for_unless_the_user_says_otherwise(call, monkeypatch, users, then):
    if users is None:
        monkeypatch.delenv(cli.LARGE_PAGES, raising=False)
    else:
        monkeypatch.setenv(cli.LARGE_PAGES, users)
    call("catalog", "models")
    assert os.environ[cli.LARGE_PAGES] == then
