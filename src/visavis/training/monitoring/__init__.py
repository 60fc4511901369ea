"""Monitoring of a training: metrics of each validation and alerts about what is wrong."""
