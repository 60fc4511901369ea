"""Data sets as they are published: MS-COCO, Karpathy's JSON, MSR-VTT, MSVD, and stored features of
the VSE++ family.

- MS-COCO as downloaded: ``annotations/captions_train2017.json`` and ``captions_val2017.json`` next to
  the images, with ``{"images": [{"id", "file_name"}], "annotations": [{"image_id", "id", "caption"}]}``.
  The images of a file are in the folder that its name contains, such as ``train2017/``, or anywhere
  under the folder. The name also contains the split. There is no test split with captions: the
  standard test is in Karpathy's list.
- Karpathy's JSON: ``{"images": [{"filename", "split", "sentences": [{"raw", "tokens"}], "imgid",
  "filepath"}]}``. Image files are in folders next to it, in ``.tar`` archives, or absent. Without
  files, ``filename`` is optional and ``cocoid`` or ``imgid`` is the name. The split ``restval``
  counts as train.
- MSR-VTT: ``{"videos": [{"video_id", "split"}], "sentences": [{"video_id", "caption"}]}``, in one
  file or two. The official split has 6,513 training, 497 validation and 2,990 test videos with about
  20 captions each. The split 1k-A is written by ``visavis data convert``.
- MSVD: ``AllVideoDescriptions.txt`` with one caption per line, which begins with the name of its
  video. ``train_list.txt``, ``val_list.txt`` and ``test_list.txt`` name 1,200, 100 and 670 videos
  with about 40 captions each. Lines that begin with ``#`` are comments. Captions of videos that are
  not in a list are skipped.
- VSE++ family: ``train_ims.npy`` and ``train_caps.txt``, and the same for dev (val) and test. The
  captions file has one caption per line. The features have one row per image with the same number of
  captions each, or one row per caption with each image as many times in succession. Such a data set
  has no pixels. Image ``train-7`` is the eighth image of ``train_ims.npy``.

Source: Chen et al. (2015), Microsoft COCO Captions. Xu et al. (2016) for MSR-VTT. Chen and Dolan
(2011) and Venugopalan et al. (2015) for MSVD.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.dataset import Dataset, require
from visavis.data.file_names import (
    SPLITS,
    escape_surrogates,
    is_valid_unicode,
    normalize_split_name,
    split_priority,
    splits_of_files,
)
from visavis.data.formats.listing import DatasetFormat, ListedImage, Listing, read_list
from visavis.data.formats.table_columns import shorten
from visavis.data.words import tokenize


class DuplicateKeyObject(dict[str, Any]):
    """A JSON object with a duplicate key. It has the last value of the key."""


def parse_json(text: str) -> Any:
    """Parse JSON. Texts may have lone surrogates, and objects may be a ``DuplicateKeyObject``."""

    def make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        return value if len(value) == len(pairs) else DuplicateKeyObject(value)

    try:
        return json.loads(text, object_pairs_hook=make_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json_list(text: str, path: Path) -> Any:
    """Parse a list with ``parse_json``."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON: {error}. Correct the file, or download it again."
        ) from None


def require_lists(content: Any, path: Path, *keys: str) -> list[list[Any]]:
    """Return the lists of a JSON object, one for each key."""
    lists = read_fields(content, *keys)
    if not all(isinstance(value, list) for value in lists):
        expected = ", ".join(f"'{key}': [...]" for key in keys)
        actual = (
            f"the keys {escape_surrogates(', '.join(content)):.80}"
            if isinstance(content, dict)
            else f"a {type(content).__name__}"
        )
        raise DataError(
            f"{path}: expected {{{expected}}}, each key once, got {actual}. Download the file "
            "again."
        )
    return lists


def read_fields(entry: Any, *keys: str) -> list[Any]:
    """Read values of an entry. All are None if it is not an object with each key once."""
    is_object = isinstance(entry, dict) and not isinstance(entry, DuplicateKeyObject)
    return [entry.get(key) if is_object else None for key in keys]


def add_malformed_image(
    listing: Listing, entry: Any, expected: str, location: str, split: str | None = None
) -> None:
    """Add an unusable image for an entry that cannot be read, so that the positions of other images
    do not change.
    """
    # The entry keeps its position, by which stored features are found.
    listing.images.append(ListedImage(location, split))
    listing.add_loss(
        "malformed entry",
        location,
        f"expected {expected}, each once, got {shorten(entry)}",
        listing.images[-1],
    )


