"""Conversion of published video features (pickles, or one ``.h5`` per video) to stores and lists
that training reads.

The output folder has ``experts/`` (a store of experts), ``caption_features/NAME/`` (stores of
features of captions) and ``dataset_NAME.json`` (lists in Karpathy's format, one for each way to
split the videos), as far as the sources have this content.

A pickle has an expert, captions, features of captions, or the index of the tested caption for each
video. Its values determine which, because published file names differ. An ``.h5`` has
``features.EXPERT`` ``[L, D]``, their times ``features_t.EXPERT`` ``[L, 2]`` and
``raw_captions.0``, ``raw_captions.1``, ... of words.

Published splits are texts with one video per line: ``train_list.txt``, ``val_list.txt`` and
``test_list.txt``. Other suffixes, such as ``train_list_full.txt``, split the same videos in another
way. Without a test list, as for 1k-A of MSR-VTT (``_jsfusion``), papers test on the val list. Then
the list ``-all`` trains on all other videos, and the list without it holds out some of them for
validation.

Source: the files that Gabeur et al. (2020, MMT) published.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visavis.core import storage
from visavis.core.errors import DataError, requires_extra
from visavis.core.progress import NoProgress, Progress
from visavis.data.data_paths import resolve_path
from visavis.data.dataset import require
from visavis.data.features.expert_store import EXPERT_NAME, create_expert_store
from visavis.data.features.store import FeatureWriter, StoreDescription
from visavis.data.file_names import is_valid_unicode
from visavis.data.formats.image_files import scan_folder
from visavis.data.formats.published_lists import read_captions_and_splits
from visavis.data.safe_pickle import read_plain_pickle
from visavis.data.sequences import pad_items
from visavis.data.video import video_id

# Training videos that are held out for validation if no such list was published.
NUM_HELD_OUT = 500
# A list of the videos of a split, such as train_list.txt or val_list_jsfusion.txt.
_LIST = re.compile(r"(train|val|test)_list(?:_(\w+))?\.txt")
# The split of JSFusion is known as 1k-A.
_SPLIT_NAME_ALIASES = {"jsfusion": "1ka"}
_PICKLES = (".pkl", ".pickle", ".npy")
# Captions whose word features are padded and written together.
_CAPTIONS_PER_BLOCK = 512
HDF5_SUFFIXES = (".h5", ".hdf5")
# Beginnings of names in an .h5 of a video.
_FEATURES = "features."
_SECONDS = "features_t."
_CAPTIONS = "raw_captions."
# Seconds that a feature of an expert covers, by the released code of MMT. Other experts have no
# times.
FEATURE_SECONDS = {"rgb": 0.2, "scene": 1.0, "s3d": 1.0, "vggish": 1.0}

_IN_PICKLE = (
    "a dict that gives each video an array [L, D] (an expert), a list of texts or of lists of "
    "words (captions), "
    "a list of arrays (features of captions) or a number (the caption that counts)"
)
_IN_HDF5 = "one .h5 per video with features.EXPERT and raw_captions.NUMBER"
_CORRECT_FILE = "Correct the file, or leave it out."


def _require(condition: object, problem: str, fix: str = _CORRECT_FILE) -> None:
    """Raise a DataError about the content of a source unless a condition holds."""
    if not condition:
        raise DataError(f"{problem}. {fix}")


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
        """Convert to a list in Karpathy's format as JSON data."""
        images = []
        # Without splits, all videos with captions.
        for video in captions if self.split_of is None else self.split_of:
            texts = captions.get(video)
            split = self.split_of and self.split_of[video]
            if not texts:
                raise DataError(
                    f"video {video} of a list has no captions. Add the captions of all videos."
                )
            if self.single_test_caption and split == "test":
                index = test_caption_index.get(video)
                # Only 1k-A of MSR-VTT is known to test one caption. Other val lists test all of
                # them, unless there is a file of indices.
                needs_index = bool(test_caption_index) or self.suffix.startswith("-1ka")
                _require(
                    index is not None or len(texts) == 1 or not needs_index,
                    f"one of {len(texts)} captions of {video} is tested, and its index is unknown",
                    "Add the file of indices, such as jsfusion_val_caption_idx.pkl, for all test "
                    "videos.",
                )
                _require(
                    index is None or index < len(texts),
                    f"the tested caption of {video} is {index}, expected an index below "
                    f"{len(texts)}",
                    "Use files that belong together.",
                )
                texts = texts if index is None else [texts[index]]
            images.append(
                {
                    "filename": video,
                    **({"split": split} if split else {}),
                    "sentences": [{"raw": caption} for caption in texts],
                }
            )
        return {"images": images}


