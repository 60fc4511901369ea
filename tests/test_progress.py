"""Progress on a terminal, and Ctrl-C in each phase of the long commands, with real processes."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.cli import console
from visavis.cli.console import ProgressBars
from visavis.core.progress import REPORT_INTERVAL_S, ItemCounter, NoProgress, StageClock
from visavis.core.stopping import kept_if_stopped, resumed_folder
from visavis.data.synthetic import write_synthetic_scenes

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")

BAR = re.compile("[━╸╺]")
SLOW_DOWN = """
import sys, time
from visavis.{module} import {owner}

work = {owner}.{name}

def slow(*args, **kwargs):
    time.sleep({seconds})
    return work(*args, **kwargs)

{owner}.{name} = slow
from visavis.cli import main

main()
"""
"""Program of the command line in which one function takes longer."""


@dataclass
class Terminal:
    """Output of a command in a terminal.

    Attributes:
        code: Exit code.
        text: Output without control sequences.
    """

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        """The lines that stay, without bars and without the echo of Ctrl-C."""
        lines = (line.replace("^C", "").strip() for line in re.split(r"[\r\n]+", self.text))
        return [line for line in lines if line and not BAR.search(line)]


def in_terminal(
    arguments: list[object], *, stop_at: str = "", program: str = "", timeout: float = 120
) -> Terminal:
    """Run ``visavis ARGUMENTS`` in a terminal, and press Ctrl-C when a text is shown."""
    start = ["-c", program] if program else ["-m", "visavis"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": "150"}
        os.execv(sys.executable, [sys.executable, *start, *map(str, arguments)])
    raw, ends = b"", time.monotonic() + timeout
    is_stopped = not stop_at
    while time.monotonic() < ends:
        if select.select([terminal], [], [], 0.05)[0]:
            try:
                received = os.read(terminal, 65536)
            except OSError:
                break
            raw += received
        if not is_stopped and stop_at in raw.decode(errors="replace"):
            os.write(terminal, b"\x03")
            is_stopped = True
    else:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw.decode(errors="replace"))
    return Terminal(os.waitstatus_to_exitcode(status), text)


def slowed(module: str, owner: str, name: str, seconds: float = 0.3) -> str:
    return SLOW_DOWN.format(module=module, owner=owner, name=name, seconds=seconds)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    # 40 images: with fewer, commands end before their progress is shown.
    data = write_synthetic_scenes(
        folder / "scenes", num_train=24, num_val=8, num_test=8, captions_per_image=2, size=32
    )
    recipe = write_recipe(folder / "tiny.toml")
    visavis.train(recipe, data=data, out=folder / "run")
    return folder


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(world, tmp_path / "world")
    monkeypatch.chdir(tmp_path / "world")
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "world"


def test_item_counter_reports_slow_tasks_only(monkeypatch):
    reports, now = [], [0.0]

    class Recorder(NoProgress):
        def update(self, *report):
            reports.append(report)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    counter = ItemCounter(Recorder(), "images", 10)
    for done in (1, 2, 10):
        counter(done)
    assert reports == []
    counter = ItemCounter(Recorder(), "images", 10)
    for done in (2, 3, 8, 10):
        now[0] += REPORT_INTERVAL_S / 2
        counter(done)
    assert reports == [("images", 3, 10, 3 / REPORT_INTERVAL_S), ("images", 10, 10, 10.0)]


def test_stop_carries_sentences_of_all_blocks(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt) as stopped,
        kept_if_stopped(lambda: "outer", lambda: tmp_path),
        kept_if_stopped(lambda: "inner"),
        kept_if_stopped(lambda: ""),
    ):
        raise KeyboardInterrupt
    assert stopped.value.__notes__ == ["inner", "outer"]
    assert resumed_folder(stopped.value) == str(tmp_path)
    with pytest.raises(ValueError, match=r"^wrong$") as error, kept_if_stopped(lambda: "kept"):
        raise ValueError("wrong")
    assert not hasattr(error.value, "__notes__")


@pytest.mark.slow
def test_terminal_shows_activity_then_items(here):
    program = slowed("retrieval.build.encoding", "_FileReader", "__call__", 0.08)
    shown = in_terminal(["index", "run", "scenes/images", "--out", "index"], program=program)
    assert shown.code == 0, shown.text
    assert re.search(r"(index|loading the model) ━", shown.text)
    counts = [int(count) for count in re.findall(r"files \S+ (\d+)/40", shown.text)]
    assert counts == sorted(counts)
    assert 0 < counts[0] < 40, "before the first shard is stored"
    assert not BAR.search(shown.text.splitlines()[-1])


@pytest.mark.slow
def test_fast_command_and_json_show_no_progress(here):
    assert not BAR.search(in_terminal(["catalog", "objectives"]).text)
    command = [sys.executable, "-m", "visavis", "evaluate", "run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["num_images"] == 8
    assert not BAR.search(done.stdout + done.stderr)


TRAIN = ["train", "tiny.toml", "--data", "scenes", "--out", "new"]
COMPARE = [
    *("compare", "tiny.toml", "--data", "scenes", "--out", "new", "--seeds", 1, "--workers", 1),
    *("--objective", "VLC", "--objective", "TripletHN", "--no-tune"),
]
NOTHING = "No result was written. Repeat it with: "
PHASES = {
    "index, encoding": (
        ["index", "run", "scenes/images", "--out", "new"],
        ("retrieval.build.encoding", "_FileReader", "__call__"),
        "/40",
        r"The index keeps 0 of 40 new files\. Repeat it with: ",
    ),
    "features": (
        ["features", "scenes", "--visual", "scenes"],
        ("models.encoders.feature_extraction", "_BatchEncoder", "__call__"),
        "/40",
        r"The features of \d+ of 40 images are kept\. Repeat it with: ",
    ),
    "train, image features": (
        TRAIN,
        ("models.encoders.feature_extraction", "_BatchEncoder", "__call__"),
        "image features",
        r"The features of \d+ of 40 images are kept\. Repeat it with: ",
    ),
    "train, first validation": (
        TRAIN,
        ("training.recipes.data_module", "DataModule", "encode", 3),
        "epochs: 1",
        r"(Everything is saved|The run is kept up to its last checkpoint)\. Continue with: .* train --resume new",
    ),
    "evaluate": (
        ["evaluate", "run"],
        ("training.recipes.data_module", "DataModule", "encode", 5),
        "evaluate ",
        NOTHING,
    ),
    "diagnose": (
        ["papers", "diagnose", "run"],
        ("training.recipes.data_module", "DataModule", "loader", 5),
        "papers diagnose ",
        NOTHING,
    ),
    "export": (
        ["export", "run", "--out", "new"],
        ("models.processor", "Processor", "save", 5),
        "Exporting",
        NOTHING,
    ),
    "compare, report": (
        COMPARE,
        ("papers.probes", "ProbeReport", "to_json", 0),
        "contributing samples",
        r"The finished runs are kept\. Continue with: .* compare --resume new",
    ),
    "serve, start": (
        ["serve", "scenes/images", "--model", "run", "--port", 0],
        ("retrieval.build.encoding", "_FileReader", "__call__"),
        "/40",
        r"The index keeps 0 of 40 new files\. Repeat it with: ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_ends_with_one_line(here, phase):
    arguments, slow_function, shown, expected = PHASES[phase]
    stopped = in_terminal(arguments, stop_at=shown, program=slowed(*slow_function))
    assert stopped.code == 130, stopped.text
    *before, last = stopped.lines
    assert re.match(rf"Stopped\. {expected}", last), stopped.text
    assert not any("Stopped" in line or "Traceback" in line for line in before), stopped.text
    if "--resume new" in last:
        assert in_terminal([arguments[0], "--resume", "new"]).code == 0


@pytest.mark.slow
def test_ctrl_c_at_any_time_of_the_start_ends_with_one_line(here):
    for seconds in (0.1, 0.3, 0.5, 0.7, 1.0, 1.4):
        command = [sys.executable, "-m", "visavis", "evaluate", "run"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        results, errors = process.communicate(timeout=60)
        if b"RSUM" in results:  # a fast machine had nothing left to stop
            continue
        # The package imports modules of the standard library before the command can begin. A slow
        # machine is still there.
        if b"__main__.py" not in errors and b"Stopped" not in errors:
            continue
        # If Ctrl-C came while a dataclass was made, with exec, CPython ends by the signal, which a
        # shell reports as 130, too.
        assert process.returncode in (130, -signal.SIGINT), (seconds, errors)
        assert errors.count(b"\n") == 1, (seconds, errors)
        assert errors.startswith(b"Stopped"), (seconds, errors)


def test_stages_add_up_to_the_duration():
    started = time.monotonic()
    clock = StageClock()
    with clock.stage("a"):
        time.sleep(0.02)
        with clock.stage("b"), clock.stage("a"):
            time.sleep(0.02)
        with pytest.raises(ValueError, match="stopped"), clock.stage("c"):
            time.sleep(0.02)
            raise ValueError("stopped")
    outer_ended = time.monotonic()
    times = clock.read()
    assert set(times) == {"other", "a", "b", "c"}
    # An inner stage is not a part of the outer one.
    assert times["a"] >= 0.04 and times["c"] >= 0.02 and times["b"] < 0.02
    assert outer_ended - started - 0.01 < sum(times.values()) <= time.monotonic() - started
    # The clock continues.
    time.sleep(0.01)
    assert clock.read()["other"] >= times["other"] + 0.01


def test_speed_of_slow_task_is_shown(capsys, monkeypatch):
    """A large model takes more than a second for a photo."""
    monkeypatch.setattr(console, "LINE_INTERVAL_S", 0.0)
    with ProgressBars() as progress:
        for speed in (0.25, 9.87, 1234.4):
            progress.update("files", 1, 8, speed)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[1] for line in lines] == ["0.2/s", "9.9/s", "1,234/s"]
