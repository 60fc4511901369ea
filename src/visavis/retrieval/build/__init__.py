"""Making and changing indexes: comparison of files, encoding, query models, compression, corrections,
export.
"""
