"""Index: a folder with a manifest (model, source, settings), and a store with one or several
vectors per item.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np

from visavis.core import storage
from visavis.core.errors import (
    DataError,
    RunError,
    ShapeError,
    StorageError,
    VisavisError,
    format_value,
)
from visavis.core.memory_budget import MemoryLimit
from visavis.core.ragged import MaxSimDirection
from visavis.data.file_names import unescape_name
from visavis.retrieval.calibrate.calibration import (
    MOMENTS,
    RATED_RESULTS,
    SCALE,
    Calibration,
    MatchScale,
    Moments,
    NoProbabilitiesError,
    NullScores,
    ScoreScale,
    standardize_by,
)
from visavis.retrieval.items import DATABASE, NO_FILTER, REMEDY, Basis, IndexItem, ItemFilter
from visavis.retrieval.search import (
    CorrectedQuery,
    EncodeTexts,
    NamedResult,
    SearchQuery,
    SearchResult,
    known_texts,
)
from visavis.retrieval.stores.base import (
    MaxSimQuery,
    Neighbor,
    Queries,
    SetEncoding,
    StoreDigest,
    VectorSets,
    VectorStore,
)
from visavis.retrieval.stores.catalog import open_store
from visavis.retrieval.stores.index_database import IndexDatabase, OtherFormatError
from visavis.retrieval.stores.name_table import best_caption

if TYPE_CHECKING:
    from visavis.data.image_file import ByteRange, Image
    from visavis.retrieval.calibrate.index_correction import IndexCorrection
    from visavis.retrieval.query_encoder import QueryEncoder
    from visavis.retrieval.source_files import FileCollection, SourceFile
    from visavis.retrieval.stores.maxsim_search import MaxSimSearch
    from visavis.retrieval.stores.set_codec import SetCodec

CODEC_FILE = "codec.npy"
MANIFEST = "manifest"
"""Name of the manifest in the database of an index."""
CORRECTION_FILE = "correction.safetensors"
OWN_STORE = "."
"""Location of the store in the folder of the index."""
FORMER_FILES = ("index.json", "items.lance")
"""Files of indexes of earlier versions."""
VECTOR_SUFFIXES = (".parquet", ".npy")
"""Suffixes of a file that takes the place of the model of an index."""
# Below this length the direction of a weighted sum is rounding noise.
MIN_QUERY_NORM = 1e-6
FINGERPRINT = re.compile("[0-9a-f]{16}")
"""Fingerprints of models and of files of vectors."""

ListFiles: TypeAlias = "Callable[[Path, Sequence[str], Mapping[str, bool]], FileCollection]"
"""Lists the files of a source, without excluded ones. The mapping has known Live Photos."""
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
    """Description of an index, a named value of its database.

    Attributes:
        model: Model of the items: a run folder, or the folder or hub name of a dual encoder.
        fingerprint: Hash of the weights and the architecture of the model.
        embedding_dim: Dimension of the vectors.
        source: The indexed folder or data set.
        store: The vector store: a path relative to the folder of the index, or a URI.
        moment_seconds: Length of a moment of a clip in seconds.
        index_id: Random id in hex, a part of the checksum of each row of the store.
        is_dataset: Whether the source is a data set.
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
        probabilities: Origin of match probabilities. Where it has none, the other one gives them.
        num_changed: Number of items that were added or removed since the scale of scores was
            computed.
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
    probabilities: Basis = "collection"
    num_changed: int = 0

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
        list_files: Lists the files of a data set, to find the bytes of its items:
            ``list_readable_files``. The caller passes it, because a search of a folder needs none of
            the formats of data sets.

    Example:
        >>> index = open_index("indexes/holidays")  # doctest: +SKIP
        >>> search_collection(index, SearchQuery.from_text("two dogs on a beach"))[0].name  # doctest: +SKIP
        'spain/img_0031.jpg'
    """

    def __init__(
        self,
        folder: Path,
        manifest: IndexManifest,
        model: QueryEncoder,
        store: VectorStore,
        list_files: ListFiles,
    ):
        self.folder = folder
        self.manifest = manifest
        self.model = model
        self.store = store
        self._list_files = list_files
        self._scale: ScoreScale | None = None
        self._moments: Moments | None = None
        # The query, the filter and the neighbors of the last call of ``rated_scores``.
        self._rated: tuple[Queries | None, ItemFilter, list[Neighbor]] = (None, NO_FILTER, [])

    @property
    def models(self) -> list[QueryEncoder]:
        """The query model, in a list."""
        return [self.model]

    def encode_query(
        self, query: SearchQuery, encode_texts: EncodeTexts | None = None
    ) -> Queries | CorrectedQuery:
        """Encode a query for the store: ``[1, D]``, or one query of late interaction. A single text
        is corrected, if the index has a correction.
        """
        encoded = self._encode_parts(query, encode_texts)
        if self.correction is not None and query.is_single_text:
            return CorrectedQuery(encoded, self.correction)
        return encoded

    def _encode_parts(self, query: SearchQuery, encode_texts: EncodeTexts | None) -> Queries:
        texts = known_texts(self.model, query)
        parts = list[tuple[float, np.ndarray]]()
        if texts:
            vectors = (encode_texts or self.model.encode_texts)([text for _, text in texts])
            parts += zip((weight for weight, _ in texts), vectors, strict=True)
        if query.images:
            images = self.model.encode_images([image for _, image in query.images])
            parts += zip((weight for weight, _ in query.images), images, strict=True)
        for weight, key in query.like:
            try:
                stored = self.store.vectors([key])
            except KeyError:
                raise DataError(
                    f"like: expected the key of an item of {self.folder}, got {key!r}. Copy a key "
                    "from search results."
                ) from None
            stored = stored.decoded() if isinstance(stored, VectorSets) else stored
            parts.append((weight, next(iter(stored))))
        problem = ""
        if not any(weight > 0 for weight, _ in parts):
            problem = (
                "a text, image or item to search for, got only exclusions. Add one, such as "
                "'beach -people'."
            )
        elif self.manifest.late_interaction is not None:
            return [MaxSimQuery.from_vectors(*parts)]
        else:
            total = np.sum([weight * row for weight, row in parts], 0, dtype=np.float32)
            norm = np.linalg.norm(total)
            if np.isfinite(norm) and norm >= MIN_QUERY_NORM:
                # The stores score inner products. With a unit vector the score is a cosine,
                # whatever the weights.
                return np.asarray(total / norm)[None]
            problem = (
                "parts that do not cancel out, got opposite vectors. Remove one, or change a "
                "weight."
            )
        raise VisavisError(f"query: expected {problem}")

    def one_version(self) -> AbstractContextManager[None]:
        """Read one version of the items, see ``Collection.one_version``."""
        return self.store.one_version()

    def nearest(
        self, encoded: Queries | CorrectedQuery, count: int, item_filter: ItemFilter
    ) -> tuple[list[SearchResult], bool]:
        """Find the items with the highest scores, see ``Collection.nearest``."""
        neighbors = self.neighbors(encoded, count, item_filter)
        # Only the items of the results are read. A shared server may have lost an item since.
        items = self.store.get([key for key, _ in neighbors])
        results = [SearchResult(items[key], score) for key, score in neighbors if key in items]
        return results, len(neighbors) == count

    def neighbors(
        self, encoded: Queries | CorrectedQuery, count: int, item_filter: ItemFilter = NO_FILTER
    ) -> list[Neighbor]:
        """Find the keys of the items with the highest scores, best first."""
        if isinstance(encoded, CorrectedQuery):
            return encoded.correction.nearest(self.store, encoded.queries, count, item_filter)
        rated, rated_filter, neighbors = self._rated
        is_complete = count <= len(neighbors) or len(neighbors) < RATED_RESULTS
        if rated is encoded and rated_filter == item_filter and is_complete:
            return neighbors[:count]
        return self.store.search(encoded, count, item_filter)[0]

    def find_named(
        self, query: SearchQuery, count: int, item_filter: ItemFilter
    ) -> list[NamedResult]:
        """Find items by file name or caption, see ``Collection.find_named``."""
        if query.images or query.like:
            return []
        text = " ".join(text for weight, text in query.texts if weight > 0)
        return [
            NamedResult(item, "name", item.path.rpartition("/")[2])
            if column == "name"
            else NamedResult(item, "caption", best_caption(item.captions, text))
            for item, column in self.store.table().named(text, count, item_filter)
        ]

    def item_vectors(self, items: Sequence[IndexItem]) -> np.ndarray:
        """Read one unit vector per item, see ``Collection.item_vectors``."""
        keys = [item.key for item in items]
        try:
            vectors = self.store.vectors(keys)
        except KeyError:
            # An update has removed an item since it was found. Such an item has no duplicate.
            stored = self.store.get(keys)
            filled = np.zeros((len(items), self.manifest.embedding_dim), np.float32)
            kept = [row for row, key in enumerate(keys) if key in stored]
            filled[kept] = self.item_vectors([items[row] for row in kept])
            return filled
        return vectors.mean_vectors() if isinstance(vectors, VectorSets) else vectors

    def image(self, item: IndexItem) -> Image | None:
        """Find the image or clip of an item, see ``Collection.image``."""
        try:
            location = self.locate(item)
        except DataError:
            return None
        from visavis.data.image_file import Image

        return Image(item.path, item.metadata.get("split", "all"), location)

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
        """Check the metadata names of a filter that no item passes."""
        # An empty index has no names, and the filter is not the cause.
        if not item_filter.metadata or not self.store.count():
            return
        names = self.store.table().metadata_names()
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
        return {item.key: item for item in self.store.table().items()}

    @cached_property
    def correction(self) -> IndexCorrection | None:
        """Correction of the scores of single texts. None: there is none, or it is off."""
        if not os.path.exists(path := self.folder / CORRECTION_FILE):
            return None
        from visavis.retrieval.calibrate.index_correction import open_correction

        manifest = self.manifest
        fingerprint = manifest.query_model.fingerprint
        return open_correction(path, fingerprint, manifest.digest, self.store)

    @property
    def scale(self) -> ScoreScale | None:
        """Scale of the scores of the query model. None: it was not computed."""
        if self._scale is None:
            # Not cached: it may be computed while a server runs.
            self._read_scale()
        return self._scale

    @property
    def moments(self) -> Moments | None:
        """Moments of the vectors of the scale. None: it was not computed, or has none."""
        return None if self.scale is None else self._moments

    def _read_scale(self) -> None:
        # In one transaction: another process may write both.
        with closing(IndexDatabase(self.folder)) as database, database.reading():
            content = database.value(SCALE)
            moments = database.content(MOMENTS)
        if content is None:
            return
        name = f"{self.folder / DATABASE}: {SCALE}"
        scale: ScoreScale = storage.parse_json(content.encode(), ScoreScale, name)
        if scale.fingerprint == self.manifest.query_model.fingerprint:
            self._moments = (
                Moments.from_bytes(moments, self.manifest.embedding_dim) if moments else None
            )
            self._scale = scale

    def match_scale(self, text: str | None) -> MatchScale:
        """Find what converts the scores of a text, see ``Collection.match_scale``."""
        manifest = self.manifest
        if self.correction:
            raise NoProbabilitiesError("the scores are corrected for hubs.")
        if manifest.probabilities == "off":
            raise NoProbabilitiesError(
                "they are off. Turn them on with visavis indexes calibrate INDEX collection."
            )
        if self.scale is None:
            raise NoProbabilitiesError(
                "the index is not calibrated for its model. Run visavis indexes calibrate INDEX "
                "collection."
            )
        reason = self.scale.reason
        captions = manifest.query_model.calibration
        if captions is not None and not captions.holds_for(text, self.store.count()):
            captions = None
            reason = f"the text or the index is not like the captions, and {reason}"
        collection = None if self.scale.tail is None else NullScores(self.scale.tail)
        prefers_captions = manifest.probabilities == "captions"
        found = (captions or collection) if prefers_captions else (collection or captions)
        if found is None:
            raise NoProbabilitiesError(reason)
        return found

    def rated_scores(
        self, encoded: Queries | CorrectedQuery, item_filter: ItemFilter
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the highest scores, see ``Collection.rated_scores``."""
        assert not isinstance(encoded, CorrectedQuery), "match_scale raises an error"
        neighbors = self.neighbors(encoded, RATED_RESULTS, item_filter)
        # ``nearest`` is called next.
        self._rated = encoded, item_filter, neighbors
        scores = np.array([[score for _, score in neighbors]])
        if isinstance(encoded, np.ndarray):
            assert self.moments is not None, "match_scale raises an error"
            standardized = self.moments.standardize(encoded, scores)
        else:
            reference = self._sample.scores(encoded[0], np.arange(len(self._sample)))
            standardized = standardize_by(scores, reference[None])
        return scores[0], standardized[0]

    @cached_property
    def _sample(self) -> MaxSimSearch:
        """Items with several vectors that give the scale."""
        from visavis.retrieval.stores.maxsim_search import MaxSimSearch

        direction = self.manifest.late_interaction
        assert self.scale is not None and direction is not None, "match_scale raises an error"
        # Without the items that were removed since.
        keys = list(self.store.get(self.scale.sample))
        if not keys:
            raise NoProbabilitiesError("the items of its scale were removed. Run visavis index.")
        return MaxSimSearch(cast("VectorSets", self.store.vectors(keys)), direction)

    def count(self, item_filter: ItemFilter) -> int:
        """Count the items that pass a filter, see ``Collection.count``."""
        return self.store.count(item_filter)

    def place(self, item: IndexItem) -> Path:
        """Path of the file of an item of a folder, which may be missing."""
        return self.root / unescape_name(item.path)

    def locate(self, item: IndexItem) -> ByteRange:
        """Find the bytes of an item. A missing file is a DataError."""
        path = self.place(item)
        if item.path in self._dataset_files:
            return self._dataset_files[item.path].location
        if self.manifest.is_dataset or not os.path.isfile(path):
            raise DataError(
                f"{item.path}: expected this file in {self.root}, got none. Update the index with "
                "visavis index."
            )
        from visavis.data.image_file import ByteRange

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
        manifest = self.manifest
        collection = self._list_files(self.root, manifest.exclude, manifest.live_pairs)
        return {file.path: file for file in collection.listed}


