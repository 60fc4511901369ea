"""A data folder as the current folder: no command and no child process imports its modules."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.conftest import PROJECT

from visavis import cli
from visavis.core.child_processes import current_folder_excluded

HOSTILE = """
import os
with open({marker!r}, "a") as file:
    file.write(__name__ + "\\n")
raise SystemExit(__name__)
"""
PACKAGES = {"torch", "numpy", "PIL", "scipy"}
PROGRAM = "from visavis.cli import main\nmain()\n"
# ``python -m`` imports these before the first line of the program.
IMPORTED_BY_RUNPY = {
    "__future__", "collections", "contextlib", "functools", "importlib", "keyword", "operator",
    "reprlib", "types", "warnings",
}  # fmt: skip


def write_modules(folder: Path, marker: Path, without: set[str] = frozenset()) -> None:
    """Write a module for each name of the standard library and the installed packages, which
    records that it was run.
    """
    installed = {
        name for name in importlib.metadata.packages_distributions() if name.isidentifier()
    }
    names = (set(sys.stdlib_module_names) | installed) - {"visavis", *without}
    for name in names:
        file = folder / name / "__init__.py" if name in PACKAGES else folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(HOSTILE.format(marker=str(marker)))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("root")


@pytest.fixture(scope="module")
def folder(root):
    """A folder of modules."""
    photos = root / "photos"
    photos.mkdir()
    write_modules(photos, root / "ran")
    return photos


@pytest.fixture(scope="module")
def inputs(root, folder, few_scenes, tiny_run, tiny_index):
    """A data set, a run, an index, the ``visavis`` script, and photos in the folder of modules."""
    for name, shared in (("scenes", few_scenes), ("run", tiny_run), ("index", tiny_index)):
        shutil.copytree(shared, root / name)
    for image in sorted((few_scenes / "images").iterdir())[:8]:
        shutil.copy(image, folder)
    (root / "visavis_script.py").write_text(PROGRAM)
    return root


@pytest.fixture
def ran(root):
    """The file that a module of the folder writes when it is run."""
    yield root / "ran"
    (root / "ran").unlink(missing_ok=True)


def test_modules_of_the_folder_run_in_an_unprotected_child(folder, ran):
    subprocess.run([sys.executable, "-c", "import threading"], cwd=folder, check=False)
    assert ran.read_text() == "threading\n"


def test_child_imports_nothing_from_the_current_folder(folder, ran):
    variables = dict(os.environ)
    with current_folder_excluded():
        subprocess.run([sys.executable, "-c", "import threading, random"], cwd=folder, check=True)
    assert not ran.exists()
    assert dict(os.environ) == variables


@pytest.mark.parametrize("value", [None, "0"])
def test_last_of_overlapping_blocks_restores_the_variables(monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("PYTHONSAFEPATH", value)
    variables = dict(os.environ)
    first, second = current_folder_excluded(), current_folder_excluded()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert os.environ["PYTHONSAFEPATH"] == "1", "the second block still starts processes"
    second.__exit__(None, None, None)
    assert dict(os.environ) == variables


def test_command_line_protects_children_of_other_libraries(monkeypatch, capsys):
    assert "PYTHONSAFEPATH" not in os.environ
    monkeypatch.setattr(sys, "argv", ["visavis", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ["PYTHONSAFEPATH"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["-m visavis", "-umvisavis", "-mvisavis"])
def test_python_m_visavis_imports_no_module_of_the_folder(tmp_path, ran, words):
    write_modules(tmp_path, ran, without=IMPORTED_BY_RUNPY)
    subprocess.run([sys.executable, *words.split(), "--version"], cwd=tmp_path, check=True)
    assert not ran.exists()


def test_every_start_of_a_process_excludes_the_current_folder():
    starts = re.compile(r"sys\.executable|get_context\(|ray\.init\(|ensure_running\(|\.submit\(\*")
    for file in (PROJECT / "src").rglob("*.py"):
        text = file.read_text()
        if starts.search(text):
            assert '"-P"' in text or "current_folder_excluded()" in text, file


SCENES = ["--data", "../scenes"]
TRAIN = ["train", "demo", *SCENES, "epochs=1", "model.embedding_dim=8"]
COMPARE = ["compare", "demo", *SCENES, "epochs=1", "--objective", "VLC", "--seeds", "2"]
COMMANDS = [
    ["index", "../run", ".", "--out", "{out}"],
    ["index", "../run", ".", "--out", "{out}", "--workers", "2"],
    ["search", "../index", "a red circle"],
    ["search", "../index", "--image", "000001.png"],
    ["serve", "../index", "--port", "0"],
    [*TRAIN, "--out", "{out}"],
    [*TRAIN, "--out", "{out}", "training.workers=2"],
    ["evaluate", "../run"],
    ["indexes", "evaluate", "../index", "../votes.jsonl"],
    ["indexes", "export-votes", "../index", "--out", "exported.jsonl"],
    ["indexes", "list-queries", "../index"],
    ["indexes", "use-queries", "../index", "items"],
    ["indexes", "restore-queries", "../index"],
    ["indexes", "correct", "../index", "none"],
    ["indexes", "measure", "../index"],
    ["indexes", "export", "../index", "--out", "exported.parquet"],
    ["indexes", "compress", "../index", "2KB"],
    ["indexes", "calibrate", "../index", "off"],
    ["indexes", "move", "../index", "../scenes/images"],
    ["indexes", "prune", "../index"],
    ["indexes", "default-model", "../run"],
    ["papers", "evaluate", "../run"],
    ["demo", "--out", "{out}"],
    ["doctor"],
    ["catalog"],
    ["data", "check", "../scenes"],
    ["data", "convert", "../scenes", "--out", "{out}"],
    ["data", "audit", "../scenes"],
    ["data", "scenes", "--out", "{out}", "--num-train", "4", "--num-val", "2", "--num-test", "2"],
    ["features", "../scenes", "--visual", "scenes", "--workers", "2"],
    [*COMPARE, "--out", "{out}", "--workers", "1"],
    [*COMPARE, "--out", "{out}", "--workers", "2"],
    ["papers", "list"],
    ["papers", "reproduce", "goal/3", "--out", "{out}"],
    ["mteb", "../run", "--out", "{out}"],
    ["papers", "diagnose", "../run", "--out", "{out}"],
    ["papers", "probe", "../run"],
    ["explain", "../run", "000001.png", "a red circle", "--out", "{out}"],
    ["data", "mine", "../run", "--out", "{out}"],
    ["papers", "anatomy", "Unified", "--out", "{out}"],
    ["papers", "board", "../run", "--out", "{out}"],
    ["papers", "coherence", "../run", "--relevance", "SceneRelevance()", "--out", "{out}"],
    ["papers", "agreement", "../run"],
    ["papers", "relevance", "--estimator", "CBoW()"],
    ["papers", "relevance", "thresholds"],
    ["papers", "relevance", "fit", "--out", "{out}"],
    ["classify", "../run", "000001.png", "circle", "square"],
    ["mcp", "../index"],
    ["export", "../run", "--out", "{out}"],
    ["papers", "convert", "../run/model", "--out", "{out}"],
]
# They need models, data or a kind of run that the inputs lack.
FAILING = {
    "data convert",
    "doctor",
    "explain",
    "indexes compress",
    "indexes default-model",
    "indexes evaluate",
    "indexes restore-queries",
    "mteb",
    "papers agreement",
    "papers convert",
    "papers relevance",
    "papers reproduce",
}
GROUPS = {"data", "indexes", "papers"}
ENDED_AFTER_S = {"serve": 60, "demo": 30, "papers relevance": 30}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_command_runs_no_module_of_the_folder(inputs, folder, ran, tmp_path, arguments):
    words = [word.format(out=tmp_path / "out") for word in arguments]
    name = " ".join(words[: 1 + (words[0] in GROUPS)])
    lines = []
    with subprocess.Popen(
        [sys.executable, inputs / "visavis_script.py", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        timer = threading.Timer(ENDED_AFTER_S.get(name, 250), process.terminate)
        timer.start()
        for line in process.stdout:
            lines.append(line)
            if words[0] == "serve" and "http" in line:
                process.terminate()
    timer.cancel()
    code = process.returncode
    assert not ran.exists(), ran.read_text()
    if name not in {*ENDED_AFTER_S, *FAILING}:
        assert code == 0, lines


@pytest.mark.slow
def test_ray_workers_run_no_module_of_the_folder(inputs, folder, ran, tmp_path):
    pytest.importorskip("ray")
    arguments = ["index", "../run", ".", "--out", tmp_path / "out", "--workers", "ray"]
    script = inputs / "visavis_script.py"
    subprocess.run([sys.executable, script, *arguments], cwd=folder, check=True, timeout=250)
    assert not ran.exists()


@pytest.mark.slow
def test_every_command_is_tried():
    import typer

    def leaves(command, words):
        commands = getattr(command, "commands", {})
        for name, child in commands.items():
            yield from leaves(child, [*words, name])
        if not commands:
            yield words

    for words in leaves(typer.main.get_command(cli.app), []):
        assert any(tried[: len(words)] == words for tried in COMMANDS), words
