"""Queries and candidates of an evaluation: the items of a split that a protocol ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from visavis.core.encoded import Encoded
from visavis.core.errors import DataError
from visavis.data.dataset import Dataset, without_captions
from visavis.data.equal_texts import text_keys, unseen_texts
from visavis.data.image_file import ByteRange, Image
from visavis.evaluation.protocols import UNPAIRED, Protocol
from visavis.losses.scoring import select_items


def first_images(split: Dataset, max_images: int) -> Dataset:
    """Take the first images of a split with their captions. ``max_images`` 0: all."""
    return split.take(np.arange(len(split.images))[: max_images or None])


def select_captions(data: Dataset, protocols: Sequence[Protocol]) -> Dataset:
    """Select the captions of a split that any of the protocols ranks: all images with the first
    captions of each.
    """
    limits = [
        protocol.captions_per_image
        for protocol in protocols
        if protocol.captions_per_image is not None
    ]
    # One protocol without a limit needs all captions.
    return data.first_captions(max(limits)) if len(limits) == len(protocols) else data


def gallery_ids(data: Dataset, protocol: Protocol) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the ids of the images and texts that a protocol ranks, -1 for unpaired ones, and the
    keys of the texts if equal texts are positives.
    """
    images = torch.arange(len(data.images))
    texts = torch.from_numpy(data.image_of)
    captions: Sequence[str] = data.captions
    if data.unpaired and protocol.takes_unpaired:
        images = pad(images, (0, len(data.unpaired_images)), value=UNPAIRED)
        texts = pad(texts, (0, len(data.unpaired_texts)), value=UNPAIRED)
        captions = [*captions, *data.unpaired_texts]
    return images, texts, text_keys(captions) if protocol.equal_texts == "positives" else None


def select_for_protocol(
    data: Dataset, visual: Encoded, text: Encoded, protocol: Protocol
) -> tuple[Dataset, Encoded, Encoded]:
    """Select the captions and the unpaired items that a protocol ranks, and their encodings."""
    if protocol.takes_unpaired:
        return data, visual, text
    selected = replace(select_captions(data, [protocol]), unpaired=())
    captions = np.flatnonzero(np.isin(data.caption_rows, selected.caption_rows))
    if data.unpaired:
        visual = select_items(visual, torch.arange(len(data.images)))
    return selected, visual, select_items(text, torch.from_numpy(captions))


def without_images(name: str, texts: Sequence[str]) -> Dataset:
    """Make a data set of texts without images, for ``Dataset.unpaired``."""
    return Dataset(name, (), tuple(texts), np.full(len(texts), UNPAIRED))


def with_distractors(
    split: Dataset, data: Dataset, added: Dataset
) -> tuple[Dataset, dict[str, int]]:
    """Add images and texts to the candidates of a split, a part of ``data``. Returns also the
    numbers of "images" and "texts" that were left out because the split has them.
    """

    def place(image: Image) -> tuple[str, int] | None:
        where = image.location
        return None if where is None else (os.path.realpath(where.path), where.offset)

    own = [*split.images, *split.unpaired_images]
    # Several images without a location are different ones.
    seen = {where for image in own if (where := place(image)) is not None}
    by_size: dict[int, list[ByteRange]] = {}
    for image in own:
        if image.location is not None:
            by_size.setdefault(image.location.num_bytes, []).append(image.location)
    listed = {where: row for row, image in enumerate(data.images) if (where := place(image))}
    rows = list[int]()
    others = list[Image]()
    left_out = 0
    for image in (*added.images, *added.unpaired_images):
        where = place(image)
        if image.location is None:
            raise DataError(
                f"{added.name}: expected images with files, got {image.name} without one. Put "
                "the images next to their list."
            )
        # The same file, the same part of an archive, or the same bytes.
        same_size = by_size.get(image.location.num_bytes, ())
        if where in seen or any(
            other.content_hash == image.location.content_hash for other in same_size
        ):
            left_out += 1
        elif where in listed:
            rows.append(listed[where])
        else:
            others.append(image)
    parts = list(split.unpaired)
    if rows:
        # Images of the data set keep their stored features.
        known = data.take(np.sort(rows))
        parts.append(without_captions(added.name, known.images, known.image_origin))
    if others:
        parts.append(without_captions(added.name, tuple(others)))
    # With an equal text, an image would count its own caption as a negative.
    texts = unseen_texts(added.unpaired_texts, [*split.captions, *split.unpaired_texts])
    if texts:
        parts.append(without_images(added.name, texts))
    num_texts = len(added.unpaired_texts) - len(texts)
    return replace(split, unpaired=tuple(parts)), {"images": left_out, "texts": num_texts}
