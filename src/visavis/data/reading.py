"""Opens a data set of any known layout: finds the path, knows the layout, lists, and refuses to lose anything unasked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from visavis.data.dataset import Dataset
from visavis.data.folder import TABLES, list_folder
from visavis.data.karpathy import list_karpathy
from visavis.data.listing import Listing, count_kinds
from visavis.data.precomp import list_precomp
from visavis.errors import DataError, nearest


def open_dataset(
    path: str | Path, *, skip_bad: bool = False, pixels: bool = False, on_progress: Callable[[int, int], None] | None = None
) -> Dataset:
    """The data set in a folder, or of one list in it (``.json``, ``.jsonl``, ``.csv``, ``.tsv``).

    path: also the name of a folder under ``VISAVIS_DATA``. skip_bad: leave out what cannot be used and say so in
    ``Dataset.skipped``, instead of raising DataError. pixels: decode every image once, too, which finds truncated and
    animated ones and copies in two splits; remembered in the cache. on_progress: called with images done and images in all.
    """
    listing = list_dataset(path)
    if pixels:
        from visavis.data.pixels import check_pixels

        check_pixels(listing, on_progress=on_progress)
    losses = listing.losses
    if losses and not skip_bad and len(listing.lost_images) < len(listing.entries):
        named = "; ".join(map(str, losses[:3])) + ("; ..." if len(losses) > 3 else "")
        raise DataError(
            f"training on {listing.source} would lose something ({count_kinds(losses)}): {named}: run `visavis data check {path}` "
            "for the whole list or train with --skip-bad to go on without them."
        )
    return listing.dataset()


def list_dataset(path: str | Path) -> Listing:
    """Everything that a data set lists, with findings; raises DataError if the path or the layout is unknown."""
    source = find_source(path)
    try:
        if source.is_dir():
            return list_precomp(source)
        return list_karpathy(source) if source.suffix == ".json" else list_folder(source)
    except OSError as error:
        raise DataError(f"{error.filename or source} cannot be read: {error.strerror}.") from None


def find_source(path: str | Path) -> Path:
    """The list that describes a data set: a Karpathy ``.json``, a table, or a folder of precomputed features."""
    place = find_file(path)
    if place.is_file():
        if place.name.endswith(("_ims.npy", "_caps.txt")):
            return place.parent
        if place.suffix not in (".json", ".jsonl", ".csv", ".tsv"):
            raise DataError(f"{place} is no list of images and captions: expected a folder or a .json, .jsonl, .csv or .tsv file.")
        return place
    lists = sorted(place.glob("dataset*.json")) + [place / name for name in TABLES if (place / name).is_file()]
    if any(place.glob("*_ims.npy")):
        lists.append(place)
    if not lists:
        raise DataError(
            f"{place} holds no data set: expected dataset_*.json, captions.jsonl, captions.csv, or train_ims.npy with train_caps.txt."
        )
    if len(lists) > 1:
        names = ", ".join("*_ims.npy" if one == place else one.name for one in lists)
        raise DataError(f"{place} holds several lists ({names}): name the one to read instead of the folder.")
    return lists[0]


def find_file(path: str | Path) -> Path:
    """A file or folder by its path, or by its name under ``VISAVIS_DATA``. Raises DataError saying where it was looked for."""
    path = Path(path).expanduser()
    if path.exists():
        return path
    root = os.environ.get("VISAVIS_DATA")
    if root is None:
        raise DataError(f"{path} does not exist, and VISAVIS_DATA, under which it would be looked up next, is not set.")
    if (Path(root) / path).exists():
        return Path(root) / path
    known = [entry.name for entry in Path(root).iterdir()] if Path(root).is_dir() else []
    raise DataError(f"{path} does not exist, neither here nor under VISAVIS_DATA ({root}): {nearest(str(path), known)}")
