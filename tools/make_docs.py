"""Write docs/reference and docs/objectives.md from docstrings, catalogs, recipes and the command line: python tools/make_docs.py [--check].

With --check nothing is written; the exit status is 1, with one sentence, if a page is not what it would be now.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import objectives_page

PROJECT = Path(__file__).resolve().parents[1]
REFERENCE = PROJECT / "docs" / "reference"

# page -> (title, what stands there, module, tuple of entries in it)
CATALOGS = {
    "objectives": ("Objectives", "What a score matrix should look like, as a number to make small.", "visavis.objectives", "CATALOG"),
    "supervisions": ("Supervisions", "What objectives are told beyond scores.", "visavis.supervision", "CATALOG"),
    "degrees": (
        "Degrees of relevance",
        "How well a caption fits an image it was not written for.",
        "visavis.degrees",
        "CATALOG",
    ),
    "models": ("Models", "From images and texts to scores.", "visavis.models", "CATALOG"),
    "metrics": ("Metrics", "How good a ranking is.", "visavis.metrics", "CATALOG"),
    "layouts": (
        "Layouts of data",
        "How a data set may lie in a folder; [data folders](../guides/data.md) has an example of each.",
        "visavis.data.catalog",
        "CATALOG",
    ),
    "protocols": (
        "Protocols",
        "Which images and captions are ranked, and how the numbers are put together.",
        "visavis.evaluation",
        "CATALOG",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale")
    check = parser.parse_args().check
    pages = {REFERENCE / f"{name}.md": text for name, text in all_pages().items()} | {
        objectives_page.DOCS / "objectives.md": objectives_page.page()
    }
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    stale += [path for path in objectives_page.pictures() if check and not path.exists()]
    stray = sorted(set(REFERENCE.glob("*.md")) - set(pages))
    if check:
        changed = ", ".join(str(path.relative_to(PROJECT)) for path in [*stale, *stray])
        if changed:
            print(f"The reference is stale ({changed}): run make docs.", file=sys.stderr)
        return bool(changed)
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for path in stray:
        path.unlink()
    for path in stale:
        path.write_text(pages[path], encoding="utf-8")
    objectives_page.draw()
    print(f"docs: {len(pages)} pages, {len(stale)} written, {len(stray)} removed.")
    return 0


def all_pages() -> dict[str, str]:
    pages = {"python": python_page(), "recipes": recipes_page(), "command_line": command_line_page()}
    pages |= {name: catalog_page(*CATALOGS[name]) for name in CATALOGS}
    pages = {name: f"{text.rstrip()}\n" for name, text in pages.items() if text}
    index = [f"- [{text.split(chr(10), 1)[0].removeprefix('# ')}]({name}.md)" for name, text in sorted(pages.items())]
    return pages | {"index": "# Reference\n\nWritten by `make docs` from the code; do not edit.\n\n" + "\n".join(index) + "\n"}


def python_page() -> str:
    """The public names of the package."""
    import visavis

    parts = ["# Python\n\nThe public names: `from visavis import ...`."]
    for name in visavis.__all__:
        value = _attribute("visavis", name)
        if callable(value):
            parts.append(entry(value, name))
            parts += [entry(method, f"{name}.{label}", level=3) for label, method in _methods(value)]
    return "\n\n".join(parts)


def catalog_page(title: str, summary: str, module: str, attribute: str) -> str:
    """A section for each class or function of a catalog; a table of fields where its entries are values."""
    catalog = _attribute(module, attribute)
    if not catalog:
        return ""
    entries = list(catalog.values() if isinstance(catalog, dict) else catalog)
    values = all(is_dataclass(value) and not isinstance(value, type) for value in entries)
    return "\n\n".join([f"# {title}\n\n{summary}", *([_table(entries)] if values else map(entry, entries))])


def _table(values: list[Any]) -> str:
    names = [field.name for field in fields(values[0]) if field.repr]
    rows = [[_shown(getattr(value, name)) for name in names] for value in values]
    return "\n".join(f"| {' | '.join(row)} |" for row in [[name.replace("_", " ") for name in names], ["---"] * len(names), *rows])


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    text = _cell(getattr(value, "__name__", None) or (", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)))
    return f"`{text}`" if re.search(r"[_*<>{}\[\]]", text) else text


def recipes_page() -> str:
    """Every recipe file that ships: the comment at its head as prose, then the names of its rows; the files say the rest."""
    from visavis.training.recipe_files import read_file, shipped, tables

    parts = []
    for name, path in shipped().items():
        head = re.match(r"(?:#[^\n]*\n)*", path.read_text(encoding="utf-8"))[0]  # type: ignore[index]
        prose = re.sub(r"^# ?", "", head, flags=re.MULTILINE).strip()
        file = read_file(name)
        rows = [f"| `{name}/{row}` | `{recipe}` | {_cell(file.recipe(row, {}).about)} |" for row, recipe in file.row_names.items()]
        table = "\n".join(["| row | also by the name | what |", "| --- | --- | --- |", *rows]) if rows else ""
        parts.append("\n\n".join(part for part in [f"## `{name}`", file.content["about"], prose, table] if part))
    listed = [(name, read_file(name)) for name in tables()]
    rows = [
        f"| `{name}/ROW` | {len(file.rows)} | `{name}/{next(iter(file.rows))}` | {_cell(file.content['about'])} |" for name, file in listed
    ]
    table = "\n".join(["| row | how many | the first | what |", "| --- | --- | --- | --- |", *rows])
    told = "`visavis catalog recipes --paper PAPER` prints each row with its figures and what it needs."
    parts.append(f"## Tables of papers\n\n{told}\n\n{table}")
    usage = (
        "What `visavis train` takes by name. `visavis catalog recipes --json` prints every setting of each; "
        "[docs/guides/recipes.md](../guides/recipes.md) says how to extend one."
    )
    return "\n\n".join([f"# Recipes\n\n{usage}", *parts])


def command_line_page() -> str:
    """Every command with its arguments and options, as typer knows them."""
    app = _attribute("visavis.cli", "app")
    if app is None:
        return ""
    import typer

    root = typer.main.get_command(app)
    return "\n\n".join([f"# Command line\n\n{_plain(root.help)}", *_commands(root, "visavis")])


def _commands(group: Any, path: str) -> list[str]:
    parts = []
    for name, command in sorted(getattr(group, "commands", {}).items()):
        if not command.hidden:
            parts += [_command(command, f"{path} {name}"), *_commands(command, f"{path} {name}")]
    return parts


def _command(command: Any, path: str) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    shown = [_placeholder(argument) for argument in arguments]
    rows = [f"| {_names(parameter)} | {_cell(getattr(parameter, 'help', None))} | {_default(parameter)} |" for parameter in command.params]
    table = "\n".join(["| argument or option | meaning | default |", "|---|---|---|", *rows]) if rows else ""
    usage = " ".join([path, *shown, *(["[OPTIONS]"] if len(arguments) < len(command.params) else [])])
    return "\n\n".join(part for part in [f"## `{path}`", _plain(command.help), f"```\n{usage}\n```", table] if part)


def _placeholder(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    default = parameter.default
    return "" if default is None or default == () or default is False or callable(default) else f"`{_cell(str(default))}`"


def entry(value: Any, name: str | None = None, level: int = 2) -> str:
    """A heading, the call with its defaults, and the docstring of a class, a function or a value of a catalog."""
    kind = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    name = name or getattr(value, "name", None) or getattr(value, "__name__", None) or type(value).__name__
    call = _signature(name.rsplit(".", 1)[-1] if level > 2 else name, value) if value is kind else repr(value)
    return f"{'#' * level} `{name}`\n\n```python\n{call}\n```\n\n{_prose(inspect.getdoc(value) or '')}".rstrip()


def _signature(name: str, value: Callable[..., Any]) -> str:
    """The call as one writes it: names and defaults; annotations are left out but for what has no default."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except ValueError:
        return f"{name}(...)"
    shown = inspect.Signature(
        [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters if parameter.name != "self"]
    )
    text = re.sub(r"<factory>|<[^<>]+ at 0x[0-9a-f]+>", "...", str(shown))
    return f"{name}{text.replace('(*, ', '(') if isinstance(value, type) else text}"


def _methods(value: Any) -> list[tuple[str, Any]]:
    """Public methods with a docstring that a class defines itself, in the order of the file."""
    if not isinstance(value, type):
        return []
    own = [(name, getattr(member, "__func__", member)) for name, member in vars(value).items() if not name.startswith("_")]
    return [(name, method) for name, method in own if inspect.isfunction(method) and method.__doc__]


def _prose(text: str) -> str:
    """A docstring as Markdown: double backquotes to single ones, examples and indented blocks fenced."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip()):
        if block.lstrip().startswith(">>>"):
            blocks.append(f"```python\n{inspect.cleandoc(block)}\n```")
        elif all(line.startswith("    ") for line in block.split("\n")):
            blocks.append(f"```\n{inspect.cleandoc(block)}\n```")
        else:
            blocks.append(re.sub(r"``([^`]+)``", r"`\1`", block))
    return "\n\n".join(blocks)


def _plain(text: str | None) -> str:
    return _prose(inspect.cleandoc((text or "").split("\f")[0]))


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _attribute(module: str, name: str) -> Any:
    """A name of a module; None where the module or the name does not exist."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("visavis"):
            return None
        raise


if __name__ == "__main__":
    sys.exit(main())
