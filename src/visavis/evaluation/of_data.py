"""All that is told of a data set's encoded images and captions, whatever the protocols ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from visavis.data.dataset import Dataset
from visavis.evaluation.coherence import coherence_of
from visavis.evaluation.protocols import Protocol
from visavis.evaluation.result import Evaluation, evaluate, evaluate_listed
from visavis.memory import Memory
from visavis.scoring import Score, pick
from visavis.types import Encoded


def read_by(split: Dataset, protocols: Sequence[Protocol]) -> Dataset:
    """What any of these protocols ranks of a split: all images, each with as many of its captions, the first ones, as the protocol has."""
    numbers = [protocol.captions_per_image for protocol in protocols if protocol.captions_per_image is not None]
    return split.first_captions(max(numbers)) if len(numbers) == len(protocols) else split


def evaluate_data(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    protocols: Sequence[Protocol],
    *,
    degrees: str = "",
    semantics: str = "reference",
    memory: Memory = None,
) -> Evaluation:
    """``evaluate`` or ``evaluate_listed``, as each protocol has it, of encoded images and captions, those of ``data`` in its order.

    protocols: the first is the result, the rest are its ``others``. degrees: also how well the order follows them, with CS@K of these
    semantics. memory: as in ``evaluate``. Raises as they do.
    """
    results = []
    for protocol in protocols:
        own = read_by(data, [protocol])
        captions = pick(text, torch.from_numpy(np.flatnonzero(np.isin(data.caption_rows, own.caption_rows))))
        results.append(_evaluated(visual, captions, score, own, protocol, degrees, semantics, memory))
    return replace(results[0], others=tuple(results[1:]))


def _evaluated(
    visual: Encoded, text: Encoded, score: Score, data: Dataset, protocol: Protocol, degrees: str, semantics: str, memory: Memory
) -> Evaluation:
    if protocol.positives:
        result = evaluate_listed(visual, text, score, data, protocol=protocol, memory=memory)
    else:
        ids = torch.arange(len(data.images)), torch.from_numpy(data.image_of)
        result = evaluate(visual, text, score, *ids, protocol=protocol, memory=memory)
    if not degrees:
        return result
    coherence = coherence_of(visual, text, score, data, degrees, semantics=semantics, protocol=protocol, memory=memory)
    return replace(result, coherence=coherence)
