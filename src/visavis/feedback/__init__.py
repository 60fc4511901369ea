"""Relevance judgments from people: records, training pairs, evaluation, and selection of queries to ask."""
