"""Data sets: readers of several formats, their check, stored features, and batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from visavis.core.lazy_imports import lazy_names

if TYPE_CHECKING:
    from visavis.data.dataset import Dataset, Image
    from visavis.data.dataset_reader import check_dataset, open_dataset

__all__ = ["Dataset", "Image", "check_dataset", "open_dataset"]

__getattr__ = lazy_names(
    __name__,
    {
        "Dataset": "visavis.data.dataset",
        "Image": "visavis.data.dataset",
        "check_dataset": "visavis.data.dataset_reader",
        "open_dataset": "visavis.data.dataset_reader",
    },
)
