"""Cached features: run a frozen encoder over all images or captions of a data set, once."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from visavis.core import storage
from visavis.core.encoded import Encoded, concatenate
from visavis.core.errors import SKIP_BAD_ADVICE, DataError, SpecError, VisavisError, log_debug
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.core.stopping import kept_if_stopped
from visavis.data.dataset import Dataset
from visavis.data.features.store import (
    VARIABLE_LENGTH_FILES,
    FeatureStore,
    FeatureWriter,
    StoreDescription,
    discard_store,
    read_description,
)
from visavis.data.image_file import Image
from visavis.data.parallel import Engine, cpu_cores, map_in_order, map_on_ray
from visavis.data.video import VideoError
from visavis.data.workers import choose_readers, read_in_workers
from visavis.models.batch_encoding import device_of, encode_batches
from visavis.models.device import choose_device, has_native_bfloat16
from visavis.models.encoders.cnn_backbones import SMALL_CNN
from visavis.models.encoders.encoder_spec import (
    EncoderSpec,
    current_preprocessing_config,
    image_converter,
)
from visavis.models.encoders.frozen_encoders import (
    CPU_IMAGE_BATCH_SIZE,
    FrozenEncoder,
    TextEncoder,
    VisualEncoder,
    open_encoder,
)
from visavis.models.encoders.preprocessing import ImageConverter
from visavis.models.encoders.pretrained_files import weights_checksum, weights_fingerprint

OnProgress = Callable[[int, int, float], None]
"""Callback with the number of finished items, of all items, and items per second since the start.
"""
# Seconds between saves, the most computation that is lost when the process is killed.
SAVE_INTERVAL_S = 1.0
# Default number of texts per batch.
TEXT_BATCH_SIZE = 64
# Default number of images per batch on a GPU, or of crops.
GPU_IMAGE_BATCH_SIZE = 64


def feature_store_folder(dataset: Dataset, spec: EncoderSpec) -> Path:
    """Return the default folder for the features of a data set, in the cache."""
    encoder = spec.name.replace("/", "--")
    if os.path.exists(spec.name):
        encoder = os.path.basename(os.path.realpath(spec.name))
    settings = "" if spec.crops == 1 else f"-{spec.crops}crops"
    settings += f"-{spec.frames_per_second:g}fps" if spec.frames_per_second else ""
    settings += "-random" if spec.random_crops else ""
    settings += f"-{spec.image_size}px" if spec.image_size else ""
    settings += f"-{spec.max_num_patches}patches" if spec.max_num_patches else ""
    settings += "-full" if spec.full_decoding else ""
    images = dataset.images if spec.side == "visual" else ()
    # Another folder for replaced images, unless they have exactly the same size in bytes, and for a
    # retrained encoder.
    sizes = [image.location.num_bytes for image in images if image.location is not None]
    # Features of earlier versions may show a TIFF turned twice.
    has_tiff = sizes and any(image.name.lower().endswith((".tif", ".tiff")) for image in images)
    decoding = " upright TIFF" if has_tiff else ""
    inputs = f"{sizes} {weights_fingerprint(spec.name)}{decoding}"
    inputs_hash = hashlib.sha256(inputs.encode()).hexdigest()[:8]
    name = (
        f"{dataset.name}-{dataset.fingerprint}-{encoder}-{spec.granularity}{settings}-{inputs_hash}"
    )
    folder = storage.cache_folder() / "features" / name
    # Another folder if the existing one was made with another preprocessing.
    preprocessing = json.dumps(current_preprocessing_config(spec))
    with suppress(VisavisError):
        if preprocessing not in ("null", json.dumps(read_description(folder).preprocessing)):
            digest = hashlib.sha256(preprocessing.encode()).hexdigest()[:8]
            return folder.with_name(f"{folder.name}-{digest}")
    return folder


def cache_features(
    dataset: Dataset,
    encoder: EncoderSpec | FrozenEncoder,
    folder: str | Path | None = None,
    *,
    batch_size: int | None = None,
    bfloat16: bool | None = None,
    engine: Engine = "local",
    workers: int | None = None,
    group: ProcessGroup = ONE_PROCESS,
    on_progress: OnProgress | None = None,
) -> FeatureStore:
    """Compute the features of all images, or of all different captions, that are not stored yet. A
    killed call resumes where it stopped.
    """
    if engine == "ray" and group.world_size > 1:
        raise VisavisError(
            f"engine: expected one process with a Ray cluster, got {group.world_size}. Start "
            "without torchrun."
        )
    spec = encoder if isinstance(encoder, EncoderSpec) else encoder.spec
    if spec.name == SMALL_CNN:
        raise SpecError(
            f"encoder: expected trained weights, got {spec.name}, which starts with random "
            "weights. Train it with visual.granularity=pixels."
        )
    is_default_folder = folder is None
    folder = feature_store_folder(dataset, spec) if folder is None else Path(folder)
    with ExitStack() as lock:
        with group.first_rank_first():
            finished, damage = None, ""
            # A complete store in the default folder needs no encoder. Damaged parts are
            # recomputed.
            if is_default_folder and isinstance(encoder, EncoderSpec):
                try:
                    is_stored = os.path.exists(folder / "features.json")
                    if is_stored and read_description(folder).complete:
                        finished = FeatureStore.open(folder)
                except storage.DamagedCacheError as reason:
                    damage = str(reason)
                if damage:
                    discard_store(folder, damage)
            if finished is None and group.is_first:
                # Another program may compute the same store.
                lock.enter_context(storage.folder_lock(folder, wait=True))
        # Rank 0 decides, because another program may finish the store in between.
        if group.broadcast_text("unfinished" if finished is None else "finished") == "finished":
            log_debug(__name__, "features of %s are read from %s", spec.name, folder)
            return FeatureStore.open(folder) if finished is None else finished
        if isinstance(encoder, EncoderSpec):
            encoder = open_encoder(encoder).to(choose_device())
        try:
            return _compute(
                dataset,
                encoder,
                folder,
                batch_size,
                bfloat16,
                on_progress,
                _BatchSharing(engine, workers, group),
            )
        except VideoError as error:
            raise DataError(
                f"{error} To continue without it, remove it from {dataset.name}. {SKIP_BAD_ADVICE}"
            ) from None


@dataclass(frozen=True)
class _ImageReader:
    """Reads and converts a batch of images in a worker process."""

    converter: ImageConverter

    def __call__(self, batch: Sequence[Image]) -> Encoded:
        return Encoded(self.converter([image.open(self.converter.min_side) for image in batch]))


class _BatchEncoder:
    """Encodes batches of images, clips or texts.

    Args:
        encoder: The encoder, or its specification in a Ray process.
        bfloat16: Whether to multiply in bfloat16.
    """

    def __init__(self, encoder: FrozenEncoder | EncoderSpec, bfloat16: bool):
        self.encoder = (
            open_encoder(encoder).to(choose_device())
            if isinstance(encoder, EncoderSpec)
            else encoder
        )
        self.spec = self.encoder.spec
        self.bfloat16 = bfloat16

    def read_batches(
        self, batches: Sequence[Sequence[Image | str]], workers: int | None
    ) -> Iterator[Encoded]:
        """Read and preprocess batches ahead."""
        workers = choose_readers(workers, self.device, sum(map(len, batches)))
        if not isinstance(self.encoder, VisualEncoder):
            # One thread, because a tokenizer is not thread-safe, and FFmpeg decodes a clip with
            # threads of its own.
            yield from map_in_order(self.read, batches, threads=1)
        elif workers:
            converter = image_converter(self.encoder.preprocessing, self.spec)
            for pixels in read_in_workers(_ImageReader(converter.to_bytes), batches, workers):
                yield pixels.to(self.device).map(converter.normalize)
        else:
            # A thread reads 4 images at once, so that all threads share a large batch of a GPU.
            ahead = max(2 * cpu_cores(), len(_split(batches[0])) if batches else 0)
            parts = map_in_order(
                self.read, [part for batch in batches for part in _split(batch)], ahead=ahead
            )
            yield from (concatenate(islice(parts, len(_split(batch)))) for batch in batches)

    @property
    def device(self) -> torch.device:
        """Device of the encoder."""
        return device_of(self.encoder)

    def read(self, batch: Sequence[Image | str]) -> Encoded:
        """Read and preprocess a batch."""
        if self.spec.side == "text":
            return self.encoder.preprocess(batch)
        # Frames are decoded while they are converted, so that a long clip is never in memory.
        if self.spec.granularity == "frames":
            rate = self.spec.frames_per_second
            return self.encoder.preprocess([image.iter_frames(rate) for image in batch])  # type: ignore[union-attr]
        return self.encoder.preprocess([image.open(self.encoder.min_side) for image in batch])  # type: ignore[union-attr]

    def __call__(self, inputs: Encoded) -> Encoded:
        """Encode a preprocessed batch."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
            return self.encoder(inputs)

    def encode(self, batch: Sequence[Image | str]) -> Encoded:
        """Read and encode a batch, in a Ray process or alone."""
        [encoded] = encode_batches(self.encoder, self, [self.read(batch)])
        return encoded


