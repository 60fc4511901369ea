"""Captions of MS-COCO as downloaded: ``annotations/captions_train2017.json`` and ``captions_val2017.json`` next to the images.

A file holds ``{"images": [{"id", "file_name"}], "annotations": [{"image_id", "id", "caption"}]}``. Its images are in the folder that its name
contains, such as ``train2017/``, or anywhere under the folder. The name also contains the split. There is no test split with captions: the
standard test is in Karpathy's list.

Source: Chen et al. (2015), Microsoft COCO Captions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.data.formats.listing import (
    DatasetFormat,
    DuplicateKeyObject,
    ListedImage,
    Listing,
    escape_surrogates,
    parse_json_list,
    shorten,
)
from visavis.data.splits import splits_of_files
from visavis.errors import DataError

FILE_PATTERN = "captions_*.json"
ANNOTATIONS = "annotations"


def list_coco(source: Path) -> Listing:
    """List the images and captions of one file, or of all files in a folder or its subfolder ``annotations``.

    Args:
        source: The file or folder.

    Returns:
        The listing.

    Raises:
        DataError: If a file is malformed, or the files belong to several releases.
    """
    folder = source if os.path.isdir(source) else source.parent
    files = [source] if folder != source else sorted([*folder.glob(FILE_PATTERN), *folder.glob(f"{ANNOTATIONS}/{FILE_PATTERN}")])
    releases = sorted({year for file in files for year in re.findall(r"\d{4}", file.name)})
    if len(releases) > 1:
        raise DataError(
            f"{source}: expected captions of one release, got {', '.join(file.name for file in files)}. Release {releases[-1]} has other "
            "splits of the same images. Move the files of one release to another folder, or name one file."
        )
    root = Path(os.path.abspath(folder))
    listing = Listing(source, folder=root.parent if root.name == ANNOTATIONS else root)
    for file, split in splits_of_files(files, folder).items():
        _read_file(listing, file, split, parse_json_list(storage.read_bytes(file, listing.folder), file))
    return listing


def _read_file(listing: Listing, file: Path, split: str | None, content: Any) -> None:
    has_lists = isinstance(content, dict) and all(isinstance(content.get(key), list) for key in ("images", "annotations"))
    if not has_lists or isinstance(content, DuplicateKeyObject):
        actual = f"the keys {escape_surrogates(', '.join(content)):.80}" if isinstance(content, dict) else f"a {type(content).__name__}"
        raise DataError(f"{file}: expected {{'images': [...], 'annotations': [...]}}, each once, got {actual}. Download the file again.")
    folder = file.stem.removeprefix("captions_")
    by_id: dict[str | int, ListedImage] = {}
    for number, record in enumerate(content["images"]):
        location = f"{file.name}, image {number}"
        name, image_id = (record.get("file_name"), record.get("id")) if isinstance(record, dict) else (None, None)
        if not isinstance(name, str) or not name or not isinstance(image_id, str | int) or isinstance(record, DuplicateKeyObject):
            listing.images.append(ListedImage(location, split))
            message = f"expected an object with id and file_name, each once, got {shorten(record)}"
            listing.add_loss("malformed entry", location, message, listing.images[-1])
            continue
        image = listing.add_image(name, split)
        image.file = name if "/" in name else f"{folder}/{name}"
        if by_id.setdefault(image_id, image) is not image:
            listing.add_loss("duplicate id", name, f"its id {image_id} is already the id of {by_id[image_id].name}", image)
    for number, record in enumerate(content["annotations"]):
        location = f"{file.name}, annotation {number}"
        text, image_id = (record.get("caption"), record.get("image_id")) if isinstance(record, dict) else (None, None)
        owner = by_id.get(image_id) if isinstance(image_id, str | int) else None
        caption = listing.add_caption(text if isinstance(text, str) else "", owner, location)
        if not isinstance(text, str) or isinstance(record, DuplicateKeyObject):
            message = f"expected an object with image_id and caption, each once, got {shorten(record)}"
            listing.add_loss("malformed entry", location, message, caption)
        elif owner is None:
            listing.add_loss("caption without image", location, f"no image has the id {shorten(image_id)}", caption)


COCO = DatasetFormat(
    name="COCO captions",
    description="annotations/captions_NAME.json of MS-COCO next to the folders of images (NAME contains train or val)",
    patterns=(f"{ANNOTATIONS}/{FILE_PATTERN}", FILE_PATTERN),
    suffixes=(FILE_PATTERN,),
    read=list_coco,
    image_files="optional",
    reads_several_files=True,
    is_fallback=True,
)
