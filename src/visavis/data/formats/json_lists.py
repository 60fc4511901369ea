"""JSON lists of images and captions: parsing without losses, and checks of their lists and entries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.formats.listing import ListedImage, Listing, escape_surrogates, shorten


class DuplicateKeyObject(dict[str, Any]):
    """A JSON object with a duplicate key. It has the last value of the key."""


def parse_json(text: str) -> Any:
    """Parse JSON. Texts may have lone surrogates, and objects may be a ``DuplicateKeyObject``.

    Args:
        text: The JSON text.

    Returns:
        The value.

    Raises:
        ValueError: If the text is not JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_detect_duplicate_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json_file(content: bytes, path: Path) -> Any:
    """Parse a JSON file with ``parse_json``.

    Args:
        content: Its content.
        path: The file, for the error.

    Returns:
        The value.

    Raises:
        DataError: If the file is not JSON.
    """
    try:
        return parse_json(storage.decode_text(content, path, "surrogateescape"))
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON: {error}. Correct the file, or download it again."
        ) from None


def require_lists(content: Any, path: Path, *keys: str) -> list[list[Any]]:
    """Return the lists of a JSON object.

    Args:
        content: The parsed file.
        path: The file, for the error.
        *keys: Keys of the lists.

    Returns:
        The list of each key.

    Raises:
        DataError: If the file is not an object, or a key is missing or duplicate, or its value is
            not a list.
    """
    lists = read_fields(content, *keys)
    if not all(isinstance(value, list) for value in lists):
        expected = ", ".join(f"'{key}': [...]" for key in keys)
        actual = (
            f"the keys {escape_surrogates(', '.join(content)):.80}"
            if isinstance(content, dict)
            else f"a {type(content).__name__}"
        )
        raise DataError(
            f"{path}: expected {{{expected}}}, each key once, got {actual}. Download the file "
            "again."
        )
    return lists


def read_fields(entry: Any, *keys: str) -> list[Any]:
    """Read values of an entry.

    Args:
        entry: The entry.
        *keys: Their keys.

    Returns:
        The value of each key. None: the key is missing, or the entry is not an object with each key
        once.
    """
    is_object = isinstance(entry, dict) and not isinstance(entry, DuplicateKeyObject)
    return [entry.get(key) if is_object else None for key in keys]


def add_malformed_image(
    listing: Listing, entry: Any, expected: str, location: str, split: str | None = None
) -> None:
    """Add an unusable image for an entry that cannot be read, so that the positions of other images
    do not change.

    Args:
        listing: The listing.
        entry: The entry.
        expected: The expected content.
        location: Location of the entry.
        split: Split of the file.
    """
    listing.images.append(ListedImage(location, split))
    listing.add_loss(
        "malformed entry",
        location,
        f"expected {expected}, each once, got {shorten(entry)}",
        listing.images[-1],
    )


def add_caption_entry(
    listing: Listing, entry: Any, id_key: str, images: Mapping[Any, ListedImage], location: str
) -> None:
    """Add the caption of an entry ``{id_key: ..., "caption": ...}``.

    Args:
        listing: The listing.
        entry: The entry.
        id_key: Key of the id of the image.
        images: Images by id.
        location: Location of the entry.
    """
    text, image_id = read_fields(entry, "caption", id_key)
    image = images.get(image_id) if isinstance(image_id, str | int) else None
    caption = listing.add_caption(text if isinstance(text, str) else "", image, location)
    if not isinstance(text, str):
        message = f"expected an object with {id_key} and caption, each once, got {shorten(entry)}"
        listing.add_loss("malformed entry", location, message, caption)
    elif image is None:
        listing.add_loss(
            "caption without image",
            location,
            f"its {id_key} {shorten(image_id)} is not listed",
            caption,
        )


def _detect_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    return value if len(value) == len(pairs) else DuplicateKeyObject(value)