def _make_splits(split_name: str, lists: dict[str, list[str]]) -> list[VideoSplits]:
    """Splits by published lists. Without a test list, the val list is the test split, and training
    videos are held out for validation.
    """
    suffix = f"-{split_name}" if split_name else ""
    missing = "the train list" if "train" not in lists else "a val or test list"
    available = " and ".join(f"the {split} list" for split in sorted(lists))
    _require(
        "train" in lists and len(lists) > 1,
        f"lists {split_name or 'without a name'}: got {available} without {missing}",
        "Add it, or remove the others.",
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
            _require(
                split_of.setdefault(video, split) == split,
                f"lists {list_name or 'without a name'}: {video} is in {split_of[video]} and in "
                f"{split}, expected one split per video",
                "Correct the lists.",
            )
    return split_of


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
        """Convert to JSON data."""
        experts = {
            name: {"embedding_dim": embedding_dim, "videos": videos}
            for name, (embedding_dim, videos) in self.experts.items()
        }
        return {**asdict(self), "folder": str(self.folder), "experts": experts}


def convert_features(
    sources: Sequence[str | Path], out: str | Path, progress: Progress | None = None
) -> ConversionReport:
    """Convert all sources, each ``PATH`` or ``NAME=PATH`` to rename an expert, to one folder. No
    code in them is executed.
    """
    _require(
        sources,
        "sources: expected pickles, .npy of objects, .h5 files or a folder of them, and lists of "
        "videos, got nothing",
        "Pass at least one.",
    )
    out = Path(out)
    progress = progress or NoProgress()
    content = _SourceContent()
    # An existing folder is refused now, not after the sources were read.
    if os.path.exists(out):
        storage.prepare_empty_folder(out, will_be_replaced=True)
    for number, source in enumerate(sources):
        content.add(source, progress)
        progress.update("sources", number + 1, len(sources), 0.0)
    # All files appear at once: a failed conversion leaves nothing.
    with storage.atomic_folder(out) as part:
        experts = _write_experts(part / "experts", content, progress)
        caption_features = tuple(content.caption_features)
        for name in caption_features:
            _write_caption_features(part / "caption_features" / name, name, content, progress)
        split_files = _write_split_files(part, os.path.basename(os.path.realpath(out)), content)
        _require(
            experts or caption_features or split_files,
            "the sources have only indices of tested captions",
            "Add the features, captions or lists they belong to.",
        )
    captions = content.captions
    num_videos = len(content.videos_with_experts | dict.fromkeys(captions))
    return ConversionReport(
        out, num_videos, sum(map(len, captions.values())), experts, caption_features, split_files
    )


@dataclass
class _SourceContent:
    """Content of all sources by video name.

    Attributes:
        experts: Arrays ``[L, D]`` by expert and video. None: the expert is missing.
        captions: Captions of each video.
        splits: Split of each video, if a file of captions has them.
        caption_features: Arrays ``[L, D]``, one per caption, by name and video.
        test_caption_index: Index of the one caption that is tested, from 0.
        hdf5_videos: HDF5 files of each source that has them.
        lists: Videos of each list ("train", "val", "test"), by the name of the split ("" without a
            name).
        checksums: Hash of the pickle of each name.
    """

    experts: dict[str, dict[str, np.ndarray | None]] = field(default_factory=dict)
    captions: dict[str, list[str]] = field(default_factory=dict)
    splits: dict[str, str] = field(default_factory=dict)
    caption_features: dict[str, dict[str, list[np.ndarray]]] = field(default_factory=dict)
    test_caption_index: dict[str, int] = field(default_factory=dict)
    hdf5_videos: list[HDF5Videos] = field(default_factory=list)
    lists: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)

    def add(self, source: str | Path, progress: Progress) -> None:
        """Read a source."""
        name, path = _parse_source(source)
        if os.path.isdir(path) or path.name.endswith(HDF5_SUFFIXES):
            videos = HDF5Videos.open(
                path, lambda done, total: progress.update("files of videos", done, total, 0.0)
            )
            self.hdf5_videos.append(videos)
            self._add_captions(videos.captions, path)
        elif matched := _LIST.fullmatch(path.name):
            split, split_name = matched.groups(default="")
            lines = map(str.strip, storage.read_text_lines(path))
            listed = [video_id(line) for line in lines if line]
            _require(
                listed and len(set(listed)) == len(listed),
                f"{path} {'has a duplicate video' if listed else 'is empty'}: expected the name of "
                "a video per line, each once",
                "Correct the list.",
            )
            same_name = self.lists.setdefault(_SPLIT_NAME_ALIASES.get(split_name, split_name), {})
            _require(
                same_name.setdefault(split, listed) is listed,
                f"{path}: duplicate {split} list of the same split",
                "Pass only one of them.",
            )
        elif path.name.endswith(".json"):
            captions, splits = read_captions_and_splits(path)
            self._add_captions(captions, path)
            given = {video_id(video): split for video, split in splits.items() if split is not None}
            without_split = next((video for video in splits if splits[video] is None), None)
            _require(
                not given or without_split is None,
                f"{path} has no split of {without_split}, but of others: expected splits of all "
                "videos or of none",
            )
            self.splits |= given
        elif path.name.endswith(_PICKLES):
            self._add_pickle(read_plain_pickle(path), name, path)
            self.checksums[name] = storage.content_hash(path)
        else:
            formats = ", ".join((*_PICKLES, *HDF5_SUFFIXES, "a .json of MSR-VTT"))
            raise DataError(
                f"{path} cannot be converted: expected {formats}, or a list of videos such as "
                "train_list.txt. Leave it out."
            )

    def _add_pickle(self, value: Any, name: str, path: Path) -> None:
        """Add the content of a pickle. Its kind is determined by its values."""
        found = "an empty dict" if value == {} else f"a {type(value).__name__}"
        _require(isinstance(value, dict) and value, f"{path} has {found}, expected {_IN_PICKLE}")
        table: dict[str, Any] = {}
        for key, entry in value.items():
            video = key.decode("latin1") if isinstance(key, bytes) else key
            _require(
                isinstance(video, str) and is_valid_unicode(video),
                f"{path}: expected Unicode texts as video names, got a {type(key).__name__}",
            )
            _require(
                video_id(video) not in table,
                f"{path}: duplicate video {video_id(video)}, with and without its file suffix",
                "Remove one of the two.",
            )
            table[video_id(video)] = entry
        # The first video that has a value decides the kind of all of them.
        first_video = next((video for video in table if not is_missing(table[video])), None)
        _require(
            first_video is not None,
            f"{path}: all {len(table):,} videos have only None, NaN or empty arrays, expected "
            f"{_IN_PICKLE}",
        )
        first = table[first_video or ""]
        first_element = first[0] if isinstance(first, list | tuple) and first else None
        target: dict[str, Any]
        parse: Callable[[Any, str, Path], Any]
        if isinstance(first, np.ndarray):
            target = _new_table(self.experts, name, path)
            parse = _parse_array
        elif isinstance(first_element, np.ndarray):
            target = _new_table(self.caption_features, name, path)
            parse = _parse_arrays
        elif isinstance(first_element, str | bytes | list | tuple):
            target = self.captions
            parse = _parse_captions
        else:
            # Not isinstance: True is an integer, too.
            _require(
                type(first) is int,
                f"{path}: video {first_video} has a {type(first).__name__}, expected {_IN_PICKLE}",
            )
            target = self.test_caption_index
            parse = _parse_caption_index
        _require_new(target, table, path)
        target |= {video: parse(entry, video, path) for video, entry in table.items()}

    def _add_captions(self, captions: dict[str, list[str]], path: Path) -> None:
        captions = {video_id(video): texts for video, texts in captions.items()}
        _require_new(self.captions, captions, path)
        self.captions |= {video: texts for video, texts in captions.items() if texts}

    @property
    def videos_with_experts(self) -> dict[str, None]:
        """Names of the videos that have an expert, in order."""
        names = [video for table in self.experts.values() for video in table]
        names += [video for files in self.hdf5_videos for video in files.paths]
        return dict.fromkeys(names)


