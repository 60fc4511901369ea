"""Check how much code one must read to own a part: its reach, the modules that it imports, directly
or not.

Imports count at any depth, except for type checking, and so does a text that names a module, as in
``import_module`` or a table of lazy names. The packages in ``CATALOGS`` name their parts lazily for
others to choose from, so that their tables do not count. The unit is a statement without docstrings,
where an assignment of a tuple to a tuple counts once for each name. The budgets are in
pyproject.toml.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import deque
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = "visavis"
CATALOGS = ("visavis", "visavis.losses.objectives")
MODULE_IN_TEXT = re.compile(rf"({PACKAGE}(?:\.\w+)+)(?::\w+)?")
SHOWN_PULLS = 12


def weight(tree: ast.AST) -> int:
    """Number of statements without docstrings, with packed assignments unpacked."""
    total = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            continue
        total += 1
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            tuples = [target for target in node.targets if isinstance(target, ast.Tuple)]
            total += max((len(target.elts) - 1 for target in tuples), default=0)
    return total


def named_modules(tree: ast.AST, module: str, *, is_package: bool) -> set[str]:
    """Dotted names that the imports and the texts of a module name."""
    names = set[str]()
    texts = list[str]()
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join([*parents, *filter(None, [node.module])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    if module not in CATALOGS:
        places = filter(None, (MODULE_IN_TEXT.fullmatch(text) for text in texts))
        names |= {place[1] for place in places}
    return names


def read_modules(source: Path) -> tuple[dict[str, int], dict[str, set[str]]]:
    """The weight of each module, and the modules that it imports."""
    weights = dict[str, int]()
    named = dict[str, set[str]]()
    for path in sorted((source / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(path.read_text())
        weights[name] = weight(tree)
        named[name] = named_modules(tree, name, is_package=path.name == "__init__.py")
    edges = dict[str, set[str]]()
    for name, others in named.items():
        packages = [name.rsplit(".", depth)[0] for depth in range(1, name.count("."))]
        found = {*packages}  # a module runs the __init__ of its packages
        for other in others:
            while other not in weights and "." in other:
                other = other.rpartition(".")[0]
            found.add(other)
        edges[name] = {other for other in found if other in weights} - {name, PACKAGE}
    return weights, edges


def reach(entry: str, edges: dict[str, set[str]]) -> dict[str, str]:
    """The modules that an entry reaches, each with the module that imports it on a shortest path."""
    importers = {entry: ""}
    waiting = deque([entry])
    while waiting:
        name = waiting.popleft()
        for other in sorted(edges[name]):
            if other not in importers:
                importers[other] = name
                waiting.append(other)
    return importers


def main() -> None:
    """Print the reach of each entry, and fail if one exceeds its budget."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    budgets: dict[str, int] = project["tool"]["visavis"]["reach"]
    weights, edges = read_modules(PROJECT / "src")
    failed = False
    for entry, budget in budgets.items():
        importers = reach(entry, edges)
        total = sum(weights[name] for name in importers)
        is_over = total > budget
        if is_over or "--all" in sys.argv:
            print(f"{entry}: {total:,} statements in {len(importers)} files, budget {budget:,}")
        if not is_over:
            continue
        failed = True
        heaviest = sorted(importers, key=lambda name: -weights[name])[:SHOWN_PULLS]
        for name in heaviest:
            print(f"  {weights[name]:5,}  {name}, imported by {importers[name] or 'the entry'}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
