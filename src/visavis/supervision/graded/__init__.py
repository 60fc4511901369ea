"""Graded relevance: not only which caption belongs to an image, but how well every other one would do."""

from visavis.supervision.graded.catalog import CATALOG
from visavis.supervision.graded.degrees import CaptionDegrees, Degrees, ImageBy, ImageDegrees
from visavis.supervision.graded.scenes import SceneDegrees
from visavis.supervision.graded.supervision import GradedSupervision
from visavis.supervision.graded.words import CBoW

__all__ = ["CATALOG", "CBoW", "CaptionDegrees", "Degrees", "GradedSupervision", "ImageBy", "ImageDegrees", "SceneDegrees"]
