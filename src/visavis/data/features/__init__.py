"""Stored features of images and captions."""
