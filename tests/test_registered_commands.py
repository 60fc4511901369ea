"""Commands of named sources and of installed packages."""

import json
import sys
from importlib.metadata import EntryPoint

import pytest

from visavis import cli
from visavis.core import own_code
from visavis.core.own_code import VARIABLE

SOURCE = '''
from __future__ import annotations

from dataclasses import dataclass

from visavis.core.command import Command
from visavis.core.result import Result
from visavis.core.table import Column, Table


@dataclass(frozen=True)
class Words(Result):
    count: int

    def to_json(self):
        return {"count": self.count}

    def tables(self):
        return [Table((Column("words"),), ((self.count,),), ("A note.",))]


def NAME(text: str, *, repeat: int = 1) -> Words:
    """Count words.

    Args:
        text: Text.
        repeat: Factor.
    """
    return Words(repeat * len(text.split()))


COMMAND = Command(NAME)
'''


@pytest.fixture
def call(monkeypatch, capfd, tmp_path):
    """``visavis ARGUMENTS`` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "[]")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["visavis", *arguments])
        capfd.readouterr()
        try:
            cli.main()
        except SystemExit as end:
            return (end.code or 0, *capfd.readouterr())
        return (0, *capfd.readouterr())

    return run


@pytest.mark.parametrize(
    ("function", "words"),
    [("count_words", ["count-words"]), ("data_count", ["data", "count"])],
)
def test_named_source_adds_a_command(call, tmp_path, function, words):
    file = tmp_path / f"own_{function}.py"
    file.write_text(SOURCE.replace("NAME", function))
    code, out, err = call("--code", file.name, *words, "a red star", "--repeat", "2", "--json")
    assert (code, json.loads(out)) == (0, {"count": 6}), err
    code, out, _ = call(f"--code={file.name}", *words, "a star")
    assert (code, out.split()) == (0, ["words", "2", "A", "note."])
    assert "Count words." in call("--code", file.name, *words[:-1], "--help")[1]
    code, _, err = call("--code", file.name, *words, "a", "--repeat", "x")
    assert (code, "Traceback" in err) == (2, False)


def test_source_without_code_option_adds_no_command(call, tmp_path):
    (tmp_path / "own_absent.py").write_text(SOURCE.replace("NAME", "count_absent"))
    assert call("count-absent", "a")[0] == 2


def test_command_cannot_replace_one_of_visavis(call, tmp_path):
    (tmp_path / "own_index.py").write_text(SOURCE.replace("NAME", "index"))
    code, _, err = call("--code", "own_index.py", "--help")
    assert code == 1
    assert err.startswith(
        "visavis: index: expected a command with a function and a name of its own"
    )


def test_installed_package_adds_a_command(call, tmp_path, monkeypatch):
    (tmp_path / "my_lab.py").write_text(SOURCE.replace("NAME", "papers_count"))
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("papers_count", "my_lab:COMMAND", "visavis.commands")
    installed = own_code._installed("commands")
    monkeypatch.setattr(
        own_code,
        "_installed",
        lambda group: installed | {"papers_count": entry} if group == "commands" else {},
    )
    code, out, err = call("papers", "count", "a red star", "--json")
    assert (code, json.loads(out)) == (0, {"count": 3}), err


def test_broken_package_is_one_error(call, monkeypatch):
    entry = EntryPoint("papers_gone", "my_missing_lab:COMMAND", "visavis.commands")
    monkeypatch.setattr(
        own_code,
        "_installed",
        lambda group: {"papers_gone": entry} if group == "commands" else {},
    )
    code, _, err = call("papers", "gone")
    assert code == 1
    assert "papers_gone: expected a part of an installed package, got ModuleNotFoundError" in err
    assert call("doctor", "--help")[0] == 0, "other commands do not load it"
    code, out, err = call("--help")
    assert (code, "papers" in out.split()) == (0, True), err