def read_manifest(folder: Path) -> IndexManifest:
    """Read the manifest of an index."""
    command = f"visavis index RUN SOURCE --out {folder}"
    remedy = f"Delete {folder} and make the index again with: {command}"
    if not is_index(folder):
        raise RunError(
            f"{folder}: expected an index ({DATABASE}), got none. Make one with: {command}"
        )
    if not os.path.exists(folder / DATABASE):
        raise RunError(
            f"{folder}: expected an index of this version ({DATABASE}), got one of an earlier "
            f"version. {remedy}"
        )
    try:
        with closing(IndexDatabase(folder)) as database:
            # Without a value, the parser reports the empty text.
            content = database.value(MANIFEST) or ""
        manifest: IndexManifest = storage.parse_json(
            content.encode(), IndexManifest, f"{folder / DATABASE}: manifest", error=RunError
        )
    except OtherFormatError as error:
        raise RunError(f"{error} {remedy}") from None
    except (DataError, StorageError, RunError) as error:
        if isinstance(error, StorageError) and REMEDY not in str(error):
            # The disk or another process is the reason, and the index is intact.
            raise RunError(str(error)) from None
        raise RunError(f"{error} It may also be of another version of visavis. {remedy}") from None
    fingerprints = [each.fingerprint for each in manifest.all_queries]
    known = ("", *fingerprints)
    for name, value, is_valid in (
        # They are names of folders.
        *(("fingerprint", each, FINGERPRINT.fullmatch(each)) for each in fingerprints),
        ("active_queries", manifest.active_queries, manifest.active_queries in known),
        ("store", manifest.store, manifest.store and "\0" not in manifest.store),
    ):
        if not is_valid:
            raise RunError(
                f"{folder / DATABASE}: {name}: expected a valid value, got {format_value(value)}. "
                f"{remedy}"
            )
    return manifest


