"""From a shard of files to items with vectors; the same files give the same rows, whoever computes them."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image as Pillow
from torch import Tensor

from visavis.data.clips import clip_frames
from visavis.data.looks import look
from visavis.data.pictures import open_picture
from visavis.errors import DataError, MissingExtra
from visavis.models.retriever import Retriever
from visavis.retrieval.item import Item, Kind
from visavis.retrieval.sources import File

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FRAMES_PER_SECOND = 1.0
"""How often a model of pictures looks at a clip."""
READERS, AT_ONCE = 4, 32
"""Threads that decode, and how many pictures are held at once."""


@dataclass(frozen=True)
class Shard:
    """Rows for a store, and a sentence for each file that cannot be read."""

    items: tuple[Item, ...]
    vectors: np.ndarray
    bad: dict[str, str]


@dataclass(frozen=True)
class _Read:
    file: File
    content: str
    pictures: list[Picture]
    rate: float


def encode_shard(model: Retriever, files: Sequence[File], moments_s: float) -> Shard:
    """Every picture as an item; every clip as an item for the whole, and one for each of its moments where it is longer than one.

    moments_s: the seconds of a moment. A model of pictures looks at one frame a second, and a clip or moment is the mean of its frames;
    a model of clips reads them itself.
    """
    rows, bad = list[tuple[Item, Tensor]](), dict[str, str]()
    stills = [file for file in files if not file.is_video]
    for read in _ahead(stills, model.processor.frames_per_second):
        bad |= {path: trouble for path, trouble in read.items() if isinstance(trouble, str)}
        if good := [one for one in read.values() if isinstance(one, _Read)]:
            encoded = model.encode_images([one.pictures[0] for one in good])
            rows += [(_item(one, "image"), vector) for one, vector in zip(good, encoded, strict=True)]
    for file in files:
        if file.is_video:
            clip = _read(file, model.processor.frames_per_second)
            if isinstance(clip, str):
                bad[file.path] = clip
            else:
                rows += _clip(model, clip, moments_s)
    rows.sort(key=lambda row: row[0].key)
    vectors = torch.stack([vector for _, vector in rows]).float().numpy() if rows else np.empty((0, 0), np.float32)
    return Shard(tuple(item for item, _ in rows), vectors, bad)


def _ahead(files: Sequence[File], rate: float) -> Iterator[dict[str, _Read | str]]:
    """What a few files at a time hold, by path, read while the ones before are encoded."""
    with ThreadPoolExecutor(READERS) as pool:
        waiting: dict[str, Future[_Read | str]] = {}
        for start in range(0, len(files), AT_ONCE):
            reading = {file.path: pool.submit(_read, file, rate) for file in files[start : start + AT_ONCE]}
            if waiting:
                yield {path: future.result() for path, future in waiting.items()}
            waiting = reading
        yield {path: future.result() for path, future in waiting.items()}


def content_of(file: File) -> str:
    """A hash of a file's bytes. Raises DataError for one that cannot be read."""
    return file.bytes.content


def _read(file: File, rate: float) -> _Read | str:
    """The pictures of a file; a sentence that says why there are none."""
    rate = rate or FRAMES_PER_SECOND
    try:
        content = file.bytes.read()
        mark = hashlib.sha256(content).hexdigest()[:32]
        if not file.is_video:
            return _Read(file, mark, [open_picture(_first_page(content), file.path)], rate)
        return _Read(file, mark, clip_frames(content, file.path, rate), rate)
    except (DataError, MissingExtra) as error:
        return str(error)


def _first_page(content: bytes) -> bytes:
    """The first picture of an animated or paged one, which readers of training data refuse."""
    if not content.startswith((b"GIF8", b"RIFF", b"\x89PNG", b"II*\0", b"MM\0*")):
        return content
    try:
        with Pillow.open(io.BytesIO(content)) as picture:
            if getattr(picture, "n_frames", 1) == 1 or picture.width * picture.height > 64_000_000:
                return content
            picture.seek(0)
            kept = io.BytesIO()
            picture.convert("RGBA").save(kept, "PNG")
            return kept.getvalue()
    except Exception:  # noqa: BLE001 - what cannot be opened here is told by open_picture
        return content


def _clip(model: Retriever, read: _Read, moments_s: float) -> list[tuple[Item, Tensor]]:
    """The whole clip, then its moments, each of the frames from its start to just before its end."""
    frames, each = read.pictures, max(1, round(moments_s * read.rate))
    spans = [range(start, min(start + each, len(frames))) for start in range(0, len(frames), each)] if len(frames) > each else []
    groups = [range(len(frames)), *spans]
    if model.processor.frames_per_second:
        vectors = model.unit_rows(model.encode_visual([[frames[i] for i in group] for group in groups]))
    else:
        rows = model.encode_images(frames)
        vectors = torch.nn.functional.normalize(torch.stack([rows[list(group)].mean(0) for group in groups]), dim=1)
    items = [_item(read, "video", frames[len(frames) // 2])]
    for span in spans:
        start, end = span.start / read.rate, math.ceil(span.stop / read.rate)
        items.append(_item(read, "moment", frames[span[len(span) // 2]], start, float(end)))
    return list(zip(items, vectors, strict=True))


def _item(read: _Read, kind: Kind, picture: Picture | None = None, start: float | None = None, end: float | None = None) -> Item:
    file = read.file
    return Item(
        key=file.path if start is None else f"{file.path}#t={start:g},{end:g}",
        path=file.path,
        kind=kind,
        content=read.content,
        size=file.size,
        modified_ns=file.modified_ns,
        start=start,
        end=end,
        look=look(picture or read.pictures[0]),
        metadata=file.metadata,
    )
