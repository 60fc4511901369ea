"""Conversion of published video features to stores and lists."""
