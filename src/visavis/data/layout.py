"""The declaration of a layout of data sets: how it is recognized, in words and by patterns, and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from visavis.data.listing import Listing


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One layout, declared once: opening a data set, ``visavis doctor``, the catalog and the reference follow from its entry there.

    name: as ``visavis data check`` shows it. files: what a folder of this layout holds, in words. patterns: of the files by which a
    folder is recognized. endings: of files that are understood when one is given instead of a folder.
    whole_folder: the source that ``read`` takes is the folder, not one list in it. read: a Listing of a source; raises DataError
    where it cannot be understood at all.
    """

    name: str
    files: str
    patterns: tuple[str, ...]
    endings: tuple[str, ...]
    read: Callable[[Path], Listing] = field(repr=False)
    whole_folder: bool = field(default=False, repr=False)

    def sources_in(self, folder: Path) -> list[Path]:
        """The lists of this layout in a folder, in the order of the patterns."""
        lists = [path for pattern in self.patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
        return [folder] if self.whole_folder and lists else lists

    def source_of(self, file: Path) -> Path | None:
        """The source that a file stands for; None if it is not of this layout."""
        if not file.name.endswith(self.endings):
            return None
        return file.parent if self.whole_folder else file
