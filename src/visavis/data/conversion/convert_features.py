"""Conversion of published video features (pickles, or one ``.h5`` per video) to stores and lists
that training reads.

The output folder has ``experts/`` (a store of experts), ``caption_features/NAME/`` (stores of
features of captions) and ``dataset_NAME.json`` (lists in Karpathy's format, one for each way to
split the videos), as far as the sources have this content.

Published splits are texts with one video per line: ``train_list.txt``, ``val_list.txt`` and
``test_list.txt``. Other suffixes, such as ``train_list_full.txt``, split the same videos in another
way. Without a test list, as for 1k-A of MSR-VTT (``_jsfusion``), papers test on the val list. Then
the list ``-all`` trains on all other videos, and the list without it holds out some of them for
validation.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.core.progress import NoProgress, Progress
from visavis.data.conversion.published_features import (
    HDF5_SUFFIXES,
    HDF5Videos,
    PublishedFeatures,
    is_missing,
)
from visavis.data.conversion.safe_pickle import read_plain_pickle
from visavis.data.dataset_reader import resolve_path
from visavis.data.features.expert_store import EXPERT_NAME, create_expert_store
from visavis.data.features.store import FeatureWriter, StoreDescription
from visavis.data.formats.published_lists import read_captions_and_splits
from visavis.data.sequences import pad_items
from visavis.data.video import video_id

# Training videos that are held out for validation if no such list was published.
NUM_HELD_OUT = 500
_LIST = re.compile(r"(train|val|test)_list(?:_(\w+))?\.txt")
_SPLIT_NAME_ALIASES = {"jsfusion": "1ka"}


@dataclass(frozen=True)
class VideoSplits:
    """One way to split videos.

    Attributes:
        suffix: Suffix of the name of its list.
        split_of: Split of each video. None: not given.
        single_test_caption: Whether only one caption of each test video counts.
    """

    suffix: str
    split_of: Mapping[str, str] | None
    single_test_caption: bool = False

    def to_karpathy(
        self, captions: Mapping[str, list[str]], test_caption_index: Mapping[str, int]
    ) -> dict[str, Any]:
        """Convert to a list in Karpathy's format.

        Args:
            captions: Captions of each video.
            test_caption_index: Index of the caption that counts, by test video.

        Returns:
            The list as JSON data.

        Raises:
            DataError: If a video has no captions, or the index of the tested caption is unknown or
                out of range.
        """
        images = []
        for video in captions if self.split_of is None else self.split_of:
            if not captions.get(video):
                raise DataError(
                    f"video {video} of a list has no captions. Add the captions of all videos."
                )
            texts, split = captions[video], self.split_of and self.split_of[video]
            is_tested = self.single_test_caption and split == "test"
            if is_tested and video in test_caption_index:
                if test_caption_index[video] >= len(texts):
                    raise DataError(
                        f"the tested caption of {video} is {test_caption_index[video]}, expected "
                        f"an index below {len(texts)}. "
                        "Use files that belong together."
                    )
                texts = [texts[test_caption_index[video]]]
            # Only 1k-A of MSR-VTT is known to test one caption. Other val lists test all of them,
            # unless there is a file of indices.
            elif (
                is_tested
                and len(texts) > 1
                and (test_caption_index or self.suffix.startswith("-1ka"))
            ):
                raise DataError(
                    f"one of {len(texts)} captions of {video} is tested, and its index is unknown. "
                    "Add the file of indices, such as "
                    "jsfusion_val_caption_idx.pkl, for all test videos."
                )
            images.append(
                {
                    "filename": video,
                    **({"split": split} if split else {}),
                    "sentences": [{"raw": caption} for caption in texts],
                }
            )
        return {"images": images}


# Videos of each list ("train", "val", "test"), by the name of the split ("" without a name).
SplitLists = dict[str, dict[str, list[str]]]


def _read_split_list(path: Path, split: str, split_name: str, lists: SplitLists) -> None:
    """Add the list of a file, whose name has a split and the name of the way to split."""
    videos = [
        video_id(name) for line in storage.read_text(path).splitlines() if (name := line.strip())
    ]
    if not videos or len(set(videos)) < len(videos):
        problem = "has a duplicate video" if videos else "is empty"
        raise DataError(
            f"{path} {problem}: expected the name of a video per line, each once. Correct the list."
        )
    same_name = lists.setdefault(_SPLIT_NAME_ALIASES.get(split_name, split_name), {})
    if same_name.setdefault(split, videos) is not videos:
        raise DataError(f"{path}: duplicate {split} list of the same split. Pass only one of them.")


def _make_splits(split_name: str, lists: dict[str, list[str]]) -> list[VideoSplits]:
    suffix = f"-{split_name}" if split_name else ""
    if "train" not in lists or len(lists) < 2:
        missing = "the train list" if "train" not in lists else "a val or test list"
        available = " and ".join(f"the {split} list" for split in sorted(lists))
        raise DataError(
            f"lists {split_name or 'without a name'}: got {available} without {missing}. Add it, "
            "or remove the others."
        )
    if "test" in lists:
        return [VideoSplits(suffix, _split_of(lists, split_name))]
    all_videos = _split_of({"train": lists["train"], "test": lists["val"]}, split_name)
    # By a hash of the name: the same videos are held out whatever the order of the list is.
    by_hash = sorted(lists["train"], key=lambda video: hashlib.sha256(video.encode()).digest())
    held_out = dict.fromkeys(by_hash[: min(NUM_HELD_OUT, len(by_hash) // 10)], "val")
    return [
        VideoSplits(suffix, all_videos | held_out, single_test_caption=True),
        VideoSplits(f"{suffix}-all", all_videos, single_test_caption=True),
    ]


def _split_of(lists: Mapping[str, list[str]], list_name: str) -> dict[str, str]:
    split_of: dict[str, str] = {}
    for split in sorted(lists, key=("train", "val", "test").index):
        for video in lists[split]:
            if split_of.setdefault(video, split) != split:
                raise DataError(
                    f"lists {list_name or 'without a name'}: {video} is in {split_of[video]} and "
                    f"in {split}, expected one split per video. "
                    "Correct the lists."
                )
    return split_of


_PICKLES = (".pkl", ".pickle", ".npy")
_CAPTIONS_PER_BLOCK = 512


@dataclass(frozen=True)
class ConversionReport:
    """Content of the output folder.

    Attributes:
        folder: The folder.
        num_videos: Number of videos.
        num_captions: Number of captions.
        experts: Dimension of each expert, and the number of videos that have it.
        caption_features: Names of the stores of caption features.
        split_files: Names of the lists.
    """

    folder: Path
    num_videos: int
    num_captions: int
    experts: dict[str, tuple[int, int]] = field(default_factory=dict)
    caption_features: tuple[str, ...] = ()
    split_files: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data.

        Returns:
            All fields by name.
        """
        experts = {
            name: {"embedding_dim": embedding_dim, "videos": videos}
            for name, (embedding_dim, videos) in self.experts.items()
        }
        return {**asdict(self), "folder": str(self.folder), "experts": experts}


