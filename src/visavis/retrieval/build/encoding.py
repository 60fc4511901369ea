"""Encode files to items with vectors, in this process or on a Ray cluster with the same result."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import unit_rows
from visavis.core.errors import DataError, MissingExtra
from visavis.core.progress import ItemCounter, Progress, StageClock
from visavis.data.capture_time import TAKEN, file_times, takeout_times
from visavis.data.image_hashes import dhash
from visavis.data.images import ImageError, decode_image, read_times
from visavis.data.parallel import Engine, map_in_order, map_on_ray
from visavis.data.video import MAX_FRAMES_PER_VIDEO, VideoError, open_frames, recording_time
from visavis.data.workers import choose_readers, read_in_workers
from visavis.models.encoders.preprocessing import ImageConverter
from visavis.models.inference import OnBatch
from visavis.models.retriever import Retriever
from visavis.retrieval.build.given_vectors import VectorFile
from visavis.retrieval.items import IndexItem, ItemKind
from visavis.retrieval.source_files import SourceFile
from visavis.retrieval.stores.base import ItemVectors, VectorSets

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


FRAMES_PER_SECOND = 1.0
"""Frame rate at which an image model encodes clips."""
READ_AHEAD = 32
"""Files that are encoded at once, and files that are decoded ahead of them."""
SHARD_SIZE = 256
"""Files that are encoded and stored at once. A killed process loses the shards in progress."""
CLIPS_PER_SHARD = 8
"""Maximum number of clips of a shard. A clip may take as long as thousands of images."""


@dataclass(frozen=True)
class UnreadableFile:
    """A file that was not encoded.

    Attributes:
        problem: A sentence.
        is_damaged: Whether its content is at fault, and not its permissions, its drive, a missing
            package or a lack of memory.
    """

    problem: str
    is_damaged: bool


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
    unreadable: dict[str, UnreadableFile]


@dataclass(frozen=True)
class _DecodedFile:
    """An image, as pixels if the model converts single images, and its file when it was read."""

    file: SourceFile
    content_hash: str
    image_hash: str
    times: Mapping[str, str]
    image: PILImage | None = None
    pixels: Tensor | None = None


# Not a tuple, whose members the loader would pin one by one.
@dataclass(frozen=True)
class _DecodedBatch:
    """Files that a worker has read, with one tensor of all pixels, which needs one open file in
    transit.
    """

    files: list[_DecodedFile | UnreadableFile]
    pixels: Tensor

    def pin_memory(self) -> _DecodedBatch:
        """Pin the pixels only."""
        return replace(self, pixels=self.pixels.pin_memory())


@dataclass(frozen=True)
class _FileReader:
    """Reads and decodes image files, in this process or in a worker.

    Attributes:
        min_side: Shorter side that a JPEG keeps, as for ``decode_image``.
        converter: Converts images to pixels. None: images stay as they are.
        batch_size: Number of images that a worker reads at once.
    """

    min_side: int
    converter: ImageConverter | None
    batch_size: int

    @classmethod
    def of_model(cls, model: Retriever) -> _FileReader:
        """Read what a model encodes. A missing encoder is an error here, and not a problem of each
        file.
        """
        processor = model.processor
        converter = processor.preprocess.to_bytes if processor.converts_single_images else None
        # An image with ten crops takes the memory of ten images.
        batch_size = max(1, READ_AHEAD // processor.visual_spec.crops)
        return cls(processor.min_side, converter, batch_size)

    def read_images(
        self, files: Sequence[SourceFile], device: torch.device, workers: int | None
    ) -> Iterator[_DecodedFile | UnreadableFile]:
        """Read image files ahead, in their order."""
        workers = choose_readers(workers, device, len(files))
        if not workers or self.converter is None:
            yield from map_in_order(self, files, ahead=READ_AHEAD)
            return
        batches = (
            files[start : start + self.batch_size]
            for start in range(0, len(files), self.batch_size)
        )
        for batch in read_in_workers(self._read_batch, batches, workers):
            rows = iter(batch.pixels.split(1))
            yield from (
                replace(each, pixels=next(rows)) if isinstance(each, _DecodedFile) else each
                for each in batch.files
            )

    def _read_batch(self, files: Sequence[SourceFile]) -> _DecodedBatch:
        """Read files in a worker."""
        decoded_files = list(map(self, files))
        pixels = list[Tensor]()
        for number, each in enumerate(decoded_files):
            if isinstance(each, _DecodedFile) and each.pixels is not None:
                pixels.append(each.pixels)
                decoded_files[number] = replace(each, pixels=None)
        return _DecodedBatch(decoded_files, torch.cat(pixels) if pixels else torch.empty(0))

    def __call__(self, file: SourceFile) -> _DecodedFile | UnreadableFile:
        """Read a file. Returns its problem if it cannot be read."""
        try:
            return file.read_unchanged(self._decode)
        except (DataError, MissingExtra) as error:
            return _unreadable(error)

    def _decode(self, file: SourceFile) -> _DecodedFile:
        """Read and decode a file."""
        content = file.location.read()
        image = decode_image(content, file.path, min_side=self.min_side, allow_animated=True)
        times = _known_times(file_times(image.info), file)
        values = file, hashlib.sha256(content).hexdigest()[:32], dhash(image), times
        if self.converter is None:
            return _DecodedFile(*values, image)
        return _DecodedFile(*values, pixels=self.converter([image]))


def _add(on_files: Callable[[int], None], start: int, done: int, _total: int = 0) -> None:
    """Report files after those that were encoded before."""
    on_files(start + done)


def _unreadable(error: DataError | MissingExtra) -> UnreadableFile:
    return UnreadableFile(str(error), isinstance(error, ImageError | VideoError))


def encode_shard(
    model: Retriever,
    files: Sequence[SourceFile],
    moment_seconds: float,
    decoded_images: Iterator[_DecodedFile | UnreadableFile] | None = None,
    on_files: Callable[[int], None] = lambda _: None,
    clock: StageClock | None = None,
) -> EncodedShard:
    """Encode each image as an item, and each clip as an item for the whole and one for each of its
    moments.
    """
    clock = clock or StageClock()
    rows = list[tuple[IndexItem, Tensor]]()
    unreadable = dict[str, UnreadableFile]()
    reader, image_files, clips = _FileReader.of_model(model), *_separate_clips(files)
    # A caller with several shards passes images that are read ahead. Else threads read them here.
    decoded_images = decoded_images or reader.read_images(image_files, model.device, workers=0)
    for start in range(0, len(image_files), READ_AHEAD):
        batch = image_files[start : start + READ_AHEAD]
        with clock.stage("reading"):
            decoded_batch = list(zip(batch, islice(decoded_images, len(batch)), strict=True))
        unreadable |= {
            file.path: decoded
            for file, decoded in decoded_batch
            if isinstance(decoded, UnreadableFile)
        }
        if images := [decoded for _, decoded in decoded_batch if isinstance(decoded, _DecodedFile)]:
            vectors = _image_vectors(model, images, partial(_add, on_files, start))
            rows += [
                (
                    _item(each.file, each.content_hash, "image", each.image_hash, each.times),
                    vector,
                )
                for each, vector in zip(images, vectors, strict=True)
            ]
    for number, file in enumerate(clips, len(image_files)):
        on_files(number)
        try:
            rows += file.read_unchanged(partial(_encode_clip, model, moment_seconds=moment_seconds))
        except (DataError, MissingExtra) as error:
            unreadable[file.path] = _unreadable(error)
    # In the order of keys: images are encoded before clips.
    rows.sort(key=lambda row: row[0].key)
    arrays = [vector.numpy() for _, vector in rows]
    joined = (
        VectorSets.from_arrays(arrays)
        if arrays and arrays[0].ndim > 1
        else np.array(arrays, np.float32)
    )
    return EncodedShard(tuple(item for item, _ in rows), joined, unreadable)


def _image_vectors(
    model: Retriever, images: Sequence[_DecodedFile], on_progress: OnBatch
) -> list[Tensor]:
    """The vectors of decoded images."""
    if isinstance(model, VectorFile):
        return model.vectors_of([each.file for each in images])
    pixels = [each.pixels for each in images if each.pixels is not None]
    if pixels:
        return model.item_vectors(model.encode_pixels(pixels, len(pixels), on_progress))
    opened = [each.image for each in images if each.image]
    return model.item_vectors(model.encode_visual(opened, on_progress))


def _separate_clips(files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """Divide files into images and clips."""
    return [file for file in files if not file.is_video], [file for file in files if file.is_video]


def _encode_clip(
    model: Retriever, file: SourceFile, *, moment_seconds: float
) -> list[tuple[IndexItem, Tensor]]:
    """The whole clip, then its moments, each from its start to just before its end. Memory holds
    the pixels of one section.
    """
    if isinstance(model, VectorFile):
        [vector] = model.vectors_of([file])
        return [
            (_item(file, file.location.content_hash, "video", "", read_file_times(file)), vector)
        ]
    # A video model has a rate of its own. An image model encodes one frame per second, and the
    # vector of a span is the mean of its frames, for each region of a late-interaction model.
    rate = model.processor.frames_per_second or FRAMES_PER_SECOND
    # At least one frame, also for moments shorter than the time between two frames.
    per_moment = max(1, round(moment_seconds * rate))
    content_hash = file.location.content_hash
    hashes = dict[int, str]()
    with file.location.open() as source:
        times = _clip_times(source, file)
    # Vector and number of frames of each part of a span.
    parts = defaultdict[range, list[tuple[Tensor, int]]](list)
    with file.location.open() as source, open_frames(source, file.path, rate) as (count, frames):
        whole = range(count)
        # A single moment would repeat the item of the whole clip.
        moments = _split(whole, per_moment) if count > per_moment else []
        hashed = {_middle(span) for span in (whole, *moments)}
        frames = _hash_frames(frames, hashed, hashes)
        # A video model encodes the frames of a span together, but only within a section. The vector
        # of a longer span is the mean of its parts.
        for section in _sections(whole, per_moment):
            spans = [
                whole,
                *moments[section.start // per_moment : math.ceil(section.stop / per_moment)],
            ]
            pieces = [
                range(max(span.start, section.start), min(span.stop, section.stop))
                for span in spans
            ]
            offsets = [
                slice(piece.start - section.start, piece.stop - section.start) for piece in pieces
            ]
            vectors = _encode_section(model, islice(frames, len(section)), len(section), offsets)
            for span, piece, vector in zip(spans, pieces, vectors, strict=True):
                # A moment that a section cuts has several parts, which are averaged at the end.
                parts[span].append((vector, len(piece)))
    rows = list[tuple[IndexItem, Tensor]]()
    for span in (whole, *moments):
        bounds = () if span == whole else (span.start / rate, float(math.ceil(span.stop / rate)))
        kind: ItemKind = "moment" if bounds else "video"
        item = _item(file, content_hash, kind, hashes[_middle(span)], times, *bounds)
        rows.append((item, _join(model, parts[span])))
    return rows


def _split(span: range, size: int) -> list[range]:
    return [span[start : start + size] for start in range(0, len(span), size)]


def _middle(span: range) -> int:
    return span[len(span) // 2]


def _sections(whole: range, per_moment: int) -> list[range]:
    """Divide a clip into parts of at most ``MAX_FRAMES_PER_VIDEO`` frames, which end where moments
    end, or are a part of one.
    """
    if len(whole) <= MAX_FRAMES_PER_VIDEO:
        return [whole]
    several_moments = MAX_FRAMES_PER_VIDEO // per_moment * per_moment
    return [
        section
        for block in _split(whole, several_moments or per_moment)
        for section in _split(block, MAX_FRAMES_PER_VIDEO)
    ]


def _hash_frames(
    frames: Iterable[PILImage], hashed: set[int], hashes: dict[int, str]
) -> Iterator[PILImage]:
    """Yield frames, and store the hashes of some of them."""
    for number, frame in enumerate(frames):
        if number in hashed:
            hashes[number] = dhash(frame)
        yield frame


def _encode_section(
    model: Retriever, frames: Iterator[PILImage], count: int, pieces: Sequence[slice]
) -> list[Tensor]:
    """Encode pieces of a section. An image model returns the mean of their frames."""
    processor = model.processor
    if processor.converts_single_images:
        pixels = (processor.preprocess.to_bytes([frame]) for frame in frames)
        if processor.frames_per_second:
            clip = torch.cat(list(pixels))
            # The longest piece is encoded alone, so that shorter ones are not padded to its length.
            first, *others = (clip[piece] for piece in pieces)
            encoded = [
                model.encode_pixels(clips, len(clips)) for clips in ([first], others) if clips
            ]
            return [vector for batch in encoded for vector in model.item_vectors(batch)]
        vectors = model.item_vectors(model.encode_pixels(pixels, count))
    else:
        batches = iter(lambda: list(islice(frames, model.batch_size)), [])
        vectors = []
        for batch in batches:
            vectors += model.item_vectors(model.encode_visual(batch))
    return [torch.stack(vectors[piece]).mean(0) for piece in pieces]


def _join(model: Retriever, parts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return the unit vector of a span from its parts."""
    if len(parts) == 1:
        [(vector, _)] = parts
        return vector if model.processor.frames_per_second else unit_rows(vector)
    # Weighted by frames, so that a short last part counts as little as it shows.
    return unit_rows(torch.stack([vector * length for vector, length in parts]).sum(0))


