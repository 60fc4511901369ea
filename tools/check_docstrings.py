"""Check docstrings: python tools/check_docstrings.py [PACKAGE ...].

A name is public if ``__all__`` of a package lists it or if the documentation imports it. Its bases
are public too.

- **Public** functions and methods document exactly their parameters (``Args:``), what they return
  or yield (``Returns:``, ``Yields:``) and the errors that they raise themselves (``Raises:``). A
  method that overrides a documented one needs no docstring, and a property needs one sentence. A
  summary that starts with "Return" describes the returned value, and "see ``Class.method``" refers
  to the description there.
- **Internal** functions have a summary only. A reason is a comment at the line that needs it.
- Classes of fields, public or internal, document exactly their fields (``Attributes:`` or
  ``Args:``).
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import griffe

PROJECT = Path(__file__).resolve().parents[1]


def main() -> int:
    package = griffe.load(
        "visavis",
        search_paths=[PROJECT / "src"],
        docstring_parser="google",
        docstring_options={"warnings": False},
        resolve_aliases=True,
    )
    public = set(public_names(package))
    prefixes = tuple(sys.argv[1:]) or ("visavis",)
    findings = [
        finding for finding in check_members(package, public) if finding.startswith(prefixes)
    ]
    for finding in findings:
        print(finding)
    return bool(findings)


def public_names(package: griffe.Object) -> Iterator[str]:
    """Paths of the functions and classes that ``__all__`` or the documentation names."""
    named = [name for module in modules(package) for name in exported(module)]
    for pattern in ("README.md", "docs/**/*.md", "examples/*.py"):
        for page in PROJECT.glob(pattern):
            imports = re.findall(
                r"from (visavis[\w.]*) import (\([^)]*\)|[^\n]+)", page.read_text(encoding="utf-8")
            )
            named += [
                f"{module}.{name}"
                for module, names in imports
                for name in re.findall(r"\w+", names)
            ]
    for path in named:
        try:
            member = package[path.removeprefix("visavis.")]
        except KeyError:  # a constant of a module, or a word of a comment
            continue
        if member.is_function or member.is_class:
            yield from with_bases(member.final_target if member.is_alias else member)


def modules(module: griffe.Object) -> Iterator[griffe.Object]:
    yield module
    for member in module.members.values():
        if not member.is_alias and member.is_module:
            yield from modules(member)


def exported(module: griffe.Object) -> Iterator[str]:
    """Paths that a module lists in ``__all__``."""
    for name in module.exports or ():
        yield f"{module.path}.{name if isinstance(name, str) else name.name}"


def with_bases(member: griffe.Object) -> Iterator[str]:
    """The path of a public name, and of the bases that it inherits its methods from."""
    yield member.path
    if member.is_class:
        for base in member.resolved_bases:
            yield from with_bases(base.final_target if base.is_alias else base)


def check_members(
    parent: griffe.Object, public: set[str], *, inside: bool = False
) -> Iterator[str]:
    """Findings of the members of a module or class, and of their members."""
    for name, member in parent.members.items():
        if member.is_alias:
            continue
        is_public = member.path in public or (inside and not name.startswith("_"))
        if member.is_function and not (inside and name.startswith("__")):
            yield from check_function(member) if is_public else check_internal(member)
        elif member.is_class:
            if not name.startswith("_"):
                yield from check_class(member)
            yield from check_members(member, public, inside=is_public)
        elif member.is_module:
            yield from check_members(member, public)


def check_internal(function: griffe.Function) -> Iterator[str]:
    """An internal function with more than a summary. Examples that run as tests may follow it."""
    if function.docstring is not None:
        paragraphs = function.docstring.value.strip().split("\n\n")
        if len(paragraphs) > 1 and ">>>" not in function.docstring.value:
            yield (
                f"{function.path}: an internal function with a docstring of several paragraphs. Keep "
                "the summary. Move each reason to a comment at its line."
            )


def check_function(function: griffe.Function) -> Iterator[str]:
    parameters = [
        parameter.name for parameter in function.parameters if parameter.name not in ("self", "cls")
    ]
    if function.docstring is None:
        if not overrides(function):
            yield f"{function.path}: no docstring"
        return
    sections = sections_of(function)
    if "property" in function.labels or (overrides(function) and set(sections) == {"text"}):
        return
    if re.search(r"see ``\w+(\.\w+)?``", function.docstring.value):
        return
    yield from compare(function, "Args", parameters, sections.get("parameters", []))
    returns = str(function.returns or "None")
    described = {"returns", "yields"} & set(sections) or function.docstring.value.startswith(
        "Return"
    )
    if returns not in ("None", "NoReturn", "Iterator[None]") and not described:
        yield f"{function.path}: no Returns"
    raised = raised_by(function)
    missing = sorted(raised - set(sections.get("raises", [])))
    if missing:
        yield f"{function.path}: Raises lacks {', '.join(missing)}"


def check_class(kind: griffe.Class) -> Iterator[str]:
    if kind.docstring is None:
        yield f"{kind.path}: no docstring"
        return
    sections = sections_of(kind)
    fields = [
        name
        for name, member in kind.members.items()
        if member.is_attribute and not name.startswith("_") and has_fields(kind) and member.annotation is not None
        and "ClassVar" not in str(member.annotation) and "instance-attribute" in member.labels
    ]  # fmt: skip
    documented_fields = sections.get("attributes") or sections.get("parameters") or []
    if fields:
        yield from compare(kind, "Attributes", fields, documented_fields)
    elif "__init__" in kind.members and not kind.members["__init__"].is_alias:
        init = kind.members["__init__"]
        parameters = [parameter.name for parameter in init.parameters if parameter.name != "self"]
        if init.docstring is None:
            documented = [
                *sections.get("parameters", []),
                *(name for name in sections.get("attributes", []) if name in parameters),
            ]
            yield from compare(kind, "Args", parameters, documented)


def compare(
    owner: griffe.Object, title: str, expected: list[str], documented: list[str]
) -> Iterator[str]:
    documented = [name.lstrip("*") for name in documented]
    expected = [name.lstrip("*") for name in expected]
    if missing := [name for name in expected if name not in documented]:
        yield f"{owner.path}: {title} lacks {', '.join(missing)}"
    if unknown := [name for name in documented if name not in expected]:
        yield f"{owner.path}: {title} names {', '.join(unknown)}, which the signature lacks"


def sections_of(owner: griffe.Object) -> dict[str, list[str]]:
    """Names by kind of section."""
    names_by_kind: dict[str, list[str]] = {}
    for section in owner.docstring.parsed:
        kind = section.kind.value
        if kind in ("parameters", "other parameters", "attributes"):
            names_by_kind.setdefault(
                "parameters" if kind == "other parameters" else kind, []
            ).extend(item.name for item in section.value)
        elif kind == "raises":
            names_by_kind.setdefault(kind, []).extend(
                str(item.annotation) for item in section.value
            )
        else:
            names_by_kind.setdefault(kind, [])
    return names_by_kind


def raised_by(function: griffe.Function) -> set[str]:
    """Errors of the project that the body itself raises by name."""
    node = ast.parse(textwrap.dedent(function.source))
    calls = [
        part.exc
        for part in ast.walk(node)
        if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call)
    ]
    return {
        call.func.id
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id[0].isupper()
    }


def has_fields(kind: griffe.Class) -> bool:
    """Whether instances are made from annotated fields: a dataclass, NamedTuple, TypedDict or
    pydantic model.
    """
    if "dataclass" in kind.labels or any(
        str(decorator.value).split("(")[0].endswith("dataclass") for decorator in kind.decorators
    ):
        return True
    return any(
        str(base).split(".")[-1] in ("NamedTuple", "TypedDict", "BaseModel", "Section")
        for base in kind.bases
    )


def overrides(function: griffe.Function) -> bool:
    parent = function.parent
    if not parent.is_class:
        return False
    try:
        return any(function.name in base.members for base in parent.mro())
    except ValueError:
        return False


if __name__ == "__main__":
    sys.exit(main())