def write_manifest(folder: Path, manifest: IndexManifest) -> None:
    """Write the manifest of an index. A new database appears together with it."""
    values = {MANIFEST: json.dumps(asdict(manifest))}
    with closing(IndexDatabase(folder, create=values)) as database:
        set_manifest(database, manifest)


def set_manifest(database: IndexDatabase, manifest: IndexManifest) -> None:
    """Write the manifest into the database of its index."""
    database.set_value(MANIFEST, json.dumps(asdict(manifest)))


def is_index(folder: str | Path) -> bool:
    """Check whether a folder contains an index, also of an earlier version."""
    return any(os.path.exists(Path(folder) / name) for name in (DATABASE, *FORMER_FILES))


def is_free_folder(folder: Path) -> bool:
    """Check whether a new index can be made in a folder."""
    if not os.path.lexists(folder):
        return True
    # A lock file remains where an update was refused before it wrote anything, and a part of the
    # database where a process was killed before.
    return os.path.isdir(folder) and all(
        file.name.endswith(".lock") or storage.name_of_part(file.name) for file in folder.iterdir()
    )


@contextmanager
def index_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of an index to change it, without waiting. What a killed process left is
    removed.
    """
    with storage.folder_lock(folder / "index", wait=False, subject=folder):
        # Not in a folder of the user that was named by mistake.
        if is_index(folder) or is_free_folder(folder):
            storage.remove_partial_files(folder)
        yield


def store_location(store: str | Path) -> str:
    """Make the location of a store absolute: a path, or a URI as it is."""
    return str(store) if "://" in str(store) else os.path.abspath(os.path.expanduser(store))


def relative_store(folder: Path, store: str | Path) -> str:
    """Make the location of a store relative to its index if it lies inside, so that the folder can
    be moved.
    """
    location = store_location(store)
    # Links are resolved, because a link inside the folder may lead to a store outside.
    path = os.path.realpath(location)
    root = os.path.realpath(folder)
    is_inside = "://" not in location and Path(path).is_relative_to(root)
    return Path(path).relative_to(root).as_posix() if is_inside else location


def check_confirmed_stores(folders: Sequence[Path], stores: Sequence[str | Path]) -> None:
    """Check that each confirmed store belongs to one of the indexes."""
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
    """Open the store of an index and check that it is complete. With ``create``, it may be missing
    or lack items, which the caller then adds.
    """
    stores = [confirmed] if isinstance(confirmed, str | Path) else confirmed or ()
    uri = _store_uri(folder, manifest)
    # The manifest of an index from somewhere else may name any path or server.
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
                codec=_read_codec(folder, manifest),
                # An update encodes the files of damaged items again.
                repairs=create,
            )
            # The caller closes the store. Up to ``pop_all``, an error closes it.
            stack.callback(vectors.close)
            digest = vectors.digest()
            expected = manifest.digest
            problem = ""
            # An update encodes the files of lost items again.
            is_refilled = create and expected is not None and digest.num_items < expected.num_items
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
