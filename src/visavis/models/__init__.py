"""The catalog of matching models, by the names that recipes use."""

from visavis.models.base import GlobalMatcher, Matcher, MatcherConfig
from visavis.models.clip import CLIP
from visavis.models.heads import Heads
from visavis.models.vse_infinity import VSEInfinity
from visavis.models.vse_plus_plus import VSEPlusPlus

CATALOG: dict[str, type[Matcher]] = {kind.name: kind for kind in (Heads, VSEPlusPlus, VSEInfinity, CLIP)}

__all__ = ["CATALOG", "CLIP", "GlobalMatcher", "Heads", "Matcher", "MatcherConfig", "VSEInfinity", "VSEPlusPlus"]
