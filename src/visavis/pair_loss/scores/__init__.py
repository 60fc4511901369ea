"""Scores in blocks, and the gradient that flows back through them: cosines and arbitrary functions."""

from visavis.blocking import Score
from visavis.pair_loss.scores.base import InputGradients, NeedsGrad, ScoreBlock, Scores
from visavis.pair_loss.scores.cosine import CachedCosines, RecomputedCosines, cosine
from visavis.pair_loss.scores.function import FunctionScores

__all__ = ["CachedCosines", "FunctionScores", "InputGradients", "NeedsGrad", "RecomputedCosines", "Score", "ScoreBlock", "Scores", "cosine"]
