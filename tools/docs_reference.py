"""Generated pages of the documentation site: the reference, the examples, the changelog. Run by
mkdocs, see mkdocs.yml.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import Any

import mkdocs_gen_files
import typer.cli

import visavis
from visavis.cli.commands import build_app
from visavis.training.recipes.files import (
    paper_figures,
    paper_tables,
    read_recipe_file,
    shipped_files,
)

PROJECT = Path(__file__).resolve().parents[1]
INTERNAL = {"cli", "api", "storage"}
"""Packages without a page: the command line has its own, API functions are public names of
``visavis``, storage is not public.
"""


def main() -> None:
    """Write every generated page."""
    reference = {"command-line.md": command_line(), "catalogs/recipes.md": recipes()}
    entries = catalogs()
    reference["catalogs/keys.md"] = recipe_keys(entries.pop("keys"))
    reference |= {f"catalogs/{kind}.md": catalog(kind, rows) for kind, rows in entries.items()}
    reference |= {f"python/{name}.md": package(name) for name in packages()}
    links = [
        f"- [{text.split(chr(10), 1)[0].removeprefix('# ')}]({path})"
        for path, text in sorted(reference.items())
    ]
    reference["index.md"] = (
        "# Reference\n\nGenerated from the source by `make docs`.\n\n" + "\n".join(links)
    )
    for path, text in reference.items():
        write(f"reference/{path}", text)
    for example in sorted((PROJECT / "examples").glob("*.py")):
        write(
            f"examples/{example.stem}.md",
            f"# {example.name}\n\n```python\n{example.read_text(encoding='utf-8').rstrip()}\n```",
        )
    for file in sorted((PROJECT / "docs" / "tutorials").glob("*.ipynb")):
        write(f"tutorials/{file.stem}.md", notebook(file))
    write(
        "contributing.md",
        (PROJECT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .replace("(CHANGELOG.md", "(changelog.md")
        .replace("](docs/", "]("),
    )
    write(
        "security.md",
        (PROJECT / "SECURITY.md").read_text(encoding="utf-8").replace("](docs/", "]("),
    )
    write(
        "changelog.md",
        (PROJECT / "CHANGELOG.md")
        .read_text(encoding="utf-8")
        .replace("](docs/", "](")
        .replace("](CONTRIBUTING.md", "](contributing.md"),
    )


def write(path: str, text: str) -> None:
    """Add a page to the site."""
    with mkdocs_gen_files.open(path, "w") as file:
        file.write(f"{text.rstrip()}\n")


def notebook(file: Path) -> str:
    """A notebook as Markdown, with a link to the file."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    blocks = [
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
        for cell, text in zip(cells, texts, strict=True)
    ]
    return "\n\n".join(
        [
            blocks[0],
            f"Download [{file.name}]({file.name}) and run it to see the tables and images.",
            *blocks[1:],
        ]
    )


def packages() -> list[str]:
    """``visavis`` and its packages that list their public names."""
    names = [
        module.name
        for module in pkgutil.walk_packages(visavis.__path__, "visavis.")
        if module.ispkg and not INTERNAL & {*module.name.split(".")}
    ]
    return [
        "visavis",
        *(name for name in names if hasattr(importlib.import_module(name), "__all__")),
    ]


def package(name: str) -> str:
    """The public classes, functions and modules of a package, rendered by mkdocstrings."""
    public = [
        label
        for label in importlib.import_module(name).__all__
        if label != "CATALOG" and not label.startswith("_")
    ]
    summary = plain((importlib.import_module(name).__doc__ or "").strip().split("\n\n")[0])
    return "\n\n".join([f"# `{name}`", summary, *(f"::: {name}.{label}" for label in public)])


def catalogs() -> dict[str, list[dict[str, Any]]]:
    """The rows of every catalog but the recipes."""
    from visavis.api.catalog_entries import CATALOGS

    return {kind: rows() for kind, rows in CATALOGS.items() if kind != "recipes"}


def catalog(kind: str, rows: list[dict[str, Any]]) -> str:
    """A section for each entry of a catalog. Objectives have an image of their gradient."""
    parts = [
        f"# {kind.replace('_', ' ').capitalize()}",
        f"`visavis catalog {kind}` prints this list.",
    ]
    if kind == "objectives":
        parts.append(GRADIENT_IMAGES)
    for row in rows:
        name = row["name"]
        parts += [f"## `{name}`", plain(row["summary"])]
        if kind == "objectives":
            parts.append(
                f"![Gradient of {name} for one positive and one "
                f"negative](../../images/objectives/{name}.svg){{ width=300 }}"
            )
        facts = [
            (label, value)
            for label, value in row.items()
            if label not in ("name", "summary") and value
        ]
        parts.append(
            "\n".join(
                f"- **{label.replace('_', ' ').capitalize()}:** {fact(label, value)}"
                for label, value in facts
            )
        )
    return "\n\n".join(part for part in parts if part)