@dataclass(frozen=True)
class _BatchSharing:
    """Processes that share the batches of a store.

    Attributes:
        engine: Where batches are encoded.
        workers: Number of Ray processes, or of processes that read images. Default: 2 Ray
            processes, else as ``choose_readers``.
        group: Processes that share the batches.
    """

    engine: Engine
    workers: int | None
    group: ProcessGroup

    def encode(
        self, encoder: _BatchEncoder, batches: Sequence[Sequence[Image | str]]
    ) -> Iterator[Encoded]:
        """Encode batches in their order. Every process gets all of them."""
        if self.engine == "ray":
            arguments = (encoder.spec, encoder.bfloat16)
            jobs = [(list(map(_with_absolute_path, batch)),) for batch in batches]
            yield from map_on_ray(
                _BatchEncoder,
                arguments,
                jobs,
                workers=self.workers,
                action="features",
                ordered=True,
            )
            return
        size = self.group.world_size
        inputs = encoder.read_batches(self.group.part(batches), self.workers)
        output_device = "cpu" if size == 1 else self.group.device
        local = encode_batches(encoder.encoder, encoder, inputs, output_device)
        if size == 1:
            yield from local
            return
        last: Encoded | None = None
        for start in range(0, len(batches), size):
            encoded = next(local, None)
            if encoded is None:
                # A rank without a batch in the last round sends an empty one, of a batch of another
                # rank if it never had one.
                encoded = (encoder.encode(batches[0]) if last is None else last)[:0]
                encoded = encoded.to(output_device)
            last = encoded
            yield from self.group.all_gather_batches([last], size)[: len(batches) - start]


