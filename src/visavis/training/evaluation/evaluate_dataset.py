"""Evaluation of the encoded items of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from visavis.core.blocking import Score
from visavis.core.encoded import Encoded
from visavis.core.memory_budget import MemoryLimit
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.data.dataset import Dataset
from visavis.evaluation.evaluate_items import evaluate, evaluate_listed
from visavis.evaluation.protocols import Protocol
from visavis.evaluation.results import Evaluation
from visavis.losses.scoring import select_items
from visavis.training.evaluation.listed_positives import read_listed_positives
from visavis.training.evaluation.ranked_split import gallery_ids, select_for_protocol
from visavis.training.evaluation.result_sections import ResultSection


def evaluate_dataset(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    protocols: Sequence[Protocol],
    *,
    sections: Sequence[ResultSection] = (),
    memory: MemoryLimit = None,
    group: ProcessGroup = ONE_PROCESS,
) -> Evaluation:
    """Evaluate encoded images and captions with `evaluate` or `evaluate_listed`, as each protocol
    requires.

    Args:
        visual: Encoded images of the data set, in its order, then its unpaired images.
        text: Encoded captions of the data set, in its order, then its unpaired texts.
        score: Score function.
        data: The data set. Its unpaired items are candidates under protocols that take them.
        protocols: The first is the result, the others are its ``other_protocols``.
        sections: Further parts of the result.
        memory: Memory of a tile.
        group: Processes that share out the scores. Each holds all items and receives the result.

    Returns:
        The result.
    """
    results = []
    for protocol in protocols:
        selected, images, captions = select_for_protocol(data, visual, text, protocol)
        if protocol.positives_file:
            text_ids = torch.from_numpy(selected.image_of)
            # Other data than the protocol's have no such list.
            protocol.validate(torch.arange(len(selected.images)), text_ids)
            result = evaluate_listed(
                images,
                captions,
                score,
                text_ids,
                read_listed_positives(protocol, selected),
                protocol=protocol,
                memory=memory,
            )
        else:
            image_ids, text_ids, keys = gallery_ids(selected, protocol)
            result = evaluate(
                images,
                captions,
                score,
                image_ids,
                text_ids,
                keys=keys,
                protocol=protocol,
                memory=memory,
                group=group,
            )
        if sections and selected.unpaired:  # sections measure pairs
            images = select_items(images, torch.arange(len(selected.images)))
            captions = select_items(captions, torch.arange(len(selected.captions)))
        measured = tuple(
            section.measure(images, captions, score, selected, folds=protocol.folds, memory=memory)
            for section in sections
        )
        results.append(replace(result, sections=measured))
    return replace(results[0], other_protocols=tuple(results[1:]))