def add_caption_entry(
    listing: Listing, entry: Any, id_key: str, images: Mapping[Any, ListedImage], location: str
) -> None:
    """Add the caption of an entry ``{id_key: ..., "caption": ...}``."""
    text, image_id = read_fields(entry, "caption", id_key)
    image = images.get(image_id) if isinstance(image_id, str | int) else None
    caption = listing.add_caption(text if isinstance(text, str) else "", image, location)
    if not isinstance(text, str):
        message = f"expected an object with {id_key} and caption, each once, got {shorten(entry)}"
        listing.add_loss("malformed entry", location, message, caption)
    elif image is None:
        listing.add_loss(
            "caption without image",
            location,
            f"its {id_key} {shorten(image_id)} is not listed",
            caption,
        )


COCO_PATTERN = "captions_*.json"
ANNOTATIONS = "annotations"


def list_coco(source: Path) -> Listing:
    """List the images and captions of one file, or of all files in a folder or its subfolder
    ``annotations``.
    """
    folder = source if os.path.isdir(source) else source.parent
    files = (
        [source]
        if folder != source
        else sorted([*folder.glob(COCO_PATTERN), *folder.glob(f"{ANNOTATIONS}/{COCO_PATTERN}")])
    )
    # 2014 and 2017 divide the same images differently: their union would have test images in train.
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
        content = parse_json_list(read_list(file, listing.folder), file)
        images, annotations = require_lists(content, file, "images", "annotations")
        folder_name = file.stem.removeprefix("captions_")
        by_id = dict[str | int, ListedImage]()
        for number, entry in enumerate(images):
            name, image_id = read_fields(entry, "file_name", "id")
            if not isinstance(name, str) or not name or not isinstance(image_id, str | int):
                location = f"{file.name}, image {number}"
                expected = "an object with id and file_name"
                add_malformed_image(listing, entry, expected, location, split)
                continue
            image = listing.add_image(name, split)
            # Files of the same name may be in several folders.
            image.file = name if "/" in name else f"{folder_name}/{name}"
            if (first := by_id.setdefault(image_id, image)) is not image:
                message = f"its id {image_id} is already the id of {first.name}"
                listing.add_loss("duplicate id", name, message, image)
        for number, entry in enumerate(annotations):
            location = f"{file.name}, annotation {number}"
            add_caption_entry(listing, entry, "image_id", by_id, location)
    return listing


COCO = DatasetFormat(
    name="COCO captions",
    description="annotations/captions_NAME.json of MS-COCO next to the folders of images (NAME contains train or val)",
    patterns=(f"{ANNOTATIONS}/{COCO_PATTERN}", COCO_PATTERN),
    suffixes=(COCO_PATTERN,),
    read=list_coco,
    image_files="optional",
    reads_several_files=True,
    fallback_level=2,
)


def list_karpathy(path: Path) -> Listing:
    """List the images and captions of a Karpathy file, in its order. A file of COCO captions with
    any name is listed, too.
    """
    text = read_list(path, path.parent)
    listing = Listing(path)
    listed = parse_json_list(text, path)
    if isinstance(listed, dict) and "annotations" in listed:
        return replace(list_coco(path), format_name=COCO.name)
    [images] = require_lists(listed, path, "images")
    # ``read_list`` has escaped bytes that are not UTF-8. The first of each line is noted.
    for number, line in enumerate(text.split("\n"), 1):
        if broken := re.search("[\udc80-\udcff]", line):
            position = len(line[: broken.start()].encode()) + 1
            message = f"byte {position} of the line ({ord(broken[0]) - 0xDC00:#04x}) is not UTF-8"
            listing.add_note("broken UTF-8", f"{path.name}:{number}", message)
    ids: dict[str, str] = {}
    for record in images:
        _read_image(listing, record, ids)
    # Of images of the same name, the first is kept, or the one in an evaluation split.
    image_of: dict[str, ListedImage] = {}
    for image in listing.images:
        earlier = image_of.setdefault(image.name, image)
        if earlier is image or not image.usable:
            continue
        if earlier.split == image.split:
            listing.add_loss(
                "duplicate name", image.name, "the name is listed twice, the first is used", image
            )
            continue
        # A result on test must not come from training on it.
        image_of[image.name], removed = sorted(
            (earlier, image), key=lambda copy: split_priority(copy.split)
        )
        message = f"the image is listed in splits {earlier.split} and {image.split}, the one in {removed.split} is skipped"
        listing.add_loss("image in two splits", image.name, message, removed)
    return listing


