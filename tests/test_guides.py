"""Blocks of docs/guides: commands and their options exist, recipes are valid, Python names can be
imported.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest
import typer

from visavis.cli import app
from visavis.evaluation.feedback.records import read_feedback
from visavis.training.recipes import settings
from visavis.training.recipes.files import read_recipe

GUIDES = Path(__file__).parents[1] / "docs" / "guides"
PAGES = sorted(path for path in GUIDES.glob("*.md") if path.name != "extend.md")
SECTIONS = {
    "data": settings.DataSettings,
    "visual": settings.VisualSettings,
    "text": settings.TextSettings,
    "optimizer": settings.OptimizerSettings,
}


def blocks(page, *languages):
    """The code blocks of a page in these languages."""
    pattern = rf"^ *```(?:{'|'.join(languages)})\n(.*?)^ *```$"
    return [
        textwrap.dedent(block)
        for block in re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ]


def commands(page):
    """The visavis commands in the blocks and in the text of a page, as lists of words."""
    text = page.read_text(encoding="utf-8")
    lines = "\n".join(blocks(page, "sh", "console")).replace("\\\n", " ").split("\n")
    lines += [span.replace("\n", " ") for span in re.findall(r"(?<!`)`(visavis [^`]+)`", text)]
    lines = [line.removeprefix("$ ") for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("visavis ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_options_exist(page):
    root = typer.main.get_command(app)
    for words in commands(page):
        command = root
        while hasattr(command, "commands") and words and words[0] in command.commands:
            command, words = command.commands[words[0]], words[1:]
        assert command.name is not None, words
        is_runnable = (
            not hasattr(command, "commands")
            or command.name == "relevance"
            or all(word.startswith("--") for word in words)
        )
        assert is_runnable, f"no such command: {words}"
        options = {"--help"} | {
            name
            for parameter in command.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= options, (
            command.name,
            words,
        )
        for word in words:
            section, _, key = re.sub(r"^phases\.\d+\.", "", word.partition("=")[0]).partition(".")
            if "=" in word and section in SECTIONS:
                assert key in SECTIONS[section].model_fields, word


def test_recipes_are_valid(tmp_path):
    complete = 0
    for page in PAGES:
        for number, block in enumerate(blocks(page, "toml")):
            content = tomllib.loads(block)
            if "name" in content:
                path = tmp_path / f"{page.stem}-{number}.toml"
                path.write_text(block, encoding="utf-8")
                for name in [f"{path}/{variant}" for variant in content.get("variants", {})] or [
                    path
                ]:
                    assert read_recipe(name).phases
                complete += 1
            for section in SECTIONS.keys() & content.keys():
                SECTIONS[section].model_validate(content[section])
    assert complete >= 3


def test_names_of_python_blocks_can_be_imported():
    for page in PAGES:
        for block in blocks(page, "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module.startswith("visavis"):
                    module = importlib.import_module(node.module)
                    assert [
                        alias.name for alias in node.names if not hasattr(module, alias.name)
                    ] == []


def test_feedback_record_is_read(tmp_path):
    (line,) = blocks(GUIDES / "feedback.md", "json")
    path = tmp_path / "votes.jsonl"
    path.write_text(line, encoding="utf-8")
    (record,) = read_feedback(path)
    assert record.item == json.loads(line)["item"]
    assert record.relevant
