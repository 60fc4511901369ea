"""Check of a whole data set, pixels included, with an exact list of its problems."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from visavis.data.dataset_reader import find_source, list_dataset
from visavis.data.formats.listing import Finding, Listing
from visavis.errors import DataError


@dataclass(frozen=True)
class SplitCounts:
    """Usable images and captions of a split.

    Attributes:
        images: Number of images.
        captions: Number of captions.
    """

    images: int
    captions: int


@dataclass(frozen=True)
class CheckReport:
    """Content and problems of a data set.

    Attributes:
        path: The list or folder that was read.
        format_name: Name of its format.
        findings: All problems.
        splits: Usable images and captions by split.
        captions_per_image: Smallest and largest number of captions per image.
        image_sizes: Number of images of each size, such as ``"640x480"``.
        duplicate_captions: Number of captions whose exact text occurs earlier.
        seconds: Duration of the check.
    """

    path: Path
    format_name: str
    findings: tuple[Finding, ...]
    splits: dict[str, SplitCounts] = field(default_factory=dict)
    captions_per_image: tuple[int, int] = (0, 0)
    image_sizes: dict[str, int] = field(default_factory=dict)
    duplicate_captions: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether training would use all items."""
        return not any(finding.loses_data for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data.

        Returns:
            All fields by name, and ``ok``.
        """
        return {**asdict(self), "path": str(self.path), "ok": self.ok}

    @classmethod
    def from_listing(cls, listing: Listing, image_sizes: dict[str, int], seconds: float) -> CheckReport:
        """Summarize a checked listing.

        Args:
            listing: The listing with all findings.
            image_sizes: Number of images of each size.
            seconds: Duration of the check.

        Returns:
            The report.
        """
        report = cls(listing.source, listing.format_name, tuple(listing.findings), image_sizes=image_sizes, seconds=seconds)
        try:
            data = listing.dataset()
        except DataError:  # no image is usable, and the findings contain the reasons
            return report
        counts = np.bincount(data.image_of, minlength=len(data.images))
        images = Counter(image.split for image in data.images)
        captions = Counter(data.images[image].split for image in data.image_of)
        return replace(
            report,
            splits={split: SplitCounts(images[split], captions[split]) for split in data.splits},
            captions_per_image=(int(counts.min()), int(counts.max())),
            duplicate_captions=len(data.captions) - len(set(data.captions)),
        )


def check_dataset(path: str | Path, *, on_progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Read and decode everything once.

    Args:
        path: The folder or file, or the name of a folder under ``VISAVIS_DATA``.
        on_progress: Called with the number of decoded images and of all images.

    Returns:
        The report.

    Raises:
        DataError: If there is nothing to read at ``path``.
    """
    from visavis.data.image_validation import validate_images

    start, source = time.perf_counter(), find_source(path)
    try:
        listing = list_dataset(path)
    except DataError as error:
        return CheckReport(source, "unknown", (Finding("unreadable", source.name, str(error)),), seconds=time.perf_counter() - start)
    sizes = validate_images(listing, decode_all_frames=True, on_progress=on_progress, use_cache=False)
    return CheckReport.from_listing(listing, sizes, time.perf_counter() - start)
