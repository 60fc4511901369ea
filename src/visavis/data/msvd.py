"""MSVD as its users divide it: ``AllVideoDescriptions.txt``, a line a caption that begins with the name of its video, beside three lists.

``train_list.txt``, ``val_list.txt`` and ``test_list.txt`` name 1,200, 100 and 670 videos, with about 40 captions each. Lines that begin with
``#`` are remarks; captions of videos that no list names are left aside. Source: Chen and Dolan (2011); Venugopalan et al. (2015).
"""

from __future__ import annotations

from pathlib import Path

from visavis import storage
from visavis.data.archives import attach_files
from visavis.data.layout import Layout
from visavis.data.listing import Entry, Listing
from visavis.data.source_text import decode
from visavis.errors import DataError

CAPTIONS = "AllVideoDescriptions.txt"
LISTS = {"train": "train_list.txt", "val": "val_list.txt", "test": "test_list.txt"}


def list_msvd(folder: Path) -> Listing:
    """All videos of the lists, with their captions. Raises DataError where a list is missing."""
    listing = Listing(folder)
    places: dict[str, int] = {}
    for split, file in LISTS.items():
        if not (folder / file).exists():
            raise DataError(f"{folder / file} is missing: expected {MSVD.files}.")
        for name in decode(storage.read_bytes(folder / file)).split():
            index = len(listing.entries)
            listing.entries.append(Entry(name, split, name))
            if (first := places.setdefault(name, index)) != index:
                kind = "name twice" if listing.entries[first].split == split else "image in two splits"
                listing.lose(kind, name, f"the video is listed in {listing.entries[first].split} already", image=index)
    unlisted = set()
    for number, line in enumerate(decode(storage.read_bytes(folder / CAPTIONS)).splitlines(), 1):
        name, _, caption = line.strip().partition(" ")
        if name in places:
            listing.add_caption(caption, places[name], f"{CAPTIONS}:{number}")
        elif name and not name.startswith("#"):
            unlisted.add(name)
    if unlisted:
        listing.note("video in no list", CAPTIONS, f"{len(unlisted)} videos with captions are in no list, {min(unlisted)} among them")
    attach_files(listing, folder, may_lack_pixels=True)
    listing.finish()
    return listing


MSVD = Layout(
    name="MSVD",
    files="AllVideoDescriptions.txt with train_list.txt, val_list.txt and test_list.txt (MSVD: a video and its caption a line)",
    patterns=(CAPTIONS,),
    endings=(CAPTIONS,),
    read=list_msvd,
    whole_folder=True,
)
