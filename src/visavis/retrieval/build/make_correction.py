"""Makes or removes the correction of an index: encodes a bank of texts, and checks on held-out queries
that it helps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.encoded import Vectors
from visavis.core.errors import DataError, RunError, VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import BarsOnly, Progress
from visavis.core.stopping import kept_if_stopped
from visavis.retrieval.build.correction_builder import (
    BANK_FILE,
    describe_correction,
    shared_tensor,
    write_bank,
    write_bias,
)
from visavis.retrieval.calibrate.index_correction import (
    CorrectionSettings,
)
from visavis.retrieval.index_folder import CORRECTION_FILE, Index, index_lock
from visavis.retrieval.open_index import open_index
from visavis.retrieval.run_data import OpenRunData, RunData
from visavis.retrieval.stores.base import ItemVectors, VectorSets

if TYPE_CHECKING:
    from visavis.evaluation.query_ranks import QueryRanks


MAX_TEXTS = 5_000
"""Maximum number of texts in a bank. More are sampled."""


CHECKED_CAPTIONS, MIN_CAPTIONS = 2_000, 100
"""Captions of items that check a correction: the maximum and the minimum number."""


def correct_index(
    folder: Path,
    correction: str,
    bank: str | Sequence[str] | None,
    open_data: OpenRunData,
    store: str | None,
    memory: MemoryLimit,
    progress: Progress,
) -> str | None:
    """Make the correction of an index, or remove it without a spec. The bank is texts, or a split
    of the run of the query model.
    """
    from visavis.losses.corrections import parse_correction

    with (
        index_lock(folder),
        kept_if_stopped(lambda: "All files are in the index."),
    ):
        if not correction:
            with storage.storage_errors(folder):
                for name in (CORRECTION_FILE, BANK_FILE):
                    storage.current_disk().unlink(folder / name)
                # Otherwise it is back after a power loss.
                storage.current_disk().sync_path(folder)
            return None
        index = open_index(folder, store=store, memory=memory)
        with closing(index.store):
            run = Path(index.manifest.query_model.model)
            data = open_data(run)
            texts, description = _read_bank(index, run, data, bank, progress)
            kind = repr(parse_correction(correction))
            with progress.activity("encoding the bank of the correction"):
                vectors = _encode(index, texts)
            is_on, check = _check(index, data, kind, texts, vectors, memory, progress)
            settings = CorrectionSettings(kind, description, index.model.fingerprint, is_on, check)
            write_bank(folder, settings, vectors)
            write_bias(index, settings, vectors, memory, progress)
    return describe_correction(settings)


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
    vectors = index.model.encode_texts(texts)
    is_late = index.manifest.late_interaction is not None
    return VectorSets.from_arrays(vectors) if is_late else np.stack(vectors)


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
    from visavis.losses.corrections import parse_correction

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
    from visavis.losses.corrections import CorrectedScore, QueryBank, parse_correction

    stored, items = index.store.all_items()
    if isinstance(items, VectorSets) or isinstance(vectors, VectorSets):
        return None
    every = [item.metadata.get("caption", "") for item in stored]
    with_caption = np.flatnonzero([bool(caption.strip()) for caption in every])
    if len(with_caption) < MIN_CAPTIONS:
        return None
    count = min(CHECKED_CAPTIONS, len(with_caption))
    rows = np.sort(np.random.default_rng(0).choice(with_caption, count, replace=False))
    captions = [every[row] for row in rows.tolist()]
    # Held-out queries: the bank of the check leaves out texts that equal a query.
    keys = text_keys([*captions, *texts])
    unseen = ~torch.isin(keys[count:], keys[:count]).numpy()
    if not unseen.any():
        return None
    # Items without a checked caption are candidates of id -1, which no query belongs to.
    image_ids = np.full(len(items), -1)
    image_ids[rows] = np.arange(count)
    queries = Vectors(torch.from_numpy(np.stack(index.model.encode_texts(captions))))
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
