"""Splits of a data set: their names, splits by file name, and splits by a hash of the image name."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

SPLITS = ("train", "val", "test")
# Texts that pandas, R and databases write for a missing value.
MISSING_TEXTS = frozenset(("nan", "NaN", "NA", "<NA>", "None", "NULL", "null", "#N/A"))
_STANDARD_NAMES = {
    **{split: split for split in SPLITS},
    **dict.fromkeys(("restval", "training"), "train"),
    **dict.fromkeys(("dev", "valid", "validate", "validation"), "val"),
    "testing": "test",
}


def normalize_split_name(raw_name: object) -> str | None:
    """Return the standard name of a split: ``restval`` and ``Train`` are train, ``dev`` and
    ``validation`` are val.

    Args:
        raw_name: Name in the source.

    Returns:
        The standard name. None if the source gives none, or the text of a missing value.
    """
    name = raw_name.strip() if isinstance(raw_name, str) else ""
    return None if name in MISSING_TEXTS else _STANDARD_NAMES.get(name.lower(), name) or None


def split_priority(split: str | None) -> int:
    """Return the order in which copies of an image are kept, because a result on test must not come
    from training on it.

    Args:
        split: Name of a split.

    Returns:
        0 for test, 1 for val, 2 for others.
    """
    return {"test": 0, "val": 1}.get(split or "", 2)


def split_by_hash(name: str) -> str:
    """Assign a split by a hash of the name: 80 % train, 10 % val, 10 % test. New images never
    change the split of others.

    Args:
        name: Name of the image.

    Returns:
        Name of the split.
    """
    # Of the name alone, so that an image never changes its split when others are added.
    hundredth = (
        int.from_bytes(hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:8]) % 100
    )
    return "train" if hundredth < 80 else "val" if hundredth < 90 else "test"


def splits_of_files(files: Iterable[Path], folder: Path) -> dict[Path, str | None]:
    """Read the split of each file from its name, or from the name of its folder:
    ``data/validation-00000-of-00001.parquet`` is val.

    If all files are named train, the data has no split to validate on. So no file has a split, and
    images are assigned by a hash.

    Args:
        files: Files under the folder.
        folder: The folder, whose own name is not read.

    Returns:
        Standard name of the split of each file. None: the names give none.
    """
    splits = {file: split_in_name(file.relative_to(folder)) for file in files}
    return splits if set(splits.values()) != {"train"} else dict.fromkeys(splits)


def find_split_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Find the files of a data set in several files.

    Args:
        folder: The folder of the data set.
        suffixes: Suffixes of the files.

    Returns:
        Files in the folder, in its folders ``data`` and ``train``, ``validation`` and so on, and in
        the latter in ``data``. Names that begin with a dot are left out.
    """
    folders = [folder]
    for parent in (folder, folder / "data"):
        children = sorted(
            child
            for child in (parent.iterdir() if os.path.isdir(parent) else ())
            if os.path.isdir(child)
        )
        folders += [
            child
            for child in children
            if (child.name == "data" and parent == folder) or split_in_name(child.name) is not None
        ]
    files = (
        file
        for parent in folders
        for file in parent.iterdir()
        if file.suffix in suffixes and not file.name.startswith(".")
    )
    return sorted(filter(os.path.isfile, files))


def split_in_name(path: str | Path) -> str | None:
    """Find the name of a split in a path.

    Args:
        path: Path of a file. The name of the file is read before the names of its folders.

    Returns:
        Standard name of the split. None: there is none.
    """
    for part in reversed(Path(path).parts):
        # Whole words: "training" is a split, and "trains.jpg" is not.
        for word in re.split(r"[\W\d_]+", part.lower()):
            if (split := normalize_split_name(word)) in SPLITS:
                return split
    return None