def convert_features(
    sources: Sequence[str | Path], out: str | Path, progress: Progress | None = None
) -> ConversionReport:
    """Convert all sources to one folder. A failed conversion leaves no output.

    Args:
        sources: Each ``PATH``, or ``NAME=PATH`` to rename an expert: pickles, ``.npy`` of objects,
            an ``.h5`` per video or a folder of them, a ``.json`` of MSR-VTT, and split lists such
            as ``train_list.txt``. No code in them is executed.
        out: The new folder.
        progress: Receives the progress.

    Returns:
        The content of the folder.

    Raises:
        DataError: If a source is unknown or malformed.
    """
    if not sources:
        raise DataError(
            "sources: expected pickles, .npy of objects, .h5 files or a folder of them, and lists "
            "of videos, got nothing. Pass at least one."
        )
    out, progress, content = Path(out), progress or NoProgress(), _SourceContent()
    if os.path.exists(out):
        storage.prepare_empty_folder(out, will_be_replaced=True)
    for number, source in enumerate(sources):
        content.add(source, progress)
        progress.update("sources", number + 1, len(sources), 0.0)
    # All files appear at once: a failed conversion leaves nothing.
    with storage.atomic_folder(out) as part:
        experts = _write_experts(part / "experts", content, progress)
        caption_features = tuple(content.published.caption_features)
        for name in caption_features:
            _write_caption_features(part / "caption_features" / name, name, content, progress)
        split_files = _write_split_files(part, os.path.basename(os.path.realpath(out)), content)
        if not (experts or caption_features or split_files):
            raise DataError(
                "the sources have only indices of tested captions. Add the features, captions or "
                "lists they belong to."
            )
    captions = content.published.captions
    num_videos = len(content.videos_with_experts | dict.fromkeys(captions))
    return ConversionReport(
        out, num_videos, sum(map(len, captions.values())), experts, caption_features, split_files
    )


