"""Evaluation of the encoded items of a data set: the results of protocols, and the ranked lists of
TREC files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from visavis.core import storage
from visavis.core.blocking import Score
from visavis.core.encoded import Direction, Encoded
from visavis.core.errors import DataError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.process_group import ONE_PROCESS, ProcessGroup
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.formats.published_lists import match_coco_ids
from visavis.evaluation.evaluate_items import evaluate, evaluate_listed
from visavis.evaluation.protocols import UNPAIRED, ListedPositives, Protocol, pair_targets
from visavis.evaluation.results import Evaluation
from visavis.evaluation.trec import RankedPart, TrecRankings, trec_rankings
from visavis.losses.scoring import select_items
from visavis.losses.targets import Targets
from visavis.training.evaluation.ranked_split import gallery_ids, select_for_protocol
from visavis.training.evaluation.result_sections import ResultSection

COCO_5K_FILE = "coco_5k_test_text/dataset_coco_5k_test.json"
"""The 5,000 test images: file names, captions, and their MS-COCO ids, which the lists use."""


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
    """Evaluate encoded images and captions, each followed by the unpaired items of ``data``, with
    `evaluate` or `evaluate_listed`. The results of all protocols but the first are its
    ``other_protocols``.
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


def rank_dataset(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    protocol: Protocol,
    *,
    memory: MemoryLimit = None,
) -> dict[Direction, TrecRankings]:
    """Rank both directions as ``evaluate_dataset`` does under one protocol."""
    data, images, texts = select_for_protocol(data, visual, text, protocol)
    # The third caption of an image is ``name#2``.
    captions = np.empty(len(data.captions), object)
    for image, captions_of_image in zip(data.images, data.captions_of, strict=True):
        captions[captions_of_image] = [
            f"{image.name}#{number}" for number in range(len(captions_of_image))
        ]
    names = {
        "image": [image.name for image in (*data.images, *data.unpaired_images)],
        "text": [*captions, *(f"#{number}" for number in range(len(data.unpaired_texts)))],
    }

    # Parts of the rankings: the listed queries, all items, or each fold.
    image_ids, text_ids, keys = gallery_ids(data, protocol)
    protocol.validate(image_ids, text_ids)
    parts: dict[Direction, list[RankedPart]] = {"i2t": [], "t2i": []}
    if protocol.positives_file:
        listed_images, listed_texts = read_listed_positives(protocol, data)
        every_text = torch.arange(len(text_ids))
        parts["i2t"].append(RankedPart(listed_images.queries, every_text, listed_images.targets))
        parts["t2i"].append(RankedPart(listed_texts.queries, image_ids, listed_texts.targets))
        return trec_rankings(images, texts, score, names, parts, memory=memory)
    for fold_images, fold_texts in protocol.split_folds(image_ids, text_ids):
        fold_keys = None if keys is None else keys[fold_texts]
        targets = pair_targets(image_ids[fold_images], text_ids[fold_texts], fold_keys)
        # Unpaired items are candidates only.
        queries = (image_ids[fold_images] != UNPAIRED).nonzero()[:, 0]
        parts["i2t"].append(RankedPart(fold_images[queries], fold_texts, targets[queries]))
        queries = (text_ids[fold_texts] != UNPAIRED).nonzero()[:, 0]
        parts["t2i"].append(RankedPart(fold_texts[queries], fold_images, targets.T[queries]))
    return trec_rankings(images, texts, score, names, parts, memory=memory)


def read_listed_positives(
    protocol: Protocol, data: Dataset
) -> tuple[ListedPositives, ListedPositives]:
    """Read the positives of the images and of the captions that a protocol lists: ECCV Caption or
    Crisscrossed Captions of MS-COCO.
    """
    # Positions by the ids of MS-COCO.
    images, captions = match_coco_ids(data, resolve_path(COCO_5K_FILE))
    return (
        _read_list(f"{protocol.positives_file}_image_to_caption.json", images, captions),
        _read_list(f"{protocol.positives_file}_caption_to_image.json", captions, images),
    )


def _read_list(name: str, queries: dict[int, int], candidates: dict[int, int]) -> ListedPositives:
    """Read one list. A positive that is not a candidate is left out."""
    content: dict[int, list[int]] = storage.read_json(resolve_path(name), dict[int, list[int]])
    if (unknown := next((query for query in content if query not in queries), None)) is not None:
        raise DataError(f"{name}: expected ids of {COCO_5K_FILE}, got {unknown}.")
    listed = {
        queries[query]: [candidates[positive] for positive in positives if positive in candidates]
        for query, positives in content.items()
    }
    num_positives = torch.tensor([len(positives) for positives in listed.values()])  # [Q]
    query = torch.arange(len(listed)).repeat_interleave(num_positives)
    candidate = torch.tensor([position for positives in listed.values() for position in positives])
    return ListedPositives(
        torch.tensor(list(listed)),
        Targets.from_pairs(query, candidate, len(listed), len(candidates)),
    )
