"""Experiments: comparisons over seeds with statistics, reproductions of papers' tables, and exports
of their results.
"""
