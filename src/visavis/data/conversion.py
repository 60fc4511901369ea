"""Published features of videos, as pickles or one ``.h5`` a video, into stores and lists that training reads.

The folder that is written holds ``experts/`` (a store of experts), ``texts/NAME/`` (stores of features of captions) and
``dataset_NAME.json`` (lists in Karpathy's layout, one for each way to divide the videos), as far as the sources have what goes there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from visavis import storage
from visavis.data.description import Description
from visavis.data.experts import NAME, new_experts
from visavis.data.features import FeatureWriter
from visavis.data.hdf5 import ENDINGS, VideoFiles
from visavis.data.msrvtt import captions_and_splits
from visavis.data.partitions import Division, Lists, is_list
from visavis.data.plain_pickle import read_plain_pickle
from visavis.data.published_values import Values, is_missing
from visavis.data.reading import find_file
from visavis.errors import DataError
from visavis.progress import Progress, Silent
from visavis.types import Encoded

_PICKLES = (".pkl", ".pickle", ".npy")
_TEXTS_AT_ONCE = 512


@dataclass(frozen=True)
class Converted:
    """What was written to ``folder``. experts: of each its width and how many of the videos have it. lists, texts: their names."""

    folder: Path
    videos: int
    captions: int
    experts: dict[str, tuple[int, int]] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        experts = {name: {"width": width, "videos": videos} for name, (width, videos) in self.experts.items()}
        return {**asdict(self), "folder": str(self.folder), "experts": experts}


def convert_features(sources: Sequence[str | Path], out: str | Path, progress: Progress | None = None) -> Converted:
    """Read all sources, and write one folder as a whole, or nothing.

    sources: each ``PATH``, or ``NAME=PATH`` to name an expert otherwise than its file: pickles, ``.npy`` of objects, ``.h5`` of a video
    or a folder of them, a ``.json`` of MSR-VTT, and lists of videos such as ``train_list.txt``. Nothing in them is run. Raises RefusedOverwrite if ``out``
    holds anything, DataError for what cannot be understood, MissingExtra for .h5 without h5py.
    """
    if not sources:
        raise DataError("there is nothing to convert: name pickles, .npy of objects, .h5 files or a folder of them, and lists of videos.")
    progress = progress or Silent()
    out, values, lists, videos = Path(out), Values(), Lists(), list[VideoFiles]()
    if out.exists():
        storage.new_folder(out, replaced=True)
    marks: dict[str, str] = {}
    for number, source in enumerate(sources):
        name, path = _named(source)
        if path.is_dir() or path.name.endswith(ENDINGS):
            videos.append(VideoFiles.open(path, lambda done, total: progress.work("files of videos", done, total, 0.0)))
            values.add_captions(videos[-1].captions, path)
        elif is_list(path):
            lists.add(path)
        elif path.name.endswith(".json"):
            captions, splits = captions_and_splits(path)
            values.add_captions(captions, path)
            values.add_splits(splits, path)
        elif path.name.endswith(_PICKLES):
            values.add(read_plain_pickle(path), name, path)
            marks[name] = storage.content_hash(path)
        else:
            known = ", ".join((*_PICKLES, *ENDINGS, "a .json of MSR-VTT"))
            raise DataError(f"{path} cannot be converted: expected {known}, or a list of videos such as train_list.txt.")
        progress.work("sources", number + 1, len(sources), 0.0)
    with storage.replacing_folder(out) as part:
        experts = _write_experts(part / "experts", values, videos, progress)
        texts = tuple(_write_texts(part / "texts" / name, name, marks[name], values, progress) for name in values.texts)
        written = _write_lists(part, out.resolve().name, values, lists)
        if not (experts or texts or written):
            raise DataError(
                "the sources say which caption of a video counts, and hold no features, captions or lists: give the files they belong to."
            )
        named = {*values.captions, *(v for table in values.experts.values() for v in table), *(v for files in videos for v in files.paths)}
    return Converted(out, len(named), sum(map(len, values.captions.values())), experts, texts, written)


def _named(source: str | Path) -> tuple[str, Path]:
    """A source by its own name, or by the one before "="."""
    text = str(source)
    name, equals, rest = text.partition("=")
    named = equals and not Path(text).exists()
    path = find_file(rest if named else text)
    name = name if named else re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)
    if not NAME.fullmatch(name):
        raise DataError(
            f"{text} would be called {name!r}: expected NAME=PATH, the name of letters, digits, . _ - and beginning with one of the first two."
        )
    return name, path


def _write_experts(folder: Path, values: Values, videos: list[VideoFiles], progress: Progress) -> dict[str, tuple[int, int]]:
    """The store of all experts; for each its width, and how many videos have it."""
    widths = {name: _width(table) for name, table in values.experts.items()}
    for files in videos:
        if twins := widths.keys() & files.widths.keys():
            raise DataError(f"the expert {min(twins)} comes from two sources: name one of them otherwise, by NAME=PATH.")
        widths |= files.widths
    if not widths:
        return {}
    told = dict.fromkeys([*(video for table in values.experts.values() for video in table), *(v for files in videos for v in files.paths)])
    names = list(told | dict.fromkeys(values.captions))
    if silent := names[len(told) :]:
        if not told.keys() & values.captions.keys():
            raise DataError(f"no expert has any of the videos that have captions, such as {silent[0]}: they do not go by the same names.")
        progress.say(f"no expert has anything of {len(silent):,} videos that have captions, such as {silent[0]}: all are missing there.")
    having = dict.fromkeys(widths, 0)
    with new_experts(folder, widths) as store:
        for number, video in enumerate(names, 1):
            parts = {name: table.get(video) for name, table in values.experts.items()}
            for files in videos:
                parts |= {name: None if is_missing(part) else part for name, part in files.read(video).items()}
            store.append(video, parts)
            for name, part in parts.items():
                having[name] += part is not None
            progress.work("videos", number, len(names), 0.0)
    return {name: (width, having[name]) for name, width in widths.items()}


def _width(table: dict[str, np.ndarray | None]) -> int:
    return next((int(array.shape[-1]) for array in table.values() if array is not None), 1)


def _write_texts(folder: Path, name: str, mark: str, values: Values, progress: Progress) -> str:
    """A store of features of captions, words by words, each caption once."""
    features: dict[str, np.ndarray] = {}
    for video, arrays in values.texts[name].items():
        captions = values.captions.get(video, [])
        if len(captions) != len(arrays):
            raise DataError(
                f"the features {name} are of {len(arrays)} captions of {video}, of which {len(captions)} are here: give the captions they are of."
            )
        for caption, array in zip(captions, arrays, strict=True):
            features.setdefault(caption, array)
    width = next(iter(features.values())).shape[-1]
    for caption, array in features.items():
        if array.ndim != 2 or array.shape[1] != width or not len(array) or array.dtype.kind != "f":
            raise DataError(
                f"the features {name} of the caption {caption[:60]!r} are {array.dtype} of shape {list(array.shape)}, expected [words, {width}]."
            )
        if not np.abs(array).max() < np.finfo(np.float16).max:
            raise DataError(f"the features {name} of the caption {caption[:60]!r} hold a value that is not finite, or beyond float16.")
    lengths = np.array([len(array) for array in features.values()])
    description = Description("text", "words", name, mark, (width,), len(features), fingerprint="")
    writer = FeatureWriter.open(folder, description, list(features), lengths)
    for block in _blocks(list(features.values())):
        writer.append(block)
        progress.work(f"captions of {name}", writer.done, len(features), 0.0)
    writer.finish()
    return name


def _blocks(arrays: list[np.ndarray]) -> Iterator[Encoded]:
    for start in range(0, len(arrays), _TEXTS_AT_ONCE):
        words = [torch.from_numpy(array.astype(np.float32)) for array in arrays[start : start + _TEXTS_AT_ONCE]]
        yield Encoded(
            pad_sequence(words, batch_first=True), pad_sequence([torch.ones(len(one), dtype=torch.bool) for one in words], batch_first=True)
        )


def _write_lists(folder: Path, name: str, values: Values, lists: Lists) -> tuple[str, ...]:
    """A list for each way to divide the videos: by lists, else as a file of captions does; one without splits where none does."""
    own = values.splits if len(set(values.splits.values())) > 1 else None
    divisions = lists.divisions() or ([Division("", own)] if values.captions else [])
    files = {f"dataset_{name}{division.ending}.json": division for division in divisions}
    for file, division in files.items():
        storage.write_json(folder / file, division.karpathy_list(values.captions, values.caption_numbers))
    return tuple(files)
