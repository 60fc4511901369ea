"""What a published pickle holds of a set of videos, told by its values: an expert, captions, features of captions, which caption is meant."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from visavis.data.clips import video_name
from visavis.data.source_text import is_unicode
from visavis.errors import DataError

_EXPECTED = (
    "a dict that gives each video an array [L, D] (an expert), a list of sentences or of lists of words (captions), "
    "a list of arrays (features of captions) or a number (the caption that counts)"
)


@dataclass
class Values:
    """What was found, by the names of videos.

    experts: by name, ``[L, D]`` or None where it is missing. captions: texts. splits: where a file of captions says them.
    texts: by name, an array ``[L, D]`` a caption.
    caption_numbers: the one caption that is tested, counted from 0.
    """

    experts: dict[str, dict[str, np.ndarray | None]] = field(default_factory=dict)
    captions: dict[str, list[str]] = field(default_factory=dict)
    splits: dict[str, str] = field(default_factory=dict)
    texts: dict[str, dict[str, list[np.ndarray]]] = field(default_factory=dict)
    caption_numbers: dict[str, int] = field(default_factory=dict)

    def add(self, value: Any, name: str, path: Path) -> None:
        """Sort in what a file holds. name: of the expert, or of the features of captions. Raises DataError if it is nothing of these."""
        if not isinstance(value, dict) or not value:
            raise DataError(f"{path} holds {'an empty dict' if value == {} else f'a {type(value).__name__}'}, expected {_EXPECTED}.")
        table: dict[str, Any] = {}
        for video, given in value.items():
            if (name_of := _name(video, path)) in table:
                raise DataError(f"{path} tells of {name_of} twice, with and without the ending of its file: give one of the two.")
            table[name_of] = given
        first = next((given for given in table.values() if not is_missing(given)), None)
        inner = first[0] if isinstance(first, list | tuple) and first else None
        if isinstance(first, np.ndarray):
            _new(self.experts, name, path)[name] = {video: _array(given, video, path) for video, given in table.items()}
        elif isinstance(inner, np.ndarray):
            _new(self.texts, name, path)[name] = {video: _arrays(given, video, path) for video, given in table.items()}
        elif isinstance(inner, str | bytes | list | tuple):
            _without_twins(self.captions, table, path).update({video: _captions(given, video, path) for video, given in table.items()})
        elif first is None:
            raise DataError(f"{path} has nothing of any of its {len(table):,} videos: None, NaN or no rows alone; expected {_EXPECTED}.")
        elif type(first) is int:
            _without_twins(self.caption_numbers, table, path).update({video: _number(given, video, path) for video, given in table.items()})
        else:
            video = next(video for video, given in table.items() if given is first)
            raise DataError(f"{path} gives the video {video} a {type(first).__name__}, expected {_EXPECTED}.")

    def add_captions(self, captions: dict[str, list[str]], path: Path) -> None:
        """Captions that are known already as texts."""
        captions = {video_name(video): texts for video, texts in captions.items()}
        _without_twins(self.captions, captions, path).update({video: texts for video, texts in captions.items() if texts})

    def add_splits(self, splits: dict[str, str | None], path: Path) -> None:
        """Those of all videos of a file, or of none. Raises DataError for a file that says those of some videos alone."""
        if silent := [video for video, split in splits.items() if split is None]:
            if len(silent) < len(splits):
                raise DataError(f"{path} says the split of some videos, and not that of {silent[0]}: expected one of every video, or none.")
            return
        self.splits |= {video_name(video): split for video, split in splits.items() if split is not None}


def is_missing(given: Any) -> bool:
    """Whether an expert has nothing of a video: None, NaN, no vectors, or vectors of NaN alone."""
    if isinstance(given, np.ndarray):
        return not given.size or (given.dtype.kind == "f" and bool(np.isnan(given).all()))
    return given is None or (isinstance(given, float) and math.isnan(given))


def _new(known: Mapping[str, Any], name: str, path: Path) -> Any:
    if name in known:
        raise DataError(f"{path} would be a second {name!r}: name it by NAME={path}.")
    return known


def _without_twins(known: dict[str, Any], table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    if twins := known.keys() & table.keys():
        raise DataError(f"{path} tells of {min(twins)}, which another file told of before: give one of the two.")
    return known


def _name(video: Any, path: Path) -> str:
    name = video.decode("latin1") if isinstance(video, bytes) else video
    if not isinstance(name, str) or not is_unicode(name):
        raise DataError(f"{path} has a {type(video).__name__} for the name of a video, expected a text in Unicode.")
    return video_name(name)


def _array(given: Any, video: str, path: Path) -> np.ndarray | None:
    if is_missing(given):
        return None
    if not isinstance(given, np.ndarray):
        raise DataError(
            f"{path} gives {video} a {type(given).__name__}, but an array to others: expected an array, or NaN where it is missing."
        )
    if not given.ndim:
        raise DataError(f"{path} gives {video} the number {given}, expected an array [length, width], or NaN where it is missing.")
    return given


def _arrays(given: Any, video: str, path: Path) -> list[np.ndarray]:
    if not isinstance(given, list | tuple) or not all(isinstance(one, np.ndarray) for one in given):
        raise DataError(f"{path} gives {video} no list of arrays, but one to others: expected an array a caption.")
    return list(given)


def _captions(given: Any, video: str, path: Path) -> list[str]:
    if not isinstance(given, list | tuple):
        raise DataError(f"{path} gives {video} a {type(given).__name__}, but captions to others: expected a list of them.")
    return [_caption(caption, video, path) for caption in given]


def _caption(given: Any, video: str, path: Path) -> str:
    words = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(word, str | bytes) for word in words):
        raise DataError(f"{path} has a caption of {video} that is no text: expected a sentence, or a list of its words.")
    caption = " ".join(word if isinstance(word, str) else word.decode("latin1") for word in words)
    if not is_unicode(caption):
        raise DataError(f"{path} has a caption of {video} that holds half a character: mend it there.")
    return caption


def _number(given: Any, video: str, path: Path) -> int:
    if type(given) is not int or given < 0:
        raise DataError(f"{path} gives {video} no number of a caption: expected a whole number from 0 up.")
    return given