@dataclass
class _SourceContent:
    """Content of all sources.

    Attributes:
        published: Content of pickles and of files of captions.
        hdf5_videos: HDF5 files of each source that has them.
        lists: Split lists.
        checksums: Hash of the pickle of each name.
    """

    published: PublishedFeatures = field(default_factory=PublishedFeatures)
    hdf5_videos: list[HDF5Videos] = field(default_factory=list)
    lists: SplitLists = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)

    def add(self, source: str | Path, progress: Progress) -> None:
        """Read a source."""
        name, path = _parse_source(source)
        if os.path.isdir(path) or path.name.endswith(HDF5_SUFFIXES):
            videos = HDF5Videos.open(
                path, lambda done, total: progress.update("files of videos", done, total, 0.0)
            )
            self.hdf5_videos.append(videos)
            self.published.add_captions(videos.captions, path)
        elif matched := _LIST.fullmatch(path.name):
            split, split_name = matched.groups(default="")
            _read_split_list(path, split, split_name, self.lists)
        elif path.name.endswith(".json"):
            captions, splits = read_captions_and_splits(path)
            self.published.add_captions(captions, path)
            self.published.add_splits(splits, path)
        elif path.name.endswith(_PICKLES):
            self.published.add(read_plain_pickle(path), name, path)
            self.checksums[name] = storage.content_hash(path)
        else:
            formats = ", ".join((*_PICKLES, *HDF5_SUFFIXES, "a .json of MSR-VTT"))
            raise DataError(
                f"{path} cannot be converted: expected {formats}, or a list of videos such as "
                "train_list.txt. Leave it out."
            )

    @property
    def videos_with_experts(self) -> dict[str, None]:
        """Names of the videos that have an expert, in order."""
        names = [video for table in self.published.experts.values() for video in table]
        names += [video for files in self.hdf5_videos for video in files.paths]
        return dict.fromkeys(names)


def _parse_source(source: str | Path) -> tuple[str, Path]:
    """Split a source into its name and its path."""
    text = str(source)
    name, equals, named_path = text.partition("=")
    has_name = equals and not os.path.exists(text)
    path = resolve_path(named_path if has_name else text)
    name = name if has_name else re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)
    if not EXPERT_NAME.fullmatch(name):
        raise DataError(
            f"{text}: expected NAME=PATH with a name of letters, digits, . _ - that begins with a "
            f"letter or digit, got {name!r}."
        )
    return name, path


