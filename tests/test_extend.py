"""Guide to extensions: each of its four sections is applied to a copy of the package and executed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).resolve().parents[1]
PAGE = (PROJECT / "docs" / "guides" / "extend.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


class Block(NamedTuple):
    """A fenced block: its language, its file if it has one, and its text."""

    language: str
    file: str
    text: str


def blocks(section: str) -> list[Block]:
    return [
        Block(*block)
        for block in re.findall(
            r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', section, re.MULTILINE | re.DOTALL
        )
    ]


def patched(text: str, diff: str) -> str:
    """A file after a diff without line numbers. The replaced lines must occur once."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(before) == 1, before
    return text.replace(before, after)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package with all additions of the guide."""
    root = tmp_path_factory.mktemp("extended")
    # Compiled modules save time. Python writes them under temporary names first.
    shutil.copytree(PROJECT / "src", root / "src", ignore=shutil.ignore_patterns("*.pyc.*"))
    for section in SECTIONS.values():
        for block in blocks(section):
            file = root / block.file
            if block.language == "diff":
                file.write_text(
                    patched(file.read_text(encoding="utf-8"), block.text), encoding="utf-8"
                )
            elif block.file:
                assert not file.exists(), f"{block.file} already exists"
                file.write_text(block.text, encoding="utf-8")
    return root


def test_guide_has_four_sections():
    # An objective is in the tutorial own-loss.md, which tests/test_docs_code.py runs.
    assert len(SECTIONS) == 4


@pytest.mark.parametrize("title", SECTIONS)
def test_section_changes_at_most_two_files(title):
    assert 1 <= len({block.file for block in blocks(SECTIONS[title]) if block.file}) <= 2


ALL = """
import json, os, sys, traceback
import visavis
assert visavis.__file__.startswith(sys.argv[1])
failed = {}
for title, use in json.load(sys.stdin).items():
    os.mkdir(title)
    os.chdir(title)
    try:
        exec(compile(use, title, "exec"), {"__name__": "__main__"})
    except BaseException:
        failed[title] = traceback.format_exc()
    os.chdir("..")
print(json.dumps(failed), file=open("failed.json", "w"))
"""


@pytest.fixture(scope="module")
def failed(copy, tmp_path_factory):
    """Errors by the title of the section. All sections run in one process, each in its own folder."""
    uses = {}
    for title, section in SECTIONS.items():
        (uses[title],) = [
            block.text for block in blocks(section) if block.language == "python" and not block.file
        ]
    folder, environment = (
        tmp_path_factory.mktemp("used"),
        {**os.environ, "PYTHONPATH": str(copy / "src")},
    )
    command = [sys.executable, "-c", ALL, str(copy)]
    process = subprocess.run(
        command,
        input=json.dumps(uses),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "failed.json").read_text())


@pytest.mark.parametrize("title", SECTIONS)
def test_section_runs_as_written(title, failed):
    assert title not in failed, failed[title]
