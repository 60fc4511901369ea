"""Encode files to items with vectors, in this process or on a Ray cluster with the same result."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from visavis.data.images import decode_image, dhash
from visavis.data.parallel import Engine, map_in_order, map_on_ray
from visavis.data.video import read_frames
from visavis.errors import DataError, MissingExtra
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.retrieval.index_folder import SkippedFile
from visavis.retrieval.items import IndexItem, ItemKind
from visavis.retrieval.source_files import SourceFile
from visavis.retrieval.stores.vector_sets import ItemVectors, VectorSets
from visavis.types import unit_rows

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


FRAMES_PER_SECOND = 1.0
"""Frame rate at which an image model encodes clips."""
READ_AHEAD = 32
"""Files that are encoded at once, and files that are decoded ahead of them."""
SHARD_SIZE = 256
"""Files that are encoded and stored at once. A killed process loses the shards in progress."""


@dataclass(frozen=True)
class EncodedShard:
    """Result of encoding some files.

    Attributes:
        items: Items in the order of keys.
        vectors: Their vectors, shape ``[N, D]``, or several per item.
        unreadable: Files that cannot be read, by path.
    """

    items: tuple[IndexItem, ...]
    vectors: ItemVectors
    unreadable: dict[str, SkippedFile]


@dataclass(frozen=True)
class _DecodedFile:
    file: SourceFile
    content_hash: str
    frames: list[PILImage]
    frames_per_second: float
    first_hash: str


def encode_shard(model: Retriever, files: Sequence[SourceFile], moment_seconds: float) -> EncodedShard:
    """Encode each image as an item, and each clip as an item for the whole and one for each of its moments.

    An image model encodes one frame per second. The vector of a clip or moment is the mean of its frames, for each region of a
    late-interaction model. A video model encodes the frames of a clip or moment together. A clip that is not longer than a moment has no moments.

    Args:
        model: Model with one vector per item, or a late-interaction model.
        files: Files to encode.
        moment_seconds: Length of a moment in seconds.

    Returns:
        Items and vectors, and the files that cannot be read.
    """
    rows, unreadable = list[tuple[IndexItem, Tensor]](), dict[str, SkippedFile]()
    image_files, clips = ([file for file in files if file.is_video == is_video] for is_video in (False, True))
    decoded_images = map_in_order(lambda file: (file, _decode(file, model.processor)), image_files, ahead=READ_AHEAD)
    while batch := list(islice(decoded_images, READ_AHEAD)):
        unreadable |= {file.path: decoded for file, decoded in batch if isinstance(decoded, tuple)}
        if images := [decoded for _, decoded in batch if isinstance(decoded, _DecodedFile)]:
            vectors = model.item_vectors(model.encode_visual([image.frames[0] for image in images]))
            rows += [(_item(image, "image", image.first_hash), vector) for image, vector in zip(images, vectors, strict=True)]
    for file in clips:
        clip = _decode(file, model.processor)
        if isinstance(clip, tuple):
            unreadable[file.path] = clip
        else:
            rows += _encode_clip(model, clip, moment_seconds)
    rows.sort(key=lambda row: row[0].key)
    arrays = [vector.numpy() for _, vector in rows]
    joined = VectorSets.from_arrays(arrays) if arrays and arrays[0].ndim > 1 else np.array(arrays, np.float32)
    return EncodedShard(tuple(item for item, _ in rows), joined, unreadable)


def _decode(file: SourceFile, processor: Processor) -> _DecodedFile | SkippedFile:
    """The frames of a file and their hashes, or the problem that prevents reading it."""
    # Outside the try statement: a missing encoder is not a problem of the file.
    frames_per_second, min_side = processor.frames_per_second or FRAMES_PER_SECOND, processor.min_side
    try:
        content = file.location.read()
        if file.is_video:
            frames = read_frames(content, file.path, frames_per_second)
        else:
            frames = [decode_image(content, file.path, min_side=min_side, allow_animated=True)]
    except (DataError, MissingExtra) as error:
        return file.size, file.modified_ns, str(error)
    return _DecodedFile(file, hashlib.sha256(content).hexdigest()[:32], frames, frames_per_second, dhash(frames[0]))


def _encode_clip(model: Retriever, clip: _DecodedFile, moment_seconds: float) -> list[tuple[IndexItem, Tensor]]:
    """The whole clip, then its moments, each from its start to just before its end."""
    frames, rate = clip.frames, clip.frames_per_second
    frames_per_moment = max(1, round(moment_seconds * rate))
    starts = range(0, len(frames), frames_per_moment) if len(frames) > frames_per_moment else ()
    moments = [range(start, min(start + frames_per_moment, len(frames))) for start in starts]
    spans = [range(len(frames)), *moments]
    if model.processor.frames_per_second:
        vectors = model.item_vectors(model.encode_visual([[frames[i] for i in span] for span in spans]))
    else:
        frame_vectors = torch.stack(model.item_vectors(model.encode_visual(frames)))
        vectors = [unit_rows(frame_vectors[list(span)].mean(0)) for span in spans]
    items = [_item(clip, "video", dhash(frames[len(frames) // 2]))]
    items += [
        _item(clip, "moment", dhash(frames[span[len(span) // 2]]), span.start / rate, float(math.ceil(span.stop / rate)))
        for span in moments
    ]
    return list(zip(items, vectors, strict=True))


def _item(decoded: _DecodedFile, kind: ItemKind, frame_hash: str, start: float | None = None, end: float | None = None) -> IndexItem:
    file = decoded.file
    return IndexItem(
        key=file.path if start is None else f"{file.path}#t={start:g},{end:g}",
        path=file.path,
        kind=kind,
        content=decoded.content_hash,
        size=file.size,
        modified_ns=file.modified_ns,
        start=start,
        end=end,
        dhash=frame_hash,
        metadata=file.metadata,
    )


def encode_in_shards(
    engine: Engine, workers: int, model_name: str, model: Retriever, files: Sequence[SourceFile], moment_seconds: float
) -> Iterator[tuple[Sequence[SourceFile], EncodedShard]]:
    """Encode files in shards of ``SHARD_SIZE``.

    Args:
        engine: ``"local"``, or ``"ray"`` for the processes of a Ray cluster.
        workers: Number of Ray processes.
        model_name: Location of the model, for Ray processes.
        model: The model.
        files: Files to encode.
        moment_seconds: Length of a moment in seconds.

    Yields:
        The files of a shard and their items. Ray yields shards in the order in which they are finished.

    Raises:
        VisavisError: If ``workers`` is invalid.
        MissingExtra: If Ray is not installed.
    """
    shards = [files[start : start + SHARD_SIZE] for start in range(0, len(files), SHARD_SIZE)]
    if engine == "local":
        yield from ((shard, encode_shard(model, shard, moment_seconds)) for shard in shards)
    else:
        full_decoding = model.processor.visual_spec.full_decoding
        arguments = (model_name, model.embedding_dim, full_decoding, moment_seconds)
        jobs = list(enumerate(map(_with_absolute_paths, shards)))
        for number, shard in map_on_ray(RayEncoder, arguments, jobs, workers=workers, action="indexing", ordered=False):
            yield shards[number], shard


def _with_absolute_paths(files: Sequence[SourceFile]) -> list[SourceFile]:
    """The files with paths that hold in every working directory."""
    return [replace(file, location=replace(file.location, path=file.location.path.absolute())) for file in files]


class RayEncoder:
    """Ray actor that encodes shards with its own copy of the model.

    Args:
        model: Location of the model.
        embedding_dim: Matryoshka dimension of the vectors. None: all dimensions.
        full_decoding: Whether JPEG files are decoded in full.
        moment_seconds: Length of a moment in seconds.
    """

    def __init__(self, model: str, embedding_dim: int | None, full_decoding: bool, moment_seconds: float):
        retriever = Retriever.load(model)
        retriever = retriever.with_full_decoding() if full_decoding else retriever
        self.model = retriever if embedding_dim is None else retriever.with_embedding_dim(embedding_dim)
        self.moment_seconds = moment_seconds

    def encode(self, number: int, files: Sequence[SourceFile]) -> tuple[int, EncodedShard]:
        """Encode a shard.

        Args:
            number: Number of the shard.
            files: Its files.

        Returns:
            Number of the shard, and its items.
        """
        return number, encode_shard(self.model, files, self.moment_seconds)
