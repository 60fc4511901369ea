"""Own parts: objectives, supervisions, noises, estimators, models, metrics, formats, vectors, stores and commands
from outside the package.

A text names a class of a file or of a package, such as ``soft_hn.py:SoftHN(margin=0.1)`` or
``my_lab.losses:SoftHN``. Its code runs only if the user of this process named it: in an argument of
a command, a Python call, or with ``--code``. Recipes and run folders store the same names, but
reading them runs nothing, because they may come from somebody else.

Installed packages extend the catalogs by entry points, such as ``visavis.objectives``.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from visavis.core.errors import SpecError, format_value, suggest_name

T = TypeVar("T")

VARIABLE = "VISAVIS_CODE"
"""Environment variable with the named sources. Worker processes inherit it."""
GROUPS = (
    "objectives",
    "supervisions",
    "noises",
    "estimators",
    "models",
    "metrics",
    "sections",
    "report_sections",
    "formats",
    "vectors",
    "stores",
    "commands",
)
"""Kinds of parts. An installed package extends them by an entry point of the group
``visavis.objectives`` and so on.
"""


class CodeNotNamed(SpecError):
    """A stored text names code that the user of this process did not name.

    Args:
        name: Part in the form ``file.py:Name``.
        source: The file or package, as the user names it.

    Attributes:
        source: The same.
    """

    def __init__(self, name: str, source: str):
        from visavis.core.environment import quote_argument

        super().__init__(
            f"{name}: expected own code that you name, because recipes and stored files never run "
            f"code by themselves. Name it with visavis --code {quote_argument(source)}, or in "
            f"Python with visavis.allow_code({source!r})."
        )
        self.name = name
        self.source = source

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.source)


_USER_TEXTS = ContextVar[tuple[str, ...]]("user_texts", default=())
_REFUSED = ContextVar[list[CodeNotNamed] | None]("refused", default=None)


def allow_code(*sources: str | Path) -> None:
    """Allow the code of files and packages, and run it.

    Args:
        *sources: Python files, or names of importable packages, which may contain own parts.

    Raises:
        SpecError: If a source does not exist or cannot be imported.
    """
    for source in map(str, sources):
        allowed = _allowed_source(source)
        # A shell does not expand ~ inside of quotes.
        path = source
        if source.endswith(".py"):
            path = os.path.abspath(os.path.expanduser(source))
        # A stored text has the name of a file without its folder.
        is_stored_name = source == os.path.basename(source) and not os.path.exists(path)
        if allowed is not None and (allowed == path or is_stored_name):
            continue
        if allowed is not None:
            raise SpecError(
                f"{source}: expected own code with a file name of its own, got {allowed} before. "
                "Rename one of them."
            )
        _load(path)
        _hash_of(path)
        os.environ[VARIABLE] = json.dumps([*allowed_code(), path])


def allowed_code() -> list[str]:
    """Return the sources that the user named, absolute paths of files and names of packages."""
    sources: list[str] = json.loads(os.environ.get(VARIABLE) or "[]")
    return sources


@contextmanager
def named_by_user(*texts: str) -> Iterator[list[CodeNotNamed]]:
    """Allow the code that texts of the user name. Stored texts may be parsed at the same time, such
    as the rest of a recipe, and allow nothing.
    """
    refused: list[CodeNotNamed] = []
    named_token = _USER_TEXTS.set(texts)
    refused_token = _REFUSED.set(refused)
    try:
        yield refused
    finally:
        _USER_TEXTS.reset(named_token)
        _REFUSED.reset(refused_token)


def find_part(name: str, catalog: Mapping[str, T], kind: type, group: str) -> T | None:
    """Find a part by its name: in the catalog, in a named source, or in an installed package."""
    if name in catalog:
        return catalog[name]
    source, _, attribute = name.rpartition(":")
    if not source:
        return _installed_part(group, name, kind) if name in _installed(group) else None
    # Not the end of a longer path, which is another file.
    is_named = re.compile(rf"(?<![\w./\\-]){re.escape(name)}\b")
    if any(is_named.search(text) for text in _USER_TEXTS.get()):
        allow_code(source)
    allowed = _allowed_source(source)
    if allowed is None:
        error = CodeNotNamed(name, source)
        if (refused := _REFUSED.get()) is not None:
            refused.append(error)
        raise error
    source = allowed
    part = getattr(_load(source), attribute, None)
    if not _is_part(part, kind):
        known = [key for key, value in vars(_load(source)).items() if _is_part(value, kind)]
        raise SpecError(
            f"{source}: expected {attribute} to be a {kind.__name__}: "
            f"{suggest_name(attribute, known) if known else 'the source has none'}"
        )
    return name_part(part) if isinstance(part, type) else part  # type: ignore[return-value]


def loaded_parts(kind: type[T], group: str) -> list[T]:
    """Return the objects of one kind from all named sources and installed packages."""
    installed = [_installed_part(group, name, kind) for name in _installed(group)]
    return _distinct([*named_parts(kind), *installed], kind)


def named_parts(kind: type[T]) -> list[T]:
    """Return the objects of one kind from all named sources."""
    values = [value for source in allowed_code() for value in vars(_load(source)).values()]
    return _distinct(values, kind)


def _distinct(values: Iterable[Any], kind: type[T]) -> list[T]:
    """The objects of one kind, by identity: a part may have fields that cannot be hashed."""
    return list({id(value): value for value in values if isinstance(value, kind)}.values())


def loaded_classes(kind: type, group: str) -> list[Any]:
    """Return the classes of one kind from all named sources and installed packages."""
    modules = [_load(source) for source in allowed_code()]
    named = [
        value
        for module in modules
        for value in vars(module).values()
        # A source imports classes of others.
        if isinstance(value, type) and _is_part(value, kind) and value.__module__ == module.__name__
    ]
    return [*named, *(_installed_part(group, name, kind) for name in installed_names(group))]


def installed_names(group: str) -> list[str]:
    """Return the names of the parts of installed packages."""
    return sorted(_installed(group))


def installed_modules(group: str) -> dict[str, str]:
    """Return the modules of the parts of installed packages, without loading them."""
    return {name: entry.module for name, entry in _installed(group).items()}


def name_part(part: type[T]) -> type[T]:
    """Give a class from outside the package the name by which texts find it again."""
    module = sys.modules.get(part.__module__)
    if part.__module__.partition(".")[0] == "visavis" or ":" in part.__qualname__:
        return part
    if part.__module__ in {
        entry.module for group in GROUPS for entry in _installed(group).values()
    }:
        return part
    if getattr(module, "__package__", "") and part.__module__ != "__main__":
        allow_code(part.__module__)
        part.__qualname__ = f"{part.__module__}:{part.__qualname__}"
        return part
    file = getattr(module, "__file__", None)
    if file is None or "<locals>" in part.__qualname__:
        raise SpecError(
            f"{part.__name__}: expected a class at the top of a file, because a run records its "
            "code, got one of an interactive session or of a function. Write it into a file, and "
            "import it."
        )
    path = os.path.abspath(file)
    if path not in allowed_code():
        _SCRIPTS[path] = module  # type: ignore[assignment]
        allow_code(path)
    # The name of the file alone is short in reports, and survives a move to another machine.
    part.__qualname__ = f"{os.path.basename(path)}:{part.__qualname__}"
    return part


def code_hashes(text: str | None = None) -> dict[str, str]:
    """Return the SHA-256 of each named source, by its file name or package, as it was loaded. It
    includes the modules that the source imports from its folder or package.
    """
    names = {os.path.basename(source): source for source in allowed_code()}
    return {
        name: _hash_of(source)
        for name, source in names.items()
        if text is None or f"{name}:" in text
    }


def stand_in(kind: type[T], text: str, error: CodeNotNamed) -> T:
    """Make an object that stands for a part whose code may not run. Every use raises the error."""

    def refuse(_: Any) -> Any:
        raise error

    names = [name for name in dir(kind) if not name.startswith("_")]
    members: dict[str, Any] = dict.fromkeys([*names, "__call__"], property(refuse))
    members |= {
        "__init__": lambda _: None,
        "__repr__": lambda _: text,
        "__eq__": lambda self, other: repr(self) == repr(other),
        "__hash__": lambda _: hash(text),
    }
    return type(kind.__name__, (kind,), members)()


_SCRIPTS: dict[str, ModuleType] = {}
"""Modules of sources that Python imported before they were named, such as the running script. A
second import would run it again and make other classes of the same names.
"""


@cache
def _load(source: str) -> ModuleType:
    if source in _SCRIPTS:
        return _SCRIPTS[source]
    # As for a script, a file may import its neighbors. A package may be in the current folder, which
    # comes last: no file of a data folder replaces a module of an installed package.
    is_file = source.endswith(".py")
    folder = os.path.dirname(source) if is_file else os.getcwd()
    is_added = is_file or folder not in sys.path
    if is_added:
        sys.path.insert(0 if is_file else len(sys.path), folder)
    try:
        if not is_file:
            return importlib.import_module(source)
        name = f"visavis_own_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
        spec = importlib.util.spec_from_file_location(name, source)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"{source}: expected Python code that can be imported, got {type(error).__name__}: "
            f"{error}. Fix it, or name another file."
        ) from error
    finally:
        if is_added:
            sys.path.remove(folder)
    return module


@cache
def _hash_of(source: str) -> str:
    """The hash of a source, and of the modules next to it that it imports, when it was allowed. A
    file that is edited later has not run.
    """
    module = _load(source)
    file = Path(str(module.__file__))
    hashes = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in _imported_files(module, source).items()
    }
    own_hash = hashlib.sha256(file.read_bytes()).hexdigest()
    if not hashes:
        return own_hash
    return hashlib.sha256(json.dumps([own_hash, sorted(hashes.items())]).encode()).hexdigest()


def _imported_files(module: ModuleType, source: str) -> dict[str, Path]:
    """The files of the modules that a source imports, directly or not, from its folder and those
    below, or from its package. Installed packages in a subfolder are not among them.
    """
    is_file = source.endswith(".py")
    folder = Path(source).parent if is_file else None
    files: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        importing = waiting.pop()
        for name in _imported_names(importing):
            imported = sys.modules.get(name)
            if imported is None or imported is module or name in files:
                continue
            file = getattr(imported, "__file__", None)
            if file is None or not os.path.isfile(file):
                continue
            if is_file:
                # The folder of the import path in which the module was found.
                path = Path(os.path.abspath(file))
                depth = imported.__name__.count(".") + (path.stem == "__init__")
                is_own = path.parents[min(depth, len(path.parents) - 1)] == folder
            else:
                is_own = name.partition(".")[0] == source.partition(".")[0]
            if is_own:
                files[name] = Path(file)
                waiting.append(imported)
    return files


def _imported_names(module: ModuleType) -> Iterator[str]:
    """The modules that the import statements of a module name, with their packages."""
    file = str(module.__file__)
    if not file.endswith(".py"):
        return
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = (module.__package__ or "").split(".")
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            words = name.split(".")
            yield from (".".join(words[:count]) for count in range(1, len(words) + 1))


def _allowed_source(source: str) -> str | None:
    """The allowed package of this name, or the allowed file with this file name."""
    if not source.endswith(".py"):
        return source if source in allowed_code() else None
    name = os.path.basename(source)
    return next((path for path in allowed_code() if os.path.basename(path) == name), None)


def _is_part(value: Any, kind: type) -> bool:
    """Whether a value is an instance of a class, or a class that is derived from it."""
    is_class = isinstance(value, type) and issubclass(value, kind) and value is not kind
    return is_class or isinstance(value, kind)


def _installed_part(group: str, name: str, kind: type) -> Any:
    """Load a part of an installed package under the name of its entry point."""
    try:
        part = _installed(group)[name].load()
    except Exception as error:
        raise SpecError(
            f"{name}: expected a part of an installed package, got {type(error).__name__}: {error}. "
            f"Fix or remove the package that names it in visavis.{group}."
        ) from error
    if not _is_part(part, kind):
        raise SpecError(
            f"{name}: expected a {kind.__name__} in the entry points visavis.{group}, got "
            f"{format_value(part)}. Fix or remove the package."
        )
    if isinstance(part, type):
        part.__qualname__ = name
    return part


@cache
def _installed(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in _all_entry_points().select(group=f"visavis.{group}")}


# Reads the metadata of every installed package.
_all_entry_points: Any = cache(importlib.metadata.entry_points)
