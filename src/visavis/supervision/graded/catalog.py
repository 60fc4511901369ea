"""All that knows degrees."""

from visavis.supervision.graded.coarse_to_fine import OF_CAPTIONS, CoarseToFine
from visavis.supervision.graded.degrees import Degrees
from visavis.supervision.graded.given import GivenDegrees
from visavis.supervision.graded.scenes import SceneDegrees

CATALOG: tuple[type[Degrees], ...] = (*OF_CAPTIONS, CoarseToFine, SceneDegrees, GivenDegrees)
