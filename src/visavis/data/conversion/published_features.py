"""Published features of videos: pickles whose values determine what they are, and HDF5 files with
one video each.

A pickle has an expert, captions, features of captions, or the index of the tested caption for each
video. An ``.h5`` has ``features.EXPERT`` ``[L, D]``, their times ``features_t.EXPERT`` ``[L, 2]``
and ``raw_captions.0``, ``raw_captions.1``, ... of words.

Source: the files that Gabeur et al. (2020, MMT) published.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError, requires_extra
from visavis.data.formats.image_files import scan_folder
from visavis.data.formats.listing import is_valid_unicode
from visavis.data.video import video_id

_EXPECTED = (
    "a dict that gives each video an array [L, D] (an expert), a list of texts or of lists of "
    "words (captions), "
    "a list of arrays (features of captions) or a number (the caption that counts)"
)
_CORRECT_FILE = "Correct the file, or leave it out."


@dataclass
class PublishedFeatures:
    """Content of published files by video name.

    Attributes:
        experts: Arrays ``[L, D]`` by expert and video. None: the expert is missing.
        captions: Captions of each video.
        splits: Split of each video, if a file of captions has them.
        caption_features: Arrays ``[L, D]``, one per caption, by name and video.
        test_caption_index: Index of the one caption that is tested, from 0.
    """

    experts: dict[str, dict[str, np.ndarray | None]] = field(default_factory=dict)
    captions: dict[str, list[str]] = field(default_factory=dict)
    splits: dict[str, str] = field(default_factory=dict)
    caption_features: dict[str, dict[str, list[np.ndarray]]] = field(default_factory=dict)
    test_caption_index: dict[str, int] = field(default_factory=dict)

    def add(self, value: Any, name: str, path: Path) -> None:
        """Add the content of a pickle. Its kind is determined by its values.

        Args:
            value: The content.
            name: Name of the expert or of the caption features.
            path: The file, for errors.

        Raises:
            DataError: If the content is of an unknown kind, or a duplicate.
        """
        if not isinstance(value, dict) or not value:
            raise DataError(
                f"{path} has {'an empty dict' if value == {} else f'a {type(value).__name__}'}, "
                f"expected {_EXPECTED}. {_CORRECT_FILE}"
            )
        table: dict[str, Any] = {}
        for video, entry in value.items():
            if (video_name := _video_name(video, path)) in table:
                raise DataError(
                    f"{path}: duplicate video {video_name}, with and without its file suffix. "
                    "Remove one of the two."
                )
            table[video_name] = entry
        # Values decide what a file is, because published file names differ.
        first = next((entry for entry in table.values() if not is_missing(entry)), None)
        first_element = first[0] if isinstance(first, list | tuple) and first else None
        target: dict[str, Any]
        parse: Callable[[Any, str, Path], Any]
        if first is None:
            raise DataError(
                f"{path}: all {len(table):,} videos have only None, NaN or empty arrays, expected "
                f"{_EXPECTED}. {_CORRECT_FILE}"
            )
        if isinstance(first, np.ndarray):
            target, parse = _new_table(self.experts, name, path), _array
        elif isinstance(first_element, np.ndarray):
            target, parse = _new_table(self.caption_features, name, path), _arrays
        elif isinstance(first_element, str | bytes | list | tuple):
            target, parse = self.captions, _captions
        # Not isinstance: True is an integer, too.
        elif type(first) is int:
            target, parse = self.test_caption_index, _caption_index
        else:
            video = next(video for video, entry in table.items() if entry is first)
            raise DataError(
                f"{path}: video {video} has a {type(first).__name__}, expected {_EXPECTED}. "
                f"{_CORRECT_FILE}"
            )
        _without_duplicates(target, table, path).update(
            {video: parse(entry, video, path) for video, entry in table.items()}
        )

    def add_captions(self, captions: dict[str, list[str]], path: Path) -> None:
        """Add captions.

        Args:
            captions: Captions of each video.
            path: The file, for errors.
        """
        captions = {video_id(video): texts for video, texts in captions.items()}
        _without_duplicates(self.captions, captions, path).update(
            {video: texts for video, texts in captions.items() if texts}
        )

    def add_splits(self, splits: dict[str, str | None], path: Path) -> None:
        """Add splits of all videos of a file, or of none.

        Args:
            splits: Split of each video. None: not given.
            path: The file, for errors.

        Raises:
            DataError: If only some videos have a split.
        """
        if without_split := [video for video, split in splits.items() if split is None]:
            if len(without_split) < len(splits):
                raise DataError(
                    f"{path} has no split of {without_split[0]}, but of others: expected splits of "
                    f"all videos or of none. {_CORRECT_FILE}"
                )
            return
        self.splits |= {
            video_id(video): split for video, split in splits.items() if split is not None
        }


def is_missing(value: Any) -> bool:
    """Return whether an expert has no features of a video: None, NaN, no vectors, or vectors of
    NaN.

    Args:
        value: The value of the expert.

    Returns:
        Whether it is missing.
    """
    if isinstance(value, np.ndarray):
        return not value.size or (value.dtype.kind == "f" and bool(np.isnan(value).all()))
    return value is None or (isinstance(value, float) and math.isnan(value))


def _new_table(tables: dict[str, dict[str, Any]], name: str, path: Path) -> dict[str, Any]:
    if name in tables:
        raise DataError(f"{path}: duplicate name {name!r}. Give it another name with NAME={path}.")
    return tables.setdefault(name, {})


def _without_duplicates(
    target: dict[str, Any], table: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Return the entries of earlier files. The entries of another file are added to them."""
    if duplicates := target.keys() & table.keys():
        raise DataError(
            f"{path}: duplicate entry {min(duplicates)}, already defined in another file. Pass "
            "only one of these files."
        )
    return target


