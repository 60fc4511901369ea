"""Graded relevance: estimators, ranking coherence of models, and agreement with human judgments."""

from visavis.evaluation.graded.base import (
    CaptionAggregation,
    CaptionRelevance,
    ImageRelevance,
    RelevanceEstimator,
)
from visavis.evaluation.graded.caption_estimators import CBoW, CrossEncoder, SentenceModel
from visavis.evaluation.graded.catalog import (
    CATALOG,
    CoarseToFine,
    FunctionRelevance,
    MatrixRelevance,
    SceneRelevance,
)
from visavis.evaluation.graded.human_agreement import measure_agreement
from visavis.evaluation.graded.ranking_coherence import RankingCoherence, ranking_coherence

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
