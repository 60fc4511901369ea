"""The language check finds replaced words in prose, messages and names, and leaves code and
quotations alone.
"""

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
    return [(finding.line, finding.text) for finding in checker.check(path)]


def test_language_check_reads_prose_but_not_code_of_markdown(checker, tmp_path):
    text = "The page tells you.\n\n```python\nsaid = 1\n```\n\nUse `told` as it is; then stop.\n"
    assert findings(checker, tmp_path, "page.md", text) == [(1, "tells"), (7, ";")]


@pytest.mark.parametrize(
    "text",
    [
        "One idea; another.",
        "One idea ; another.",
        "Run `make`; then stop.",
        "First {name}; then stop.",
        "One idea;",
    ],
)
def test_language_check_finds_semicolons(checker, tmp_path, text):
    assert findings(checker, tmp_path, "page.md", text) == [(1, ";")]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.toml",
            'name = "told"\n# It is said.\nabout = "It tells a story."\nrequires = """\nA b\nat hand"""',
            [(2, "said"), (3, "tells"), (6, "at hand")],
        ),
        ("a.toml", "lr = 1 # set anew\n[a]\nurl = 'https://x.org/#said so'", [(1, "anew")]),
        (
            "a.yml",
            "# It is said.\nrun: one; two\ntitle: The page tells",
            [(1, "said"), (2, ";"), (3, "tells")],
        ),
        ("a.yaml", "name: It is said", [(1, "said")]),
        (
            "Makefile",
            "# It is said.\nsaid:\n\t@cd told; echo 'It tells a story.'; true",
            [(1, "said"), (3, "tells")],
        ),
        ("run", "said=1; cd told\necho 'It is said.' >&2", [(2, "said")]),
        (
            "a.html",
            (
                "<!-- It is\nsaid. -->\n<p class='told now'>One&nbsp;idea; another.</p>\n<i "
                "style='color: a; b: c'></i>"
            ),
            [(2, "said"), (3, "told"), (3, ";")],
        ),
        (
            "a.html",
            "<b title='It tells a story'>x</b>\n<script>\ntold = 1; // It is said.\n</script>",
            [(1, "tells"), (3, "said")],
        ),
        (
            "a.html.j2",
            (
                "{# It is said. #}\n{% set told = 1 %}{{ table('It tells a story.', told) "
                "}}\n<p>anew</p>"
            ),
            [(1, "said"), (2, "tells"), (3, "anew")],
        ),
        (
            "a.js",
            "const told = 'said'; // It is said.\n/* It\ntells. */\nsend(`One ${told}; another`)",
            [(1, "said"), (3, "tells"), (4, ";")],
        ),
        (
            "a.css",
            ".told { color: red; }\n/* It is said. */\na::after { content: 'It tells a story'; }",
            [(2, "said"), (3, "tells")],
        ),
    ],
)
def test_language_check_reads_other_kinds_of_files(checker, tmp_path, name, text, expected):
    """Only comments and texts: code, keys and strings of one word are not prose."""
    assert sorted(findings(checker, tmp_path, name, text)) == sorted(expected)


def test_language_check_covers_kinds_and_settings_of_the_project(checker):
    suffixes = {
        path.suffix
        for folder in ("src", "studies")
        for path in (checker.PROJECT / folder).rglob("*")
        if path.is_file()
    }
    binary = {".pyc", ".npz", ".safetensors", ".gz", ".json", ".typed", ".txt", ".svg", ""}
    assert suffixes - checker.READERS.keys() <= binary
    assert all((checker.PROJECT / name).exists() for name in checker.SETTINGS)


def test_language_check_reads_docstrings_messages_and_comments(checker, tmp_path):
    text = '"""A model is no model."""\n# what is at hand\nraise ValueError(f"{1} pictures are missing")\n'
    assert sorted(findings(checker, tmp_path, "module.py", text)) == [
        (1, "is no model"),
        (2, "at hand"),
        (3, "pictures"),
    ]


def test_language_check_reads_names_and_test_names(checker, tmp_path):
    name = "test_" + "long_name_" * 6
    text = f"def {name}(wanted):\n    kept_degrees = wanted\n"
    assert sorted(findings(checker, tmp_path, "module.py", text)) == [
        (1, name),
        (1, "wanted"),
        (2, "kept_degrees"),
    ]


def test_language_check_measures_sentences(checker, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\nOne two three. One two three four five.\n\n- An item of a list\n\n| a | b |\n"
    )
    figures = checker.docs_figures([page])
    assert figures["median sentence"] == 5
    assert figures["semicolons"] == figures["replaced words"] == 0
