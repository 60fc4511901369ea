"""Matching models, by the names that recipes use."""

from visavis.models.base import GlobalMatcher, Matcher, MatcherConfig
from visavis.models.clip.model import CLIP
from visavis.models.image_text.bfan import BFAN
from visavis.models.image_text.heads import Heads
from visavis.models.image_text.max_sim import MaxSim
from visavis.models.image_text.scan import SCAN
from visavis.models.image_text.sgraf import SGRAF
from visavis.models.image_text.vse_infinity import VSEInfinity
from visavis.models.image_text.vse_plus_plus import VSEPlusPlus
from visavis.models.image_text.vsrn import VSRN
from visavis.models.video_text.ce import CE
from visavis.models.video_text.mmt import MMT
from visavis.models.xvlm.model import XVLM

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
