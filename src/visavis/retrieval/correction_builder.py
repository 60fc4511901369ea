"""Makes and updates the correction of an index: encodes a bank of texts, checks on held-out queries
that it helps, and computes the bias of each item.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from visavis.core.blocking import chunk_slices
from visavis.core.encoded import MaxSimDirection, Vectors
from visavis.core.errors import DataError, RunError, VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import BarsOnly, Progress
from visavis.retrieval.index_correction import (
    CorrectionSettings,
    digest_tensors,
    read_correction_file,
    write_correction_file,
)
from visavis.retrieval.index_folder import CORRECTION_FILE, Index
from visavis.retrieval.run_data import OpenRunData, RunData
from visavis.retrieval.stores.arrow_tables import items_from_table
from visavis.retrieval.stores.base import ItemVectors, MaxSimQuery, StoreDigest, VectorSets
from visavis.retrieval.stores.exact_search import shared_tensor
from visavis.retrieval.stores.maxsim_search import MaxSimSearch

if TYPE_CHECKING:
    from visavis.evaluation.query_ranks import QueryRanks

BANK_FILE = "correction_bank.safetensors"
MAX_TEXTS = 5_000
"""Maximum number of texts in a bank. More are sampled."""
CHECKED_CAPTIONS, MIN_CAPTIONS = 2_000, 100
"""Captions of items that check a correction: the maximum and the minimum number."""


def update_correction(
    index: Index,
    run: Path,
    correction: str | None,
    bank: str | Sequence[str] | None,
    open_data: OpenRunData,
    memory: MemoryLimit,
    progress: Progress,
) -> str | None:
    """Make, update or remove the correction of an index.

    Args:
        index: The index, with its final content.
        run: Its run or model.
        correction: Spec of a new correction. Empty: the index gets none. None: the one of the index
            is updated.
        bank: Texts, or a split of the run whose captions are the bank.
        open_data: Opens the data of the run.
        memory: Memory limit of blocks of scores.
        progress: Receives progress.

    Returns:
        The correction and the result of its check. None: the index has none.

    Raises:
        DataError: If the bank is empty, or the split does not exist.
        RunError: If a pretrained model has no split.
    """
    from visavis.evaluation.corrections import parse_correction

    folder = index.folder
    if correction == "":
        for name in (CORRECTION_FILE, BANK_FILE):
            with suppress(FileNotFoundError):
                os.remove(folder / name)
        return None
    if correction is None:
        if not os.path.exists(folder / BANK_FILE):
            return None
        tensors, settings = read_correction_file(folder / BANK_FILE)
        vectors = _bank_vectors(tensors)
        if settings.fingerprint != index.model.fingerprint:
            return f"{settings}: off, because it belongs to another query model."
    else:
        data = open_data(run)
        texts, description = _read_bank(index, run, data, bank, progress)
        kind = parse_correction(correction)
        with progress.activity("encoding the bank of the correction"):
            vectors = _encode(index, texts)
        is_on, check = _check(index, data, repr(kind), texts, vectors, memory, progress)
        settings = CorrectionSettings(
            repr(kind), description, index.model.fingerprint, is_on, check
        )
        write_correction_file(folder / BANK_FILE, settings, _bank_tensors(vectors))
    assert index.manifest.digest is not None
    if correction is not None or not _is_current(folder, index.manifest.digest):
        with progress.activity("computing the correction"):
            items = index.store.all_vectors()
            blocks = bank_scores(items, vectors, index.manifest.late_interaction, memory)
            # Without items there is nothing to correct.
            bias = parse_correction(settings.correction).fit(blocks) if len(items) else None
        parts = digest_tensors(index.manifest.digest)
        parts["bias"] = torch.zeros(0, dtype=torch.float64) if bias is None else bias.bias
        if bias is not None and bias.is_hub is not None:
            parts["is_hub"] = bias.is_hub
        write_correction_file(folder / CORRECTION_FILE, settings, parts)
    return f"{settings}: {'on' if settings.is_on else 'off'}. {settings.check}"


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
    from visavis.evaluation.corrections import STATISTICS_BYTES_PER_PAIR
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


def _read_bank(
    index: Index,
    run: Path,
    data: RunData | None,
    bank: str | Sequence[str] | None,
    progress: Progress,
) -> tuple[list[str], str]:
    """The texts of a bank that the model can encode, at most ``MAX_TEXTS``, and their description."""
    if bank is None or isinstance(bank, str):
        split = bank or "train"
        if data is None:
            raise RunError(
                f"--bank: expected a .txt file with one text per line for the pretrained model "
                f"{run}, got the split {split}. Pass --bank FILE.txt."
            )
        texts = list(data.captions(split, BarsOnly(progress)))
        name = f"captions of {split}"
    else:
        texts = list(bank)
        name = "texts"
    known = [text for text in texts if text.strip() and _is_known(index, text)]
    if len(known) < len(texts):
        progress.message(
            f"--bank: left out {len(texts) - len(known):,} texts without a word that the model knows."
        )
    if not (texts := known):
        raise DataError(
            "--bank: expected at least one text that the model can encode, got none. Pass other "
            "texts."
        )
    if len(texts) > MAX_TEXTS:
        sample = np.random.default_rng(0).choice(len(texts), MAX_TEXTS, replace=False)
        texts = [texts[number] for number in np.sort(sample).tolist()]
    return texts, f"{len(texts):,} {name}"


def _is_known(index: Index, text: str) -> bool:
    with suppress(VisavisError):
        index.model.unknown_words(text)
        return True
    return False


def _encode(index: Index, texts: Sequence[str]) -> ItemVectors:
    vectors = index.encode_texts(texts)
    if index.manifest.late_interaction is None:
        return torch.stack(vectors).float().numpy()
    return VectorSets.from_arrays([words.numpy() for words in vectors])


def _check(
    index: Index,
    data: RunData | None,
    correction: str,
    texts: Sequence[str],
    vectors: ItemVectors,
    memory: MemoryLimit,
    progress: Progress,
) -> tuple[bool, str]:
    """Whether held-out text queries gain from a correction, and a sentence about it."""
    from visavis.evaluation.bootstrap import bootstrap_images

    unchecked = (
        "Its effect cannot be checked without validation data of the run, or items with captions."
    )
    try:
        with progress.activity("checking the correction"):
            ranks = _validation_ranks(data, correction, texts, progress) or _caption_ranks(
                index, correction, texts, vectors, memory
            )
    except VisavisError as error:
        return False, f"{unchecked} {error}"
    if ranks is None:
        return False, unchecked
    source, before, after = ranks
    samples = bootstrap_images({"before": {0: before}, "after": {0: after}})
    gain = samples.difference("after", "before")
    interval = "" if gain.interval is None else f" (95 % interval {gain.interval})"
    # A gain that other queries could reverse is not worth the risk.
    is_on = gain.interval is not None and gain.interval.low > 0
    return is_on, f"Text to image, {source}: {gain.value:+.1f} RSUM{interval}."


def _validation_ranks(
    data: RunData | None, correction: str, texts: Sequence[str], progress: Progress
) -> tuple[str, QueryRanks, QueryRanks] | None:
    """Ranks of the validation captions of a run, without and with a correction."""
    if data is None:
        return None
    from visavis.evaluation.corrections import parse_correction

    split = data.validation_split
    before, after = (
        data.query_ranks(split, each, texts, BarsOnly(progress))
        for each in (None, parse_correction(correction))
    )
    return f"{len(before.text_ranks):,} captions of {split}", before, after


def _caption_ranks(
    index: Index,
    correction: str,
    texts: Sequence[str],
    vectors: ItemVectors,
    memory: MemoryLimit,
) -> tuple[str, QueryRanks, QueryRanks] | None:
    """Ranks of captions of items among all items, without and with a correction."""
    from visavis.data.equal_texts import text_keys
    from visavis.evaluation import evaluate
    from visavis.evaluation.corrections import CorrectedScore, QueryBank, parse_correction

    items = index.store.all_vectors()
    if isinstance(items, VectorSets) or isinstance(vectors, VectorSets):
        return None
    table = index.store.table()
    every = [item.metadata.get("caption", "") for item in items_from_table(table)]
    with_caption = np.flatnonzero([bool(caption.strip()) for caption in every])
    if len(with_caption) < MIN_CAPTIONS:
        return None
    count = min(CHECKED_CAPTIONS, len(with_caption))
    rows = np.sort(np.random.default_rng(0).choice(with_caption, count, replace=False))
    captions = [every[row] for row in rows.tolist()]
    keys = text_keys([*captions, *texts])
    unseen = ~torch.isin(keys[count:], keys[:count]).numpy()
    if not unseen.any():
        return None
    image_ids = np.full(len(items), -1)
    image_ids[rows] = np.arange(count)
    queries = Vectors(torch.stack(index.encode_texts(captions)).float())
    bank = QueryBank("bank", Vectors(torch.from_numpy(vectors[unseen])))

    def score(visual: Tensor, text: Tensor) -> Tensor:
        return visual @ text.T

    results = [
        evaluate(
            Vectors(shared_tensor(items)), queries, each, image_ids, range(count), memory=memory
        )
        for each in (score, CorrectedScore(score, parse_correction(correction), bank))
    ]
    return f"{count:,} captions of items", results[0].query_ranks, results[1].query_ranks


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
