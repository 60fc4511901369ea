"""Evaluation of data sets: the items of a split that a protocol ranks, and the result."""
