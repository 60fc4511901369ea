"""Project rules that no other tool checks."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import visavis
from visavis import api, cli

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "src" / "visavis"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def module_path(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a file, from its root."""
    return list(ast.walk(ast.parse(path.read_text())))


def test_source_files_have_a_docstring():
    assert [module_path(path) for path in SOURCES if not ast.get_docstring(nodes(path)[0])] == []  # type: ignore[arg-type]


SHARED_MODULE_NAMES = {"__init__", "base", "catalog", "conversion", "model"}
"""Names of modules with the same role in parallel packages."""


def test_module_names_are_unique_except_for_roles():
    names = Counter(path.stem for path in SOURCES)
    assert {name for name, count in names.items() if count > 1} <= SHARED_MODULE_NAMES


def contracts(kind: str) -> list[dict]:
    """The contracts of import-linter of one type."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    return [each for each in project["tool"]["importlinter"]["contracts"] if each["type"] == kind]


def layers() -> list[list[str]]:
    """The packages of each layer, from the top."""
    (contract,) = contracts("layers")
    return [
        [name.strip() for name in layer.split("|")]
        for layer in contract["layers"]
        if not layer.startswith("(")
    ]


def named_modules(tree: ast.AST) -> set[str]:
    """Modules of the package that texts of a file name, as ``import_module`` and tables of lazy names
    do: "visavis.x.y" or "visavis.x.y:Name", also the beginning of a formatted text.
    """
    names = set()
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and re.fullmatch(r"visavis(\.\w+)+(:\w*)?\.?", text):
            names.add(text.partition(":")[0].rstrip("."))
    return names


def reaches_up(package: str, named: str) -> bool:
    """Whether a package must not name another one: it stands above, or next to it, or a contract
    forbids it.
    """
    level = {name: number for number, layer in enumerate(layers()) for name in layer}
    if package not in level or named not in level or package == named:
        return False
    forbidden = any(
        f"visavis.{package}" in contract["source_modules"]
        and f"visavis.{named}" in contract["forbidden_modules"]
        for contract in contracts("forbidden")
    )
    return level[named] <= level[package] or forbidden


def test_texts_name_only_modules_of_lower_layers():
    """Import-linter does not see an import by text."""
    named_above = [
        f"{module_path(path)}: {name}"
        for path in SOURCES
        for name in sorted(named_modules(nodes(path)[0]))
        if reaches_up(path.relative_to(PACKAGE).parts[0], name.split(".")[1])
    ]
    assert named_above == []


def test_named_modules_are_found_in_calls_and_tables():
    program = """
