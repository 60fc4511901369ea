"""Graded relevance: estimators, ranking coherence of models, and agreement with human judgments."""

from visavis.papers.relevance.base import (
    CaptionAggregation,
    CaptionRelevance,
    ImageRelevance,
    RelevanceEstimator,
)
from visavis.papers.relevance.caption_estimators import CBoW, CrossEncoder, SentenceModel
from visavis.papers.relevance.catalog import (
    CATALOG,
    CoarseToFine,
    FunctionRelevance,
    MatrixRelevance,
    SceneRelevance,
)
from visavis.papers.relevance.human_agreement import measure_agreement
from visavis.papers.relevance.ranking_coherence import RankingCoherence, ranking_coherence

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