def _read_image(listing: Listing, record: Any, ids: dict[str, str]) -> None:
    location = f"{listing.source.name}, image {len(listing.images)}"
    if not isinstance(record, dict):
        add_malformed_image(
            listing, record, "an object with filename, split and sentences", location
        )
        return
    file = record.get("filename")
    number = record.get("cocoid", record.get("imgid"))
    file = file if isinstance(file, str) and file else None
    name = file or (
        location
        if number is None
        else shorten(number)
        if isinstance(number, list | dict)
        else str(number)
    )
    folder = record.get("filepath")
    split = record.get("split")
    has_folder = folder and file and isinstance(folder, str)
    image = ListedImage(
        name, normalize_split_name(split), f"{folder}/{file}" if has_folder else file
    )
    listing.images.append(image)
    for key, value, kind in (
        ("split", split, str),
        ("filepath", folder, str),
        ("cocoid or imgid", number, str | int | float),
    ):
        if value is not None and not isinstance(value, kind):
            message = f"its {key} is {shorten(value)}, expected another kind of value"
            listing.add_loss("malformed entry", name, message, image)
    if isinstance(record, DuplicateKeyObject):
        listing.add_loss("malformed entry", name, "a key is duplicated", image)
    if file is None and number is None:
        message = "the captions name no image: no filename, cocoid or imgid"
        listing.add_loss("caption without image", location, message, image)
    for key in ("imgid", "cocoid"):
        if earlier := _earlier(ids, key, record, name):
            message = f"its {key} {record[key]} is already the id of {earlier}"
            listing.add_loss("duplicate id", name, message, image)
    sentences = record.get("sentences", [])
    if not isinstance(sentences, list):
        message = f"sentences is {shorten(sentences)}, expected a list"
        listing.add_loss("malformed entry", name, message, image)
        return
    for position, sentence in enumerate(sentences, 1):
        location = f"{name}, caption {position}"
        # Some lists have plain texts instead of objects.
        sentence = sentence if isinstance(sentence, dict) else {"raw": sentence}
        text = sentence.get("raw", sentence.get("tokens"))
        if isinstance(text, list) and all(isinstance(token, str | int | float) for token in text):
            text = " ".join(map(str, text))
        caption = listing.add_caption(text if isinstance(text, str) else "", image, location)
        if not isinstance(text, str) or isinstance(sentence, DuplicateKeyObject):
            once = ", each once" * isinstance(sentence, DuplicateKeyObject)
            message = f"expected raw or tokens{once}, got {shorten(sentence)}"
            listing.add_loss("malformed entry", location, message, caption)
        elif earlier := _earlier(ids, "sentid", sentence, location):
            message = f"its sentid {sentence['sentid']} is already the id of {earlier}"
            listing.add_loss("duplicate id", location, message, caption)


def _earlier(ids: dict[str, str], key: str, record: dict[str, Any], owner: str) -> str | None:
    """Return the earlier owner of a record's id, or None if the id is new."""
    value = record.get(key)
    if value is None:
        return None
    shown = value if isinstance(value, str | int | float) else shorten(value)
    first = ids.setdefault(f"{key} {shown}", owner)
    return None if first == owner else first


KARPATHY = DatasetFormat(
    name="Karpathy JSON",
    description="dataset_NAME.json (Karpathy's list of images with splits and sentences)",
    patterns=("dataset*.json",),
    suffixes=(".json",),
    read=list_karpathy,
    image_files="optional",
)


@dataclass(frozen=True)
class _Sentence:
    raw: str


@dataclass(frozen=True)
class _CocoImage:
    filename: str
    cocoid: int
    sentids: list[int]
    sentences: list[_Sentence]


@dataclass(frozen=True)
class _CocoList:
    images: list[_CocoImage]


def match_coco_ids(data: Dataset, path: Path) -> tuple[dict[int, int], dict[int, int]]:
    """Return the index of the image of each MS-COCO image id, and of the caption of each sentence
    id, by Karpathy's list at ``path``.
    """
    # Names, because the positions differ in parts of a data set.
    listed = {image.filename: image for image in storage.read_json(path, _CocoList).images}
    images: dict[int, int] = {}
    captions: dict[int, int] = {}
    for position, (image, own_captions) in enumerate(
        zip(data.images, data.captions_of, strict=True)
    ):
        require(
            image.name in listed,
            f"image {image.name} is not in {path}. Use the images that this list describes.",
        )
        entry = listed[image.name]
        same_texts = [tokenize(data.captions[i]) for i in own_captions] == [
            tokenize(sentence.raw) for sentence in entry.sentences
        ]
        require(
            same_texts and len(entry.sentids) == len(own_captions),
            f"image {image.name} has other captions than in {path}, or another order of them. "
            "Use the captions of this list.",
        )
        images[entry.cocoid] = position
        captions |= dict(zip(entry.sentids, own_captions.tolist(), strict=True))
    return images, captions