def _with_absolute_path(item: Image | str) -> Image | str:
    """Return the item with a path that is valid in a process with another working directory."""
    if isinstance(item, str) or item.location is None:
        return item
    return replace(item, location=replace(item.location, path=item.location.path.absolute()))


def _compute(
    dataset: Dataset,
    encoder: FrozenEncoder,
    folder: Path,
    batch_size: int | None,
    bfloat16: bool | None,
    on_progress: OnProgress | None,
    sharing: _BatchSharing,
) -> FeatureStore:
    """Compute the missing part of a store, which rank 0 writes."""
    spec = encoder.spec
    group = sharing.group
    device = device_of(encoder)
    if bfloat16 is None:
        bfloat16 = spec.side == "text" and has_native_bfloat16(device)
        # An unfinished store is continued in its precision.
        with suppress(VisavisError):
            bfloat16 = read_description(folder).precision == "bfloat16"
    if spec.side == "text":
        default_batch_size = TEXT_BATCH_SIZE
    elif spec.granularity == "frames":
        default_batch_size = 1
    elif device.type != "cpu":
        default_batch_size = max(1, GPU_IMAGE_BATCH_SIZE // spec.crops)
    else:
        default_batch_size = CPU_IMAGE_BATCH_SIZE
    batch_size = batch_size or default_batch_size
    keys, lengths = _sorted_keys(dataset, encoder)
    images = {image.name: image for image in dataset.images} if spec.side == "visual" else {}
    items: list[Image | str] = [images[key] for key in keys] if images else list(keys)
    batch_encoder = _BatchEncoder(encoder, bfloat16)
    writer = None
    with group.first_rank_first():
        if group.is_first:
            writer = FeatureWriter.open(
                folder, _describe_store(dataset, batch_encoder, items), keys, lengths
            )
    start = int(group.broadcast_text(str(writer.rows_written) if writer else ""))
    # Only the rows that are missing.
    batches = [items[i : i + batch_size] for i in range(start, len(items), batch_size)]
    noun = "image" if images else "caption"

    def describe() -> str:
        rows = start if writer is None else writer.rows_saved
        return f"The features of {rows:,} of {len(items):,} {noun}s are kept."

    with kept_if_stopped(describe):
        encoded = sharing.encode(batch_encoder, batches)
        _write_batches(writer, encoded, start, len(items), on_progress)
    with group.first_rank_first():
        return writer.finish() if writer is not None else FeatureStore.open(folder)


def _split(batch: Sequence[Image | str]) -> list[Sequence[Image | str]]:
    return [
        batch[start : start + CPU_IMAGE_BATCH_SIZE]
        for start in range(0, len(batch), CPU_IMAGE_BATCH_SIZE)
    ]


def _describe_store(
    dataset: Dataset, encoder: _BatchEncoder, items: list[Image | str]
) -> StoreDescription:
    """Describe the store of all items. The first item is encoded for its shape."""
    spec = encoder.spec
    first = encoder.encode(items[:1])
    assert isinstance(first.vectors, torch.Tensor)
    if spec.granularity == "regions" and first.mask is not None:
        raise DataError(
            f"visual.granularity: expected pooled for {spec.name}, whose images have different "
            "numbers of patches, got regions. Use pooled, or another encoder for regions."
        )
    return StoreDescription(
        modality=spec.side,
        granularity=spec.granularity,
        encoder=spec.name,
        weights_checksum=weights_checksum(encoder.encoder),
        shape=tuple(first.vectors.shape[2 if spec.granularity in VARIABLE_LENGTH_FILES else 1 :]),
        num_items=len(items),
        fingerprint=dataset.fingerprint,
        crops=spec.crops,
        precision="bfloat16" if encoder.bfloat16 else "float32",
        preprocessing=encoder.encoder.preprocessing_config,
        versions={
            package: version(package)
            for package in ("visavis", "torch", "transformers")
            if find_spec(package)
        },
    )


def _write_batches(
    writer: FeatureWriter | None,
    batches: Iterator[Encoded],
    start: int,
    total: int,
    on_progress: OnProgress | None,
) -> None:
    """Encode all batches. Rank 0 has a writer and writes them."""
    saved_at = started_at = time.perf_counter()
    done = start
    for batch in batches:
        done += len(batch)
        now = time.perf_counter()
        if writer is not None:
            writer.append(batch)
            # Not after each batch, because each save waits for the disk.
            if now - saved_at > SAVE_INTERVAL_S:
                writer.save()
                saved_at = now
        if on_progress is not None:
            on_progress(done, total, (done - start) / (now - started_at))


def _sorted_keys(dataset: Dataset, encoder: FrozenEncoder) -> tuple[list[str], np.ndarray | None]:
    """Return the key of each row in the order of computation: images as listed, different captions
    from short to long.
    """
    if not isinstance(encoder, TextEncoder):
        keys = [image.name for image in dataset.images]
        rate = encoder.spec.frames_per_second
        return keys, np.array(
            [image.num_frames(rate) for image in dataset.images]
        ) if rate else None
    # Sorted, so that the rows do not depend on the order of the data set.
    texts = sorted(set(dataset.captions))
    lengths = encoder.count_tokens(texts)
    # From short to long, so that a batch has little padding.
    order = np.argsort(lengths, kind="stable")
    return [texts[i] for i in order], lengths[order]
