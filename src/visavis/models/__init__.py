"""The catalog of matching models, by the names that recipes use."""

from visavis.models.base import GlobalMatcher, Matcher, MatcherConfig
from visavis.models.bfan import BFAN
from visavis.models.ce import CE
from visavis.models.clip import CLIP
from visavis.models.heads import Heads
from visavis.models.max_sim import MaxSim
from visavis.models.mmt import MMT
from visavis.models.scan import SCAN
from visavis.models.sgraf import SGRAF
from visavis.models.vse_infinity import VSEInfinity
from visavis.models.vse_plus_plus import VSEPlusPlus
from visavis.models.vsrn import VSRN
from visavis.models.xvlm import XVLM

CATALOG: dict[str, type[Matcher]] = {
    kind.name: kind for kind in (Heads, VSEPlusPlus, VSEInfinity, VSRN, SCAN, BFAN, SGRAF, MaxSim, CLIP, XVLM, CE, MMT)
}

__all__ = [
    "BFAN",
    "CATALOG",
    "CE",
    "CLIP",
    "GlobalMatcher",
    "Heads",
    "MMT",
    "Matcher",
    "MatcherConfig",
    "MaxSim",
    "SCAN",
    "SGRAF",
    "VSEInfinity",
    "VSEPlusPlus",
    "VSRN",
    "XVLM",
]
