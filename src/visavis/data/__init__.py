"""Data sets: readers that list images and captions, their check, features stored beside them, and batches."""

from visavis.data.check import check_dataset
from visavis.data.dataset import Dataset, Image
from visavis.data.reading import open_dataset

__all__ = ["Dataset", "Image", "check_dataset", "open_dataset"]
