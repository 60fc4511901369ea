"""Data sets: readers of several formats, their check, stored features, and batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from visavis.core.lazy_imports import lazy_names

if TYPE_CHECKING:
    from visavis.data.dataset import Dataset, Image

__all__ = ["Dataset", "Image"]

__getattr__ = lazy_names(
    __name__, {"Dataset": "visavis.data.dataset", "Image": "visavis.data.dataset"}
)