MSRVTT_PATTERN = "*videodatainfo*.json"


def list_msrvtt(folder: Path) -> Listing:
    """List all videos and captions of the files in a folder."""
    return _list_files(folder, sorted(folder.glob(MSRVTT_PATTERN)))


def read_captions_and_splits(path: Path) -> tuple[dict[str, list[str]], dict[str, str | None]]:
    """Read the captions of each video in order, and the split of each video (None: not given)."""
    listing = _list_files(path, [path])
    for image in listing.images:
        require(
            is_valid_unicode(f"{image.name} {image.split}"),
            f"{path}: expected a name and split in UTF-8, got {image.name!r} in split "
            f"{image.split!r}. Save the file in UTF-8.",
        )
    captions: dict[str, list[str]] = {image.name: [] for image in listing.images if image.usable}
    for caption in listing.captions:
        if not caption.usable or caption.image is None or not is_valid_unicode(caption.text):
            raise DataError(
                f"{path.with_name(caption.location)}: expected the caption of a listed video, got "
                f"{shorten(caption.text)}. Add its video to the list, or remove the caption."
            )
        captions[caption.image.name].append(caption.text)
    return captions, {image.name: image.split for image in listing.images if image.usable}


def _list_files(source: Path, files: list[Path]) -> Listing:
    listing = Listing(source)
    sentences = dict[str, list[Any]]()
    for file in files:
        content = parse_json_list(read_list(file, source), file)
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
    patterns=(MSRVTT_PATTERN,),
    suffixes=("videodatainfo.json", "videodatainfo_2017.json"),
    read=list_msrvtt,
    image_files="optional",
    reads_whole_folder=True,
)


CAPTIONS_FILE = "AllVideoDescriptions.txt"
SPLIT_FILES = {"train": "train_list.txt", "val": "val_list.txt", "test": "test_list.txt"}


def list_msvd(folder: Path) -> Listing:
    """List all videos of the three lists, with their captions."""
    listing = Listing(folder)
    for split, file in SPLIT_FILES.items():
        require(
            os.path.exists(folder / file),
            f"{folder / file} is missing: expected {MSVD.description}. Add this list.",
        )
        for name in read_list(folder / file, folder).split():
            listing.add_image(name, split)
    # Captions of videos that no list names.
    unlisted = set()
    for number, line in enumerate(read_list(folder / CAPTIONS_FILE, folder).split("\n"), 1):
        name, _, caption = line.strip().partition(" ")
        if name in listing.by_name:
            listing.add_caption(caption, listing.by_name[name], f"{CAPTIONS_FILE}:{number}")
        elif name and not name.startswith("#"):
            unlisted.add(name)
    if unlisted:
        message = f"{len(unlisted)} videos with captions are not in a list, such as {min(unlisted)}"
        listing.add_note("video not in a list", CAPTIONS_FILE, message)
    return listing


MSVD = DatasetFormat(
    name="MSVD",
    description="AllVideoDescriptions.txt with train_list.txt, val_list.txt and test_list.txt (MSVD: a video and its caption per line)",
    patterns=(CAPTIONS_FILE,),
    suffixes=(CAPTIONS_FILE,),
    read=list_msvd,
    image_files="optional",
    reads_whole_folder=True,
)


