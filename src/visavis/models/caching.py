"""Features of a data set, computed once: a tower over all images or captions into a store."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis import storage
from visavis.data.clips import BrokenClip
from visavis.data.dataset import Dataset
from visavis.data.description import RAGGED, Description
from visavis.data.features import FeatureStore, FeatureWriter
from visavis.data.store_files import discard_store, read_description
from visavis.errors import DataError, SpecError, VisavisError
from visavis.models import small_cnn
from visavis.models.device import multiplies_bfloat16
from visavis.models.pretrained import weights_checksum, weights_mark
from visavis.models.towers import PICTURES_AT_ONCE, ClipTower, TextTower, TowerSpec, VisualTower, prepared_by

OnProgress = Callable[[int, int, float], None]
"""Called with items done, items in all, and items a second since the start."""


SAVE_EVERY_S = 1.0
"""How much computing a kill can cost."""


def store_folder(dataset: Dataset, spec: TowerSpec) -> Path:
    """Where the features of a data set lie unless another folder is named.

    The name changes with the images' sizes in bytes and with the tower's weights, so that a replaced picture (unless it is
    exactly as large) or a retrained tower does not meet features of the old one; and where a store of this name holds
    pictures that were prepared otherwise than the tower's folder says now.
    """
    tower = Path(spec.name).resolve().name if os.path.exists(spec.name) else spec.name.replace("/", "--")
    crops = "" if spec.crops == 1 else f"-{spec.crops}crops"
    crops += f"-{spec.frames_per_second:g}fps" if spec.frames_per_second else ""
    crops += ("-random" if spec.random_crops else "") + (f"-{spec.size}px" if spec.size else "")
    sizes = [image.bytes.num_bytes for image in dataset.images if image.bytes is not None] if spec.side == "visual" else []
    mark = hashlib.sha256(f"{sizes} {weights_mark(spec.name)}".encode()).hexdigest()[:8]
    folder = storage.cache_folder() / "features" / f"{dataset.name}-{dataset.fingerprint}-{tower}-{spec.view}{crops}-{mark}"
    prepared = json.dumps(prepared_by(spec))
    with suppress(VisavisError):
        if prepared not in ("null", json.dumps(read_description(folder).preprocessing)):
            return folder.with_name(f"{folder.name}-{hashlib.sha256(prepared.encode()).hexdigest()[:8]}")
    return folder


def cache_features(
    dataset: Dataset,
    tower: TowerSpec | VisualTower | TextTower | ClipTower,
    folder: str | Path | None = None,
    *,
    batch_size: int | None = None,
    bfloat16: bool | None = None,
    on_progress: OnProgress | None = None,
) -> FeatureStore:
    """The store of a tower's features of all images, or of all different captions; computes what is missing of it.

    A finished store in the default folder is opened without loading the tower. A killed call goes on where it ended;
    one that another process is computing is waited for. What is damaged is computed anew.
    batch_size: default 4 pictures, a clip, or 64 texts. bfloat16: for products; default: for texts,
    where the processor multiplies it faster than float32.
    Raises RefusedOverwrite if other features stand in ``folder``, DataError for a video that cannot be read.
    """
    spec = tower if isinstance(tower, TowerSpec) else tower.spec
    if spec.name == small_cnn.NAME:
        raise SpecError(f"{spec.name} begins with random weights, so that its features say nothing: train it with visual.view=pixels.")
    if folder is None:
        folder = store_folder(dataset, spec)
        if isinstance(tower, TowerSpec) and (store := _finished(folder)) is not None:
            return store
    with storage.alone(folder, wait=True):
        encoder = tower.open() if isinstance(tower, TowerSpec) else tower
        try:
            return _compute(dataset, encoder, Path(folder), batch_size, bfloat16, on_progress)
        except BrokenClip as error:
            raise DataError(
                f"{str(error).removesuffix('.')}; mend it, take it out of {dataset.name}, or leave out what is broken with --skip-bad."
            ) from None


def _finished(folder: Path) -> FeatureStore | None:
    """The finished store in a folder of the cache; None where there is none, or a damaged one, which is discarded."""
    try:
        return FeatureStore.open(folder) if (folder / "features.json").exists() and read_description(folder).complete else None
    except storage.Damaged as reason:
        discard_store(folder, reason)
        return None


def _compute(
    dataset: Dataset,
    encoder: VisualTower | TextTower | ClipTower,
    folder: Path,
    batch_size: int | None,
    bfloat16: bool | None,
    on_progress: OnProgress | None,
) -> FeatureStore:
    """What is missing of a store, computed and written."""
    spec = encoder.spec
    device = next(encoder.parameters()).device
    bfloat16 = _in_bfloat16(folder, encoder, device) if bfloat16 is None else bfloat16
    batch_size = batch_size or (64 if spec.side == "text" else 1 if spec.view == "frames" else PICTURES_AT_ONCE)
    keys, lengths = _keys(dataset, encoder)
    images = {image.name: image for image in dataset.images}

    def prepare(batch: list[str]) -> Any:
        if isinstance(encoder, TextTower):
            return encoder.preprocess(batch)
        if isinstance(encoder, ClipTower):
            return encoder.preprocess([images[name].frames(spec.frames_per_second) for name in batch])
        return encoder.preprocess([images[name].open() for name in batch])

    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=bfloat16):
        first = encoder(prepare(keys[:1]).to(device))
        description = Description(
            side=spec.side,
            view=spec.view,
            tower=spec.name,
            weights=weights_checksum(encoder),
            shape=tuple(first.vectors.shape[2 if spec.view in RAGGED else 1 :]),
            count=len(keys),
            fingerprint=dataset.fingerprint,
            crops=spec.crops,
            precision="bfloat16" if bfloat16 else "float32",
            preprocessing=encoder.description,
            versions={package: version(package) for package in ("visavis", "torch", "transformers") if find_spec(package)},
        )
        writer = FeatureWriter.open(folder, description, keys, lengths)
        start, started = writer.done, time.perf_counter()
        saved = started
        for inputs in _ahead(prepare, [keys[i : i + batch_size] for i in range(start, len(keys), batch_size)]):
            writer.append(encoder(inputs.to(device)))
            now = time.perf_counter()
            if now - saved > SAVE_EVERY_S:
                writer.save()
                saved = now
            if on_progress is not None:
                on_progress(writer.done, len(keys), (writer.done - start) / (now - started))
    return writer.finish()


def _in_bfloat16(folder: Path, encoder: VisualTower | TextTower | ClipTower, device: torch.device) -> bool:
    """The precision of products where none is asked for: that of a store which was begun here, perhaps by another machine."""
    with suppress(VisavisError):
        return read_description(folder).precision == "bfloat16"
    return encoder.spec.side == "text" and multiplies_bfloat16(device)


def _keys(dataset: Dataset, encoder: VisualTower | TextTower | ClipTower) -> tuple[list[str], np.ndarray | None]:
    """What the rows stand for, in the order of computing: images as listed; different captions, short ones first."""
    if isinstance(encoder, ClipTower):
        lengths = np.array([image.num_frames(encoder.spec.frames_per_second) for image in dataset.images])
        return [image.name for image in dataset.images], lengths
    if isinstance(encoder, VisualTower):
        return [image.name for image in dataset.images], None
    texts = sorted(set(dataset.captions))
    lengths = encoder.lengths(texts)
    order = np.argsort(lengths, kind="stable")
    return [texts[i] for i in order], lengths[order]


def _ahead(prepare: Callable[[list[str]], Any], batches: Iterable[list[str]]) -> Iterator[Any]:
    """Each batch prepared in one background thread while the one before it is computed."""
    with ThreadPoolExecutor(1) as thread:
        waiting = None
        for batch in batches:
            coming = thread.submit(prepare, batch)
            if waiting is not None:
                yield waiting.result()
            waiting = coming
        if waiting is not None:
            yield waiting.result()
