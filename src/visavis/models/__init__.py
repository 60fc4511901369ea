"""Matching models, by the names that recipes use. A model is imported when it is used."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from visavis.core.lazy_imports import LazyCatalog, lazy_names

if TYPE_CHECKING:
    from visavis.models.base import Matcher

CATALOG: MutableMapping[str, type[Matcher]] = LazyCatalog(
    {
        "Heads": "visavis.models.image_text.global_matchers:Heads",
        "VSE++": "visavis.models.image_text.global_matchers:VSEPlusPlus",
        "VSEInfinity": "visavis.models.image_text.global_matchers:VSEInfinity",
        "SCAN": "visavis.models.image_text.cross_attention:SCAN",
        "BFAN": "visavis.models.image_text.cross_attention:BFAN",
        "MaxSim": "visavis.models.image_text.cross_attention:MaxSim",
        "CLIP": "visavis.models.clip.model:CLIP",
        "EmbeddingModel": "visavis.models.embedding_model:EmbeddingModel",
    }
)
"""Models by the names that recipes use, ``Matcher.name``. Installed packages add further ones by
entry points, see ``all_models``.
"""

__all__ = ["CATALOG", "Matcher", "all_models", "find_model"]

__getattr__ = lazy_names(__name__, {"Matcher": "visavis.models.base"})


def find_model(name: str) -> type[Matcher] | None:
    """Find a matching model.

    Args:
        name: Name in the catalog or of an installed package, or "model.py:MyMatcher".

    Returns:
        The class. None if there is no model of this name.

    Raises:
        SpecError: If the source of an own model has no such class, or may not run.
    """
    from visavis.core.own_code import find_part
    from visavis.models.base import Matcher

    kind = find_part(name, CATALOG, Matcher, "models")
    if kind is not None and name not in CATALOG:
        kind.name = kind.__qualname__ if ":" in kind.__qualname__ else name
    return kind


def all_models() -> dict[str, type[Matcher]]:
    """Import all models of the catalog and of installed packages.

    Returns:
        The classes by name, in the order in which lists show them: the models of the catalog, each
        followed by the installed models that are ``listed_after`` it, then all others by name.

    Raises:
        SpecError: If a part of an installed package cannot be loaded.
    """
    from visavis.core.own_code import installed_names

    installed = {
        name: kind for name in installed_names("models") if (kind := find_model(name)) is not None
    }
    models: dict[str, type[Matcher]] = {}
    for name, kind in CATALOG.items():
        models[name] = kind
        models |= {own: kind for own, kind in installed.items() if kind.listed_after == name}
    return models | installed


def suggest_model(name: str) -> str:
    """Make the end of an error message about an unknown model: the closest name, or all names."""
    from visavis.core.errors import suggest_name
    from visavis.core.own_code import installed_modules

    installed = installed_modules("models")
    text = suggest_name(name, [*CATALOG, *installed])
    if any(module.startswith("visavis.") for module in installed.values()):
        return text
    return (
        f"{text} If it is a model of visavis, install visavis again: the installed version "
        "does not list it."
    )
