"""Graded relevance: not only which caption belongs to an image, but how well every other one would do."""

from visavis.degrees.base import CaptionDegrees, Degrees, ImageBy, ImageDegrees
from visavis.degrees.catalog import CATALOG
from visavis.degrees.coarse_to_fine import CoarseToFine
from visavis.degrees.cross_encoder import CrossEncoder
from visavis.degrees.given import FunctionDegrees, GivenDegrees
from visavis.degrees.scenes import SceneDegrees
from visavis.degrees.sentences import SentenceModel
from visavis.degrees.words import CBoW

__all__ = [
    "CATALOG",
    "CBoW",
    "CaptionDegrees",
    "CoarseToFine",
    "CrossEncoder",
    "Degrees",
    "FunctionDegrees",
    "GivenDegrees",
    "ImageBy",
    "ImageDegrees",
    "SceneDegrees",
    "SentenceModel",
]
