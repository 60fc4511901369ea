"""Fixtures of trainings, for the models of papers."""

from tests.training.conftest import in_pieces, outcome, recipe, scenes

__all__ = ["in_pieces", "outcome", "recipe", "scenes"]
