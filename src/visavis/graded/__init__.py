"""Graded relevance: estimators, ranking coherence of models, and agreement with human judgments."""

from visavis.graded.estimators.base import (
    CaptionAggregation,
    CaptionRelevance,
    ImageRelevance,
    RelevanceEstimator,
)
from visavis.graded.estimators.catalog import CATALOG, CoarseToFine
from visavis.graded.estimators.known_relevance import (
    FunctionRelevance,
    MatrixRelevance,
    SceneRelevance,
)
from visavis.graded.estimators.sentence_models import CrossEncoder, SentenceModel
from visavis.graded.estimators.word_vectors import CBoW
from visavis.graded.human_agreement import measure_agreement
from visavis.graded.ranking_coherence import RankingCoherence, ranking_coherence

__all__ = [
    "CATALOG",
    "CBoW",
    "CaptionAggregation",
    "CaptionRelevance",
    "CoarseToFine",
    "CrossEncoder",
    "FunctionRelevance",
    "ImageRelevance",
    "MatrixRelevance",
    "RankingCoherence",
    "RelevanceEstimator",
    "SceneRelevance",
    "SentenceModel",
    "measure_agreement",
    "ranking_coherence",
]
