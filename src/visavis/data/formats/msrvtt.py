"""MSR-VTT as published: ``{"videos": [{"video_id", "split"}], "sentences": [{"video_id", "caption"}]}``, in one file or two.

The official split has 6,513 training, 497 validation and 2,990 test videos with about 20 captions each. The split 1k-A is written by
``visavis data convert``.

Source: Xu et al. (2016).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visavis import storage
from visavis.data.formats.image_files import attach_files
from visavis.data.formats.listing import (
    DatasetFormat,
    DuplicateKeyObject,
    ListedImage,
    Listing,
    decode_utf8,
    is_valid_unicode,
    normalize_split_name,
    parse_json,
    shorten,
)
from visavis.errors import DataError

FILE_PATTERN = "*videodatainfo*.json"


def list_msrvtt(folder: Path) -> Listing:
    """List all videos and captions of the files in a folder.

    Args:
        folder: The folder.

    Returns:
        The listing.
    """
    listing = Listing(folder)
    contents = {path.name: _read(path) for path in sorted(folder.glob(FILE_PATTERN))}
    for file, content in contents.items():
        for number, video in enumerate(content["videos"]):
            _add_video(listing, video, f"{file}, video {number}")
    for file, content in contents.items():
        for number, sentence in enumerate(content["sentences"]):
            _add_caption(listing, sentence, f"{file}, sentence {number}")
    attach_files(listing, folder, may_lack_pixels=True)
    listing.finalize()
    return listing


def read_captions_and_splits(path: Path) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    """Read the captions and splits of one file.

    Args:
        path: The JSON file.

    Returns:
        The captions of each video in order, and the split of each video. None: the file gives no split.

    Raises:
        DataError: If the file is malformed, or has a caption of an unknown video.
    """
    content = _read(path)
    videos = [video for video in content["videos"] if isinstance(video, dict) and "video_id" in video]
    captions: dict[str, list[str]] = {video["video_id"]: [] for video in videos}
    for number, sentence in enumerate(content["sentences"]):
        name, text = (sentence.get(key) if isinstance(sentence, dict) else None for key in ("video_id", "caption"))
        if not isinstance(text, str) or not isinstance(name, str) or name not in captions or not is_valid_unicode(text):
            raise DataError(f"{path}, sentence {number}: expected the caption of a listed video, got {shorten(sentence)}.")
        captions[name].append(text)
    splits = {video["video_id"]: normalize_split_name(split) if isinstance(split := video.get("split"), str) else None for video in videos}
    return captions, splits


def _read(path: Path) -> dict[str, list[Any]]:
    try:
        content = parse_json(decode_utf8(storage.read_bytes(path)))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}.") from None
    lists = [content.get(key) for key in ("videos", "sentences")] if isinstance(content, dict) else []
    if isinstance(content, DuplicateKeyObject) or not lists or not all(isinstance(value, list) for value in lists):
        raise DataError(f"{path} has no lists of videos and sentences: expected {{'videos': [...], 'sentences': [...]}}, each once.")
    return content


def _add_video(listing: Listing, video: Any, location: str) -> None:
    name = video.get("video_id") if isinstance(video, dict) else None
    split = video.get("split") if isinstance(video, dict) else None
    if not isinstance(name, str) or not name or not isinstance(split, str | None) or isinstance(video, DuplicateKeyObject):
        listing.images.append(ListedImage(location, None))
        message = f"expected an object with video_id and split, got {shorten(video)}"
        listing.add_loss("malformed entry", location, message, image=len(listing.images) - 1)
        return
    listing.add_image(name, normalize_split_name(split))


def _add_caption(listing: Listing, sentence: Any, location: str) -> None:
    name, text = (sentence.get(key) if isinstance(sentence, dict) else None for key in ("video_id", "caption"))
    index = listing.index_of.get(name, -1) if isinstance(name, str) else -1
    caption = listing.add_caption(text if isinstance(text, str) else "", index, location)
    if not isinstance(text, str):
        message = f"expected an object with video_id and caption, got {shorten(sentence)}"
        listing.add_loss("malformed entry", location, message, caption=caption)
    elif index < 0:
        listing.add_loss(
            "caption without image", location, f"its video_id is {shorten(name)}, which is not a listed video", caption=caption
        )


MSRVTT = DatasetFormat(
    name="MSR-VTT",
    description="train_val_videodatainfo.json and test_videodatainfo.json (lists of videos and sentences, as MSR-VTT publishes them)",
    patterns=(FILE_PATTERN,),
    suffixes=("videodatainfo.json", "videodatainfo_2017.json"),
    read=list_msrvtt,
    reads_whole_folder=True,
)
