"""Training data that is read from shards: tar files of WebDataset and Parquet files of Hugging Face
data sets.
"""
