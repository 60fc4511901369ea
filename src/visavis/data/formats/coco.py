"""Captions of MS-COCO as downloaded: ``annotations/captions_train2017.json`` and
``captions_val2017.json`` next to the images.

A file holds ``{"images": [{"id", "file_name"}], "annotations": [{"image_id", "id", "caption"}]}``.
Its images are in the folder that its name contains, such as ``train2017/``, or anywhere under the
folder. The name also contains the split. There is no test split with captions: the standard test is
in Karpathy's list.

Source: Chen et al. (2015), Microsoft COCO Captions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.formats.json_lists import (
    add_caption_entry,
    add_malformed_image,
    parse_json_file,
    read_fields,
    require_lists,
)
from visavis.data.formats.listing import DatasetFormat, ListedImage, Listing
from visavis.data.splits import splits_of_files

FILE_PATTERN = "captions_*.json"
ANNOTATIONS = "annotations"


def list_coco(source: Path) -> Listing:
    """List the images and captions of one file, or of all files in a folder or its subfolder
    ``annotations``.

    Args:
        source: The file or folder.

    Returns:
        The listing.

    Raises:
        DataError: If a file is malformed, or the files belong to several releases.
    """
    folder = source if os.path.isdir(source) else source.parent
    files = (
        [source]
        if folder != source
        else sorted([*folder.glob(FILE_PATTERN), *folder.glob(f"{ANNOTATIONS}/{FILE_PATTERN}")])
    )
    releases = sorted({year for file in files for year in re.findall(r"\d{4}", file.name)})
    if len(releases) > 1:
        raise DataError(
            f"{source}: expected captions of one release, got "
            f"{', '.join(file.name for file in files)}. Release {releases[-1]} has other "
            "splits of the same images. Move the files of one release to another folder, or name "
            "one file."
        )
    root = Path(os.path.abspath(folder))
    listing = Listing(source, folder=root.parent if root.name == ANNOTATIONS else root)
    for file, split in splits_of_files(files, folder).items():
        _read_file(listing, file, split)
    return listing


def _read_file(listing: Listing, file: Path, split: str | None) -> None:
    content = parse_json_file(storage.read_bytes(file, listing.folder), file)
    images, annotations = require_lists(content, file, "images", "annotations")
    folder = file.stem.removeprefix("captions_")
    by_id: dict[str | int, ListedImage] = {}
    for number, entry in enumerate(images):
        name, image_id = read_fields(entry, "file_name", "id")
        if not isinstance(name, str) or not name or not isinstance(image_id, str | int):
            add_malformed_image(
                listing,
                entry,
                "an object with id and file_name",
                f"{file.name}, image {number}",
                split,
            )
            continue
        image = listing.add_image(name, split)
        image.file = name if "/" in name else f"{folder}/{name}"
        if by_id.setdefault(image_id, image) is not image:
            listing.add_loss(
                "duplicate id",
                name,
                f"its id {image_id} is already the id of {by_id[image_id].name}",
                image,
            )
    for number, entry in enumerate(annotations):
        add_caption_entry(listing, entry, "image_id", by_id, f"{file.name}, annotation {number}")


COCO = DatasetFormat(
    name="COCO captions",
    description="annotations/captions_NAME.json of MS-COCO next to the folders of images (NAME contains train or val)",
    patterns=(f"{ANNOTATIONS}/{FILE_PATTERN}", FILE_PATTERN),
    suffixes=(FILE_PATTERN,),
    read=list_coco,
    image_files="optional",
    reads_several_files=True,
    fallback_level=2,
)
