"""Audit of a data set: near-duplicates, uninformative captions, likely mislabeled pairs, and the
expected gain from more data.
"""
