"""Index: a folder with a manifest (model, source, settings), and a store with one or several
vectors per item.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from visavis.core import storage
from visavis.core.encoded import MaxSimDirection
from visavis.core.errors import (
    DataError,
    RunError,
    ShapeError,
    StorageError,
    VisavisError,
    format_value,
)
from visavis.core.memory_budget import MemoryLimit
from visavis.data.dataset import ByteRange, Image
from visavis.retrieval.items import MANIFEST, NO_FILTER, IndexItem, ItemFilter
from visavis.retrieval.search import (
    Calibration,
    CorrectedQuery,
    EncodeTexts,
    NullScores,
    SearchQuery,
    SearchResult,
    known_texts,
    no_probabilities,
)
from visavis.retrieval.stores.arrow_tables import items_from_table, metadata_names
from visavis.retrieval.stores.base import (
    REMEDY,
    MaxSimQuery,
    Neighbor,
    Queries,
    SetEncoding,
    StoreDigest,
    VectorSets,
    VectorStore,
)
from visavis.retrieval.stores.catalog import open_store

if TYPE_CHECKING:
    from visavis.models.retriever import Retriever
    from visavis.retrieval.index_correction import IndexCorrection
    from visavis.retrieval.source_files import SourceFile
    from visavis.retrieval.stores.set_codec import SetCodec

STORE_FOLDER, CODEC_FILE = "items.lance", "codec.npy"
CORRECTION_FILE = "correction.safetensors"
FORMAT = 2
VECTOR_SUFFIXES = (".parquet", ".npy")
"""Suffixes of a file that takes the place of the model of an index."""
# Below this length the direction of a weighted sum is rounding noise.
MIN_QUERY_NORM = 1e-6

SkippedFile = tuple[int, int, str]
"""Size in bytes, modification time in ns, and the problem of a file that cannot be decoded."""


@dataclass(frozen=True)
class IndexModel:
    """A model that encodes text queries for the vectors of an index.

    Attributes:
        model: Run folder, or the folder or hub name of a dual encoder.
        fingerprint: Hash of the weights and the architecture of the model.
        calibration: Calibration of its scores. None if there is none.
    """

    model: str
    fingerprint: str
    calibration: Calibration | None = None


@dataclass(frozen=True)
class IndexManifest:
    """Content of ``index.json``.

    Attributes:
        model: Model of the items: a run folder, or the folder or hub name of a dual encoder.
        fingerprint: Hash of the weights and the architecture of the model.
        embedding_dim: Dimension of the vectors.
        source: The indexed folder or data set.
        store: The vector store: a path relative to this file, or a URI.
        moment_seconds: Length of a moment of a clip in seconds.
        index_id: Random id in hex, a part of the checksum of each row of the store.
        is_dataset: Whether the source is a data set.
        format: Version of the file.
        exclude: Patterns of names and paths that are not indexed.
        skipped: Files that cannot be decoded, by path.
        decoders: Versions of the decoders that could not decode them. Files are decoded again with
            other versions.
        live_pairs: Whether a clip belongs to a photo, by a hash of both files.
        digest: Content of the store. None while the index is built.
        calibration: Calibration of scores by labels. None if there is none for this model.
        late_interaction: Which means of MaxSim the score contains. None for a model with one vector
            per item.
        full_decoding: Whether JPEG files are decoded in full.
        queries: Models that were trained on the vectors of this index to encode text queries.
        active_queries: Fingerprint of the model that encodes text queries. Empty: the model of the
            items.
        previous_queries: Fingerprint of the model that did before.
        ignore_captions: Whether match probabilities come from the collection, also if captions
            calibrate the index.
        item_bytes: Requested bytes per item of compressed vectors. None: they are not compressed.
        encoding: Encoding of compressed vectors.
        codec_hash: Hash of the file with the principal axes of the encoding.
    """

    model: str
    fingerprint: str
    embedding_dim: int
    source: str
    store: str
    moment_seconds: float
    index_id: str
    is_dataset: bool = False
    format: int = FORMAT
    exclude: tuple[str, ...] = ()
    skipped: Mapping[str, SkippedFile] = field(default_factory=dict)
    decoders: str = ""
    live_pairs: Mapping[str, bool] = field(default_factory=dict)
    digest: StoreDigest | None = None
    calibration: Calibration | None = None
    late_interaction: MaxSimDirection | None = None
    full_decoding: bool = False
    item_bytes: int | None = None
    encoding: SetEncoding | None = None
    codec_hash: str = ""
    queries: tuple[IndexModel, ...] = ()
    active_queries: str = ""
    previous_queries: str = ""
    ignore_captions: bool = False

    @property
    def all_queries(self) -> tuple[IndexModel, ...]:
        """The model of the items, and all that were trained on its vectors."""
        return (IndexModel(self.model, self.fingerprint, self.calibration), *self.queries)

    @property
    def query_model(self) -> IndexModel:
        """The model that encodes text queries."""
        active = self.active_queries or self.fingerprint
        return next(each for each in self.all_queries if each.fingerprint == active)


class Index:
    """Images and clips that can be searched, made by ``visavis.index`` and opened by ``open_index``.

    Args:
        folder: Folder of the index.
        manifest: Content of its manifest.
        model: Model that encodes queries.
        store: Store of the vectors.

    Example:
        >>> index = open_index("indexes/holidays")  # doctest: +SKIP
        >>> search_collection(index, SearchQuery.from_text("two dogs on a beach"))[0].name  # doctest: +SKIP
        'spain/img_0031.jpg'
    """

    def __init__(
        self,
        folder: Path,
        manifest: IndexManifest,
        model: Retriever,
        store: VectorStore,
    ):
        self.folder = folder
        self.manifest = manifest
        self.model = model
        self.store = store

    def encode_texts(self, texts: Sequence[str]) -> list[torch.Tensor]:
        """Encode texts as queries.

        Args:
            texts: The texts.

        Returns:
            Unit vectors of each text: shape ``[D]``, or ``[n, D]`` for a late-interaction model.
        """
        if self.manifest.late_interaction is None:
            # Rows of one tensor. Late interaction has another number of vectors for each text.
            return list(self.model.encode_texts(texts))
        return self.model.item_vectors(self.model.encode_text(texts))

    @property
    def models(self) -> list[Retriever]:
        """The model of the index, in a list."""
        return [self.model]

    def encode_query(
        self, query: SearchQuery, encode_texts: EncodeTexts | None = None
    ) -> Queries | CorrectedQuery:
        """Encode a query for the store. A single text is corrected, if the index has a correction.

        Args:
            query: The query.
            encode_texts: Returns the unit vectors of texts, as the method ``encode_texts`` does,
                which is the default.

        Returns:
            Unit vector, shape ``[1, D]``, or one query of late interaction.

        Raises:
            RunError: If the file of the correction is damaged.
            VisavisError: If the query is empty, has only negative weights, or its parts cancel out.
            DataError: If an item or image of the query does not exist.
        """
        encoded = self._encode_parts(query, encode_texts)
        if self.correction is not None and query.is_single_text:
            return CorrectedQuery(encoded, self.correction)
        return encoded

    def _encode_parts(self, query: SearchQuery, encode_texts: EncodeTexts | None) -> Queries:
        texts = known_texts(self.model, query)
        parts = list[tuple[float, torch.Tensor]]()
        if texts:
            vectors = (encode_texts or self.encode_texts)([text for _, text in texts])
            parts += zip((weight for weight, _ in texts), vectors, strict=True)
        if query.images:
            images = self.model.item_vectors(
                self.model.encode_visual([image for _, image in query.images])
            )
            parts += zip((weight for weight, _ in query.images), images, strict=True)
        for weight, key in query.like:
            if not self.store.get([key]):
                raise DataError(
                    f"like: expected the key of an item of {self.folder}, got {key!r}. Copy a key "
                    "from search results."
                )
            stored = self.store.vectors([key])
            stored = stored.decoded() if isinstance(stored, VectorSets) else stored
            parts.append((weight, torch.from_numpy(next(iter(stored)))))
        problem = ""
        if not any(weight > 0 for weight, _ in parts):
            problem = (
                "a text, image or item to search for, got only exclusions. Add one, such as "
                "'beach -people'."
            )
        elif self.manifest.late_interaction is not None:
            return [MaxSimQuery.from_vectors(*((weight, rows.numpy()) for weight, rows in parts))]
        else:
            total = torch.stack([weight * row for weight, row in parts]).sum(0)
            norm = total.norm()
            if norm.isfinite() and norm >= MIN_QUERY_NORM:
                # The stores score inner products. With a unit vector the score is a cosine,
                # whatever the weights.
                vector: np.ndarray = (total / norm).numpy()
                return vector[None]
            problem = (
                "parts that do not cancel out, got opposite vectors. Remove one, or change a "
                "weight."
            )
        raise VisavisError(f"query: expected {problem}")

    def nearest(
        self, encoded: Queries | CorrectedQuery, count: int, item_filter: ItemFilter
    ) -> tuple[list[SearchResult], bool]:
        """Find the items with the highest scores, see ``Collection.nearest``."""
        neighbors = self.neighbors(encoded, count, item_filter)
        # Only the items of the results are read. A shared store may have lost an item since.
        items = self.store.get([key for key, _ in neighbors])
        results = [SearchResult(items[key], score) for key, score in neighbors if key in items]
        return results, len(neighbors) == count

    def neighbors(
        self, encoded: Queries | CorrectedQuery, count: int, item_filter: ItemFilter = NO_FILTER
    ) -> list[Neighbor]:
        """Find the keys of the items with the highest scores.

        Args:
            encoded: The encoded query.
            count: Maximum number of items.
            item_filter: Conditions on the items.

        Returns:
            Keys and scores, best first.
        """
        if isinstance(encoded, CorrectedQuery):
            return encoded.correction.nearest(self.store, encoded.queries, count, item_filter)
        return self.store.search(encoded, count, item_filter)[0]

    def item_vectors(self, items: Sequence[IndexItem]) -> np.ndarray:
        """Read one unit vector per item, see ``Collection.item_vectors``."""
        vectors = self.store.vectors([item.key for item in items])
        return vectors.mean_vectors() if isinstance(vectors, VectorSets) else vectors

    def image(self, item: IndexItem) -> Image | None:
        """Find the image or clip of an item, see ``Collection.image``."""
        try:
            return Image(item.path, item.metadata.get("split", "all"), self.locate(item))
        except DataError:
            return None

    def explain_no_results(self, item_filter: ItemFilter) -> str:
        """Explain why a search found nothing, see ``Collection.explain_no_results``."""
        self.check_filter_names(item_filter)
        if item_filter and self.store.count():
            unfinished = " The index is unfinished, so items are missing." * self.is_unfinished
            return f"No item of the index passes the filters.{unfinished}"
        if self.is_unfinished:
            return (
                "The index is unfinished and has no items yet. Run visavis index again to complete "
                "it."
            )
        return "The index has no items. Add images to its source, and run visavis index again."

    def check_filter_names(self, item_filter: ItemFilter) -> None:
        """Check the metadata names of a filter that no item passes.

        Args:
            item_filter: Conditions on the items.

        Raises:
            DataError: If no item has a name of the filter.
        """
        if not item_filter.metadata or not self.store.count():
            return
        names = metadata_names(self.store.table())
        unknown = next((name for name in item_filter.metadata if name not in names), None)
        if unknown is not None:
            fix = "Filter by one of them." if names else "Remove the filter."
            known = (
                f"one of the names {', '.join(sorted(names))}"
                if names
                else "no filter, because the items have no metadata"
            )
            raise DataError(f"metadata: expected {known}, got {unknown!r}. {fix}")

    @property
    def is_unfinished(self) -> bool:
        """Whether items are missing, because an update was interrupted or is still running."""
        return self.manifest.digest is None

    @property
    def root(self) -> Path:
        """The indexed folder or data set."""
        return Path(self.manifest.source)

    @cached_property
    def items(self) -> dict[str, IndexItem]:
        """All items by key, as of the first access. Read the items of results from ``store``
        instead, with ``get``.
        """
        return {item.key: item for item in items_from_table(self.store.table())}

    @cached_property
    def correction(self) -> IndexCorrection | None:
        """Correction of the scores of single texts. None: there is none, or it is off."""
        if not os.path.exists(path := self.folder / CORRECTION_FILE):
            return None
        from visavis.retrieval.index_correction import open_correction

        manifest = self.manifest
        fingerprint = manifest.query_model.fingerprint
        return open_correction(path, fingerprint, manifest.digest, self.store)

    @cached_property
    def calibration(self) -> Calibration | None:
        """Calibration of scores by labels. None if there is none for this model, it does not hold
        for this number of items, scores are corrected, or captions are ignored.
        """
        if self.correction or self.manifest.ignore_captions:
            return None
        calibration = self.manifest.query_model.calibration
        is_valid = calibration is not None and calibration.is_valid_for(self.store.count())
        return calibration if is_valid else None

    @cached_property
    def null_scores(self) -> NullScores:
        """Calibration of scores without labels, see ``Collection.null_scores``."""
        if self.correction:
            raise no_probabilities("the scores are corrected for hubs.")
        manifest = self.manifest
        if manifest.late_interaction is not None:
            raise no_probabilities("items have several vectors.")
        from visavis.retrieval.no_match import recall_null_scores

        owner = f"{manifest.index_id} {manifest.query_model.fingerprint}"
        return recall_null_scores(self.model, self.store, owner)

    def count(self, item_filter: ItemFilter) -> int:
        """Count the items that pass a filter, see ``Collection.count``."""
        return self.store.count(item_filter)

    def locate(self, item: IndexItem) -> ByteRange:
        """Find the bytes of an item.

        Args:
            item: Item of the index.

        Returns:
            Location of the bytes.

        Raises:
            DataError: If the file is missing. A link that points outside the source is refused when
                the bytes are read.
        """
        path = self.root / item.path
        if item.path in self._dataset_files:
            return self._dataset_files[item.path].location
        if self.manifest.is_dataset or not os.path.isfile(path):
            raise DataError(
                f"{item.path}: expected this file in {self.root}, got none. Update the index with "
                "visavis index."
            )
        # With a root, a link that was made after indexing cannot lead out of the source.
        return ByteRange(path, root=Path(os.path.realpath(self.root)))

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    @cached_property
    def _dataset_files(self) -> dict[str, SourceFile]:
        """The files of a data set by name. Empty for a folder."""
        if not self.manifest.is_dataset:
            return {}
        from visavis.retrieval.source_files import list_readable_files

        return {
            file.path: file
            for file in list_readable_files(
                self.root, self.manifest.exclude, self.manifest.live_pairs
            ).listed
        }


def read_manifest(folder: Path) -> IndexManifest:
    """Read the manifest of an index.

    Args:
        folder: Folder of the index.

    Returns:
        Content of ``index.json``.

    Raises:
        RunError: If there is no index, or its manifest is missing, damaged or of another format.
    """
    command = f"visavis index RUN SOURCE --out {folder}"
    remedy = f"Delete {folder} and make the index again with: {command}"
    if not is_index(folder):
        raise RunError(
            f"{folder}: expected an index ({MANIFEST}), got none. Make one with: {command}"
        )
    try:
        manifest: IndexManifest | None = storage.read_checksummed_json(
            folder / MANIFEST, IndexManifest, error=RunError
        )
    except RunError as error:
        raise RunError(f"{error} It may also be of another version of visavis. {remedy}") from None
    if manifest is None or manifest.format != FORMAT:
        raise RunError(
            f"{folder}: expected {MANIFEST}, got a store without it. {remedy}"
            if manifest is None
            else f"{folder / MANIFEST}: expected format {FORMAT}, got {manifest.format}. The "
            f"version of visavis differs. {remedy}"
        )
    known = ("", *(each.fingerprint for each in manifest.all_queries))
    for name, value, is_valid in (
        ("active_queries", manifest.active_queries, manifest.active_queries in known),
        ("store", manifest.store, "\0" not in manifest.store),
    ):
        if not is_valid:
            raise RunError(
                f"{folder / MANIFEST}: {name}: expected a valid value, got {format_value(value)}. "
                f"{remedy}"
            )
    return manifest


def write_manifest(folder: Path, manifest: IndexManifest) -> None:
    """Write the manifest of an index.

    Args:
        folder: Folder of the index.
        manifest: Content of ``index.json``.
    """
    storage.write_checksummed_json(folder / MANIFEST, asdict(manifest))


def is_index(folder: str | Path) -> bool:
    """Check whether a folder contains an index.

    Args:
        folder: Any path.

    Returns:
        Whether there is a manifest, or a store whose manifest is lost.
    """
    return os.path.exists(Path(folder) / MANIFEST) or os.path.exists(Path(folder) / STORE_FOLDER)


def is_free_folder(folder: Path) -> bool:
    """Check whether a new index can be made in a folder.

    Args:
        folder: Any path.

    Returns:
        Whether the path does not exist, or is a folder that contains at most lock files.
    """
    if not os.path.lexists(folder):
        return True
    # A lock file remains where an update was refused before it wrote anything.
    return os.path.isdir(folder) and all(file.name.endswith(".lock") for file in folder.iterdir())


def store_location(store: str | Path) -> str:
    """Make the location of a store absolute.

    Args:
        store: Path or URI.

    Returns:
        Absolute path or URI.
    """
    return str(store) if "://" in str(store) else os.path.abspath(os.path.expanduser(store))


def relative_store(folder: Path, store: str | Path) -> str:
    """Make the location of a store relative to its index if it lies inside, so that the folder can
    be moved.

    Args:
        folder: Folder of the index.
        store: Path or URI. A relative path is resolved against the current directory.

    Returns:
        Relative path, absolute path or URI, as in a manifest.
    """
    location = store_location(store)
    # Links are resolved, because a link inside the folder may lead to a store outside.
    path = os.path.realpath(location)
    root = os.path.realpath(folder)
    is_inside = "://" not in location and Path(path).is_relative_to(root)
    return Path(path).relative_to(root).as_posix() if is_inside else location


def check_confirmed_stores(folders: Sequence[Path], stores: Sequence[str | Path]) -> None:
    """Check that each confirmed store is that of an index.

    Args:
        folders: Folders of the indexes.
        stores: Confirmed locations.

    Raises:
        RunError: If a store belongs to none of the indexes.
    """
    uris = {folder: _store_uri(folder, read_manifest(folder)) for folder in folders}
    for store in stores:
        if not any(
            relative_store(folder, store) == relative_store(folder, uri)
            for folder, uri in uris.items()
        ):
            expected = " or ".join(f"{uri}, the store of {folder}" for folder, uri in uris.items())
            raise RunError(
                f"--store: expected {expected}, got {store}. Remove --store, or correct it."
            )


def _store_uri(folder: Path, manifest: IndexManifest) -> str:
    """Absolute path or URI of the store of an index."""
    return manifest.store if "://" in manifest.store else store_location(folder / manifest.store)


def open_index_store(
    folder: Path,
    manifest: IndexManifest,
    memory: MemoryLimit = None,
    *,
    confirmed: str | Path | Sequence[str | Path] | None = None,
    create: bool = False,
) -> VectorStore:
    """Open the store of an index and check that it is complete.

    Args:
        folder: Folder of the index.
        manifest: Its manifest.
        memory: Memory limit of a search.
        confirmed: Location of the store, or of the stores of several indexes. Only these may be
            outside the folder.
        create: Whether to create a missing store, and to accept an empty one, which the caller then
            fills.

    Returns:
        The store of the vectors.

    Raises:
        RunError: If the store is not confirmed, missing, damaged, or that of another index.
    """
    stores = [confirmed] if isinstance(confirmed, str | Path) else confirmed or ()
    uri = _store_uri(folder, manifest)
    if relative_store(folder, uri) == uri and uri not in map(store_location, stores):
        raise RunError(
            f"{folder}: expected a store inside this folder, got {uri}. If you trust the index, "
            f"confirm its store with --store {uri}."
        )
    if isinstance(confirmed, str | Path):
        check_confirmed_stores([folder], stores)
    try:
        with ExitStack() as stack:
            vectors = open_store(
                uri,
                manifest.embedding_dim if create else None,
                memory,
                index_id=manifest.index_id,
                late_interaction=manifest.late_interaction,
                # Without a digest, the last update was interrupted.
                verify_files=manifest.digest is None,
                digest=manifest.digest,
                codec=_read_codec(folder, manifest),
            )
            # The caller closes the store. Up to ``pop_all``, an error closes it.
            stack.callback(vectors.close)
            digest = vectors.digest()
            expected = manifest.digest
            problem = ""
            is_refilled = create and digest.num_items == 0
            if vectors.embedding_dim != manifest.embedding_dim:
                problem = (
                    f"vectors of dimension {manifest.embedding_dim}, got {vectors.embedding_dim}"
                )
            elif expected is not None and expected != digest and not is_refilled:
                problem = (
                    f"the {expected.num_items:,} items of this index, got {digest.num_items:,} "
                    "others"
                )
            if not problem:
                stack.pop_all()
                return vectors
            problem = f"{uri}: expected {problem}. {REMEDY}"
    except (DataError, ShapeError, StorageError) as error:
        problem = str(error)
    raise RunError(f"{folder}: the store of the index cannot be used: {problem}")


def _read_codec(folder: Path, manifest: IndexManifest) -> SetCodec | None:
    """The codec of an index with compressed vectors."""
    if manifest.encoding is None:
        return None
    from visavis.retrieval.stores.set_codec import SetCodec

    path = folder / CODEC_FILE
    codec = SetCodec.read(path, manifest.encoding)
    if storage.content_hash(path) != manifest.codec_hash:
        raise DataError(
            f"{path}: has another checksum than when the index was made. Delete the index and make "
            "it again."
        )
    return codec
