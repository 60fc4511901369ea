"""Karpathy's JSON: ``{"images": [{"filename", "split", "sentences": [{"raw", "tokens"}], "imgid",
"filepath"}]}``.

Image files are in folders next to the JSON file, in ``.tar`` archives, or absent. Without files,
``filename`` is optional and ``cocoid`` or ``imgid`` is the name. The split ``restval`` counts as
train.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.dataset import Dataset
from visavis.data.formats.coco import COCO, list_coco
from visavis.data.formats.json_lists import (
    DuplicateKeyObject,
    add_malformed_image,
    parse_json_file,
    require_lists,
)
from visavis.data.formats.listing import DatasetFormat, ListedImage, Listing, shorten
from visavis.data.splits import normalize_split_name, split_priority
from visavis.data.vocabulary import tokenize


def list_karpathy(path: Path) -> Listing:
    """List the images and captions of a Karpathy file, in its order. A file of COCO captions with
    any name is listed, too.

    Args:
        path: The JSON file.

    Returns:
        The listing.

    Raises:
        DataError: If the file is not JSON with a list ``images``.
    """
    content = storage.read_bytes(path, path.parent)
    listing, listed = Listing(path), parse_json_file(content, path)
    if isinstance(listed, dict) and "annotations" in listed:
        return replace(list_coco(path), format_name=COCO.name)
    [images] = require_lists(listed, path, "images")
    _note_broken_lines(listing, content)
    ids: dict[str, str] = {}
    for record in images:
        _read_image(listing, record, ids)
    _find_duplicate_names(listing)
    return listing


def _read_image(listing: Listing, record: Any, ids: dict[str, str]) -> None:
    location = f"{listing.source.name}, image {len(listing.images)}"
    if not isinstance(record, dict):
        add_malformed_image(
            listing, record, "an object with filename, split and sentences", location
        )
        return
    file, number = record.get("filename"), record.get("cocoid", record.get("imgid"))
    file = file if isinstance(file, str) and file else None
    name = file or (
        location
        if number is None
        else shorten(number)
        if isinstance(number, list | dict)
        else str(number)
    )
    folder, split = record.get("filepath"), record.get("split")
    image = ListedImage(
        name,
        normalize_split_name(split),
        f"{folder}/{file}" if folder and file and isinstance(folder, str) else file,
    )
    listing.images.append(image)
    for key, value, kind in (
        ("split", split, str),
        ("filepath", folder, str),
        ("cocoid or imgid", number, str | int | float),
    ):
        if value is not None and not isinstance(value, kind):
            listing.add_loss(
                "malformed entry",
                name,
                f"its {key} is {shorten(value)}, expected another kind of value",
                image,
            )
    if isinstance(record, DuplicateKeyObject):
        listing.add_loss("malformed entry", name, "a key is duplicated", image)
    if file is None and number is None:
        listing.add_loss(
            "caption without image",
            location,
            "the captions name no image: no filename, cocoid or imgid",
            image,
        )
    for key in ("imgid", "cocoid"):
        if earlier := _earlier(ids, key, record, name):
            listing.add_loss(
                "duplicate id",
                name,
                f"its {key} {record[key]} is already the id of {earlier}",
                image,
            )
    _read_sentences(listing, record.get("sentences", []), image, ids)


def _read_sentences(
    listing: Listing, sentences: Any, image: ListedImage, ids: dict[str, str]
) -> None:
    if not isinstance(sentences, list):
        listing.add_loss(
            "malformed entry",
            image.name,
            f"sentences is {shorten(sentences)}, expected a list",
            image,
        )
        return
    for number, sentence in enumerate(sentences, 1):
        location = f"{image.name}, caption {number}"
        sentence = sentence if isinstance(sentence, dict) else {"raw": sentence}
        text = sentence.get("raw", sentence.get("tokens"))
        if isinstance(text, list) and all(isinstance(token, str | int | float) for token in text):
            text = " ".join(map(str, text))
        caption = listing.add_caption(text if isinstance(text, str) else "", image, location)
        if not isinstance(text, str) or isinstance(sentence, DuplicateKeyObject):
            once = ", each once" * isinstance(sentence, DuplicateKeyObject)
            listing.add_loss(
                "malformed entry",
                location,
                f"expected raw or tokens{once}, got {shorten(sentence)}",
                caption,
            )
        elif earlier := _earlier(ids, "sentid", sentence, location):
            listing.add_loss(
                "duplicate id",
                location,
                f"its sentid {sentence['sentid']} is already the id of {earlier}",
                caption,
            )


def _earlier(ids: dict[str, str], key: str, record: dict[str, Any], owner: str) -> str | None:
    """Return the earlier owner of a record's id, or None if the id is new."""
    if record.get(key) is None:
        return None
    first = ids.setdefault(
        f"{key} {record[key] if isinstance(record[key], str | int | float) else shorten(record[key])}",
        owner,
    )
    return None if first == owner else first


def _find_duplicate_names(listing: Listing) -> None:
    """Mark images of the same name as unusable. The first is kept, or the one in an evaluation
    split.
    """
    image_of: dict[str, ListedImage] = {}
    for image in listing.images:
        earlier = image_of.setdefault(image.name, image)
        if earlier is image or not image.usable:
            continue
        if earlier.split == image.split:
            listing.add_loss(
                "duplicate name", image.name, "the name is listed twice, the first is used", image
            )
            continue
        image_of[image.name], removed = sorted(
            (earlier, image), key=lambda copy: split_priority(copy.split)
        )
        message = f"the image is listed in splits {earlier.split} and {image.split}, the one in {removed.split} is skipped"
        listing.add_loss("image in two splits", image.name, message, removed)


def _note_broken_lines(listing: Listing, content: bytes) -> None:
    if storage.text_encoding(content) != "utf-8-sig":
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            message = f"byte {error.start + 1} of the line ({line[error.start]:#04x}) is not UTF-8"
            listing.add_note("broken UTF-8", f"{listing.source.name}:{number}", message)


KARPATHY = DatasetFormat(
    name="Karpathy JSON",
    description="dataset_NAME.json (Karpathy's list of images with splits and sentences)",
    patterns=("dataset*.json",),
    suffixes=(".json",),
    read=list_karpathy,
    image_files="optional",
)


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


def match_coco_ids(data: Dataset, path: Path) -> tuple[dict[int, int], dict[int, int]]:
    """Match the images and captions of a data set with their MS-COCO ids.

    Args:
        data: The data set.
        path: Karpathy's list, which contains the ids.

    Returns:
        Index of the image of each image id, and index of the caption of each sentence id.

    Raises:
        DataError: If an image is not in the list, or has other captions there.
    """
    listed = {image.filename: image for image in storage.read_json(path, _CocoList).images}
    images: dict[int, int] = {}
    captions: dict[int, int] = {}
    for position, (image, own_captions) in enumerate(
        zip(data.images, data.captions_of, strict=True)
    ):
        if image.name not in listed:
            raise DataError(
                f"image {image.name} is not in {path}. Use the images that this list describes."
            )
        entry = listed[image.name]
        same_texts = [tokenize(data.captions[i]) for i in own_captions] == [
            tokenize(sentence.raw) for sentence in entry.sentences
        ]
        if not same_texts or len(entry.sentids) != len(own_captions):
            raise DataError(
                f"image {image.name} has other captions than in {path}, or another order of them. "
                "Use the captions of this list."
            )
        images[entry.cocoid] = position
        captions |= dict(zip(entry.sentids, own_captions.tolist(), strict=True))
    return images, captions
