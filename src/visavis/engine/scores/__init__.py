"""Scores in blocks, and the gradient that flows back through them: of cosines, kept or not, and of any function."""

from visavis.engine.scores.base import Block, Gradients, NeedsGrad, Scores
from visavis.engine.scores.cosine import CosineBlocks, cosine
from visavis.engine.scores.function import FunctionScores, Score, parameters_of
from visavis.engine.scores.kept import KeptCosines

__all__ = [
    "Block",
    "CosineBlocks",
    "FunctionScores",
    "Gradients",
    "KeptCosines",
    "NeedsGrad",
    "Score",
    "Scores",
    "cosine",
    "parameters_of",
]
