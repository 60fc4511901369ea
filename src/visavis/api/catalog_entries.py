"""Entries of the catalogs, and the parts of docstrings that they show: the source of ``visavis
catalog`` and of the reference pages.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from visavis.core.errors import StorageError, VisavisError, suggest_name

CatalogEntry = dict[str, Any]
"""An entry of a catalog: its name, its summary, and further texts by label. Recipes also have
nested values.
"""


def objectives() -> list[CatalogEntry]:
    """Return every objective with its formula, source and defaults."""
    from visavis.losses.objectives import CATALOG

    return [
        _class_entry(kind, "Formula:", "Advice:", "Source:") | {"defaults": repr(kind())}
        for kind in CATALOG
    ]


def models() -> list[CatalogEntry]:
    """Return every matching model with its inputs and the defaults of its architecture."""
    from visavis.models import all_models

    return [
        {
            "name": name,
            "summary": docstring_summary(kind),
            "formula": docstring_section(kind, "Formula:"),
            "inputs": f"images as {' or '.join(kind.visual_granularities)}, texts as {' or '.join(kind.text_granularities)}",
            "defaults": f"{name}({_defaults(kind.Config)})",
        }
        for name, kind in all_models().items()
    ]


def metrics() -> list[CatalogEntry]:
    """Return every metric by its key in results."""
    from visavis.evaluation.metrics import CATALOG

    return [
        {
            "name": metric.name,
            "summary": metric.definition,
            "formula": metric.formula,
            "ir_measures": metric.ir_measures or "none",
            "unit": f"{metric.unit}, {'more' if metric.higher_is_better else 'less'} is better",
        }
        for metric in CATALOG
    ]


def data_formats() -> list[CatalogEntry]:
    """Return every data format with the files by which it is recognized."""
    from visavis.data.dataset_reader import FORMATS

    return [
        {
            "name": layout.name,
            "summary": layout.description,
            "recognized_by": ", ".join(layout.patterns),
        }
        for layout in FORMATS
    ]


def protocols() -> list[CatalogEntry]:
    """Return every evaluation protocol."""
    from visavis.evaluation import CATALOG

    return [{"name": protocol.name, "summary": protocol.description} for protocol in CATALOG]


def supervisions() -> list[CatalogEntry]:
    """Return every supervision with its source and defaults."""
    from visavis.core.own_code import loaded_classes
    from visavis.training.supervision import CATALOG, Supervision

    kinds = [*CATALOG, *loaded_classes(Supervision, "supervisions")]
    return [_class_entry(kind, "Source:") | {"defaults": repr(kind())} for kind in kinds]


def noises() -> list[CatalogEntry]:
    """Return every kind of noise in the training captions with its source and defaults."""
    from visavis.core.own_code import loaded_classes
    from visavis.data.noise import CATALOG, Noise

    kinds = [*CATALOG, *loaded_classes(Noise, "noises")]
    return [_class_entry(kind, "Source:") | {"defaults": repr(kind())} for kind in kinds]


def sections() -> list[CatalogEntry]:
    """Return every further part of an evaluation result with its defaults."""
    from visavis.core.own_code import loaded_classes
    from visavis.training.evaluation.result_sections import ResultSection

    return [
        _class_entry(kind, "Source:") | {"defaults": _defaults(kind)}
        for kind in loaded_classes(ResultSection, "sections")
    ]


def relevance_estimators() -> list[CatalogEntry]:
    """Return every relevance estimator with its source and defaults."""
    from visavis.papers.relevance import CATALOG

    return [_class_entry(kind, "Source:") | {"defaults": _defaults(kind)} for kind in CATALOG]


def corrections() -> list[CatalogEntry]:
    """Return every correction of scores with its formula, source and defaults."""
    from visavis.losses.corrections import CATALOG

    return [
        _class_entry(kind, "Formula:", "Source:") | {"defaults": repr(kind())} for kind in CATALOG
    ]


def keys() -> list[CatalogEntry]:
    """Return every key of a recipe with its type and default. Keys of a phase are those of the
    first one. Keys of a model are in the catalog of models.
    """
    from visavis.training.recipes.recipe import Recipe

    return _section_keys(Recipe, "")


def _section_keys(section: Any, prefix: str) -> list[CatalogEntry]:
    """The keys of a section of a recipe, and of the sections in it."""
    texts = docstring_arguments(section, "Attributes:")
    entries = list[CatalogEntry]()
    for name, field in section.model_fields.items():
        inner = get_args(field.annotation)[0] if name == "phases" else field.annotation
        if hasattr(inner, "model_fields"):
            entries += _section_keys(inner, f"{prefix}{name}.{'0.' * (name == 'phases')}")
            continue
        # The default as a recipe has it.
        default = field.get_default(call_default_factory=True)
        is_plain = isinstance(default, bool | int | float | str | list | tuple | dict)
        text = "none" if default is None else json.dumps(default if is_plain else repr(default))
        entries.append(
            {
                "name": f"{prefix}{name}",
                "summary": texts[name],
                "type": _type_text(field.annotation, field.metadata),
                "default": "required" if field.is_required() else text,
            }
        )
    return entries


def _type_text(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """A type of a key in the words of TOML, with its bounds."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {getattr(limit, name):g}"
        for limit in metadata
        for name, sign in signs.items()
        if hasattr(limit, name)
    ]
    arguments = [argument for argument in get_args(kind) if argument not in (NoneType, ...)]
    origin = get_origin(kind)
    if origin is Annotated:
        limits = arguments[1:]
        return _type_text(
            arguments[0], [part for limit in limits for part in getattr(limit, "metadata", [limit])]
        )
    if origin is Literal:
        text = " or ".join(json.dumps(argument) for argument in arguments)
    elif origin is tuple:
        text = f"list of: {_type_text(arguments[0])}"
    elif origin is dict or kind is dict:
        text = f"table of: {_type_text(arguments[1])}"
    elif arguments:
        text = " or ".join(_type_text(argument) for argument in arguments)
    else:
        names = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "any"}
        text = names.get(kind) or f"text of an {kind.__name__}"
    return " ".join([text, " and ".join(bounds)]).strip()


