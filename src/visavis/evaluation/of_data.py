"""All that is told of a data set's encoded images and captions, whatever the protocol asks for."""

from __future__ import annotations

from dataclasses import replace

import torch

from visavis.data.dataset import Dataset
from visavis.evaluation.coherence import coherence_of
from visavis.evaluation.protocols import Protocol
from visavis.evaluation.result import Evaluation, evaluate, evaluate_listed
from visavis.memory import Memory
from visavis.scoring import Score
from visavis.types import Encoded


def evaluate_data(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    protocol: Protocol,
    *,
    degrees: str = "",
    semantics: str = "reference",
    memory: Memory = None,
) -> Evaluation:
    """``evaluate`` or ``evaluate_listed``, as the protocol has it, of encoded images and captions, those of ``data`` in its order.

    degrees: also how well the order follows them, with CS@K of these semantics. memory: as in ``evaluate``. Raises as they do.
    """
    if protocol.positives:
        result = evaluate_listed(visual, text, score, data, protocol=protocol, memory=memory)
    else:
        ids = torch.arange(len(data.images)), torch.from_numpy(data.image_of)
        result = evaluate(visual, text, score, *ids, protocol=protocol, memory=memory)
    if not degrees:
        return result
    coherence = coherence_of(visual, text, score, data, degrees, semantics=semantics, protocol=protocol, memory=memory)
    return replace(result, coherence=coherence)