def recipe_keys(rows: list[dict[str, Any]]) -> str:
    """For each section of a recipe, a table of its keys and what they do."""
    parts = [
        "# Keys of recipes",
        (
            "`visavis catalog keys` prints this list. A recipe, `key=value` on the command line and "
            "`overrides` in Python accept these keys. [Recipes](../../guides/recipes.md) has "
            "examples. The keys of `model` are in the [catalog of models](models.md)."
        ),
    ]
    sections = dict[str, list[dict[str, Any]]]()
    for row in rows:
        sections.setdefault(row["name"].rpartition(".")[0], []).append(row)
    for section, keys in sections.items():
        parts += [
            f"## {f'`{section}`' if section else 'Top level'}",
            table(
                ("key", "type", "default"),
                [
                    (f"`{key['name']}`", cell(key["type"]), f"`{cell(key['default'])}`")
                    for key in keys
                ],
            ),
            "\n".join(f"- **`{key['name']}`:** {escape(key['summary'])}" for key in keys),
        ]
    return "\n\n".join(parts)


def escape(text: str) -> str:
    """A text without emphasis and names of attributes."""
    return re.sub(r"[_*{}]", r"\\\g<0>", text)


GRADIENT_IMAGES = """Each image shows one query with one positive, scored $s_p$ (x axis), and one negative, scored $s_n$ (y axis).
An arrow shows how a step down the gradient moves the two scores. Its color is its length, relative to the longest arrow of the image.
There is no arrow where the gradient is zero. All parameters have their defaults."""


def fact(label: str, value: Any) -> str:
    """A value of a catalog: code stays as written."""
    return f"`{value}`" if label == "defaults" else plain(str(value))


def plain(text: str) -> str:
    """One line of Markdown. Text that Markdown would read as emphasis or a tag becomes code."""
    text = " ".join(text.split())
    return text if re.search("[`$]", text) or not re.search(r"[_*<>{}\[\]]", text) else f"`{text}`"


def recipes() -> str:
    """Every recipe file with its description and variants, then the tables of papers."""
    parts = [
        "# Recipes",
        (
            "`visavis train` accepts these names. See [how to write a "
            "recipe](../../guides/recipes.md)."
        ),
    ]
    for name, path in shipped_files().items():
        head = re.match(r"(?:#[^\n]*\n)*", path.read_text(encoding="utf-8"))
        file = read_recipe_file(name)
        variants = [
            (f"`{name}/{row}`", f"`{recipe}`", cell(file.recipe(row, {}).about))
            for row, recipe in file.variant_names.items()
        ]
        prose = re.sub(r"^# ?", "", head[0] if head else "", flags=re.MULTILINE).strip()
        parts += [
            f"## `{name}`",
            file.content["about"],
            prose,
            table(("variant", "alias", "description"), variants),
        ]
    files = {name: read_recipe_file(name) for name in paper_tables() | paper_figures()}
    rows = [
        (
            f"`{name}/ROW`",
            str(len(file.variants)),
            f"`{name}/{next(iter(file.variants))}`",
            cell(file.content["about"]),
        )
        for name, file in files.items()
    ]
    parts += [
        "## Tables and figures of papers",
        ("`visavis papers list PAPER` prints each row with its figures and requirements."),
    ]
    return "\n\n".join(
        part for part in [*parts, table(("id", "rows", "first row", "description"), rows)] if part
    )


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table, or nothing without rows."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def cell(text: str | None) -> str:
    """A text on one line of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")


def command_line() -> str:
    """Every command with its arguments and options."""
    root = typer.main.get_command(build_app())
    text = typer.cli.get_docs_for_click(
        obj=root, ctx=typer.Context(root), name="visavis", title="Command line"
    )
    examples = re.compile(r"^Examples:\n((?:  .+\n)+)", re.MULTILINE)
    text = examples.sub(
        lambda match: f"**Examples**:\n\n```sh\n{textwrap.dedent(match[1])}```\n", text
    )
    # Typer does not escape help texts: <n> outside code would become a tag.
    return "`".join(
        part.replace("<", "&lt;") if index % 2 == 0 else part
        for index, part in enumerate(text.split("`"))
    )


main()
