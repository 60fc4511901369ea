"""Stored features in the layout of the VSE++ family: ``train_ims.npy`` and ``train_caps.txt``, likewise dev (val) and test.

The captions file has one caption a line. The features have a row per image and 1 or 5 captions each, or a row per caption
with each image five times in a row. Such a set has no pixels; image ``train-7`` is the eighth image of ``train_ims.npy``:

    features = precomp_features("f30k_precomp", "train")       # [images, ...], memory-mapped
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from visavis import storage
from visavis.data.layout import Layout
from visavis.data.listing import Entry, Listing, split_name
from visavis.data.source_text import decode
from visavis.errors import DataError, nearest

CAPTIONS_PER_IMAGE = 5


def list_precomp(folder: Path) -> Listing:
    """All images and captions, split by split. Raises DataError for features without captions, or of several shapes."""
    listing = Listing(folder)
    _check_shapes(folder, {_split_of(stem): _read_split(listing, folder, stem) for stem in _stems(folder)})
    listing.finish()
    listing.feature_files = tuple(feature_files(folder))
    listing.find_broken_features = lambda: [
        f"{split}-{row}" for split in dict.fromkeys(entry.split or "" for entry in listing.entries) for row in _broken_rows(folder, split)
    ]
    return listing


def precomp_features(path: str | Path, split: str) -> np.ndarray:
    """``[images, ...]``, memory-mapped: row i belongs to image ``<split>-i``. Raises DataError for an unknown split."""
    folder = Path(path)
    stems = {_split_of(stem): stem for stem in _stems(folder)}
    if split not in stems:
        raise DataError(f"{folder} has no features of split {split}: {nearest(split, stems)}")
    rows, captions = _open(folder, stems[split])
    per_image = _rows_per_image(rows, len(captions))
    if per_image is None:
        raise DataError(f"{folder}: {_wrong_width(stems[split], rows, captions)}.")
    return rows[::per_image]


def all_precomp_features(path: str | Path) -> dict[str, np.ndarray]:
    """Those of every split, in order. Raises DataError if the features of an image are of another shape in one than in another."""
    found = {_split_of(stem): precomp_features(path, _split_of(stem)) for stem in _stems(Path(path))}
    _check_shapes(Path(path), found)
    return found


def feature_files(path: str | Path) -> list[Path]:
    """The arrays of a folder in this layout."""
    return sorted(Path(path).glob("*_ims.npy"))


def _read_split(listing: Listing, folder: Path, stem: str) -> np.ndarray:
    rows, captions = _open(folder, stem)
    per_image = _rows_per_image(rows, len(captions))
    if per_image is None:
        listing.lose("wrong width", f"{stem}_caps.txt", _wrong_width(stem, rows, captions))
        return rows
    first, images, split = len(listing.entries), len(rows) // per_image, _split_of(stem)
    listing.entries += [Entry(f"{split}-{index}", split) for index in range(images)]
    for line, caption in enumerate(captions):
        listing.add_caption(caption, first + line * images // len(captions), f"{stem}_caps.txt:{line + 1}")
    return rows


def _check_shapes(folder: Path, found: dict[str, np.ndarray]) -> None:
    shapes = {split: rows.shape[1:] for split, rows in found.items()}
    first = next(iter(shapes), "")
    if other := next((split for split, shape in shapes.items() if shape != shapes[first]), None):
        raise DataError(
            f"{folder} holds features of shape {shapes[first]} an image in {first} and {shapes[other]} in {other}, expected one shape."
        )


def _broken_rows(folder: Path, split: str) -> list[int]:
    """The images of a split with features that are not finite; reads all of them."""
    rows = precomp_features(folder, split)
    if not np.issubdtype(rows.dtype, np.floating):
        return []
    return [index for index, row in enumerate(rows) if not np.isfinite(row).all()]


def _stems(folder: Path) -> list[str]:
    order = ["train", "dev", "val", "test"]
    stems = {path.name.removesuffix("_ims.npy") for path in feature_files(folder)}
    if {"dev", "val"} <= stems:
        raise DataError(f"{folder} has dev_ims.npy and val_ims.npy, two names of the validation split: take one of them away.")
    return sorted(stems, key=lambda stem: (order.index(stem) if stem in order else len(order), stem))


def _split_of(stem: str) -> str:
    return split_name(stem) or stem


def _open(folder: Path, stem: str) -> tuple[np.ndarray, list[str]]:
    features, texts = folder / f"{stem}_ims.npy", folder / f"{stem}_caps.txt"
    rows = storage.read_array(features, kinds="fiu", mapped=True)
    if rows.ndim < 2 or 0 in rows.shape:
        raise DataError(f"{features} holds {rows.dtype} of shape {rows.shape}, expected numbers with a row per image.")
    if not texts.exists():
        raise DataError(f"{texts} is missing: the features in {features.name} have no captions.")
    lines = decode(storage.read_bytes(texts)).split("\n")
    return rows, [line.rstrip("\r") for line in (lines[:-1] if not lines[-1] else lines)]


def _rows_per_image(rows: np.ndarray, num_captions: int) -> int | None:
    """1, or 5 where each image is stored five times in a row; None where rows and captions do not fit."""
    if num_captions == len(rows) * CAPTIONS_PER_IMAGE:
        return 1
    if num_captions != len(rows):
        return None
    return CAPTIONS_PER_IMAGE if _stored_five_times(rows) else 1


def _stored_five_times(rows: np.ndarray) -> bool:
    """Whether rows 5i .. 5i + 4 are equal, in up to 200 groups spread over the file."""
    groups = len(rows) // CAPTIONS_PER_IMAGE
    if not groups or len(rows) % CAPTIONS_PER_IMAGE:
        return False
    for group in np.unique(np.linspace(0, groups - 1, 200).astype(int)) * CAPTIONS_PER_IMAGE:
        same = np.asarray(rows[group : group + CAPTIONS_PER_IMAGE])
        if not np.array_equal(same, np.broadcast_to(same[:1], same.shape), equal_nan=np.issubdtype(same.dtype, np.floating)):
            return False
    return True


def _wrong_width(stem: str, rows: np.ndarray, captions: list[str]) -> str:
    return f"{stem}_caps.txt has {len(captions)} rows and {stem}_ims.npy {len(rows)}; expected as many captions, or five times as many"


PRECOMP = Layout(
    name="precomp",
    files="train_ims.npy with train_caps.txt, likewise dev and test (stored features, and a caption a line)",
    patterns=("*_ims.npy",),
    endings=("_ims.npy", "_caps.txt"),
    read=list_precomp,
    whole_folder=True,
)