def _new_table(tables: dict[str, dict[str, Any]], name: str, path: Path) -> dict[str, Any]:
    _require(
        name not in tables,
        f"{path}: duplicate name {name!r}",
        f"Give it another name with NAME={path}.",
    )
    return tables.setdefault(name, {})


def _require_new(target: Mapping[str, Any], table: Mapping[str, Any], path: Path) -> None:
    duplicate = min(target.keys() & table.keys(), default=None)
    _require(
        duplicate is None,
        f"{path}: duplicate entry {duplicate}, already defined in another file",
        "Pass only one of these files.",
    )


def is_missing(value: Any) -> bool:
    """Return whether an expert has no features of a video: None, NaN, no vectors, or vectors of
    NaN.
    """
    if isinstance(value, np.ndarray):
        return not value.size or (value.dtype.kind == "f" and bool(np.isnan(value).all()))
    return value is None or (isinstance(value, float) and math.isnan(value))


def _parse_array(value: Any, video: str, path: Path) -> np.ndarray | None:
    if is_missing(value):
        return None
    if not isinstance(value, np.ndarray):
        raise DataError(
            f"{path} gives {video} a {type(value).__name__}, but an array to others: expected an "
            f"array, or NaN where it is missing. {_CORRECT_FILE}"
        )
    # Not _require: the text of a large array takes long.
    if not value.ndim:
        raise DataError(
            f"{path} gives {video} the number {value}, expected an array [length, width], or NaN "
            f"where it is missing. {_CORRECT_FILE}"
        )
    return value


