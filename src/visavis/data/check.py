"""Check a whole data set, pixels included, and list exactly what is wrong with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from visavis.data.listing import Finding, Listing
from visavis.data.reading import find_source, list_dataset
from visavis.errors import DataError


@dataclass(frozen=True)
class SplitCount:
    """Images and captions of a split that can be used."""

    images: int
    captions: int


@dataclass(frozen=True)
class CheckReport:
    """What is in a data set and what is wrong with it.

    path: the list that was read. captions_per_image: the fewest and the most. image_sizes: how many images have each size
    ``"width x height"``. duplicate_captions: captions whose exact text occurs earlier in the set.
    """

    path: Path
    layout: str
    findings: tuple[Finding, ...]
    splits: dict[str, SplitCount] = field(default_factory=dict)
    captions_per_image: tuple[int, int] = (0, 0)
    image_sizes: dict[str, int] = field(default_factory=dict)
    duplicate_captions: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether training would lose nothing."""
        return not any(finding.loses for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Every field under its name, and ``ok``."""
        return {**asdict(self), "path": str(self.path), "ok": self.ok}


def check_dataset(path: str | Path, *, on_progress: Callable[[int, int], None] | None = None) -> CheckReport:
    """Read and decode everything once. Raises DataError only if there is nothing to read at ``path``."""
    from visavis.data.pixels import check_pixels

    start, source = time.perf_counter(), find_source(path)
    try:
        listing = list_dataset(path)
    except DataError as error:
        return CheckReport(source, "unknown", (Finding("unreadable", source.name, str(error)),), seconds=time.perf_counter() - start)
    sizes = check_pixels(listing, whole=True, on_progress=on_progress, remembered=False)
    return _summary(listing, sizes, start)


def _summary(listing: Listing, sizes: dict[str, int], start: float) -> CheckReport:
    try:
        data = listing.dataset()
    except DataError:  # nothing can be used; the findings say why
        return CheckReport(listing.source, listing.layout, tuple(listing.findings), image_sizes=sizes, seconds=time.perf_counter() - start)
    counts = np.bincount(data.image_of, minlength=len(data.images))
    images = Counter(image.split for image in data.images)
    captions = Counter(data.images[image].split for image in data.image_of)
    return CheckReport(
        path=listing.source,
        layout=listing.layout,
        findings=tuple(listing.findings),
        splits={split: SplitCount(images[split], captions[split]) for split in data.splits},
        captions_per_image=(int(counts.min()), int(counts.max())),
        image_sizes=sizes,
        duplicate_captions=len(data.captions) - len(set(data.captions)),
        seconds=time.perf_counter() - start,
    )
