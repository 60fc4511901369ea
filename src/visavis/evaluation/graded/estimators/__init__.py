"""Relevance estimators: word vectors, sentence models, cross-encoders, synthetic scenes, matrices
and functions.
"""
