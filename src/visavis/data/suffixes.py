"""Suffixes of the files of a collection: images, videos, and photos that cannot be decoded.

Example:
    >>> describe_other_files(["a.xmp", "b.XMP", "logo.svg", "README"])
    '4 other files: .xmp, .svg, no suffix'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath

# Images that Pillow decodes: the suffixes that it registers for ``supported_formats``.
IMAGE_SUFFIXES = (
    *(
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".mpo",
        ".png",
        ".apng",
        ".webp",
        ".gif",
        ".bmp",
        ".dib",
        ".tif",
        ".tiff",
        ".avif",
        ".avifs",
    ),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".jp2", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx"),
)
VIDEO_SUFFIXES = (
    *(
        ".mp4",
        ".m4v",
        ".mov",
        ".qt",
        ".webm",
        ".mkv",
        ".avi",
        ".divx",
        ".mpg",
        ".mpeg",
        ".mpe",
        ".vob",
        ".ts",
        ".mts",
        ".m2ts",
        ".m2t",
    ),
    *(".wmv", ".asf", ".flv", ".f4v", ".3gp", ".3g2", ".ogv", ".ogm"),
)
VISUAL_SUFFIXES = IMAGE_SUFFIXES + VIDEO_SUFFIXES
# Photos of phones and cameras that cannot be decoded.
UNSUPPORTED_SUFFIXES = (
    *(
        ".heic",
        ".heif",
        ".hif",
        ".jxl",
        ".jxr",
        ".3fr",
        ".arw",
        ".cr2",
        ".cr3",
        ".crw",
        ".dcr",
        ".dng",
        ".erf",
        ".fff",
        ".gpr",
        ".iiq",
    ),
    *(
        ".kdc",
        ".mef",
        ".mos",
        ".mrw",
        ".nef",
        ".nrw",
        ".orf",
        ".pef",
        ".raf",
        ".raw",
        ".rw2",
        ".rwl",
        ".sr2",
        ".srf",
        ".srw",
        ".x3f",
    ),
)
# Lists, tables, features and notes of a data set.
DATASET_SUFFIXES = (
    ".json",
    ".jsonl",
    ".csv",
    ".tsv",
    ".txt",
    ".token",
    ".parquet",
    ".arrow",
    ".npy",
    ".npz",
    ".pkl",
    ".md",
)
# Suffixes in one line about other files.
MAX_NAMED_SUFFIXES = 10


def unsupported_problem(name: str) -> str | None:
    """Return the problem of a photo that cannot be decoded, by its suffix.

    Args:
        name: File name.

    Returns:
        The problem and its fix without the period. None for any other file.
    """
    suffix = PurePath(name).suffix.lower()
    if suffix not in UNSUPPORTED_SUFFIXES:
        return None
    return f"expected a JPEG, PNG or other supported image, got a {suffix} file. Convert it to JPEG"


def describe_other_files(names: Iterable[str]) -> str | None:
    """Count files that are not read, and name their suffixes, the most frequent first.

    Args:
        names: File names. Images and videos are listed by their names instead.

    Returns:
        A text such as ``"12 other files: .xmp, .svg"``. None if there are none.
    """
    suffixes = Counter(PurePath(name).suffix.lower() or "no suffix" for name in names)
    # The most frequent first, then by name, so that the line does not depend on the order of the
    # files.
    ordered = sorted(suffixes, key=lambda suffix: (-suffixes[suffix], suffix))
    shown, total = ordered[:MAX_NAMED_SUFFIXES], suffixes.total()
    shown += ["..."] if len(ordered) > len(shown) else []
    return f"{total:,} other file{'s'[: total > 1]}: {', '.join(shown)}" if total else None
