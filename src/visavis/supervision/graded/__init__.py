"""Graded relevance: not only which caption belongs to an image, but how well every other one would do."""

from visavis.supervision.graded.catalog import CATALOG
from visavis.supervision.graded.coarse_to_fine import CoarseToFine
from visavis.supervision.graded.cross_encoder import CrossEncoder
from visavis.supervision.graded.degrees import CaptionDegrees, Degrees, ImageBy, ImageDegrees
from visavis.supervision.graded.given import FunctionDegrees, GivenDegrees
from visavis.supervision.graded.scenes import SceneDegrees
from visavis.supervision.graded.sentences import SentenceModel
from visavis.supervision.graded.supervision import GradedSupervision
from visavis.supervision.graded.words import CBoW

__all__ = [
    "CATALOG",
    "CBoW",
    "CaptionDegrees",
    "CoarseToFine",
    "CrossEncoder",
    "Degrees",
    "FunctionDegrees",
    "GivenDegrees",
    "GradedSupervision",
    "ImageBy",
    "ImageDegrees",
    "SceneDegrees",
    "SentenceModel",
]
