"""Open a data set of any known layout: find it, recognize its layout, list it, and refuse to lose anything silently."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path

from visavis.data.catalog import CATALOG
from visavis.data.dataset import Dataset
from visavis.data.layout import Layout
from visavis.data.listing import Listing, count_kinds
from visavis.data.source_text import is_unicode, printable
from visavis.errors import DataError, nearest


def open_dataset(
    path: str | Path,
    *,
    skip_bad: bool = False,
    pixels: bool = False,
    rate: float = 0.0,
    whole: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> Dataset:
    """The data set in a folder, or of one list in it (``.json``, ``.jsonl``, ``.csv``, ``.tsv``).

    path: also the name of a folder under ``VISAVIS_DATA``. skip_bad: leave out what cannot be used and say so in
    ``Dataset.skipped``, instead of raising DataError. pixels: also decode every image once, to find truncated and
    animated ones and copies in two splits; the result is kept in the cache. rate: pictures a second at which clips are read, so that too
    long ones are found; 0: not known. whole: decode every frame of a clip, not only its first one. on_progress: called with images done and images in all.
    """
    listing = list_dataset(path)
    if pixels:
        from visavis.data.pixels import check_pixels

        check_pixels(listing, rate=rate, whole=whole, on_progress=on_progress)
    losses = listing.losses
    if losses and not skip_bad and len(listing.lost_images) < len(listing.entries):
        named = "; ".join(map(str, losses[:3])) + ("; ..." if len(losses) > 3 else "")
        raise DataError(
            f"training on {listing.source} would lose something ({count_kinds(losses)}): {named}: run `visavis data check {shlex.quote(str(path))}` "
            "for the whole list or train with --skip-bad to go on without them."
        )
    return listing.dataset()


def list_dataset(path: str | Path) -> Listing:
    """Everything that a data set lists, with findings; raises DataError if the path or the layout is unknown."""
    layout, source = _locate(path)
    try:
        listing = layout.read(source)
    except OSError as error:
        raise DataError(f"{error.filename or source} cannot be read: {error.strerror}.") from None
    listing.layout = layout.name
    return listing


def find_source(path: str | Path) -> Path:
    """What describes a data set: the list to read, or the folder where the layout is of a whole folder. Raises as ``list_dataset``."""
    return _locate(path)[1]


def data_folder() -> Path | None:
    """The folder that ``VISAVIS_DATA`` names, under which data sets are looked up by name; None if it is not set."""
    chosen = os.environ.get("VISAVIS_DATA")
    return Path(chosen) if chosen else None


def datasets_in(folder: Path) -> list[str]:
    """Names of the sub-folders that hold a data set of a known layout."""
    children = (child for child in folder.iterdir() if child.is_dir())
    return sorted(child.name for child in children if any(layout.sources_in(child) for layout in CATALOG))


def find_file(path: str | Path) -> Path:
    """A file or folder by its path, or by its name under ``VISAVIS_DATA``. Raises DataError saying where it was looked for."""
    return _look_up(path, "")


def is_there(path: str | Path) -> bool:
    """Whether ``find_file`` finds something."""
    path, root = Path(path).expanduser(), data_folder()
    return os.path.exists(path) or (root is not None and os.path.exists(root / path))


def _locate(path: str | Path) -> tuple[Layout, Path]:
    """The layout of a data set, and its source: the list, or the folder."""
    names = ", ".join(pattern for layout in CATALOG for pattern in layout.patterns)
    expected = f"one of {names} (`visavis catalog layouts` tells what is in them)"
    place = _look_up(path, f"; a data set is a folder with {expected}")
    if place.is_file():
        known = [(layout, source) for layout in CATALOG if (source := layout.source_of(place)) is not None]
        if not known:
            endings = ", ".join(ending for layout in CATALOG for ending in layout.endings)
            raise DataError(f"{place} is no list of images and captions: expected a folder, or a file that ends in {endings}.")
        return known[0]
    known = [(layout, source) for layout in CATALOG for source in layout.sources_in(place)]
    if not known:
        raise DataError(f"{place} holds no data set: expected {expected}.")
    if len(known) > 1:
        names = ", ".join(layout.patterns[0] if source == place else source.name for layout, source in known)
        raise DataError(f"{place} holds several lists ({names}): name the one to read instead of the folder.")
    return known[0]


def _look_up(path: str | Path, expected: str) -> Path:
    path = Path(path).expanduser()
    if not is_unicode(str(path)):
        raise DataError(f"the path {printable(str(path))} is not UTF-8, in which all that is written about it would be: rename it.")
    if os.path.exists(path):
        return path
    root = data_folder()
    if root is None:
        raise DataError(f"{path} does not exist, and VISAVIS_DATA, under which it would be looked up next, is not set{expected}.")
    if os.path.exists(root / path):
        return root / path
    known = [entry.name for entry in root.iterdir()] if root.is_dir() else []
    raise DataError(f"{path} does not exist, neither here nor under VISAVIS_DATA ({root}){expected}: {nearest(str(path), known)}")