def _video_name(video: Any, path: Path) -> str:
    name = video.decode("latin1") if isinstance(video, bytes) else video
    if not isinstance(name, str) or not is_valid_unicode(name):
        raise DataError(
            f"{path}: expected Unicode texts as video names, got a {type(video).__name__}. "
            f"{_CORRECT_FILE}"
        )
    return video_id(name)


def _array(value: Any, video: str, path: Path) -> np.ndarray | None:
    if is_missing(value):
        return None
    if not isinstance(value, np.ndarray):
        raise DataError(
            f"{path} gives {video} a {type(value).__name__}, but an array to others: expected an "
            "array, or NaN where it is missing. "
            f"{_CORRECT_FILE}"
        )
    if not value.ndim:
        raise DataError(
            f"{path} gives {video} the number {value}, expected an array [length, width], or NaN "
            f"where it is missing. {_CORRECT_FILE}"
        )
    return value


def _arrays(value: Any, video: str, path: Path) -> list[np.ndarray]:
    if not isinstance(value, list | tuple) or not all(
        isinstance(array, np.ndarray) for array in value
    ):
        raise DataError(
            f"{path}: video {video} has no list of arrays, but others have: expected one array per "
            f"caption. {_CORRECT_FILE}"
        )
    return list(value)


def _captions(value: Any, video: str, path: Path) -> list[str]:
    if not isinstance(value, list | tuple):
        raise DataError(
            f"{path}: video {video} has a {type(value).__name__}, but others have captions: "
            f"expected a list of captions. {_CORRECT_FILE}"
        )
    return [_caption(caption, video, path) for caption in value]


def _caption(value: Any, video: str, path: Path) -> str:
    words = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(word, str | bytes) for word in words):
        raise DataError(
            f"{path}: a caption of {video} is not a text: expected a text or a list of words. "
            f"{_CORRECT_FILE}"
        )
    caption = " ".join(word if isinstance(word, str) else word.decode("latin1") for word in words)
    if not is_valid_unicode(caption):
        raise DataError(
            f"{path}: a caption of {video} has an incomplete character. Fix it in the file."
        )
    return caption


def _caption_index(value: Any, video: str, path: Path) -> int:
    if type(value) is not int or value < 0:
        raise DataError(
            f"{path}: video {video} has no caption index: expected an integer >= 0. {_CORRECT_FILE}"
        )
    return value


HDF5_SUFFIXES = (".h5", ".hdf5")
_FEATURES, _SECONDS, _CAPTIONS = "features.", "features_t.", "raw_captions."
# Seconds that a feature of an expert covers, by the released code of MMT. Other experts have no
# times.
FEATURE_SECONDS = {"rgb": 0.2, "scene": 1.0, "s3d": 1.0, "vggish": 1.0}
_CONTENT = "one .h5 per video with features.EXPERT and raw_captions.NUMBER"


