"""Training by a recipe: the trainer, checkpoints, monitoring, ensembles, interpolation and
forgetting.
"""
