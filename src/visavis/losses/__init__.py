"""Objectives on score matrices, their targets and scores, and the loss module that applies them."""
