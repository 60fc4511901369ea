"""Matching models, by the names that recipes use."""

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

__all__ = ["CATALOG", "Matcher"]
