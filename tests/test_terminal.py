"""Terminal output: encodings, control characters in names, closed pipes, and JSON of values that
are not finite.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys

import pytest
from PIL import Image
from tests.fixtures.recipes import recipe_text

from visavis import cli
from visavis.cli.terminal import print_json


@pytest.fixture
def call(monkeypatch, tmp_path):
    """``visavis ARGUMENTS`` in an empty folder with the encoding of a terminal: exit code, stdout,
    stderr.
    """
    monkeypatch.chdir(tmp_path)

    def call(*arguments, encoding="utf-8"):
        streams = [
            io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2)
        ]
        for name, stream in zip(("stdout", "stderr"), streams, strict=True):
            monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr(sys, "argv", ["visavis", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        finally:
            # A stopped command ignores Ctrl-C until its process ends.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return (code, *(stream.buffer.getvalue().decode(encoding) for stream in streams))

    return call


@pytest.mark.parametrize(
    "command",
    [
        "doctor",
        "catalog",
        "evaluate {run}",
        "papers diagnose {run} --objective TripletHN",
        "papers coherence {run} --relevance SceneRelevance() --queries 1",
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_output_is_valid_on_an_ascii_terminal(call, tiny_run, command, as_json):
    code, out, err = call(
        *command.format(run=tiny_run).split(), *["--json"] * as_json, encoding="ascii"
    )
    assert code == 0 or command == "doctor", err
    assert out.strip()
    assert not as_json or isinstance(json.loads(out), dict)


def test_json_is_the_same_in_ascii_and_utf_8(call):
    in_ascii, in_unicode = (
        json.loads(call("catalog", "--json", encoding=encoding)[1])
        for encoding in ("ascii", "utf-8")
    )
    assert in_ascii == in_unicode


linux_only = pytest.mark.skipif(
    sys.platform != "linux", reason="file names that other systems do not allow"
)
CONTROLS = "\x1b[2J\x9b31m\x07"


@linux_only
def test_file_names_never_send_control_characters(call, tiny_run, tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (40, 40), "red").save(tmp_path / "images" / f"{CONTROLS}.png")
    (tmp_path / "images" / f"{CONTROLS}broken.png").write_bytes(b"\x89PNG")
    code, out, err = call("search", tiny_run, "red", "--collection", tmp_path / "images")
    assert code == 0, err
    assert r"\x1b[2J\x9b31m\x07.png" in out
    assert r"\x1b[2J\x9b31m\x07broken.png" in err
    for output in (
        out,
        err,
        *call("evaluate", f"gone{CONTROLS}\n")[1:],
        *call("search", tiny_run, "red", "--collection", "images", "--json")[1:],
    ):
        assert not set(CONTROLS[:1] + CONTROLS[4:5] + CONTROLS[-1]) & set(output)
    hits = json.loads(call("search", tiny_run, "red", "--collection", "images", "--json")[1])[
        "hits"
    ]
    assert hits[0]["name"] == f"{CONTROLS}.png"


def test_error_is_one_line_for_a_name_with_newline(call):
    code, out, err = call("evaluate", "gone\nvisavis: all is well")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1


@linux_only
def test_error_shows_names_that_are_not_utf_8(call, tmp_path):
    name = os.fsdecode(b"gone\xff")
    code, _, err = call("evaluate", name)
    assert code == 1
    assert r"gone\udcff" in err


def test_print_json_writes_null_for_nan_and_infinity(capsys):
    print_json(
        {
            "mean": float("nan"),
            "all": [1.5, float("inf"), (float("-inf"), "NaN")],
            "by": {"k": float("nan")},
        }
    )
    assert (
        capsys.readouterr().out
        == '{"mean": null, "all": [1.5, null, [null, "NaN"]], "by": {"k": null}}\n'
    )


def test_train_reads_a_recipe_with_byte_order_mark(call, few_scenes, tmp_path):
    (tmp_path / "tiny.toml").write_bytes(b"\xef\xbb\xbf" + recipe_text().encode())
    code, out, err = call("train", "tiny.toml", "--data", few_scenes, "--out", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["run"] == "run"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a shell with pipefail")
@pytest.mark.parametrize(
    "command", ["catalog formats", pytest.param("catalog formats --json", marks=pytest.mark.long)]
)
def test_closed_pipe_ends_a_command_without_message(command):
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "visavis", *command.split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=environment,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("8 GiB"), "out of memory: 8 GiB. Process less at once"),
        (KeyboardInterrupt(), ""),
    ],
)
def test_main_reports_memory_errors_and_interrupts(call, monkeypatch, error, message):
    def fail():
        raise error

    monkeypatch.setattr("visavis.api.doctor", fail)
    code, out, err = call("doctor")
    assert code == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("value", "expected"), [(None, "1"), ("0", "0")])
def test_main_enables_huge_pages_unless_set(call, monkeypatch, value, expected):
    if value is None:
        monkeypatch.delenv(cli.HUGE_PAGES_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(cli.HUGE_PAGES_VARIABLE, value)
    call("catalog", "models")
    assert os.environ[cli.HUGE_PAGES_VARIABLE] == expected


@pytest.mark.parametrize(
    ("command", "value", "policy", "expected"),
    [
        ("index", None, None, "1000"),
        ("index", "7", None, "7"),
        ("index", None, "ACTIVE", None),
        ("catalog", None, None, None),
    ],
)
def test_threads_of_encoding_commands_sleep_early(
    call, monkeypatch, command, value, policy, expected
):
    values = {cli.SPIN_VARIABLE: value, "OMP_WAIT_POLICY": policy}
    for name, text in values.items():
        # Set first, so that the value of the command is removed after the test.
        monkeypatch.setenv(name, text or "")
        if text is None:
            monkeypatch.delenv(name)
    call(command, "--help")
    assert os.environ.get(cli.SPIN_VARIABLE) == expected
