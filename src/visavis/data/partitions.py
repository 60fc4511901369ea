"""Which videos are trained on and which are tested, by published lists: a list of Karpathy's layout is written for each way to divide them.

Lists are texts of a video a line: ``train_list.txt``, ``val_list.txt`` and ``test_list.txt``; others of the same endings, such as
``train_list_full.txt``, divide the same videos in another way. Where a way has no test list, as 1k-A of MSR-VTT (``_jsfusion``), its val
list is what the papers test on; there ``-all`` trains on all other videos, and without it some of them are held out for validation.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visavis import storage
from visavis.data.clips import video_name
from visavis.data.source_text import decode
from visavis.errors import DataError

HELD_OUT = 500
"""Training videos that are held out for validation where nobody published a list of such."""
_LIST = re.compile(r"(train|val|test)_list(?:_(\w+))?\.txt")
_KNOWN_AS = {"jsfusion": "1ka"}


def is_list(path: Path) -> bool:
    """Whether a file is one of these lists, by its name."""
    return _LIST.fullmatch(path.name) is not None


@dataclass(frozen=True)
class Division:
    """One way to divide videos. ending: of the name of its list. splits: of each video; None where nobody gave any.

    pairs: one caption of a test video counts, that of a published number.
    """

    ending: str
    splits: Mapping[str, str] | None
    pairs: bool = False

    def karpathy_list(self, captions: Mapping[str, list[str]], tested: Mapping[str, int]) -> dict[str, Any]:
        """A list in Karpathy's layout. tested: by video, the number of the caption that counts.

        Raises DataError for a video without captions, and for the number of a caption that it does not have.
        """
        images = []
        for video in captions if self.splits is None else self.splits:
            if not captions.get(video):
                raise DataError(f"a list names the video {video}, of which there are no captions: give those of all videos.")
            own, split = captions[video], self.splits and self.splits[video]
            if self.pairs and split == "test" and video in tested:
                if tested[video] >= len(own):
                    raise DataError(
                        f"caption {tested[video]} of {video} is tested, but it has {len(own)}, counted from 0: "
                        "the files do not belong together."
                    )
                own = [own[tested[video]]]
            elif self.pairs and split == "test" and len(own) > 1 and (tested or self.ending.startswith("-1ka")):
                raise DataError(
                    f"of {video} one caption is tested, and no file says which of its {len(own)}: give that of numbers, such as "
                    "jsfusion_val_caption_idx.pkl, for all test videos."
                )
            images.append({"filename": video, **({"split": split} if split else {}), "sentences": [{"raw": caption} for caption in own]})
        return {"images": images}


class Lists:
    """Lists of videos, by the way they divide them ("" where it has no name) and by split."""

    def __init__(self) -> None:
        self._ways: dict[str, dict[str, list[str]]] = {}

    def add(self, path: Path) -> None:
        """Read a list. Raises DataError for one that names a video twice, or none."""
        matched = _LIST.fullmatch(path.name)
        assert matched is not None
        split, way = matched.groups(default="")
        videos = [video_name(name) for line in decode(storage.read_bytes(path)).splitlines() if (name := line.strip())]
        if not videos or len(set(videos)) < len(videos):
            raise DataError(f"{path} names {'a video twice' if videos else 'no video'}: expected the name of a video a line, each once.")
        if self._ways.setdefault(_KNOWN_AS.get(way, way), {}).setdefault(split, videos) is not videos:
            raise DataError(f"{path} would be a second {split} list of the same way to divide videos: give one of the two.")

    def divisions(self) -> list[Division]:
        """All ways. Raises DataError for a list that has no others beside it, or that shares videos with them."""
        return [division for way, lists in self._ways.items() for division in _divisions(f"-{way}" if way else "", lists)]


def _divisions(ending: str, lists: dict[str, list[str]]) -> list[Division]:
    if "train" not in lists or len(lists) < 2:
        missing = "the train list" if "train" not in lists else "a val or test list"
        given = " and ".join(f"the {split} list" for split in sorted(lists))
        raise DataError(
            f"of the lists {ending[1:] or 'without another name'} {given} came without {missing}: add it, or take out what is there."
        )
    if "test" in lists:
        return [Division(ending, _split_of(lists, ending[1:]))]
    every = _split_of({"train": lists["train"], "test": lists["val"]}, ending[1:])
    by_hash = sorted(lists["train"], key=lambda video: hashlib.sha256(video.encode()).digest())
    held_out = dict.fromkeys(by_hash[: min(HELD_OUT, len(by_hash) // 10)], "val")
    return [Division(ending, every | held_out, pairs=True), Division(f"{ending}-all", every, pairs=True)]


def _split_of(lists: Mapping[str, list[str]], where: str) -> dict[str, str]:
    split_of: dict[str, str] = {}
    for split in sorted(lists, key=("train", "val", "test").index):
        for video in lists[split]:
            if split_of.setdefault(video, split) != split:
                raise DataError(f"the lists {where} put {video} in {split_of[video]} and in {split}: expected one split a video.")
    return split_of
