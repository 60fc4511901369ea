"""Positives that a protocol lists: ECCV Caption and Crisscrossed Captions of MS-COCO."""

from __future__ import annotations

import torch

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import Dataset
from visavis.data.formats.published_lists import match_coco_ids
from visavis.evaluation.protocols import ListedPositives, Protocol
from visavis.losses.targets import Targets

COCO_5K_FILE = "coco_5k_test_text/dataset_coco_5k_test.json"
"""The 5,000 test images: file names, captions, and their MS-COCO ids, which the lists use."""


def read_listed_positives(
    protocol: Protocol, data: Dataset
) -> tuple[ListedPositives, ListedPositives]:
    """Read the positives that a protocol lists.

    Args:
        protocol: A protocol with a positives_file.
        data: Its data set.

    Returns:
        Positives of the images and of the captions.
    """
    # positions by the ids of MS-COCO
    images, captions = match_coco_ids(data, resolve_path(COCO_5K_FILE))
    return (
        _read(f"{protocol.positives_file}_image_to_caption.json", images, captions),
        _read(f"{protocol.positives_file}_caption_to_image.json", captions, images),
    )


def _read(name: str, queries: dict[int, int], candidates: dict[int, int]) -> ListedPositives:
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
