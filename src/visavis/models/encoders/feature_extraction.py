"""Cached features: run a frozen encoder over all images or captions of a data set, once."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis import storage
from visavis.data.dataset import Dataset
from visavis.data.features.store import (
    VARIABLE_LENGTH_FILES,
    FeatureStore,
    FeatureWriter,
    StoreDescription,
    discard_store,
    read_description,
)
from visavis.data.parallel import map_in_order
from visavis.data.video import VideoError
from visavis.errors import DataError, SpecError, VisavisError, log_debug
from visavis.models.device import has_native_bfloat16
from visavis.models.encoders.cnn_backbones import SMALL_CNN
from visavis.models.encoders.frozen_encoders import (
    CPU_IMAGE_BATCH_SIZE,
    EncoderSpec,
    FrozenEncoder,
    TextEncoder,
    current_preprocessing_config,
)
from visavis.models.encoders.pretrained_files import weights_checksum, weights_fingerprint
from visavis.types import Encoded

OnProgress = Callable[[int, int, float], None]
"""Callback with the number of finished items, of all items, and items per second since the start."""


SAVE_INTERVAL_S = 1.0
"""Seconds between saves, the most computation that is lost when the process is killed."""


def feature_store_folder(dataset: Dataset, spec: EncoderSpec) -> Path:
    """Return the default folder for the features of a data set.

    The name depends on the images' sizes in bytes and on the encoder's weights. A replaced image (unless it has exactly the same size) or a
    retrained encoder therefore has another folder. The same holds if the existing folder was made with another preprocessing.

    Args:
        dataset: The data set.
        spec: The encoder.

    Returns:
        Folder in the cache.
    """
    encoder = os.path.basename(os.path.realpath(spec.name)) if os.path.exists(spec.name) else spec.name.replace("/", "--")
    crops = "" if spec.crops == 1 else f"-{spec.crops}crops"
    crops += f"-{spec.frames_per_second:g}fps" if spec.frames_per_second else ""
    crops += ("-random" if spec.random_crops else "") + (f"-{spec.image_size}px" if spec.image_size else "")
    sizes = [image.location.num_bytes for image in dataset.images if image.location is not None] if spec.side == "visual" else []
    inputs_hash = hashlib.sha256(f"{sizes} {weights_fingerprint(spec.name)}".encode()).hexdigest()[:8]
    folder = storage.cache_folder() / "features" / f"{dataset.name}-{dataset.fingerprint}-{encoder}-{spec.granularity}{crops}-{inputs_hash}"
    preprocessing = json.dumps(current_preprocessing_config(spec))
    with suppress(VisavisError):
        if preprocessing not in ("null", json.dumps(read_description(folder).preprocessing)):
            return folder.with_name(f"{folder.name}-{hashlib.sha256(preprocessing.encode()).hexdigest()[:8]}")
    return folder


def cache_features(
    dataset: Dataset,
    encoder: EncoderSpec | FrozenEncoder,
    folder: str | Path | None = None,
    *,
    batch_size: int | None = None,
    bfloat16: bool | None = None,
    on_progress: OnProgress | None = None,
) -> FeatureStore:
    """Compute the features of all images, or of all different captions, that are not stored yet.

    A complete store in the default folder is opened without loading the encoder. A killed call resumes where it stopped. If another process
    computes the same store, the call waits. Damaged parts are recomputed.

    Args:
        dataset: The data set.
        encoder: The encoder, or its specification.
        folder: Folder of the store. None: the default folder in the cache.
        batch_size: Items per batch. None: 4 images, 1 clip or 64 texts.
        bfloat16: Whether to multiply in bfloat16. None: for texts, if the processor has native bfloat16.
        on_progress: Called after each batch.

    Returns:
        The store.

    Raises:
        SpecError: If the encoder starts with random weights.
        DataError: If a video cannot be read.
        RefusedOverwrite: If ``folder`` holds other features.
    """
    spec = encoder if isinstance(encoder, EncoderSpec) else encoder.spec
    if spec.name == SMALL_CNN:
        raise SpecError(
            f"encoder: expected trained weights, got {spec.name}, which starts with random weights. Train it with visual.granularity=pixels."
        )
    if folder is None:
        folder = feature_store_folder(dataset, spec)
        if isinstance(encoder, EncoderSpec) and (store := _open_finished(folder)) is not None:
            log_debug(__name__, "features of %s are read from %s", spec.name, folder)
            return store
    with storage.folder_lock(folder, wait=True):
        encoder = encoder.open() if isinstance(encoder, EncoderSpec) else encoder
        try:
            return _compute(dataset, encoder, Path(folder), batch_size, bfloat16, on_progress)
        except VideoError as error:
            raise DataError(
                f"{str(error).removesuffix('.')}. Repair the video, remove it from {dataset.name}, or skip broken files with --skip-bad."
            ) from None


def _open_finished(folder: Path) -> FeatureStore | None:
    """Return the complete store in a folder. A damaged store is discarded."""
    try:
        return FeatureStore.open(folder) if os.path.exists(folder / "features.json") and read_description(folder).complete else None
    except storage.DamagedCacheError as reason:
        discard_store(folder, reason)
        return None


def _compute(
    dataset: Dataset, encoder: FrozenEncoder, folder: Path, batch_size: int | None, bfloat16: bool | None, on_progress: OnProgress | None
) -> FeatureStore:
    """Compute and write the missing part of a store."""
    spec = encoder.spec
    device = next(encoder.parameters()).device
    bfloat16 = _choose_bfloat16(folder, encoder, device) if bfloat16 is None else bfloat16
    batch_size = batch_size or (64 if spec.side == "text" else 1 if spec.granularity == "frames" else CPU_IMAGE_BATCH_SIZE)
    keys, lengths = _sorted_keys(dataset, encoder)
    images = {image.name: image for image in dataset.images}
    decodes_images = spec.side == "visual" and spec.granularity != "frames"

    def read(key: str) -> Any:
        if spec.side == "text":
            return key
        return images[key].frames(spec.frames_per_second) if spec.granularity == "frames" else images[key].open(encoder.min_side)

    def prepare(batch: list[str]) -> Encoded:
        return encoder.preprocess([read(key) for key in batch])

    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
        first = encoder(prepare(keys[:1]).to(device))
        description = StoreDescription(
            modality=spec.side,
            granularity=spec.granularity,
            encoder=spec.name,
            weights_checksum=weights_checksum(encoder),
            shape=tuple(first.vectors.shape[2 if spec.granularity in VARIABLE_LENGTH_FILES else 1 :]),
            num_items=len(keys),
            fingerprint=dataset.fingerprint,
            crops=spec.crops,
            precision="bfloat16" if bfloat16 else "float32",
            preprocessing=encoder.preprocessing_config,
            versions={package: version(package) for package in ("visavis", "torch", "transformers") if find_spec(package)},
        )
        writer = FeatureWriter.open(folder, description, keys, lengths)
        start, started = writer.rows_written, time.perf_counter()
        saved = started
        batches = [keys[i : i + batch_size] for i in range(start, len(keys), batch_size)]
        # One thread for texts, because a tokenizer is not thread-safe, and for clips, which FFmpeg decodes with threads of its own.
        for inputs in map_in_order(prepare, batches, threads=0 if decodes_images else 1):
            writer.append(encoder(inputs.to(device)))
            now = time.perf_counter()
            if now - saved > SAVE_INTERVAL_S:
                writer.save()
                saved = now
            if on_progress is not None:
                on_progress(writer.rows_written, len(keys), (writer.rows_written - start) / (now - started))
    return writer.finish()


def _choose_bfloat16(folder: Path, encoder: FrozenEncoder, device: torch.device) -> bool:
    """Choose the precision of products: the one of an existing store, else bfloat16 for texts on processors with native support."""
    with suppress(VisavisError):
        return read_description(folder).precision == "bfloat16"
    return encoder.spec.side == "text" and has_native_bfloat16(device)


def _sorted_keys(dataset: Dataset, encoder: FrozenEncoder) -> tuple[list[str], np.ndarray | None]:
    """Return the key of each row in the order of computation: images as listed, different captions from short to long."""
    if not isinstance(encoder, TextEncoder):
        rate = encoder.spec.frames_per_second
        return [image.name for image in dataset.images], np.array([image.num_frames(rate) for image in dataset.images]) if rate else None
    texts = sorted(set(dataset.captions))
    lengths = encoder.count_tokens(texts)
    order = np.argsort(lengths, kind="stable")
    return [texts[i] for i in order], lengths[order]
