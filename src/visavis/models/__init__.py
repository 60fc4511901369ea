"""Matching models, by the names that recipes use."""

from visavis.core.own_code import find_part
from visavis.models.base import Matcher
from visavis.models.clip.model import CLIP
from visavis.models.image_text.heads import Heads
from visavis.models.image_text.region_word_matchers import BFAN, SCAN, MaxSim
from visavis.models.image_text.sgraf import SGRAF
from visavis.models.image_text.vse_infinity import VSEInfinity
from visavis.models.image_text.vse_plus_plus import VSEPlusPlus
from visavis.models.image_text.vsrn import VSRN
from visavis.models.video_text.ce import CE
from visavis.models.video_text.mmt import MMT
from visavis.models.xvlm.model import XVLM

CATALOG: dict[str, type[Matcher]] = {
    kind.name: kind
    for kind in (
        Heads,
        VSEPlusPlus,
        VSEInfinity,
        VSRN,
        SCAN,
        BFAN,
        SGRAF,
        MaxSim,
        CLIP,
        XVLM,
        CE,
        MMT,
    )
}


def find_model(name: str) -> type[Matcher] | None:
    """Find a matching model.

    Args:
        name: Name in the catalog or of an installed package, or "model.py:MyMatcher".

    Returns:
        The class. None if there is no model of this name.

    Raises:
        SpecError: If the source of an own model has no such class, or may not run.
    """
    kind = find_part(name, CATALOG, Matcher, "models")
    if kind is not None and kind not in CATALOG.values():
        kind.name = kind.__qualname__ if ":" in kind.__qualname__ else name
    return kind


__all__ = ["CATALOG", "Matcher", "find_model"]
