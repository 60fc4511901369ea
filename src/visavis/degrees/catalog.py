"""All estimators of degrees of relevance."""

from visavis.degrees.base import Degrees
from visavis.degrees.coarse_to_fine import OF_CAPTIONS, CoarseToFine
from visavis.degrees.given import GivenDegrees
from visavis.degrees.scenes import SceneDegrees

CATALOG: tuple[type[Degrees], ...] = (*OF_CAPTIONS, CoarseToFine, SceneDegrees, GivenDegrees)
