"""Ranked lists of a data set for TREC files."""

from __future__ import annotations

import numpy as np
import torch

from visavis.core.blocking import Score
from visavis.core.encoded import Direction, Encoded
from visavis.core.memory_budget import MemoryLimit
from visavis.data.dataset import Dataset
from visavis.evaluation.protocols import UNPAIRED, Protocol, pair_targets
from visavis.evaluation.trec import RankedPart, TrecRankings, trec_rankings
from visavis.training.evaluation.listed_positives import read_listed_positives
from visavis.training.evaluation.ranked_split import gallery_ids, select_for_protocol


def rank_dataset(
    visual: Encoded,
    text: Encoded,
    score: Score,
    data: Dataset,
    protocol: Protocol,
    *,
    memory: MemoryLimit = None,
) -> dict[Direction, TrecRankings]:
    """Rank both directions as ``evaluate_dataset`` does under one protocol.

    Args:
        visual: Encoded images of the data set, in its order, then its unpaired images.
        text: Encoded captions of the data set, in its order, then its unpaired texts.
        score: Score function.
        data: The data set.
        protocol: The protocol.
        memory: Memory for blocks of scores.

    Returns:
        Rankings by direction.
    """
    selected, images, captions = select_for_protocol(data, visual, text, protocol)
    parts = _ranked_parts(selected, protocol)
    return trec_rankings(images, captions, score, _item_names(selected), parts, memory=memory)


def _item_names(data: Dataset) -> dict[str, list[str]]:
    """Names of the images and of the texts: the third caption of an image is ``name#2``."""
    captions = np.empty(len(data.captions), object)
    for image, captions_of_image in zip(data.images, data.captions_of, strict=True):
        captions[captions_of_image] = [
            f"{image.name}#{number}" for number in range(len(captions_of_image))
        ]
    texts_without_image = [f"#{number}" for number in range(len(data.unpaired_texts))]
    return {
        "image": [image.name for image in (*data.images, *data.unpaired_images)],
        "text": [*captions, *texts_without_image],
    }


def _ranked_parts(data: Dataset, protocol: Protocol) -> dict[Direction, list[RankedPart]]:
    """All items, each fold, or the listed queries."""
    image_ids, text_ids, keys = gallery_ids(data, protocol)
    protocol.validate(image_ids, text_ids)
    if protocol.positives_file:
        listed_images, listed_texts = read_listed_positives(protocol, data)
        every_text = torch.arange(len(text_ids))
        return {
            "i2t": [RankedPart(listed_images.queries, every_text, listed_images.targets)],
            "t2i": [RankedPart(listed_texts.queries, image_ids, listed_texts.targets)],
        }
    parts: dict[Direction, list[RankedPart]] = {"i2t": [], "t2i": []}
    for images, texts in protocol.split_folds(image_ids, text_ids):
        fold_keys = None if keys is None else keys[texts]
        targets = pair_targets(image_ids[images], text_ids[texts], fold_keys)
        # Unpaired items are candidates only.
        queries = (image_ids[images] != UNPAIRED).nonzero()[:, 0]
        parts["i2t"].append(RankedPart(images[queries], texts, targets[queries]))
        queries = (text_ids[texts] != UNPAIRED).nonzero()[:, 0]
        parts["t2i"].append(RankedPart(texts[queries], images, targets.T[queries]))
    return parts