def _parse_arrays(value: Any, video: str, path: Path) -> list[np.ndarray]:
    _require(
        isinstance(value, list | tuple) and all(isinstance(array, np.ndarray) for array in value),
        f"{path}: video {video} has no list of arrays, but others have: expected one array per "
        "caption",
    )
    return list(value)


def _parse_captions(value: Any, video: str, path: Path) -> list[str]:
    _require(
        isinstance(value, list | tuple),
        f"{path}: video {video} has a {type(value).__name__}, but others have captions: expected a "
        "list of captions",
    )
    captions = []
    for caption in value:
        words = caption if isinstance(caption, list | tuple) else [caption]
        # Not _require: the messages of 200,000 captions would take longer than the checks.
        if not all(isinstance(word, str | bytes) for word in words):
            raise DataError(
                f"{path}: a caption of {video} is not a text: expected a text or a list of words. "
                f"{_CORRECT_FILE}"
            )
        text = " ".join(word if isinstance(word, str) else word.decode("latin1") for word in words)
        if not is_valid_unicode(text):
            raise DataError(
                f"{path}: a caption of {video} has an incomplete character. Fix it in the file."
            )
        captions.append(text)
    return captions


def _parse_caption_index(value: Any, video: str, path: Path) -> int:
    _require(
        type(value) is int and value >= 0,
        f"{path}: video {video} has no caption index: expected an integer >= 0",
    )
    return int(value)


