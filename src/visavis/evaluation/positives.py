"""Right answers that are listed in files instead of told by who was written for whom: ECCV Caption, Crisscrossed Captions.

A caption then fits many images and an image many captions, far more than its own five; what is not listed counts as wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from visavis import storage
from visavis.data.captions import tokenize
from visavis.data.dataset import Dataset
from visavis.data.reading import find_file
from visavis.errors import DataError
from visavis.evaluation.protocols import Protocol
from visavis.targets import Targets

COCO_5K = "coco_5k_test_text/dataset_coco_5k_test.json"
"""The 5,000 test images: file names, captions, and their ids in MS-COCO, by which the lists name them."""


@dataclass(frozen=True)
class _Sentence:
    raw: str


@dataclass(frozen=True)
class _CocoImage:
    filename: str
    cocoid: int
    sentids: list[int]
    sentences: list[_Sentence]


@dataclass(frozen=True)
class _CocoList:
    images: list[_CocoImage]


@dataclass(frozen=True)
class Listed:
    """One direction. queries ``[Q]``: positions of those that are listed. targets: their right answers among all candidates."""

    queries: Tensor
    targets: Targets


def listed_positives(protocol: Protocol, data: Dataset) -> tuple[Listed, Listed]:
    """What a protocol lists for the images and for the captions of a data set. Raises DataError for missing or damaged lists and other data."""
    images, captions = coco_ids(data, find_file(COCO_5K))
    return (
        _read(f"{protocol.positives}_image_to_caption.json", images, captions),
        _read(f"{protocol.positives}_caption_to_image.json", captions, images),
    )


def coco_ids(data: Dataset, path: Path) -> tuple[dict[int, int], dict[int, int]]:
    """Where the images and captions of a data set stand, by their ids in MS-COCO, which Karpathy's list at ``path`` tells.

    Raises DataError for an image that is not in the list, or with other captions.
    """
    listed = {image.filename: image for image in storage.read_json(path, _CocoList).images}
    images: dict[int, int] = {}
    captions: dict[int, int] = {}
    for position, (image, own) in enumerate(zip(data.images, data.captions_of, strict=True)):
        if image.name not in listed:
            raise DataError(f"image {image.name} is not in {path}: what people said is of those images alone.")
        known = listed[image.name]
        if [tokenize(data.captions[i]) for i in own] != [tokenize(sentence.raw) for sentence in known.sentences] or len(
            known.sentids
        ) != len(own):
            raise DataError(f"the captions of image {image.name} are not those in {path}, or in another order.")
        images[known.cocoid] = position
        captions |= dict(zip(known.sentids, own.tolist(), strict=True))
    return images, captions


def _read(name: str, queries: dict[int, int], candidates: dict[int, int]) -> Listed:
    """One list; a right answer that is no candidate is left out."""
    content: dict[int, list[int]] = storage.read_json(find_file(name), dict[int, list[int]])
    if (unknown := next((query for query in content if query not in queries), None)) is not None:
        raise DataError(f"{name} lists right answers to {unknown}, which is not in {COCO_5K}.")
    listed = {queries[query]: [candidates[answer] for answer in right if answer in candidates] for query, right in content.items()}
    number = torch.tensor([len(right) for right in listed.values()])
    query = torch.arange(len(listed)).repeat_interleave(number)
    answer = torch.tensor([position for right in listed.values() for position in right])
    return Listed(torch.tensor(list(listed)), Targets.from_pairs(query, answer, len(listed), len(candidates)))