def _item(
    file: SourceFile,
    content_hash: str,
    kind: ItemKind,
    frame_hash: str,
    times: Mapping[str, str],
    start: float | None = None,
    end: float | None = None,
) -> IndexItem:
    return IndexItem(
        key=file.path if start is None else f"{file.path}#t={start:g},{end:g}",
        path=file.path,
        kind=kind,
        content=content_hash,
        size=file.size,
        modified_ns=file.modified_ns,
        start=start,
        end=end,
        dhash=frame_hash,
        metadata=with_file_times(file.metadata, times),
    )


def with_file_times(metadata: Mapping[str, str], times: Mapping[str, str]) -> Mapping[str, str]:
    """Add the capture time of a file to the metadata of its item, unless a table contains one."""
    return metadata if TAKEN in metadata else {**times, **metadata}


def read_file_times(file: SourceFile) -> Mapping[str, str]:
    """Read the capture time of a file that is encoded already, as ``exif_times``. Empty: it has
    none, or cannot be read.
    """
    with suppress(DataError, MissingExtra):
        if not file.is_video:
            return _known_times(read_times(file.location.read(), file.path), file)
        with file.location.open() as source:
            return _clip_times(source, file)
    return {}


def _clip_times(source: BinaryIO, file: SourceFile) -> Mapping[str, str]:
    """The capture time of an opened clip, as ``exif_times``."""
    taken = recording_time(source, file.path)
    return _known_times({TAKEN: taken} if taken else {}, file)


