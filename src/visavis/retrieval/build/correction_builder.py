"""The correction of an index, computed for its items: the bias of each item by the texts of a bank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visavis.core.errors import RunError
from visavis.core.memory_budget import MemoryLimit, chunk_slices
from visavis.core.progress import Progress
from visavis.core.ragged import MaxSimDirection
from visavis.retrieval.calibrate.index_correction import (
    CorrectionSettings,
    digest_array,
    read_correction_file,
    write_correction_file,
)
from visavis.retrieval.index_folder import CORRECTION_FILE, Index
from visavis.retrieval.stores.base import ItemVectors, MaxSimQuery, StoreDigest, VectorSets
from visavis.retrieval.stores.maxsim_search import MaxSimSearch

BANK_FILE = "correction_bank.safetensors"


def refresh_correction(index: Index, memory: MemoryLimit, progress: Progress) -> str | None:
    """Compute the correction of an index again if its items have changed. None: it has none."""
    folder = index.folder
    if not os.path.exists(folder / BANK_FILE):
        return None
    arrays, settings = read_correction_file(folder / BANK_FILE)
    if settings.fingerprint != index.model.fingerprint:
        return f"{settings}: off, because it belongs to another query model."
    assert index.manifest.digest is not None
    if not _is_current(folder, index.manifest.digest):
        write_bias(index, settings, _bank_vectors(arrays), memory, progress)
    return describe_correction(settings)


def describe_correction(settings: CorrectionSettings) -> str:
    """Describe a correction: spec, bank, whether it is on, and the result of its check."""
    return f"{settings}: {'on' if settings.is_on else 'off'}. {settings.check}"


def write_bank(folder: Path, settings: CorrectionSettings, vectors: ItemVectors) -> None:
    """Write the texts of a correction."""
    write_correction_file(folder / BANK_FILE, settings, _bank_arrays(vectors))


def write_bias(
    index: Index,
    settings: CorrectionSettings,
    bank: ItemVectors,
    memory: MemoryLimit,
    progress: Progress,
) -> None:
    """Compute and write the bias of each item."""
    from visavis.losses.corrections import parse_correction

    assert index.manifest.digest is not None
    with progress.activity("computing the correction"):
        items = index.store.all_vectors()
        blocks = bank_scores(items, bank, index.manifest.late_interaction, memory)
        # Without items there is nothing to correct.
        bias = parse_correction(settings.correction).fit(blocks) if len(items) else None
    # Later, the digest shows whether the biases belong to the items.
    parts = {"digest": digest_array(index.manifest.digest)}
    parts["bias"] = np.zeros(0) if bias is None else bias.bias.numpy()
    if bias is not None and bias.is_hub is not None:
        parts["is_hub"] = bias.is_hub.numpy()
    write_correction_file(index.folder / CORRECTION_FILE, settings, parts)


def bank_scores(
    items: ItemVectors,
    bank: ItemVectors,
    late_interaction: MaxSimDirection | None,
    memory: MemoryLimit = None,
) -> Iterator[Tensor]:
    """Yield the scores of blocks of bank texts with all items, float32, ``[R, N]``."""
    from visavis.losses.corrections import STATISTICS_BYTES_PER_PAIR
    from visavis.losses.scoring import max_query_rows

    rows = max_query_rows(len(items), STATISTICS_BYTES_PER_PAIR, memory)
    for chunk in chunk_slices(len(bank), rows):
        if isinstance(items, VectorSets):
            assert late_interaction is not None
            queries = [MaxSimQuery.from_vectors((1.0, words)) for words in bank[chunk]]
            search = MaxSimSearch(items, late_interaction, memory=memory)
            scores, order = search.search(queries, len(items))
            # A search returns scores best first. They go back to the order of items.
            block = np.empty_like(scores)
            np.put_along_axis(block, order, scores, axis=1)
            yield torch.from_numpy(block)
        else:
            assert not isinstance(bank, VectorSets)
            yield shared_tensor(bank)[chunk] @ shared_tensor(items).T


def shared_tensor(array: np.ndarray) -> Tensor:
    """Convert an array to a tensor that shares its memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a read-only array must not be written
        return torch.from_numpy(np.ascontiguousarray(array))


def _bank_arrays(vectors: ItemVectors) -> dict[str, np.ndarray]:
    if isinstance(vectors, VectorSets):
        return {"rows": vectors.rows, "offsets": vectors.offsets}
    return {"rows": vectors}


def _bank_vectors(arrays: dict[str, np.ndarray]) -> ItemVectors:
    rows = arrays["rows"]
    return VectorSets(rows, arrays["offsets"]) if "offsets" in arrays else rows


def _is_current(folder: Path, digest: StoreDigest) -> bool:
    """Whether the biases are those of the items, and were not lost."""
    with suppress(RunError):
        arrays, _ = read_correction_file(folder / CORRECTION_FILE)
        return np.array_equal(arrays["digest"], digest_array(digest))
    return False
