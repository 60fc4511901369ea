"""Fingerprints of files: whether they are unchanged, by size and time, and if those differ by content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.data.dataset import ByteRange

# Called with the number of finished units and of all units.
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class ContentFingerprint:
    """Fingerprint of many files. The same names with the same bytes have the same ``content_hash``.

    Attributes:
        num_files: Number of files.
        stat_hash: Hash of names, locations, sizes and times of change.
        content_hash: Hash of names and bytes.
    """

    num_files: int
    stat_hash: str
    content_hash: str

    @classmethod
    def compute(
        cls, files: Mapping[str, ByteRange], previous: ContentFingerprint | None = None, on_progress: ProgressCallback | None = None
    ) -> ContentFingerprint:
        """Compute the fingerprint of files. They are read only if a size or time has changed.

        Args:
            files: Locations by name.
            previous: An earlier fingerprint, which is returned if its ``stat_hash`` is unchanged.
            on_progress: Called with the number of files that were read and of all files.

        Returns:
            The fingerprint.
        """
        locations = [[name, str(location.path), location.offset, location.size] for name, location in sorted(files.items())]
        key = stat_hash({location.path for location in files.values()}, locations)
        if previous is not None and previous.stat_hash == key:
            return previous
        record = storage.cache_folder() / "checks" / f"contents-{key}.json"
        fingerprint: ContentFingerprint | None = storage.read_checksummed_json(record, cls)
        if fingerprint is None:
            fingerprint = cls(len(files), key, _content_hash(files, on_progress))
            storage.write_checksummed_json(record, asdict(fingerprint))
        return fingerprint


def file_stats(paths: Iterable[Path]) -> dict[Path, list[str | int]]:
    """Return what identifies the content of files without reading them.

    Args:
        paths: The files.

    Returns:
        Full path, size in bytes and time of change in ns of each file. Size and time are -1 if the file does not exist.
    """
    return {path: _stat(os.path.realpath(path)) for path in sorted(paths)}


def stat_hash(paths: Iterable[Path], *extra: Any) -> str:
    """Hash the sizes and times of files, as a key for cached results that depend on their content.

    Args:
        paths: The files.
        extra: More JSON data of the key.

    Returns:
        32 hexadecimal digits.
    """
    return hashlib.sha256(json.dumps([list(file_stats(paths).values()), *extra]).encode()).hexdigest()[:32]


def _stat(path: str) -> list[str | int]:
    try:
        status = os.stat(path)
    except OSError:  # the reader of the file reports the reason
        return [path, -1, -1]
    return [path, status.st_size, status.st_mtime_ns]


def _content_hash(files: Mapping[str, ByteRange], on_progress: ProgressCallback | None) -> str:
    digest = hashlib.sha256()
    for number, (name, location) in enumerate(sorted(files.items()), 1):
        content = storage.content_hash(location.path) if location.size is None else hashlib.sha256(location.read()).hexdigest()
        digest.update(json.dumps([name, content]).encode())
        if on_progress is not None:
            on_progress(number, len(files))
    return digest.hexdigest()[:32]