def stores() -> list[CatalogEntry]:
    """Return every kind of vector store with its locations, its extra and its defaults."""
    from visavis.retrieval.stores.catalog import store_kinds

    return [
        {
            "name": name,
            "summary": docstring_summary(kind.store_class),
            "locations": ", ".join(kind.locations),
            "install": f"visavis[{kind.extra}]" if kind.extra else "",
            "vectors_per_item": "one or several" if kind.several_vectors else "one",
            "defaults": kind.default,
        }
        for name, kind in store_kinds().items()
    ]


def recipes() -> list[CatalogEntry]:
    """Return every shipped recipe file as training resolves it, then every row of the papers'
    tables and every curve of their figures.
    """
    from visavis.training.recipes.files import read_recipe_file, shipped_files

    entries = []
    for name in shipped_files():
        file = read_recipe_file(name)
        variants = {variant: file.recipe(variant, {}).to_dict() for variant in file.variants}
        entry = {"name": name, "summary": str(file.content.get("about", ""))}
        entries.append(
            entry
            | ({"variants": variants} if variants else {"recipe": file.recipe(None, {}).to_dict()})
        )
    return entries + table_rows()


def table_rows(paper: str | None = None) -> list[CatalogEntry]:
    """Return the rows of the papers' tables with published results, requirements and recipes, and
    the curves of their figures.
    """
    from visavis.training.recipes.files import paper_figures, paper_tables, read_recipe_file
    from visavis.training.recipes.published_tables import figure_curves, published_results

    papers = {name.partition("/")[0] for name in paper_tables()}
    if paper is not None and paper not in papers:
        raise VisavisError(
            f"paper: expected a paper with tables, got {paper!r}: {suggest_name(paper, papers)}"
        )
    entries = []
    rows = published_results() | figure_curves()
    for table in paper_tables() | paper_figures():
        file = read_recipe_file(table)
        for name in (
            f"{table}/{variant}"
            for variant in file.variants
            if paper in (None, table.partition("/")[0])
        ):
            row = rows[name]
            recipe = None if row.not_trainable else file.recipe(row.row, {}).to_dict()
            encoders = (
                dict.fromkeys(recipe[side]["encoder"] for side in ("visual", "text"))
                if recipe
                else {}
            )
            requirements = {
                "needs": recipe["data"]["requires"] if recipe else "",
                "encoders": [encoder for encoder in encoders if encoder not in ("", "vocabulary")],
                "recipe": recipe,
            }
            entries.append(
                {"name": name, "summary": str(file.content["about"])} | row.to_json() | requirements
            )
    return entries


