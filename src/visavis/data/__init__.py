"""Data sets: readers of several formats, their check, stored features, and batches."""

from visavis.data.dataset import Dataset, Image
from visavis.data.dataset_reader import check_dataset, open_dataset

__all__ = ["Dataset", "Image", "check_dataset", "open_dataset"]
