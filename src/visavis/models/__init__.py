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
        "VSRN": "visavis.models.image_text.vsrn:VSRN",
        "SCAN": "visavis.models.image_text.cross_attention:SCAN",
        "BFAN": "visavis.models.image_text.cross_attention:BFAN",
        "SGRAF": "visavis.models.image_text.sgraf:SGRAF",
        "MaxSim": "visavis.models.image_text.cross_attention:MaxSim",
        "CLIP": "visavis.models.clip.model:CLIP",
        "EmbeddingModel": "visavis.models.embedding_model:EmbeddingModel",
        "XVLM": "visavis.models.xvlm.model:XVLM",
        "CE": "visavis.models.expert_matchers:CE",
        "MMT": "visavis.models.expert_matchers:MMT",
    }
)
"""Models by the names that recipes use, ``Matcher.name``."""

__all__ = ["CATALOG", "Matcher", "find_model"]

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