CATALOGS: dict[str, Callable[[], list[CatalogEntry]]] = {
    "objectives": objectives,
    "models": models,
    "metrics": metrics,
    "formats": data_formats,
    "supervisions": supervisions,
    "noises": noises,
    "sections": sections,
    "relevance": relevance_estimators,
    "recipes": recipes,
    "protocols": protocols,
    "corrections": corrections,
    "stores": stores,
    "keys": keys,
}
"""Kinds of the catalog, in the order in which they are printed."""


def catalog_entries(kind: str) -> list[CatalogEntry]:
    """Return the entries of a catalog, from the cache if no source file has changed: torch, which
    the catalogs import, takes several times as long as reading them.
    """
    from visavis.core import storage
    from visavis.core.own_code import installed_modules

    modules = installed_modules("models") if kind == "models" else {}
    # Files of other packages may change, too.
    is_extended = not all(module.startswith("visavis.") for module in modules.values())
    if kind == "stores" or is_extended:
        return CATALOGS[kind]()
    root = Path(__file__).parents[1]
    key = storage.stat_hash([*root.rglob("*.py"), *root.rglob("*.toml")], modules)
    # Without a home folder, or with a full disk, the entries are made each time.
    with suppress(StorageError):
        file = storage.cache_folder() / "catalog" / f"{kind}.json"
        stored = storage.read_checksummed_json(file, dict[str, Any])
        if stored is None or stored["key"] != key:
            stored = {"key": key, "entries": json.loads(json.dumps(CATALOGS[kind]()))}
            storage.write_checksummed_json(file, stored)
        return stored["entries"]
    return CATALOGS[kind]()


def _class_entry(kind: type, *sections: str) -> CatalogEntry:
    """Name, summary and sections of the docstring of a class."""
    texts = {label.lower().rstrip(":"): docstring_section(kind, label) for label in sections}
    return {"name": kind.__name__, "summary": docstring_summary(kind)} | texts


def _defaults(kind: Any) -> str:
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    defaults |= {
        field.name: field.default_factory()
        for field in fields(kind)
        if field.default_factory is not MISSING
    }
    return ", ".join(f"{name}={value!r}" for name, value in defaults.items())


INLINE_SECTIONS = (
    "Formula:",
    "dL/ds",
    "Advice:",
    "Source:",
    "Special cases:",
    "Memory:",
    "Differs from:",
)
"""Labels that may begin a section in the middle of a paragraph."""


def docstring_summary(documented: Any) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


def docstring_section(documented: Any, label: str) -> str:
    """Return one section of a docstring on one line."""
    return " ".join(" ".join(_section_lines(documented, label)).split())


def docstring_arguments(documented: Any, label: str = "Args:") -> dict[str, str]:
    """Return the entries of the ``Args`` section, or of another one."""
    entries: dict[str, str] = {}
    name = ""
    for line in _section_lines(documented, label):
        if entry := re.match(r" {4}(\w+): +(.*)", line):
            name = entry[1]
            entries[entry[1]] = entry[2]
        elif name:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return {name: text.replace("``", "") for name, text in entries.items()}


def docstring_commands(function: Any) -> list[str]:
    """Return the commands of the ``Command line:`` section."""
    return [
        line.strip()
        for line in _section_lines(function, "Command line:")
        if line.strip().startswith("visavis ")
    ]


def _section_lines(documented: Any, label: str) -> list[str]:
    """Lines of a section: those indented below its label, or those up to a blank line or another
    label.
    """
    section: list[str] = []
    inside = indented = False
    for line in (inspect.getdoc(documented) or "").splitlines():
        if line.startswith(label):
            inside = True
            line = line.removeprefix(label)
            indented = not line.strip()
        elif indented:
            inside = inside and (not line.strip() or line.startswith(" "))
        elif not line.strip() or line.startswith(INLINE_SECTIONS):
            inside = False
        if inside:
            section.append(line)
    return section
