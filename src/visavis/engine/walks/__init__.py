"""Two walks over blocks of scores: one direction after the other, or tiles that serve both directions at once."""

from visavis.engine.walks.outcome import ValueAndGradients, on_graph
from visavis.engine.walks.rows import walk_rows
from visavis.engine.walks.shared_blocks import walk_shared_blocks

__all__ = ["ValueAndGradients", "on_graph", "walk_rows", "walk_shared_blocks"]
