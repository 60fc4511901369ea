"""Fingerprint of the bytes of many files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from visavis.core import storage
from visavis.data.dataset import ByteRange, ProgressCallback


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
        cls, files: Mapping[str, ByteRange], on_progress: ProgressCallback | None = None
    ) -> ContentFingerprint:
        """Compute the fingerprint of files. They are read only if a size or time has changed since
        an earlier call.

        Args:
            files: Locations by name.
            on_progress: Called with the number of files that were read and of all files.

        Returns:
            The fingerprint.
        """
        locations = [
            [name, str(location.path), location.offset, location.size]
            for name, location in sorted(files.items())
        ]
        key = storage.stat_hash({location.path for location in files.values()}, locations)
        record = storage.cache_folder() / "checks" / f"contents-{key}.json"
        fingerprint: ContentFingerprint | None = storage.read_checksummed_json(record, cls)
        if fingerprint is None:
            fingerprint = cls(len(files), key, _content_hash(files, on_progress))
            storage.write_checksummed_json(record, asdict(fingerprint))
        return fingerprint


def _content_hash(files: Mapping[str, ByteRange], on_progress: ProgressCallback | None) -> str:
    hashes = {}
    # In the order of archives and tables, where images of one block are next to each other.
    for number, (name, location) in enumerate(
        sorted(files.items(), key=lambda file: (file[1].path, file[1].offset)), 1
    ):
        hashes[name] = location.sha256()
        if on_progress is not None:
            on_progress(number, len(files))
    digest = hashlib.sha256()
    for name, content_hash in sorted(hashes.items()):
        digest.update(json.dumps([name, content_hash]).encode())
    return digest.hexdigest()[:32]
