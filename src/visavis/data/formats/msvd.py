"""MSVD as commonly split: ``AllVideoDescriptions.txt`` with one caption per line, which begins with the name of its video, and three lists.

``train_list.txt``, ``val_list.txt`` and ``test_list.txt`` name 1,200, 100 and 670 videos with about 40 captions each. Lines that begin with
``#`` are comments. Captions of videos that are not in a list are skipped.

Source: Chen and Dolan (2011). Venugopalan et al. (2015).
"""

from __future__ import annotations

from pathlib import Path

from visavis import storage
from visavis.data.formats.image_files import attach_files
from visavis.data.formats.listing import DatasetFormat, Listing, decode_utf8
from visavis.errors import DataError

CAPTIONS_FILE = "AllVideoDescriptions.txt"
SPLIT_FILES = {"train": "train_list.txt", "val": "val_list.txt", "test": "test_list.txt"}


def list_msvd(folder: Path) -> Listing:
    """List all videos of the three lists, with their captions.

    Args:
        folder: The folder.

    Returns:
        The listing.

    Raises:
        DataError: If a list is missing.
    """
    listing = Listing(folder)
    for split, file in SPLIT_FILES.items():
        if not (folder / file).exists():
            raise DataError(f"{folder / file} is missing: expected {MSVD.description}.")
        for name in decode_utf8(storage.read_bytes(folder / file)).split():
            listing.add_image(name, split)
    unlisted = set()
    for number, line in enumerate(decode_utf8(storage.read_bytes(folder / CAPTIONS_FILE)).splitlines(), 1):
        name, _, caption = line.strip().partition(" ")
        if name in listing.index_of:
            listing.add_caption(caption, listing.index_of[name], f"{CAPTIONS_FILE}:{number}")
        elif name and not name.startswith("#"):
            unlisted.add(name)
    if unlisted:
        message = f"{len(unlisted)} videos with captions are not in a list, such as {min(unlisted)}"
        listing.add_note("video not in a list", CAPTIONS_FILE, message)
    attach_files(listing, folder, may_lack_pixels=True)
    listing.finalize()
    return listing


MSVD = DatasetFormat(
    name="MSVD",
    description="AllVideoDescriptions.txt with train_list.txt, val_list.txt and test_list.txt (MSVD: a video and its caption per line)",
    patterns=(CAPTIONS_FILE,),
    suffixes=(CAPTIONS_FILE,),
    read=list_msvd,
    reads_whole_folder=True,
)
