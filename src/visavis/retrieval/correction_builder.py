"""The correction of an index, computed for its items: the bias of each item by the texts of a bank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visavis.core.blocking import chunk_slices
from visavis.core.encoded import MaxSimDirection
from visavis.core.errors import RunError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import Progress
from visavis.retrieval.index_correction import (
    CorrectionSettings,
    digest_tensors,
    read_correction_file,
    write_correction_file,
)
from visavis.retrieval.index_folder import CORRECTION_FILE, Index
from visavis.retrieval.stores.base import ItemVectors, MaxSimQuery, StoreDigest, VectorSets
from visavis.retrieval.stores.exact_search import shared_tensor
from visavis.retrieval.stores.maxsim_search import MaxSimSearch

BANK_FILE = "correction_bank.safetensors"


def refresh_correction(index: Index, memory: MemoryLimit, progress: Progress) -> str | None:
    """Compute the correction of an index again if its items have changed.

    Args:
        index: The index, with its final content.
        memory: Memory limit of blocks of scores.
        progress: Receives progress.

    Returns:
        The correction and the result of its check. None: the index has none.
    """
    folder = index.folder
    if not os.path.exists(folder / BANK_FILE):
        return None
    tensors, settings = read_correction_file(folder / BANK_FILE)
    if settings.fingerprint != index.model.fingerprint:
        return f"{settings}: off, because it belongs to another query model."
    assert index.manifest.digest is not None
    if not _is_current(folder, index.manifest.digest):
        write_bias(index, settings, _bank_vectors(tensors), memory, progress)
    return describe_correction(settings)


def describe_correction(settings: CorrectionSettings) -> str:
    """Describe a correction.

    Args:
        settings: The correction.

    Returns:
        Its spec and bank, whether it is on, and the result of its check.
    """
    return f"{settings}: {'on' if settings.is_on else 'off'}. {settings.check}"


def write_bank(folder: Path, settings: CorrectionSettings, vectors: ItemVectors) -> None:
    """Write the texts of a correction.

    Args:
        folder: Folder of the index.
        settings: The correction.
        vectors: Vectors of the texts.
    """
    write_correction_file(folder / BANK_FILE, settings, _bank_tensors(vectors))


def write_bias(
    index: Index,
    settings: CorrectionSettings,
    bank: ItemVectors,
    memory: MemoryLimit,
    progress: Progress,
) -> None:
    """Compute and write the bias of each item.

    Args:
        index: The index, with its final content.
        settings: The correction.
        bank: Vectors of its texts.
        memory: Memory limit of blocks of scores.
        progress: Receives progress.
    """
    from visavis.losses.corrections import parse_correction

    assert index.manifest.digest is not None
    with progress.activity("computing the correction"):
        items = index.store.all_vectors()
        blocks = bank_scores(items, bank, index.manifest.late_interaction, memory)
        # Without items there is nothing to correct.
        bias = parse_correction(settings.correction).fit(blocks) if len(items) else None
    parts = digest_tensors(index.manifest.digest)
    parts["bias"] = torch.zeros(0, dtype=torch.float64) if bias is None else bias.bias
    if bias is not None and bias.is_hub is not None:
        parts["is_hub"] = bias.is_hub
    write_correction_file(index.folder / CORRECTION_FILE, settings, parts)


def bank_scores(
    items: ItemVectors,
    bank: ItemVectors,
    late_interaction: MaxSimDirection | None,
    memory: MemoryLimit = None,
) -> Iterator[Tensor]:
    """Yield the scores of blocks of bank texts with all items.

    Args:
        items: Vectors of the items.
        bank: Vectors of the texts.
        late_interaction: Means of MaxSim in a score. None: there is one vector per item.
        memory: Memory of a block.

    Yields:
        Scores, float32, shape ``[R, N]``.
    """
    from visavis.losses.corrections import STATISTICS_BYTES_PER_PAIR
    from visavis.losses.scoring import max_query_rows

    rows = max_query_rows(len(items), STATISTICS_BYTES_PER_PAIR, memory)
    for chunk in chunk_slices(len(bank), rows):
        if isinstance(items, VectorSets):
            assert late_interaction is not None
            queries = [MaxSimQuery.from_vectors((1.0, words)) for words in bank[chunk]]
            search = MaxSimSearch(items, late_interaction, memory=memory)
            scores, order = search.search(queries, len(items))
            block = np.empty_like(scores)
            np.put_along_axis(block, order, scores, axis=1)
            yield torch.from_numpy(block)
        else:
            assert not isinstance(bank, VectorSets)
            yield shared_tensor(bank)[chunk] @ shared_tensor(items).T


def _bank_tensors(vectors: ItemVectors) -> dict[str, Tensor]:
    if isinstance(vectors, VectorSets):
        return {
            "rows": torch.from_numpy(vectors.rows),
            "offsets": torch.from_numpy(vectors.offsets),
        }
    return {"rows": torch.from_numpy(vectors)}


def _bank_vectors(tensors: dict[str, Tensor]) -> ItemVectors:
    rows = tensors["rows"].numpy()
    return VectorSets(rows, tensors["offsets"].numpy()) if "offsets" in tensors else rows


def _is_current(folder: Path, digest: StoreDigest) -> bool:
    """Whether the biases are those of the items, and were not lost."""
    with suppress(RunError):
        tensors, _ = read_correction_file(folder / CORRECTION_FILE)
        return tensors["digest"].equal(digest_tensors(digest)["digest"])
    return False
