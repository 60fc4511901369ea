"""Features of videos as one ``.h5`` a video: ``features.EXPERT`` ``[L, D]`` and ``raw_captions.0``, ``raw_captions.1``, ... of words.

Source: the layout in which Gabeur et al. (2020, MMT) published theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visavis import storage
from visavis.data.clips import video_name
from visavis.data.published_values import is_missing
from visavis.data.walking import files_under
from visavis.errors import DataError, MissingExtra

ENDINGS = (".h5", ".hdf5")
_FEATURES, _CAPTIONS = "features.", "raw_captions."
_CONTENT = "one .h5 a video with features.EXPERT and raw_captions.NUMBER in it"


@dataclass(frozen=True)
class VideoFiles:
    """Files by the names of their videos. widths: of the experts that any of them has. captions: of each video, in order."""

    paths: dict[str, Path]
    widths: dict[str, int]
    captions: dict[str, list[str]]

    @classmethod
    def open(cls, place: Path, on_progress: Callable[[int, int], None] | None = None) -> VideoFiles:
        """All in a folder, however deep, or one file. Raises DataError where there is none, or one of another layout."""
        listed = [place] if place.is_file() else [path for path, _ in files_under(place) if path.name.endswith(ENDINGS)]
        if not listed:
            raise DataError(f"{place} holds no .h5: expected {_CONTENT}.")
        files = cls({}, {}, {})
        for number, path in enumerate(listed, 1):
            if (twin := files.paths.setdefault(video_name(path.stem), path)) is not path:
                raise DataError(f"{path} is of the same video as {twin}, by its name: expected one file a video.")
            with _opened(path) as video:
                files.note(path, video)
            if on_progress is not None:
                on_progress(number, len(listed))
        return files

    def read(self, video: str) -> dict[str, np.ndarray]:
        """The features of a video by expert."""
        if video not in self.paths:
            return {}
        with _opened(self.paths[video]) as content:
            return {name: content[_FEATURES + name][()] for name in self.widths if _FEATURES + name in content}

    def note(self, path: Path, video: Any) -> None:
        """What a file holds, without its features."""
        for key in video:
            _check(path, video, key)
            if key.startswith(_FEATURES):
                shape, name = video[key].shape, key.removeprefix(_FEATURES)
                if len(shape) != 2 and is_missing(video[key][()]):
                    continue
                if len(shape) not in (1, 2):
                    raise DataError(f"{path}: {key} is of shape {list(shape)}, expected [length, width], or NaN where it is missing.")
                if self.widths.setdefault(name, shape[-1]) != shape[-1]:
                    raise DataError(
                        f"{path}: {key} is {shape[-1]} wide, but {self.widths[name]} in files before: expected one width an expert."
                    )
        numbers = sorted(int(key.removeprefix(_CAPTIONS)) for key in video if key.removeprefix(_CAPTIONS).isdecimal())
        self.captions[video_name(path.stem)] = [
            _sentence(video[f"{_CAPTIONS}{number}"][()], f"{path}: {_CAPTIONS}{number}") for number in numbers
        ]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise MissingExtra("h5py", "video", f"reading {path}") from None
    with storage.regular_file(path):
        try:
            with h5py.File(path, "r") as video:
                yield video
        except (KeyError, RuntimeError, TypeError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is damaged or of another layout, expected {_CONTENT}: {str(error)[:100]}.") from None


def _check(path: Path, video: Any, key: str) -> None:
    """What a file holds must lie in it, and be of a size that can be: HDF5 also knows links to other files."""
    import h5py

    if not isinstance(video.get(key, getlink=True), h5py.HardLink):
        raise DataError(f"{path}: {key} is a link to elsewhere, which is not followed: expected {_CONTENT}.")
    content = video[key]
    if not isinstance(content, h5py.Dataset) or content.is_virtual or content.external:
        raise DataError(f"{path}: {key} is no array in the file itself: expected {_CONTENT}.")
    if content.nbytes > storage.MAX_BYTES:
        raise DataError(f"{path}: {key} is of {content.nbytes:,} bytes, expected at most {storage.MAX_BYTES:,}.")


def _sentence(words: Any, where: str) -> str:
    listed = words.tolist() if isinstance(words, np.ndarray) else [words]
    if not isinstance(listed, list) or not listed or not all(isinstance(word, str | bytes) for word in listed):
        raise DataError(f"{where} is no text, expected the words of a caption, or a sentence.")
    return " ".join(word.decode() if isinstance(word, bytes) else word for word in listed)