def read_source_times(file: SourceFile) -> Mapping[str, str]:
    """Read the capture time of a file in other files that may have it. Empty: none has it."""
    for place in file.time_sources:
        with suppress(DataError, MissingExtra):
            content = place.read()
            is_json = place.path.suffix.lower() == ".json"
            found = takeout_times(content) if is_json else read_times(content, str(place.path))
            if TAKEN in found:
                return found
    return {}


def _known_times(times: Mapping[str, str], file: SourceFile) -> Mapping[str, str]:
    """The capture time of a file, or of another file that has it."""
    if TAKEN in times or TAKEN in file.metadata:
        return times
    return read_source_times(file) or times


def encode_in_shards(
    engine: Engine,
    workers: int | None,
    model_name: str,
    model: Retriever,
    files: Sequence[SourceFile],
    moment_seconds: float,
    progress: Progress,
    clock: StageClock,
) -> Iterator[tuple[Sequence[SourceFile], EncodedShard]]:
    """Encode files in shards of ``SHARD_SIZE``. Ray yields shards in the order in which they are
    finished.
    """
    shards = divide_into_shards(files)
    # Vectors of a file are read where the file is.
    if engine == "local" or isinstance(model, VectorFile):
        # One reader for all shards reads the next shard while this one is encoded.
        decoded_images = _FileReader.of_model(model).read_images(
            _separate_clips(files)[0], model.device, workers
        )
        count = ItemCounter(progress, "files", len(files))
        num_done = 0
        for shard in shards:
            on_files = partial(_add, count, num_done)
            yield shard, encode_shard(model, shard, moment_seconds, decoded_images, on_files, clock)
            num_done += len(shard)
    else:
        full_decoding = model.processor.visual_spec.full_decoding
        arguments = (model_name, model.embedding_dim, full_decoding, moment_seconds)
        # Processes of a cluster may run in another working directory.
        jobs = [
            (
                number,
                [
                    replace(file, place=replace(file.location, path=file.location.path.absolute()))
                    for file in shard
                ],
            )
            for number, shard in enumerate(shards)
        ]
        for number, shard in map_on_ray(
            RayEncoder, arguments, jobs, workers=workers, action="indexing", ordered=False
        ):
            yield shards[number], shard


