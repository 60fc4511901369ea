"""Check of a data set: its content and all of its problems."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from visavis.core.errors import DataError
from visavis.core.result import Result
from visavis.data.dataset import Dataset, ProgressCallback
from visavis.data.dataset_reader import list_source, locate_dataset
from visavis.data.formats.large_table import table_problems
from visavis.data.formats.listing import Finding
from visavis.data.image_validation import validate_images

# A check of more images does not open them.
MAX_CHECKED_IMAGES = 1_000_000


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
class CheckReport(Result):
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

    ROWS: ClassVar[str] = "findings"

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
        """Convert to JSON data."""
        return {**asdict(self), "path": str(self.path), "ok": self.ok}


def check_dataset(
    path: str | Path, *, decode_videos: bool = False, on_progress: ProgressCallback | None = None
) -> CheckReport:
    """Read everything, and decode all images and a sample of the videos, or all of them."""
    start = time.perf_counter()
    dataset_format, source = locate_dataset(path)
    try:
        data = dataset_format.open(source) if dataset_format.open is not None else None
        if data is not None and len(data.images) > MAX_CHECKED_IMAGES:
            note = f"{len(data.images):,} images are not opened: expected at most {MAX_CHECKED_IMAGES:,}"
            findings = (
                *table_problems(source),
                Finding("images not checked", source.name, note, loses_data=False),
            )
            return _with_counts(CheckReport(source, dataset_format.name, findings), data, start)
        listing = list_source(dataset_format, source)
    except DataError as error:
        return CheckReport(
            source,
            "unknown",
            (Finding("unreadable", source.name, str(error)),),
            seconds=time.perf_counter() - start,
        )
    sizes = validate_images(
        listing,
        decode_all_frames=True,
        sample_videos=not decode_videos,
        on_progress=on_progress,
        use_cache=False,
    )
    report = CheckReport(source, listing.format_name, tuple(listing.findings), image_sizes=sizes)
    if not any(image.usable for image in listing.images):
        return replace(report, seconds=time.perf_counter() - start)
    return _with_counts(report, listing.dataset(), start)


def _with_counts(report: CheckReport, data: Dataset, start: float) -> CheckReport:
    counts = data.captions_of.counts
    splits = {name: data.split(name) for name in data.splits}
    return replace(
        report,
        splits={
            name: SplitCounts(len(split.images), len(split.captions))
            for name, split in splits.items()
        },
        captions_per_image=(int(counts.min()), int(counts.max())),
        duplicate_captions=0 if data.is_lazy else len(data.captions) - len(set(data.captions)),
        seconds=time.perf_counter() - start,
    )
