"""The rules of the house that no other tool checks."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import visavis
from visavis import cli, verbs

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "src" / "visavis"
SOURCES = sorted(PACKAGE.rglob("*.py"))
VERBS = {*verbs.__all__, "compare", "index", "reproduce", "serve"}
"""Those that are there, and those whose names are kept for them."""


def named(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_a_source_file_has_at_most_300_lines_and_says_what_lives_in_it():
    texts = {named(path): path.read_text() for path in SOURCES}
    assert [name for name, text in texts.items() if text.count("\n") > 300] == []
    without = [name for name, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))]
    assert without == [], "a module begins with a docstring"


def voices(path: Path) -> list[str]:
    """What a file prints by: ``print``, ``console.print``, ``typer.echo``, or a stream of ``sys`` itself."""
    names = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name | ast.Attribute)]
    return [name for name in names if name in {"print", "sys.stdout", "sys.stderr"} or name.endswith((".print", ".echo"))]


def test_only_the_command_line_prints():
    guilty = {named(path): found for path in SOURCES if PACKAGE / "cli" not in path.parents and (found := voices(path))}
    assert guilty == {}


def test_it_is_seen_that_the_command_line_prints():
    seen = {name for path in (PACKAGE / "cli").rglob("*.py") for name in voices(path)}
    assert {"typer.echo", "console.print", "sys.stdout"} <= seen


@pytest.mark.parametrize("folder", ["objectives", "metrics", "models"])
def test_no_mathematics_knows_of_processes(folder):
    assert [named(path) for path in (PACKAGE / folder).rglob("*.py") if "torch.distributed" in path.read_text()] == []


def test_no_module_bears_the_name_of_a_verb():
    """``visavis.train`` is the function; a module of that name would take its place once imported."""
    assert [named(path) for path in PACKAGE.iterdir() if path.stem in VERBS] == []


def test_every_file_is_written_through_storage():
    """Only ``storage`` opens a file for writing or saves an array, a tensor or a picture under a name."""
    writes = re.compile(r"\.write_(text|bytes)\(|open\([^)]*['\"][wax]b?\+?['\"]|\bnp\.savez?\(|\btorch\.save\(|\bsave_file\(|\bto_csv\(")
    guilty = [
        f"{named(path)}:{number}"
        for path in SOURCES
        if path.parent.name != "storage"
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if writes.search(line) and not re.search(r"storage\.|\bpart\b|ZipFile|io\.BytesIO", line)
    ]
    assert guilty == []


def test_every_make_target_that_a_page_names_exists():
    targets = set(re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint", "fix", "docs", "bench", "study", "golden"} <= targets
    pages = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *(PROJECT / "docs").rglob("*.md"), PROJECT / ".ci" / "run"]
    named_targets = {target for page in pages for target in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE)}
    assert named_targets <= targets


def test_every_set_of_packages_that_make_installs_exists():
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    stamps = [".venv/.core", ".venv/.demo", ".venv/.dev"]
    told = subprocess.run(["make", "-n", "-B", *stamps], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    installed = re.findall(r"-e '([^']*)'", told)
    assert len(installed) == len(stamps)
    for wanted in installed:
        named = re.fullmatch(r"\.(?:\[([a-z,]+)\])?", wanted)
        assert named and set((named[1] or "").split(",")) - {""} <= extras, wanted


def test_every_command_and_extra_that_a_page_names_exists():
    """Also what the package says of itself: a verb that is still to come is not promised."""
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    commands |= {group.name for group in cli.app.registered_groups}
    pages = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *(PROJECT / "docs").rglob("*.md"), *SOURCES]
    texts = {page: page.read_text() for page in pages}
    promised = {name for text in texts.values() for name in re.findall(r"(?:^|`|\$ )visavis ([a-z]+)(?=[ `\n])", text, re.MULTILINE)}
    assert {"train", "search"} <= promised
    assert promised <= commands
    assert {name for text in texts.values() for names in re.findall(r"visavis\[([a-z,]+)\]'", text) for name in names.split(",")} <= extras
    for said in (visavis.__doc__, cli.app.info.help, tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["description"]):
        assert not re.search(r"\b(compare|explain|index|serve)s?\b", said)


def test_every_relative_link_of_a_page_leads_somewhere():
    pages = PROJECT.glob("*.md")  # those of the site are checked as it is built
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())]
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_versions_agree():
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert visavis.__version__ == importlib.metadata.version("visavis") == version
    headings = re.findall(r"^## \[(.+?)\]", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert len(headings) == 1 or headings[1] == version


def test_public_names_are_importable_and_listed_once():
    assert len(set(visavis.__all__)) == len(visavis.__all__)
    assert {"PairLoss", "Targets", "load", "parse"} <= set(visavis.__all__)
    assert set(visavis.__all__) <= set(dir(visavis))


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


@pytest.mark.timing
def test_importing_costs_little_beside_torch():
    program = "import time, torch; start = time.perf_counter(); import visavis; print(time.perf_counter() - start)"
    runs = [subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True) for _ in range(5)]
    assert statistics.median(float(run.stdout) for run in runs) <= 0.2


@pytest.mark.timing
@pytest.mark.parametrize(
    "command", [["-m", "visavis", "--help"], [str(Path(sys.executable).with_name("visavis")), "--help"]], ids=["module", "script"]
)
def test_help_answers_at_once(command):
    assert statistics.median(seconds(*command) for _ in range(5)) <= 0.5


def test_help_never_imports_torch():
    program = "import sys; sys.argv = ['visavis', '--help']\ntry:\n import visavis.cli; visavis.cli.main()\nfinally:\n assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "Usage" in shown.stdout
    assert "AssertionError" not in shown.stderr