def list_precomp(folder: Path) -> Listing:
    """List the images and captions of a folder, split by split."""
    listing = Listing(folder)
    features = dict[str, np.ndarray]()
    for split, stem in _stems(folder).items():
        features[split], captions, problem = _open_split(folder, stem)
        if problem:
            listing.add_loss("wrong row count", f"{stem}_caps.txt", problem)
            continue
        images = [ListedImage(f"{split}-{index}", split) for index in range(len(features[split]))]
        listing.images += images
        # Captions of an image are in succession.
        for line, caption in enumerate(captions):
            image = images[line * len(images) // len(captions)]
            listing.add_caption(caption, image, f"{stem}_caps.txt:{line + 1}")
    _check_shapes(folder, features)
    listing.feature_files = tuple(find_precomp_files(folder))
    listing.find_nonfinite_features = lambda: [
        f"{split}-{index}"
        for split, rows in features.items()
        if np.issubdtype(rows.dtype, np.floating)
        for index, row in enumerate(rows)
        if not np.isfinite(row).all()
    ]
    return listing


def load_precomp_features(path: str | Path) -> dict[str, np.ndarray]:
    """Load the features ``[images, ...]`` of all splits, memory-mapped. Row i is image
    ``SPLIT-i``.
    """
    folder = Path(path)
    features = dict[str, np.ndarray]()
    for split, stem in _stems(folder).items():
        features[split], _, problem = _open_split(folder, stem)
        require(not problem, f"{folder}: {problem}. Store one caption per line.")
    _check_shapes(folder, features)
    return features


def find_precomp_files(path: str | Path) -> list[Path]:
    """Find the feature arrays of a folder."""
    return sorted(Path(path).glob("*_ims.npy"))


def _check_shapes(folder: Path, features: dict[str, np.ndarray]) -> None:
    # Of an image: [D] or [R, D].
    shapes = {split: rows.shape[1:] for split, rows in features.items()}
    first = next(iter(shapes), "")
    if other := next((split for split, shape in shapes.items() if shape != shapes[first]), None):
        raise DataError(
            f"{folder}: expected features of one shape, got {shapes[first]} per image in {first} "
            f"and {shapes[other]} in {other}. "
            "Extract the features of all splits with one encoder."
        )


def _stems(folder: Path) -> dict[str, str]:
    """Find the splits of a folder, and the beginning of the file names of each."""
    stems = dict[str, str]()
    for path in find_precomp_files(folder):
        stem = path.name.removesuffix("_ims.npy")
        other = stems.setdefault(normalize_split_name(stem) or stem, stem)
        require(
            other == stem,
            f"{folder} has both {other}_ims.npy and {path.name}, which are names of the same "
            "split. Remove one of them.",
        )
    # train, val and test first, then other splits by name.
    order = [*(split for split in SPLITS if split in stems), *sorted(stems.keys() - set(SPLITS))]
    return {split: stems[split] for split in order}


def _open_split(folder: Path, stem: str) -> tuple[np.ndarray, list[str], str]:
    """Return the features of each image, all captions, and the problem of their numbers. "": none."""
    features = folder / f"{stem}_ims.npy"
    texts = folder / f"{stem}_caps.txt"
    rows = storage.read_array(features, folder, kinds="fiu", memory_map=True)
    require(
        rows.ndim > 1 and 0 not in rows.shape,
        f"{features}: expected numbers with one row per image, got {rows.dtype} of shape "
        f"{rows.shape}. Save them as an array.",
    )
    require(
        os.path.exists(texts),
        f"{texts} is missing: expected the captions of {features.name}. Write one caption per "
        "line.",
    )
    lines = read_list(texts, folder).split("\n")
    captions = [line.rstrip("\r") for line in (lines[:-1] if not lines[-1] else lines)]
    if not captions or len(captions) % len(rows):
        problem = (
            f"expected {len(rows)} captions, as {features.name} has rows, or a multiple of it, got "
            f"{len(captions)}"
        )
        return rows[:0], captions, problem
    if len(captions) > len(rows):
        return rows, captions, ""
    # As many captions as rows: each image has one caption, or is stored once for each.
    copies = _count_copies(rows)
    if not copies:
        # Taken as different images, every caption would be wrong for the copies of its own image.
        problem = f"expected each image of {features.name} the same number of times in succession"
        return rows[:0], captions, problem
    return rows[::copies], captions, ""


def _count_copies(rows: np.ndarray) -> int:
    """Return how often each image is stored in succession, judged by up to 200 places in the file.
    0: most images are stored several times, but not all equally often.
    """

    def are_equal(start: int, count: int) -> bool:
        group = np.asarray(rows[start : start + count])
        first = np.broadcast_to(group[:1], group.shape)
        return np.array_equal(group, first, equal_nan=np.issubdtype(group.dtype, np.floating))

    def places(step: int) -> np.ndarray:
        return np.unique(np.linspace(0, len(rows) // step - 1, 200).astype(int)) * step

    copies = next((n for n in range(1, len(rows)) if not are_equal(n - 1, 2)), len(rows))
    if copies == len(rows):  # constant features, such as zeros, of any number of images
        return 1
    if len(rows) % copies == 0 and all(are_equal(start, copies) for start in places(copies)):
        return copies
    neighbors = places(1)[:-1]
    return 0 if np.mean([are_equal(start, 2) for start in neighbors]) > 0.5 else 1


PRECOMP = DatasetFormat(
    name="precomp",
    description="train_ims.npy with train_caps.txt, likewise dev and test (stored features, and one caption per line)",
    patterns=("*_ims.npy",),
    suffixes=("_ims.npy", "_caps.txt"),
    read=list_precomp,
    image_files="none",
    reads_whole_folder=True,
)
