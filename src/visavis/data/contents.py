"""Whether files are still what they were: by size and time, and where those differ by what they hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from visavis import storage
from visavis.data.dataset import Bytes
from visavis.data.finite import file_marks

OnProgress = Callable[[int, int], None]
"""Called with files read and files in all."""


@dataclass(frozen=True)
class Contents:
    """Many files in few words: two are equal in ``content`` if the same names hold the same bytes.

    files: how many. marks: a hash of their names, places, sizes and times of change. content: a hash of their names and bytes.
    """

    files: int
    marks: str
    content: str

    @classmethod
    def of(cls, files: Mapping[str, Bytes], known: Contents | None = None, on_progress: OnProgress | None = None) -> Contents:
        """Those of files by name. They are read once, and not again until a size or a time differs; not at all where the marks
        are those of ``known``. Raises DataError for a file that cannot be read.
        """
        marks = _marks(files)
        if known is not None and known.marks == marks:
            return known
        record = storage.cache_folder() / "checks" / f"contents-{marks}.json"
        contents: Contents | None = storage.kept(record, cls)
        if contents is None:
            contents = cls(len(files), marks, _content(files, on_progress))
            storage.keep(record, asdict(contents))
        return contents


def _marks(files: Mapping[str, Bytes]) -> str:
    digest = hashlib.sha256(json.dumps(list(file_marks({place.path for place in files.values()}).values())).encode())
    for name, place in sorted(files.items()):
        digest.update(json.dumps([name, str(place.path), place.offset, place.size]).encode())
    return digest.hexdigest()[:32]


def _content(files: Mapping[str, Bytes], on_progress: OnProgress | None) -> str:
    digest = hashlib.sha256()
    for number, (name, place) in enumerate(sorted(files.items()), 1):
        content = storage.content_hash(place.path) if place.size is None else hashlib.sha256(place.read()).hexdigest()
        digest.update(json.dumps([name, content]).encode())
        if on_progress is not None:
            on_progress(number, len(files))
    return digest.hexdigest()[:32]
