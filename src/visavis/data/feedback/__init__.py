"""Relevance judgments from people: records, training pairs and evaluation."""
