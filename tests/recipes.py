"""Recipe of a training that takes a second."""

from __future__ import annotations

TINY_RECIPE = """
name = "tiny"
visual = { encoder = "scenes", granularity = "pooled" }
text = { encoder = "vocabulary", min_count = 1 }
model = { kind = "VSE++", embedding_dim = 8, word_dim = 4 }
training = { batch_size = 8, metric_batches = 1, threads = 1 }
phases = [{ epochs = 1, objective = "VLC()" }]
"""