@dataclass(frozen=True)
class HDF5Videos:
    """HDF5 files by video.

    Attributes:
        paths: File of each video.
        embedding_dims: Dimension of each expert of any file.
        captions: Captions of each video, in order.
    """

    paths: dict[str, Path]
    embedding_dims: dict[str, int]
    captions: dict[str, list[str]]

    @classmethod
    def open(cls, path: Path, on_progress: Callable[[int, int], None] | None = None) -> HDF5Videos:
        """Open one file, or all files in a folder and its subfolders.

        Args:
            path: The file or folder.
            on_progress: Called with the number of files that were read and of all files.

        Returns:
            The files.

        Raises:
            DataError: If there are only other files, or one of another layout.
        """
        listed = [path]
        if not os.path.isfile(path):
            scan = scan_folder(path)
            for name, problem in scan.problems.items():
                if name.endswith(HDF5_SUFFIXES) or os.path.isdir(path / name):
                    raise DataError(f"{path / name}: {problem}.")
            listed = [path / name for name in scan.files if name.endswith(HDF5_SUFFIXES)]
        if not listed:
            raise DataError(
                f"{path} has no .h5: expected {_CONTENT}. Add these files, or pass another folder."
            )
        files = cls({}, {}, {})
        for number, file in enumerate(listed, 1):
            if (duplicate := files.paths.setdefault(video_id(file.stem), file)) is not file:
                raise DataError(
                    f"{file} has the same video name as {duplicate}: expected one file per video. "
                    "Remove one of them."
                )
            with _open_hdf5(file) as video:
                files.add_file(file, video)
            if on_progress is not None:
                on_progress(number, len(listed))
        return files

    def read(self, video: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Read the features of a video, and their times: the middle of their stored start and end,
        or their place by `FEATURE_SECONDS`.

        Args:
            video: Name of the video.

        Returns:
            Features by expert, and times in seconds by expert, ``[L]``.
        """
        features: dict[str, np.ndarray] = {}
        seconds: dict[str, np.ndarray] = {}
        if video not in self.paths:
            return features, seconds
        with _open_hdf5(self.paths[video]) as content:
            for name in self.embedding_dims:
                if _FEATURES + name not in content:
                    continue
                features[name] = vectors = content[_FEATURES + name][()]
                if vectors.ndim != 2:
                    continue
                times = _stored_seconds(content, name, len(vectors))
                if times is None and name in FEATURE_SECONDS:
                    times = (np.arange(len(vectors)) + 0.5) * FEATURE_SECONDS[name]
                if times is not None:
                    seconds[name] = times
        return features, seconds

    def add_file(self, path: Path, video: Any) -> None:
        """Add the captions and dimensions of a file. Features are not read.

        Args:
            path: The file.
            video: The open HDF5 file.

        Raises:
            DataError: If an array has another dimension than in other files.
        """
        for key in video:
            _check(path, video, key)
            if key.startswith(_FEATURES):
                shape, name = video[key].shape, key.removeprefix(_FEATURES)
                # A missing expert is stored as a single NaN.
                if len(shape) != 2 and is_missing(video[key][()]):
                    continue
                if len(shape) not in (1, 2):
                    raise DataError(
                        f"{path}: {key} is of shape {list(shape)}, expected [length, width], or "
                        f"NaN. {_CORRECT_FILE}"
                    )
                if self.embedding_dims.setdefault(name, shape[-1]) != shape[-1]:
                    raise DataError(
                        f"{path}: {key} has dimension {shape[-1]}, but {self.embedding_dims[name]} "
                        "in earlier files: expected one dimension. "
                        f"{_CORRECT_FILE}"
                    )
        numbers = [
            number
            for key in video
            if key.startswith(_CAPTIONS) and (number := key.removeprefix(_CAPTIONS)).isdecimal()
        ]
        # As numbers, of any length.
        numbers.sort(key=lambda number: (len(number.lstrip("0")), number.lstrip("0")))
        self.captions[video_id(path.stem)] = [
            _sentence(video[f"{_CAPTIONS}{number}"][()], f"{path}: {_CAPTIONS}{number:.20}")
            for number in numbers
        ]


@contextmanager
def _open_hdf5(path: Path) -> Iterator[Any]:
    with requires_extra("video", f"reading {path}"):
        import h5py
    with storage.reading_regular_file(path):
        try:
            with h5py.File(path, "r") as video:
                yield video
        except (KeyError, RuntimeError, TypeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} is damaged or of another layout, expected {_CONTENT}: "
                f"{storage.error_reason(error)[:100]}. {_CORRECT_FILE}"
            ) from None


def _check(path: Path, video: Any, key: str) -> None:
    """Check that content is in the file itself and of a possible size. HDF5 also supports links to
    other files.
    """
    import h5py

    if not isinstance(video.get(key, getlink=True), h5py.HardLink):
        raise DataError(
            f"{path}: {key} is a link, and links are not followed: expected {_CONTENT}. "
            f"{_CORRECT_FILE}"
        )
    content = video[key]
    if not isinstance(content, h5py.Dataset) or content.is_virtual or content.external:
        raise DataError(
            f"{path}: {key} is not an array in the file itself: expected {_CONTENT}. "
            f"{_CORRECT_FILE}"
        )
    if content.nbytes > storage.MAX_BYTES:
        raise DataError(
            f"{path}: {key} has {content.nbytes:,} bytes, expected at most {storage.MAX_BYTES:,}. "
            f"{_CORRECT_FILE}"
        )


def _stored_seconds(video: Any, name: str, length: int) -> np.ndarray | None:
    """Return the stored times of the vectors of an expert, or the middles of their starts and ends.
    None: no usable times.
    """
    if _SECONDS + name not in video:
        return None
    times = np.atleast_1d(video[_SECONDS + name][()])[:length]
    if times.ndim == 2 and times.size:
        times = times.mean(1)
    is_usable = (
        times.dtype.kind in "fiu" and times.shape == (length,) and bool(np.isfinite(times).all())
    )
    return times if is_usable else None


def _sentence(words: Any, location: str) -> str:
    listed = words.tolist() if isinstance(words, np.ndarray) else [words]
    if (
        not isinstance(listed, list)
        or not listed
        or not all(isinstance(word, str | bytes) for word in listed)
    ):
        raise DataError(
            f"{location} is not a text: expected the words of a caption, or a text. {_CORRECT_FILE}"
        )
    return " ".join(word.decode() if isinstance(word, bytes) else word for word in listed)