def divide_into_shards(files: Sequence[SourceFile]) -> list[list[SourceFile]]:
    """Divide files, in their order, into shards that take similar times."""
    shards = list[list[SourceFile]]()
    num_clips = 0
    for file in files:
        is_full = not shards or len(shards[-1]) == SHARD_SIZE
        if is_full or (file.is_video and num_clips == CLIPS_PER_SHARD):
            shards.append([])
            num_clips = 0
        shards[-1].append(file)
        num_clips += file.is_video
    return shards


class RayEncoder:
    """Ray actor that encodes shards with its own copy of the model.

    Args:
        model: Location of the model.
        embedding_dim: Matryoshka dimension of the vectors. None: all dimensions.
        full_decoding: Whether JPEG files are decoded in full.
        moment_seconds: Length of a moment in seconds.
    """

    def __init__(
        self, model: str, embedding_dim: int | None, full_decoding: bool, moment_seconds: float
    ):
        retriever = Retriever.load(model)
        retriever = retriever.with_full_decoding() if full_decoding else retriever
        self.model = (
            retriever if embedding_dim is None else retriever.with_embedding_dim(embedding_dim)
        )
        self.moment_seconds = moment_seconds

    def encode(self, number: int, files: Sequence[SourceFile]) -> tuple[int, EncodedShard]:
        """Encode a shard. Its number identifies it, because shards are finished in any order."""
        return number, encode_shard(self.model, files, self.moment_seconds)
