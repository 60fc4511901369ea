"""All that knows degrees."""

from visavis.supervision.graded.degrees import Degrees
from visavis.supervision.graded.scenes import SceneDegrees
from visavis.supervision.graded.words import CBoW

CATALOG: tuple[type[Degrees], ...] = (CBoW, SceneDegrees)