def _write_experts(
    folder: Path, content: _SourceContent, progress: Progress
) -> dict[str, tuple[int, int]]:
    """Write the store of all experts. Return the dimension of each, and how many videos have it."""
    tables, captions = content.published.experts, content.published.captions
    # An expert that every video lacks still needs a dimension.
    embedding_dims = {
        name: next((int(array.shape[-1]) for array in table.values() if array is not None), 1)
        for name, table in tables.items()
    }
    for files in content.hdf5_videos:
        if duplicates := embedding_dims.keys() & files.embedding_dims.keys():
            raise DataError(
                f"duplicate expert {min(duplicates)} in two sources. Give one of them another name "
                "with NAME=PATH."
            )
        embedding_dims |= files.embedding_dims
    if not embedding_dims:
        return {}
    with_experts = content.videos_with_experts
    names = list(with_experts | dict.fromkeys(captions))
    if without_experts := names[len(with_experts) :]:
        if not with_experts.keys() & captions.keys():
            raise DataError(
                f"no expert has any of the videos with captions, such as {without_experts[0]}. Use "
                "the same video names in all files."
            )
        progress.message(
            f"{len(without_experts):,} videos with captions, such as {without_experts[0]}, are "
            "missing in all experts"
        )
    num_videos_with = dict.fromkeys(embedding_dims, 0)
    with create_expert_store(folder, embedding_dims) as store:
        for number, video in enumerate(names, 1):
            parts = {name: table.get(video) for name, table in tables.items()}
            seconds: dict[str, np.ndarray] = {}
            for files in content.hdf5_videos:
                features, times = files.read(video)
                parts |= {
                    name: None if is_missing(part) else part for name, part in features.items()
                }
                seconds |= {name: times[name] for name in times if parts[name] is not None}
            store.append(video, parts, seconds)
            for name, part in parts.items():
                num_videos_with[name] += part is not None
            progress.update("videos", number, len(names), 0.0)
    return {
        name: (embedding_dim, num_videos_with[name])
        for name, embedding_dim in embedding_dims.items()
    }


def _write_caption_features(
    folder: Path, name: str, content: _SourceContent, progress: Progress
) -> None:
    """Write a store of word features of captions, each caption once."""
    features: dict[str, np.ndarray] = {}
    for video, arrays in content.published.caption_features[name].items():
        captions = content.published.captions.get(video, [])
        if len(captions) != len(arrays):
            raise DataError(
                f"features {name}: got {len(arrays)} arrays for {len(captions)} captions of "
                f"{video}. Add the captions they belong to."
            )
        for caption, array in zip(captions, arrays, strict=True):
            # Equal captions of several videos share the features of the first one.
            features.setdefault(caption, array)
    embedding_dim = next(iter(features.values())).shape[-1]
    for caption, array in features.items():
        if (
            array.ndim != 2
            or array.shape[1] != embedding_dim
            or not len(array)
            or array.dtype.kind != "f"
        ):
            raise DataError(
                f"features {name} of the caption {caption[:60]!r}: expected floats of shape "
                f"[words, {embedding_dim}], "
                f"got {array.dtype} of shape {list(array.shape)}. Correct the features."
            )
        if not np.abs(array).max() < np.finfo(np.float16).max:
            raise DataError(
                f"features {name} of the caption {caption[:60]!r}: expected values that are finite "
                "in float16. Scale them."
            )
    lengths = np.array([len(array) for array in features.values()])
    description = StoreDescription(
        "text",
        "words",
        name,
        content.checksums[name],
        (embedding_dim,),
        len(features),
        fingerprint="",
    )
    writer = FeatureWriter.open(folder, description, list(features), lengths)
    arrays = list(features.values())
    for start in range(0, len(arrays), _CAPTIONS_PER_BLOCK):
        block = arrays[start : start + _CAPTIONS_PER_BLOCK]
        writer.append(pad_items([torch.from_numpy(array.astype(np.float32)) for array in block]))
        progress.update(f"captions of {name}", writer.rows_written, len(features), 0.0)
    writer.finish()


def _write_split_files(folder: Path, name: str, content: _SourceContent) -> tuple[str, ...]:
    """Write a list for each way to split the videos: from split lists, else from a file of
    captions, else without splits.
    """
    published = content.published
    all_splits = [
        splits
        for split_name, lists in content.lists.items()
        for splits in _make_splits(split_name, lists)
    ]
    if not all_splits and published.captions:
        has_splits = len(set(published.splits.values())) > 1
        all_splits = [VideoSplits("", published.splits if has_splits else None)]
    files = {f"dataset_{name}{splits.suffix}.json": splits for splits in all_splits}
    for file, splits in files.items():
        storage.write_json(
            folder / file, splits.to_karpathy(published.captions, published.test_caption_index)
        )
    return tuple(files)