import_module("visavis.training.trainer")
import_module(f"visavis.models.{name}")
PLACES = {"a": "visavis.retrieval.stores.base:Store"}
log("visavis.search is slow", "my_visavis.x", "visavis")
"""
    assert named_modules(ast.parse(program)) == {
        "visavis.training.trainer",
        "visavis.models",
        "visavis.retrieval.stores.base",
    }
    assert reaches_up("data", "retrieval") and reaches_up("research", "retrieval")
    assert reaches_up("retrieval", "training") and not reaches_up("retrieval", "evaluation")


def test_architecture_page_lists_every_package_in_layer_order():
    names = [name for layer in layers() for name in layer]
    page = (PROJECT / "docs" / "explanation" / "architecture.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == names


def test_class_names_are_unique():
    """Each matcher has a class ``Config`` inside."""
    classes = [
        node.name
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and node.name != "Config"
    ]
    assert [name for name, count in Counter(classes).items() if count > 1] == []


def print_calls(path: Path) -> list[str]:
    """Names by which a file prints: ``print``, ``console.print``, ``typer.echo``, or a stream of
    ``sys``.
    """
    names = [
        ast.unparse(node) for node in nodes(path) if isinstance(node, ast.Name | ast.Attribute)
    ]
    return [
        name
        for name in names
        if name in {"print", "sys.stdout", "sys.stderr"} or name.endswith((".print", ".echo"))
    ]


def test_only_the_command_line_prints():
    printing = {
        module_path(path): calls
        for path in SOURCES
        if PACKAGE / "cli" not in path.parents and (calls := print_calls(path))
    }
    assert printing == {}


def test_print_calls_finds_those_of_the_command_line():
    names = {name for path in (PACKAGE / "cli").rglob("*.py") for name in print_calls(path)}
    assert {"print", "console.print", "sys.stdout"} <= names


@pytest.mark.parametrize("folder", ["objectives", "metrics", "models"])
def test_math_packages_do_not_use_process_groups(folder):
    assert [
        module_path(path)
        for path in (PACKAGE / folder).rglob("*.py")
        if "torch.distributed" in path.read_text()
    ] == []


def test_no_module_has_the_name_of_an_api_function():
    """``visavis.train`` is a function. A module of that name would replace it once imported."""
    assert [module_path(path) for path in PACKAGE.iterdir() if path.stem in api.__all__] == []


def test_files_are_written_only_through_storage():
    """Only ``storage`` opens a file for writing or saves an array, a tensor or an image to a path."""
    writes = re.compile(
        r"\.write_(text|bytes)\(|open\([^)]*['\"][wax]b?\+?['\"]|\bnp\.savez?\(|\btorch\.save\(|\bsave_file\(|\bto_csv\("
    )
    lines = [
        f"{module_path(path)}:{number}"
        for path in SOURCES
        if path.parent.name != "storage"
        for number, line in enumerate(path.read_text().split("\n"), 1)
        if writes.search(line) and not re.search(r"storage\.|\bpart\b|ZipFile|io\.BytesIO", line)
    ]
    assert lines == []


def test_paths_are_checked_with_functions_that_do_not_raise():
    """``Path.exists`` and the like raise OSError on long names, ``Path.resolve`` raises
    RuntimeError on links in a loop.
    """
    methods = {"exists", "is_file", "is_dir", "is_symlink", "resolve"}
    calls = [
        f"{module_path(path)}:{node.lineno}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr in methods
        and ast.unparse(node.value) not in ("Path(__file__)", "entry", "os.path")
    ]
    assert calls == []


def test_vectors_are_normalized_with_unit_rows():
    """``torch.nn.functional.normalize`` gives zero vectors for norms above 1e19. Pixels have no
    such norms.
    """
    users = [
        module_path(path)
        for path in SOURCES
        if re.search(r"import .*\bnormalize\b|functional\.normalize\(", path.read_text())
    ]
    assert users == ["core/blocking.py", "research/audit/duplicates.py"]


def test_make_targets_in_docs_exist():
    targets = set(re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "lint", "fix", "docs", "bench", "study", "golden"} <= targets
    pages = [
        PROJECT / "README.md",
        PROJECT / "CONTRIBUTING.md",
        *(PROJECT / "docs").rglob("*.md"),
        PROJECT / ".ci" / "run",
    ]
    documented = {
        target
        for page in pages
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert documented <= targets


def test_make_installs_existing_extras():
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].keys()
    stamps = [".venv/.core", ".venv/.demo", ".venv/.dev"]
    output = subprocess.run(
        ["make", "-n", "-B", *stamps], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout
    installed = re.findall(r"-e '([^']*)'", output)
    assert len(installed) == len(stamps)
    for requirement in installed:
        match = re.fullmatch(r"\.(?:\[([a-z,]+)\])?", requirement)
        assert match and set((match[1] or "").split(",")) - {""} <= extras, requirement


def test_make_skips_scripts_with_required_arguments():
    scripts = [
        path
        for folder in ("benchmarks", "studies")
        for path in sorted((PROJECT / folder).glob("*.py"))
    ]
    required = re.compile(r'add_argument\("[a-z]\w*"(?!.*nargs="[*?]")')
    (pattern,) = re.findall(r"if grep -Eq '(.+)'", (PROJECT / "Makefile").read_text())
    assert [path.name for path in scripts if required.search(path.read_text())] == [
        path.name for path in scripts if re.search(pattern, path.read_text())
    ]


def test_commands_and_extras_in_docs_exist():
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ].keys()
    commands = {
        command.name or command.callback.__name__ for command in cli.app.registered_commands
    }
    commands |= {group.name for group in cli.app.registered_groups}
    pages = [
        PROJECT / "README.md",
        PROJECT / "CONTRIBUTING.md",
        *(PROJECT / "docs").rglob("*.md"),
        *SOURCES,
    ]
    texts = {page: page.read_text() for page in pages}
    documented = {
        name
        for text in texts.values()
        for name in re.findall(r"(?:`|\$ )visavis ([a-z]+)(?=[ `\n])", text, re.MULTILINE)
    }
    assert {"train", "search"} <= documented
    assert documented <= commands
    assert {
        name
        for text in texts.values()
        for names in re.findall(r"visavis\[([a-z,]+)\]'", text)
        for name in names.split(",")
    } <= extras


def test_relative_links_of_markdown_files_exist():
    # links of the site are checked when it is built
    pages = PROJECT.glob("*.md")
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
    ]
    assert [
        f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()
    ] == []


def test_versions_agree():
    version = visavis.__version__
    assert importlib.metadata.version("visavis") == version
    assert f"\nversion: {version}\n" in (PROJECT / "CITATION.cff").read_text()
    headings = re.findall(
        r"^## \[(.+?)\] - \d{4}-\d{2}-\d{2}$", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert headings[0] == version
    assert (PROJECT / "CITATION.cff").read_text().count(
        re.search(r"\] - (\S+)$", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    ) == 1


def test_public_names_are_listed_once():
    assert len(set(visavis.__all__)) == len(visavis.__all__)
    assert {"PairLoss", "Targets", "load", "parse"} <= set(visavis.__all__)
    assert set(visavis.__all__) <= set(dir(visavis))


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


@pytest.mark.timing
def test_import_time_is_small_compared_with_torch():
    program = "import time, torch; start = time.perf_counter(); import visavis; print(time.perf_counter() - start)"
    runs = [
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
        for _ in range(5)
    ]
    assert statistics.median(float(run.stdout) for run in runs) <= 0.2


@pytest.mark.timing
@pytest.mark.parametrize(
    "command",
    [["-m", "visavis", "--help"], [str(Path(sys.executable).with_name("visavis")), "--help"]],
    ids=["module", "script"],
)
def test_help_takes_at_most_half_a_second(command):
    assert statistics.median(seconds(*command) for _ in range(5)) <= 0.5


def test_help_never_imports_torch():
    program = "import sys; sys.argv = ['visavis', '--help']\ntry:\n import visavis.cli; visavis.cli.main()\nfinally:\n assert 'torch' not in sys.modules"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "Usage" in process.stdout
    assert "AssertionError" not in process.stderr
