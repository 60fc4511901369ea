"""The language check finds replaced words in prose, messages and names, and leaves code and quotations alone."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[1] / "tools" / "check_language.py"


@pytest.fixture(scope="module")
def checker():
    spec = importlib.util.spec_from_file_location("check_language", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def findings(checker, tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return [(finding.line, finding.found) for finding in checker.check(path)]


def test_language_check_reads_prose_but_not_code_of_markdown(checker, tmp_path):
    text = "The page tells you.\n\n```python\nsaid = 1\n```\n\nUse `told` as it is; then stop.\n"
    assert findings(checker, tmp_path, "page.md", text) == [(1, "tells"), (7, ";")]


def test_language_check_reads_docstrings_messages_and_comments(checker, tmp_path):
    text = '"""A model is no model."""\n# what is at hand\nraise ValueError(f"{1} pictures are missing")\n'
    assert sorted(findings(checker, tmp_path, "module.py", text)) == [(1, "is no model"), (2, "at hand"), (3, "pictures")]


def test_language_check_reads_names_and_test_names(checker, tmp_path):
    name = "test_" + "long_name_" * 6
    text = f"def {name}(tower):\n    kept_degrees = tower\n"
    assert sorted(findings(checker, tmp_path, "module.py", text)) == [(1, name), (1, "tower"), (2, "kept_degrees")]


def test_language_check_measures_sentences(checker, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\nOne two three. One two three four five.\n\n- An item of a list\n\n| a | b |\n")
    figures = checker.docs_figures([page])
    assert figures["median sentence"] == 5
    assert figures["semicolons"] == figures["replaced words"] == 0
