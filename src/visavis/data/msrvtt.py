"""MSR-VTT as it is published: ``{"videos": [{"video_id", "split"}], "sentences": [{"video_id", "caption"}]}``, in one file or two.

The official division: 6,513 training, 497 validation and 2,990 test videos, 20 captions each, now and then fewer. That of 1k-A is written
by ``visavis data convert`` (see data/partitions.py). Source: Xu et al. (2016).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visavis import storage
from visavis.data.archives import attach_files
from visavis.data.layout import Layout
from visavis.data.listing import Entry, Listing, split_name
from visavis.data.source_text import RepeatedKey, decode, is_unicode, parse_json, shown
from visavis.errors import DataError

PATTERN = "*videodatainfo*.json"


def list_msrvtt(folder: Path) -> Listing:
    """All videos and captions of the files in a folder. Raises DataError for one that is not JSON with lists ``videos`` and ``sentences``."""
    listing = Listing(folder)
    contents = {path.name: _read(path) for path in sorted(folder.glob(PATTERN))}
    places: dict[str, int] = {}
    for file, content in contents.items():
        for number, video in enumerate(content["videos"]):
            _add_video(listing, video, f"{file}, video {number}", places)
    for file, content in contents.items():
        for number, sentence in enumerate(content["sentences"]):
            _add_caption(listing, sentence, f"{file}, sentence {number}", places)
    attach_files(listing, folder, may_lack_pixels=True)
    listing.finish()
    return listing


def captions_and_splits(path: Path) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    """The captions of each video in one such file, in its order, and the split that it says; None where it says none.

    Raises DataError for what is no such file, or names what is not there.
    """
    content = _read(path)
    videos = [video for video in content["videos"] if isinstance(video, dict) and "video_id" in video]
    captions: dict[str, list[str]] = {video["video_id"]: [] for video in videos}
    for number, sentence in enumerate(content["sentences"]):
        name, text = (sentence.get(key) if isinstance(sentence, dict) else None for key in ("video_id", "caption"))
        if not isinstance(text, str) or not isinstance(name, str) or name not in captions or not is_unicode(text):
            raise DataError(f"{path}, sentence {number}: expected the caption of a listed video, found {shown(sentence)}.")
        captions[name].append(text)
    splits = {video["video_id"]: split_name(split) if isinstance(split := video.get("split"), str) else None for video in videos}
    return captions, splits


def _read(path: Path) -> dict[str, list[Any]]:
    try:
        content = parse_json(decode(storage.read_bytes(path)))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}.") from None
    lists = [content.get(key) for key in ("videos", "sentences")] if isinstance(content, dict) else []
    if isinstance(content, RepeatedKey) or not lists or not all(isinstance(one, list) for one in lists):
        raise DataError(f"{path} has no lists of videos and sentences: expected {{'videos': [...], 'sentences': [...]}}, each once.")
    return content


def _add_video(listing: Listing, video: Any, place: str, places: dict[str, int]) -> None:
    name = video.get("video_id") if isinstance(video, dict) else None
    split = video.get("split") if isinstance(video, dict) else None
    index = len(listing.entries)
    if not isinstance(name, str) or not name or not isinstance(split, str | None) or isinstance(video, RepeatedKey):
        listing.entries.append(Entry(place, None))
        listing.lose("malformed entry", place, f"expected an object with video_id and split, found {shown(video)}", image=index)
        return
    listing.entries.append(Entry(name, split_name(split), name))
    if places.setdefault(name, index) != index:
        listing.lose("name twice", name, "the video is listed twice; the first is used", image=index)


def _add_caption(listing: Listing, sentence: Any, place: str, places: dict[str, int]) -> None:
    name, text = (sentence.get(key) if isinstance(sentence, dict) else None for key in ("video_id", "caption"))
    index = places.get(name, -1) if isinstance(name, str) else -1
    caption = listing.add_caption(text if isinstance(text, str) else "", index, place)
    if not isinstance(text, str):
        listing.lose("malformed entry", place, f"expected an object with video_id and caption, found {shown(sentence)}", caption=caption)
    elif index < 0:
        listing.lose("caption without image", place, f"its video_id is {shown(name)}, which no video has", caption=caption)


MSRVTT = Layout(
    name="MSR-VTT",
    files="train_val_videodatainfo.json and test_videodatainfo.json (lists of videos and sentences, as MSR-VTT publishes them)",
    patterns=(PATTERN,),
    endings=("videodatainfo.json", "videodatainfo_2017.json"),
    read=list_msrvtt,
    whole_folder=True,
)
