"""Stored features of the VSE++ family: ``train_ims.npy`` and ``train_caps.txt``, and the same for
dev (val) and test.

The captions file has one caption per line. The features have one row per image with the same number
of captions each, or one row per caption with each image as many times in succession. Such a data set has no
pixels. Image ``train-7`` is the eighth image of ``train_ims.npy``.

Example:
    >>> features = load_precomp_features("f30k_precomp")["train"]    # doctest: +SKIP
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.file_names import SPLITS, normalize_split_name
from visavis.data.formats.listing import DatasetFormat, ListedImage, Listing, read_list


def list_precomp(folder: Path) -> Listing:
    """List the images and captions of a folder, split by split.

    Args:
        folder: The folder.

    Returns:
        The listing.

    Raises:
        DataError: If features have no captions, or their shapes differ between splits.
    """
    listing, features = Listing(folder), dict[str, np.ndarray]()
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
    """Load the features of all splits, memory-mapped.

    Args:
        path: The folder.

    Returns:
        Features of shape ``[images, ...]`` by split. Row i belongs to image ``<split>-i``.

    Raises:
        DataError: If rows and captions do not match, or the shapes differ between splits.
    """
    folder, features = Path(path), dict[str, np.ndarray]()
    for split, stem in _stems(folder).items():
        features[split], _, problem = _open_split(folder, stem)
        if problem:
            raise DataError(f"{folder}: {problem}. Store one caption per line.")
    _check_shapes(folder, features)
    return features


def find_precomp_files(path: str | Path) -> list[Path]:
    """Find the feature arrays of a folder.

    Args:
        path: The folder.

    Returns:
        Paths of the arrays.
    """
    return sorted(Path(path).glob("*_ims.npy"))


def _check_shapes(folder: Path, features: dict[str, np.ndarray]) -> None:
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
        if (other := stems.setdefault(normalize_split_name(stem) or stem, stem)) != stem:
            raise DataError(
                f"{folder} has both {other}_ims.npy and {path.name}, which are names of the same "
                "split. Remove one of them."
            )
    # train, val and test first, then other splits by name.
    order = [*(split for split in SPLITS if split in stems), *sorted(stems.keys() - set(SPLITS))]
    return {split: stems[split] for split in order}


def _open_split(folder: Path, stem: str) -> tuple[np.ndarray, list[str], str]:
    """Return the features of each image, all captions, and the problem of their numbers. "": none."""
    features, texts = folder / f"{stem}_ims.npy", folder / f"{stem}_caps.txt"
    rows = storage.read_array(features, folder, kinds="fiu", memory_map=True)
    if rows.ndim < 2 or 0 in rows.shape:
        raise DataError(
            f"{features}: expected numbers with one row per image, got {rows.dtype} of shape "
            f"{rows.shape}. Save them as an array."
        )
    if not os.path.exists(texts):
        raise DataError(
            f"{texts} is missing: expected the captions of {features.name}. Write one caption per "
            "line."
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
