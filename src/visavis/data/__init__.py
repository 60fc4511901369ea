"""Data sets: readers of several formats, their check, stored features, and batches."""
