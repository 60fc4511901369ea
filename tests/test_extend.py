"""The five pages on adding something, each followed to the letter in a copy of the package."""

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

PROJECT = Path(__file__).resolve().parents[1]
PAGE = (PROJECT / "docs" / "guides" / "extend.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


class Block(NamedTuple):
    """A fenced block: its language, the file it is of, if any, and its text."""

    language: str
    file: str
    text: str


def blocks(section: str) -> list[Block]:
    return [Block(*block) for block in re.findall(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', section, re.MULTILINE | re.DOTALL)]


def patched(text: str, diff: str) -> str:
    """A file after a diff without line numbers: what stands there now must occur once."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(before) == 1, before
    return text.replace(before, after)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The package with everything added that the page adds."""
    root = tmp_path_factory.mktemp("extended")
    shutil.copytree(PROJECT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for section in SECTIONS.values():
        for block in blocks(section):
            file = root / block.file
            if block.language == "diff":
                file.write_text(patched(file.read_text(encoding="utf-8"), block.text), encoding="utf-8")
            elif block.file:
                assert not file.exists(), f"{block.file} is there already"
                file.write_text(block.text, encoding="utf-8")
    return root


def test_the_page_tells_of_five_things():
    assert len(SECTIONS) == 5


@pytest.mark.parametrize("title", SECTIONS)
def test_each_takes_two_files_at_most(title):
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
    """What went wrong with the new things, by the title of the section: all are used in one process, each in a folder of its own."""
    uses = {}
    for title, section in SECTIONS.items():
        (uses[title],) = [block.text for block in blocks(section) if block.language == "python" and not block.file]
    folder, environment = tmp_path_factory.mktemp("used"), {**os.environ, "PYTHONPATH": str(copy / "src")}
    command = [sys.executable, "-c", ALL, str(copy)]
    done = subprocess.run(command, input=json.dumps(uses), cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "failed.json").read_text())


@pytest.mark.parametrize("title", SECTIONS)
def test_it_works_as_written(title, failed):
    assert title not in failed, failed[title]
