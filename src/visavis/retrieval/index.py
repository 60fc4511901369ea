"""An index: a folder that remembers a model and where its pictures lie, and a store with one vector an item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from visavis import storage
from visavis.data.dataset import Bytes
from visavis.errors import DataError, RunError
from visavis.memory import Memory
from visavis.models.retriever import Retriever
from visavis.retrieval.calibration import Calibration
from visavis.retrieval.item import Item
from visavis.retrieval.sources import File, open_source
from visavis.retrieval.store import VectorStore
from visavis.retrieval.stores import open_store

MANIFEST = "index.json"
FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What ``index.json`` says.

    model: the run folder, or the folder or hub name of a dual encoder. source: what was indexed, a folder or a data set. store: where the
    vectors are: a folder beside this file, or a URI. moments_s: the seconds of a moment of a clip. skipped: files that cannot be read,
    with their size and time and what was wrong with them.
    """

    model: str
    fingerprint: str
    width: int
    source: str
    store: str
    moments_s: float
    is_dataset: bool = False
    format: int = FORMAT
    skipped: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)


class Index:
    """Pictures and clips that can be searched; ``building.build_index`` makes one.

    >>> index = Index.open("indexes/holidays")                              # doctest: +SKIP
    >>> search(index, Query.of("two dogs on a beach")).hits[0].item.path    # doctest: +SKIP
    'spain/img_0031.jpg'
    """

    def __init__(self, folder: Path, manifest: Manifest, model: Retriever, store: VectorStore):
        self.folder, self.manifest, self.model, self.store = folder, manifest, model, store

    @classmethod
    def open(
        cls, folder: str | Path, *, model: str | Path | None = None, device: str | torch.device | None = None, memory: Memory = None
    ) -> Index:
        """The index in a folder. model: where its model lies now, if elsewhere than when the index was made.

        Raises RunError for a folder without an index, or where the model is gone or another one.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        name = str(model or manifest.model)
        try:
            retriever = Retriever.load(name, device=device, memory=memory)
        except RunError as error:
            raise RunError(f"the model of the index {folder} cannot be opened: {error} Name where it lies now with --model.") from None
        check_model(folder, manifest, name, retriever)
        return cls(folder, manifest, of_width(retriever, manifest.width), open_store(store_uri(folder, manifest), manifest.width, memory))

    @property
    def root(self) -> Path:
        """The folder, or data set, that was indexed."""
        return Path(self.manifest.source)

    @cached_property
    def items(self) -> dict[str, Item]:
        """All items by key, as they were when first asked for."""
        return {item.key: item for item in self.store.items()}

    @cached_property
    def calibration(self) -> Calibration | None:
        """How likely a score is a match; None where that is not known for a model, or for a collection of this size."""
        known = storage.kept(self.folder / Calibration.file, Calibration)
        return known if known is not None and known.holds_for(len(self.items)) else None

    def locate(self, item: Item) -> Bytes:
        """Where the bytes of an item lie. Raises DataError if they are gone, or outside of what was indexed."""
        if self._files is not None:
            if item.path not in self._files:
                raise DataError(f"{item.path} is no longer in {self.root}: bring the index up to date with visavis index.")
            return self._files[item.path].bytes
        place = self.root / item.path
        if not place.resolve().is_relative_to(self.root.resolve()):
            raise DataError(f"{item.path} leads out of {self.root} by now: it is not shown.")
        if not place.is_file():
            raise DataError(f"{item.path} is no longer in {self.root}: bring the index up to date with visavis index.")
        return Bytes(place)

    def describe(self) -> dict[str, Any]:
        """Name, model, number of items, width of vectors, and what was indexed."""
        known = self.manifest
        return {"name": self.folder.name, "model": known.model, "count": len(self.items), "width": known.width, "source": known.source}

    @cached_property
    def _files(self) -> dict[str, File] | None:
        """The files of a data set; None for a folder, whose files lie where their paths say."""
        return {file.path: file for file in open_source(self.root).files} if self.manifest.is_dataset else None


def read_manifest(folder: Path) -> Manifest:
    """What an index remembers. Raises RunError where there is none."""
    file = folder / MANIFEST
    if not file.is_file():
        raise RunError(f"{folder} is no index: expected {MANIFEST} in it. Make one with: visavis index RUN SOURCE --out {folder}")
    manifest: Manifest = storage.read_json(file, Manifest, error=RunError)
    if manifest.format != FORMAT:
        raise RunError(f"{file} is of format {manifest.format}, expected {FORMAT}: it was made by another version; make the index anew.")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    storage.write_json(folder / MANIFEST, asdict(manifest))


def is_index(folder: str | Path) -> bool:
    """Whether a folder holds an index."""
    return (Path(folder) / MANIFEST).is_file()


def of_width(model: Retriever, width: int) -> Retriever:
    """A model with vectors as an index has them, which may be their first numbers alone."""
    return model.narrowed(width) if width in model.matcher.widths[:-1] else model


def store_uri(folder: Path, manifest: Manifest) -> str:
    """Where the vectors are: a folder or file beside the manifest, or a URI as it is."""
    return manifest.store if "://" in manifest.store else str(folder / manifest.store)


def check_model(folder: Path, manifest: Manifest, name: str, model: Retriever) -> None:
    """Raise RunError for another model than the one that the vectors are of."""
    if model.fingerprint != manifest.fingerprint:
        raise RunError(
            f"the index {folder} was made with a model of fingerprint {manifest.fingerprint}, and {name} has {model.fingerprint}: scores "
            "across models mean nothing. Name the model that made it, or make another index with --out."
        )
