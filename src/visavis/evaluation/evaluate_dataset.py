"""Evaluation of the encoded images and captions of a data set under one or several protocols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from visavis.blocking import Score
from visavis.data.dataset import Dataset
from visavis.evaluation.protocols import Protocol
from visavis.evaluation.results import Evaluation, evaluate, evaluate_listed
from visavis.graded.ranking_coherence import ranking_coherence
from visavis.memory_budget import MemoryLimit
from visavis.scoring import select_items
from visavis.types import Encoded


def select_captions(data: Dataset, protocols: Sequence[Protocol]) -> Dataset:
    """Select the captions of a split that any of the protocols ranks: all images with the first captions of each.

    Args:
        data: A split.
        protocols: The protocols.

    Returns:
        The split, with as many captions per image as the protocols need.
    """
    numbers = [protocol.captions_per_image for protocol in protocols if protocol.captions_per_image is not None]
    return data.first_captions(max(numbers)) if len(numbers) == len(protocols) else data


def evaluate_dataset(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    protocols: Sequence[Protocol],
    *,
    relevance: str = "",
    semantics: str = "reference",
    memory: MemoryLimit = None,
) -> Evaluation:
    """Evaluate encoded images and captions with `evaluate` or `evaluate_listed`, as each protocol requires.

    Args:
        visual: Encoded images of the data set, in its order.
        text: Encoded captions of the data set, in its order.
        score: Score function.
        data: The data set.
        protocols: The first is the result, the others are its ``other_protocols``.
        relevance: Relevance estimator, for the coherence of the ranking with graded relevance. Empty: none.
        semantics: Semantics of CS@K.
        memory: Memory of a tile.

    Returns:
        The result.
    """
    results = []
    for protocol in protocols:
        selected = select_captions(data, [protocol])
        captions = select_items(text, torch.from_numpy(np.flatnonzero(np.isin(data.caption_rows, selected.caption_rows))))
        if protocol.positives_file:
            result = evaluate_listed(visual, captions, score, selected, protocol=protocol, memory=memory)
        else:
            ids = torch.arange(len(selected.images)), torch.from_numpy(selected.image_of)
            result = evaluate(visual, captions, score, *ids, protocol=protocol, memory=memory)
        if relevance:
            coherence = ranking_coherence(
                visual, captions, score, selected, relevance, semantics=semantics, folds=protocol.folds, memory=memory
            )
            result = replace(result, coherence=coherence)
        results.append(result)
    return replace(results[0], other_protocols=tuple(results[1:]))
