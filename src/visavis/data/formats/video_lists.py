"""Lists of videos and captions, as MSR-VTT and MSVD publish them.

MSR-VTT has ``{"videos": [{"video_id", "split"}], "sentences": [{"video_id", "caption"}]}``, in one
file or two. The official split has 6,513 training, 497 validation and 2,990 test videos with about
20 captions each. The split 1k-A is written by ``visavis data convert``.

MSVD has ``AllVideoDescriptions.txt`` with one caption per line, which begins with the name of its
video. ``train_list.txt``, ``val_list.txt`` and ``test_list.txt`` name 1,200, 100 and 670 videos
with about 40 captions each. Lines that begin with ``#`` are comments. Captions of videos that are
not in a list are skipped.

Source: Xu et al. (2016) for MSR-VTT. Chen and Dolan (2011) and Venugopalan et al. (2015) for MSVD.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.formats.json_lists import (
    add_caption_entry,
    add_malformed_image,
    parse_json_file,
    read_fields,
    require_lists,
)
from visavis.data.formats.listing import DatasetFormat, Listing, is_valid_unicode, shorten
from visavis.data.splits import normalize_split_name

FILE_PATTERN = "*videodatainfo*.json"


def list_msrvtt(folder: Path) -> Listing:
    """List all videos and captions of the files in a folder.

    Args:
        folder: The folder.

    Returns:
        The listing.
    """
    return _list_files(folder, sorted(folder.glob(FILE_PATTERN)))


def read_captions_and_splits(path: Path) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    """Read the captions and splits of one file.

    Args:
        path: The JSON file.

    Returns:
        The captions of each video in order, and the split of each video. None: the file gives no
        split.

    Raises:
        DataError: If the file is malformed, or has a caption of an unknown video.
    """
    listing = _list_files(path, [path])
    for image in listing.images:
        if not is_valid_unicode(f"{image.name} {image.split}"):
            raise DataError(
                f"{path}: expected a name and split in UTF-8, got {image.name!r} in split "
                f"{image.split!r}. Correct it."
            )
    captions: dict[str, list[str]] = {image.name: [] for image in listing.images if image.usable}
    for caption in listing.captions:
        if not caption.usable or caption.image is None or not is_valid_unicode(caption.text):
            raise DataError(
                f"{path.with_name(caption.location)}: expected the caption of a listed video, got "
                f"{shorten(caption.text)}. Correct it."
            )
        captions[caption.image.name].append(caption.text)
    return captions, {image.name: image.split for image in listing.images if image.usable}


def _list_files(source: Path, files: list[Path]) -> Listing:
    listing, sentences = Listing(source), dict[str, list[Any]]()
    for file in files:
        content = parse_json_file(storage.read_bytes(file, source), file)
        videos, sentences[file.name] = require_lists(content, file, "videos", "sentences")
        for number, video in enumerate(videos):
            name, split = read_fields(video, "video_id", "split")
            if isinstance(name, str) and name and isinstance(split, str | None):
                listing.add_image(name, normalize_split_name(split))
            else:
                add_malformed_image(
                    listing,
                    video,
                    "an object with video_id and split",
                    f"{file.name}, video {number}",
                )
    for file_name, entries in sentences.items():
        for number, entry in enumerate(entries):
            add_caption_entry(
                listing, entry, "video_id", listing.by_name, f"{file_name}, sentence {number}"
            )
    return listing


MSRVTT = DatasetFormat(
    name="MSR-VTT",
    description="train_val_videodatainfo.json and test_videodatainfo.json (lists of videos and sentences, as MSR-VTT publishes them)",
    patterns=(FILE_PATTERN,),
    suffixes=("videodatainfo.json", "videodatainfo_2017.json"),
    read=list_msrvtt,
    image_files="optional",
    reads_whole_folder=True,
)


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
        if not os.path.exists(folder / file):
            raise DataError(
                f"{folder / file} is missing: expected {MSVD.description}. Add this list."
            )
        for name in _read_text(folder, file).split():
            listing.add_image(name, split)
    unlisted = set()
    for number, line in enumerate(_read_text(folder, CAPTIONS_FILE).split("\n"), 1):
        name, _, caption = line.strip().partition(" ")
        if name in listing.by_name:
            listing.add_caption(caption, listing.by_name[name], f"{CAPTIONS_FILE}:{number}")
        elif name and not name.startswith("#"):
            unlisted.add(name)
    if unlisted:
        message = f"{len(unlisted)} videos with captions are not in a list, such as {min(unlisted)}"
        listing.add_note("video not in a list", CAPTIONS_FILE, message)
    return listing


def _read_text(folder: Path, file: str) -> str:
    return storage.decode_text(
        storage.read_bytes(folder / file, folder), folder / file, "surrogateescape"
    )


MSVD = DatasetFormat(
    name="MSVD",
    description="AllVideoDescriptions.txt with train_list.txt, val_list.txt and test_list.txt (MSVD: a video and its caption per line)",
    patterns=(CAPTIONS_FILE,),
    suffixes=(CAPTIONS_FILE,),
    read=list_msvd,
    image_files="optional",
    reads_whole_folder=True,
)
