"""Indexes of images and clips: ``build`` makes them, ``open_index`` opens them, ``query_encoder``
encodes queries, ``search`` finds items, ``calibrate`` computes match probabilities, ``stores`` keeps
items and vectors, and ``server`` answers over HTTP.
"""