@dataclass(frozen=True)
class HDF5Videos:
    """HDF5 files by video.

    Attributes:
        paths: File of each video.
        embedding_dims: Dimension of each expert of any file.
        captions: Captions of each video, in order.
    """

    paths: dict[str, Path]
    embedding_dims: dict[str, int]
    captions: dict[str, list[str]]

    @classmethod
    def open(cls, path: Path, on_progress: Callable[[int, int], None]) -> HDF5Videos:
        """Open one file, or all files in a folder and its subfolders."""
        listed = [path]
        # Only problems of files that would be read matter.
        if not os.path.isfile(path):
            scan = scan_folder(path)
            for name, problem in scan.problems.items():
                if name.endswith(HDF5_SUFFIXES) or os.path.isdir(scan.place(name)):
                    raise DataError(f"{path / name}: {problem}.")
            listed = [scan.place(name) for name in scan.files if name.endswith(HDF5_SUFFIXES)]
        _require(
            listed,
            f"{path} has no .h5: expected {_IN_HDF5}",
            "Add these files, or pass another folder.",
        )
        files = cls({}, {}, {})
        for number, file in enumerate(listed, 1):
            first = files.paths.setdefault(video_id(file.stem), file)
            _require(
                first is file,
                f"{file} has the same video name as {first}: expected one file per video",
                "Remove one of them.",
            )
            with _open_hdf5(file) as video:
                files._add_file(file, video)
            on_progress(number, len(listed))
        return files

    def read(self, video: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Read the features of a video, and their times in seconds ``[L]``: the middle of their
        stored start and end, or their place by `FEATURE_SECONDS`.
        """
        features: dict[str, np.ndarray] = {}
        seconds: dict[str, np.ndarray] = {}
        if video not in self.paths:
            return features, seconds
        with _open_hdf5(self.paths[video]) as content:
            for name in self.embedding_dims:
                if _FEATURES + name not in content:
                    continue
                features[name] = vectors = content[_FEATURES + name][()]
                # A missing expert.
                if vectors.ndim != 2:
                    continue
                stored = content[_SECONDS + name][()] if _SECONDS + name in content else []
                times = np.atleast_1d(stored)[: len(vectors)]
                # Start and end of each vector, [L, 2].
                if times.ndim == 2 and times.size:
                    times = times.mean(1)
                is_number = times.dtype.kind in "fiu" and times.shape == (len(vectors),)
                # Without one valid time per vector, the times follow from the place.
                if is_number and np.isfinite(times).all():
                    seconds[name] = times
                elif name in FEATURE_SECONDS:
                    seconds[name] = (np.arange(len(vectors)) + 0.5) * FEATURE_SECONDS[name]
        return features, seconds

    def _add_file(self, path: Path, video: Any) -> None:
        """Add the captions and dimensions of a file. Features are not read."""
        import h5py

        for key in video:
            # HDF5 supports links to other files, which opening the content would follow.
            _require(
                isinstance(video.get(key, getlink=True), h5py.HardLink),
                f"{path}: {key} is a link, and links are not followed: expected {_IN_HDF5}",
            )
            content = video[key]
            _require(
                isinstance(content, h5py.Dataset)
                and not content.is_virtual
                and not content.external,
                f"{path}: {key} is not an array in the file itself: expected {_IN_HDF5}",
            )
            _require(
                content.nbytes <= storage.MAX_BYTES,
                f"{path}: {key} has {content.nbytes:,} bytes, expected at most "
                f"{storage.MAX_BYTES:,}",
            )
            if key.startswith(_FEATURES):
                shape = content.shape
                name = key.removeprefix(_FEATURES)
                # A missing expert is stored as a single NaN.
                if len(shape) != 2 and is_missing(content[()]):
                    continue
                _require(
                    len(shape) in (1, 2),
                    f"{path}: {key} is of shape {list(shape)}, expected [length, width], or NaN",
                )
                embedding_dim = self.embedding_dims.setdefault(name, shape[-1])
                _require(
                    embedding_dim == shape[-1],
                    f"{path}: {key} has dimension {shape[-1]}, but {embedding_dim} in earlier "
                    "files: expected one dimension",
                )
        numbers = [key.removeprefix(_CAPTIONS) for key in video if key.startswith(_CAPTIONS)]
        # In the order of the numbers, which may be longer than Python converts.
        numbers = sorted(
            filter(str.isdecimal, numbers),
            key=lambda number: (len(number.lstrip("0")), number.lstrip("0")),
        )
        captions = self.captions[video_id(path.stem)] = list[str]()
        for number in numbers:
            stored = video[f"{_CAPTIONS}{number}"][()]
            words = stored.tolist() if isinstance(stored, np.ndarray) else [stored]
            is_text = isinstance(words, list) and all(
                isinstance(word, str | bytes) for word in words
            )
            _require(
                is_text and words,
                f"{path}: {_CAPTIONS}{number:.20} is not a text: expected the words of a caption, "
                "or a text",
            )
            captions.append(
                " ".join(word.decode() if isinstance(word, bytes) else word for word in words)
            )


@contextmanager
def _open_hdf5(path: Path) -> Iterator[Any]:
    with requires_extra("video", f"reading {path}"):
        import h5py
    with storage.reading_regular_file(path):
        try:
            with h5py.File(path, "r") as video:
                yield video
        except (KeyError, RuntimeError, TypeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path} is damaged or of another layout, expected {_IN_HDF5}: "
                f"{storage.error_reason(error)[:100]}. {_CORRECT_FILE}"
            ) from None


def _parse_source(source: str | Path) -> tuple[str, Path]:
    """Split a source into its name and its path."""
    text = str(source)
    name, equals, named_path = text.partition("=")
    has_name = equals and not os.path.exists(text)
    path = resolve_path(named_path if has_name else text)
    name = name if has_name else re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)
    require(
        EXPERT_NAME.fullmatch(name),
        f"{text}: expected NAME=PATH with a name of letters, digits, . _ - that begins with a "
        f"letter or digit, got {name!r}.",
    )
    return name, path


def _write_experts(
    folder: Path, content: _SourceContent, progress: Progress
) -> dict[str, tuple[int, int]]:
    """Write the store of all experts. Return the dimension of each, and how many videos have it."""
    tables = content.experts
    captions = content.captions
    # An expert that every video lacks still needs a dimension.
    embedding_dims = {
        name: next((int(array.shape[-1]) for array in table.values() if array is not None), 1)
        for name, table in tables.items()
    }
    for files in content.hdf5_videos:
        duplicate = min(embedding_dims.keys() & files.embedding_dims.keys(), default=None)
        _require(
            duplicate is None,
            f"duplicate expert {duplicate} in two sources",
            "Give one of them another name with NAME=PATH.",
        )
        embedding_dims |= files.embedding_dims
    if not embedding_dims:
        return {}
    with_experts = content.videos_with_experts
    # Videos with experts first, then those with captions alone.
    names = list(with_experts | dict.fromkeys(captions))
    if without_experts := names[len(with_experts) :]:
        _require(
            with_experts.keys() & captions.keys(),
            f"no expert has any of the videos with captions, such as {without_experts[0]}",
            "Use the same video names in all files.",
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
    for video, arrays in content.caption_features[name].items():
        captions = content.captions.get(video, [])
        _require(
            len(captions) == len(arrays),
            f"features {name}: got {len(arrays)} arrays for {len(captions)} captions of {video}",
            "Add the captions they belong to.",
        )
        for caption, array in zip(captions, arrays, strict=True):
            # Equal captions of several videos share the features of the first one.
            features.setdefault(caption, array)
    # Of the first caption. All others must have it.
    embedding_dim = next(iter(features.values())).shape[-1]
    for caption, array in features.items():
        # Not _require: the message would take longer than the check.
        if (
            array.ndim != 2
            or array.shape[1] != embedding_dim
            or not len(array)
            or array.dtype.kind != "f"
        ):
            raise DataError(
                f"features {name} of the caption {caption[:60]!r}: expected floats of shape [words, "
                f"{embedding_dim}], got {array.dtype} of shape {list(array.shape)}. Correct the "
                "features."
            )
        # Also false for NaN.
        if not np.abs(array).max() < np.finfo(np.float16).max:
            raise DataError(
                f"features {name} of the caption {caption[:60]!r}: expected values that are finite "
                "in float16. Scale them."
            )
    # Captions have different numbers of words. Blocks are padded, the store keeps the lengths.
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
    all_splits = [
        splits
        for split_name, lists in content.lists.items()
        for splits in _make_splits(split_name, lists)
    ]
    if not all_splits and content.captions:
        has_splits = len(set(content.splits.values())) > 1
        all_splits = [VideoSplits("", content.splits if has_splits else None)]
    files = {f"dataset_{name}{splits.suffix}.json": splits for splits in all_splits}
    for file, splits in files.items():
        storage.write_json(
            folder / file, splits.to_karpathy(content.captions, content.test_caption_index)
        )
    return tuple(files)
