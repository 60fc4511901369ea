"""Pretrained and small encoders of images and texts."""
