"""Search service: served indexes, searches, votes and preferences behind the HTTP API. Searches run
on a thread of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from starlette.exceptions import HTTPException
from torch import Tensor

from visavis.core.blocking import chunk_slices
from visavis.core.encoded import Direction, unit_rows
from visavis.core.errors import DataError, VisavisError
from visavis.data.capture_time import TAKEN, UNREADABLE_TIME, modified_time
from visavis.data.feedback.records import (
    FeedbackFile,
    Judgment,
    Preference,
    QueryKey,
    votes_not_undone,
)
from visavis.retrieval.index_folder import CORRECTION_FILE, Index, read_manifest
from visavis.retrieval.items import (
    MANIFEST,
    NO_FILTER,
    IndexItem,
    ItemFilter,
    tags_to_metadata,
)
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import (
    EncodeTexts,
    SearchQuery,
    SearchResult,
    SearchResults,
    grouped_results,
    parse_query,
    search_collection,
    unknown_words,
)
from visavis.retrieval.server.image_cache import ImageCache, ImageInput
from visavis.retrieval.server.limits import LRUCache, ServerLimits, ServerMetrics, WaitingLimit
from visavis.retrieval.server.schemas import ApiError, FacetsResponse, HitResponse
from visavis.retrieval.source_files import COMPANIONS
from visavis.retrieval.stores.arrow_tables import item_times, items_from_table, newest_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from PIL.Image import Image as PILImage

T = TypeVar("T")
RESULT_BLOCK, CACHED_QUERIES, CACHE_SECONDS = 60, 512, 300.0
"""Results of one search, so that the next page is cached, number of cached queries, and their
lifetime in seconds.
"""
SHOWN_ITEMS = 20_000
"""Number of items of results whose images are served after they left the index."""
UPDATE_SECONDS = 2.0
"""Time between two checks for an update of the index."""
MAX_RETRY_SECONDS = 60.0
"""Longest time until a version that cannot be opened is tried again."""
CACHED_TEXTS = 1024
"""Number of texts whose vectors are cached."""
MAX_TEXTS_AT_ONCE, TEXTS_PER_TURN, IMAGES_PER_TURN = 128, 64, 4
"""Number of texts that are encoded in one batch, and of texts and images of one request before other
requests are served.
"""

MAX_FOLDERS, MAX_METADATA_VALUES = 50, 30
"""Maximum number of folders, and of values of one metadata name, that are offered as filters."""


class ServedIndex:
    """An index that is served.

    Args:
        index: The index.
        name: Name that is shown when two indexes are compared. Default: the name of the folder.
        has_probabilities: Whether results have match probabilities without captions, too.
        stores: Confirmed locations of stores outside the folders of indexes.

    Attributes:
        count: Number of items.
        version: Text that changes with the items, the model and the correction.
    """

    def __init__(
        self,
        index: Index,
        name: str | None = None,
        *,
        has_probabilities: bool = False,
        stores: Sequence[str | Path] = (),
    ):
        self.index = index
        self.count = index.store.count()
        self.has_probabilities = has_probabilities or index.manifest.ignore_captions
        self.stores = stores
        self.name = name or index.folder.name
        self._text_vectors = LRUCache[Tensor](CACHED_TEXTS)
        self._files = _file_states(index.folder)
        # The first check reads the manifest: an update may have ended since the index was opened.
        self._checked = list[_FileState]()
        opened = repr((index.manifest, self._files[1]))
        self.version = hashlib.sha256(opened.encode()).hexdigest()[:16]

    def newer(self) -> ServedIndex | None:
        """Open the index again after an update.

        Returns:
            The new version. None: there is none, or its update is still running.

        Raises:
            VisavisError: If the new version cannot be opened.
        """
        files = _file_states(self.index.folder)
        if files == self._checked:
            return None
        manifest = read_manifest(self.index.folder)
        is_same = manifest == self.index.manifest and files[1] == self._files[1]
        if is_same or manifest.digest is None:
            self._checked = files
            return None
        index = open_index(self.index.folder, store=self.stores)
        if index.is_unfinished:  # another update began
            index.close()
            self._checked = files
            return None
        # Not recorded as checked: after an error, the next call opens it again.
        newer = ServedIndex(
            index, self.name, has_probabilities=self.has_probabilities, stores=self.stores
        )
        if (manifest.query_model, manifest.fingerprint, manifest.embedding_dim) == (
            self.index.manifest.query_model,
            self.index.manifest.fingerprint,
            self.index.manifest.embedding_dim,
        ):
            # The model is loaded already.
            index.model = self.index.model
            newer._text_vectors = self._text_vectors
        return newer

    def find_content(self, content: str) -> IndexItem | None:
        """Find an item by the hash of its file, which stays the same when the file is moved.

        Args:
            content: The hash.

        Returns:
            The first such item.
        """
        import pyarrow.compute as pc

        row = pc.index(self._table["content"], content).as_py()
        return None if row < 0 else items_from_table(self._table.slice(row, 1))[0]

    def is_missing(self, item: IndexItem) -> bool:
        """Check whether the file of an item was moved or removed since the index was updated. The
        files of a data set are not checked.

        Args:
            item: The item.

        Returns:
            Whether the file does not exist.
        """
        return not self.index.manifest.is_dataset and not os.path.isfile(
            self.index.root / item.path
        )

    @property
    def model_name(self) -> str:
        """Name of the model: of its run or folder, or on the hub."""
        location = self.index.manifest.query_model.model
        if not os.path.isabs(location):
            return location
        parts = Path(location).parts
        # A model in the cache of the hub has the name of a commit.
        cached = next((part for part in parts if part.startswith("models--")), None)
        if cached is not None:
            return cached.removeprefix("models--").replace("--", "/")
        # The model of a run is in its folder "model".
        return next((part for part in reversed(parts) if part != "model"), parts[-1])

    @property
    def score_is_cosine(self) -> bool:
        """Whether the score of the model is the cosine of its vectors. This loads the model."""
        matcher = self.index.model.matcher
        return matcher.score_is_cosine and not matcher.rerank_top_k

    def search(
        self,
        key: QueryKey,
        image: PILImage | None,
        top: int,
        item_filter: ItemFilter,
        encode_texts: EncodeTexts | None = None,
    ) -> SearchResults:
        """Find the best items, or the newest ones for an empty query.

        Args:
            key: The query.
            image: Uploaded image of the query.
            top: Maximum number of results.
            item_filter: Conditions on the items.
            encode_texts: Encodes the texts of the query. None: the method of this class.

        Returns:
            Results, best first.

        Raises:
            VisavisError: If the query has only exclusions, or no item has a metadata name of the
                filter.
        """
        if not key:
            newest = grouped_results(
                self.index, partial(self._find_newest, item_filter=item_filter), top
            )
            if not newest:
                self.index.check_filter_names(item_filter)
            return SearchResults(tuple(newest))
        query = SearchQuery(
            texts=parse_query(key.text),
            images=() if image is None else ((1.0, image),),
            like=((1.0, key.similar_to),) if key.similar_to else (),
        )
        has_probabilities = self.has_probabilities and query.is_single_text
        results = search_collection(
            self.index,
            query,
            top,
            item_filter,
            encode_texts=encode_texts or self.encode_texts,
            max_irrelevant=1.0 if has_probabilities else None,
        )
        return replace(results, unknown_words=unknown_words(self.index.model, query))

    def video_path(self, item: IndexItem) -> Path:
        """Find the file of a video, or of the video of a moment.

        Args:
            item: The item.

        Returns:
            Path of the file, without links.

        Raises:
            DataError: If the file is missing, a link leads out of the source, or the video is a
                part of an archive.
        """
        location = self.index.locate(item)
        with location.open():  # checks links
            path = Path(os.path.realpath(location.path))
        if location.size is not None:
            raise DataError(
                f"{item.path}: expected a file of its own, got a part of an archive. Unpack it to "
                "play the video."
            )
        return path

    def _find_newest(self, count: int, item_filter: ItemFilter) -> tuple[list[SearchResult], bool]:
        """The newest items, and whether there may be more."""
        rows = newest_rows(self._table, count, item_filter)
        items = items_from_table(self._table.take(rows))
        return [SearchResult(item, 0.0) for item in items], len(rows) == count

    def encode_texts(self, texts: Sequence[str]) -> list[Tensor]:
        """Encode texts at once. Texts of recent queries are taken from a cache.

        Args:
            texts: The texts.

        Returns:
            Unit vectors of each text: shape ``[D]``, or ``[n, D]`` for a late-interaction model.
        """
        vectors = {
            text: vector for text in texts if (vector := self._text_vectors.get(text)) is not None
        }
        if missing := list(dict.fromkeys(text for text in texts if text not in vectors)):
            vectors |= zip(missing, self.index.encode_texts(missing), strict=True)
        for text, vector in vectors.items():
            self._text_vectors.put(text, vector)
        return [vectors[text] for text in texts]

    def encode_known(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Encode the texts of several requests at once.

        Args:
            texts: The texts.

        Returns:
            Vectors by text, as of ``encode_texts``. Texts whose words are all unknown are left out,
            because the request with such a text reports it.
        """
        known = list[str]()
        for text in dict.fromkeys(texts):
            with suppress(VisavisError):
                self.index.model.unknown_words(text)
                known.append(text)
        return dict(zip(known, self.encode_texts(known), strict=True))

    def shorten(self, vectors: Tensor, dimensions: int | None) -> Tensor:
        """Shorten vectors to their first dimensions, if the model was trained for it.

        Args:
            vectors: Unit vectors, shape ``[N, D]``.
            dimensions: Number of dimensions. None: all.

        Returns:
            Unit vectors.

        Raises:
            ApiError: If the model was not trained for this number of dimensions.
        """
        full = vectors.shape[1]
        if dimensions in (None, full):
            return vectors
        trained = [dim for dim in self.index.model.matcher.matryoshka_dims if dim < full] + [full]
        if dimensions not in trained:
            raise ApiError(
                400,
                f"dimensions: expected {' or '.join(map(str, trained))}, the dimensions that the "
                f"model was trained for, got {dimensions}. Use one of them, or omit dimensions.",
                param="dimensions",
            )
        return unit_rows(vectors[:, :dimensions])

    def warm_up(self) -> None:
        """Run a first search, which is slower than later ones.

        Raises:
            VisavisError: If there can be no match probabilities, and they are requested.
        """
        if self.has_probabilities and self.index.calibration is None:
            _ = self.index.null_scores
        first_items = [QueryKey(similar_to=key) for key in self._table["key"][:1].to_pylist()]
        for key in [*first_items, QueryKey("an image")]:
            with suppress(VisavisError):  # a vocabulary may contain no word of the text
                self.search(key, None, 1, NO_FILTER)

    @cached_property
    def _table(self) -> pa.Table:
        """All items as columns, as of the first access."""
        return self.index.store.table()

    @cached_property
    def facets(self) -> FacetsResponse:
        """Values to filter by."""
        return count_facets(self._table)


_FileState = tuple[int, int, int] | None


def _file_states(folder: Path) -> list[_FileState]:
    """State of the files of an index that change with its version."""
    states = list[_FileState]()
    for name in (MANIFEST, CORRECTION_FILE):
        try:
            state = os.stat(folder / name)
        except OSError:
            states.append(None)
        else:
            states.append((state.st_ino, state.st_mtime_ns, state.st_size))
    return states


def count_facets(table: pa.Table) -> FacetsResponse:
    """Count the values that items can be filtered by.

    Args:
        table: Table of items.

    Returns:
        Number of items by value.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    paths = table["path"]
    folders = _count(
        pc.replace_substring_regex(paths.filter(pc.match_substring(paths, "/")), "/[^/]*$", "")
    )
    folders.pop("", None)
    # The years of numpy count from 1970.
    years = _count(
        pa.array(
            item_times(table).astype("datetime64[us]").astype("datetime64[Y]").astype(np.int64)
            + 1970
        )
    )
    tags = pc.value_counts(pc.list_flatten(table["metadata"]))
    names = pc.replace_substring_regex(tags.field("values"), "(?s)=.*", "")
    few = [
        name
        for name, count in _count(names).items()
        if 1 < count <= MAX_METADATA_VALUES and name not in (TAKEN, UNREADABLE_TIME, COMPANIONS)
    ]
    metadata: dict[str, dict[str, int]] = {}
    for tag in tags.filter(pc.is_in(names, value_set=pa.array(few, pa.string()))).to_pylist():
        [(name, value)] = tags_to_metadata([tag["values"]]).items()
        metadata.setdefault(name, {})[value] = tag["counts"]
    return FacetsResponse(
        kinds=_count(table["kind"]),
        folders=dict(folders.most_common(MAX_FOLDERS)),
        years={str(year): count for year, count in sorted(years.items())},
        metadata={name: dict(sorted(values.items())) for name, values in sorted(metadata.items())},
    )


def _count(values: Any) -> Counter[Any]:
    """How often each value of a column or array occurs."""
    import pyarrow.compute as pc

    return Counter(
        {count["values"]: count["counts"] for count in pc.value_counts(values).to_pylist()}
    )


def modified_at(item: IndexItem) -> datetime:
    """Convert the modification time of an item.

    Args:
        item: The item.

    Returns:
        Time in UTC.
    """
    return modified_time(item.modified_ns).astimezone(UTC)


def item_values(item: IndexItem) -> dict[str, Any]:
    """Convert an item to the form of the API.

    Args:
        item: The item.

    Returns:
        Values of ``ItemModel``.
    """
    values = {name: getattr(item, name) for name in ("key", "kind", "start", "end")}
    return values | {"modified": modified_at(item), "metadata": dict(item.metadata)}


def result_values(key: QueryKey, result: SearchResult) -> dict[str, Any]:
    """Convert a result to the form of the API.

    Args:
        key: The query.
        result: The result.

    Returns:
        Values of ``HitModel``.
    """
    probability = result.match_probability
    is_known = probability is not None and math.isfinite(probability)
    return item_values(result.item) | {
        "score": result.score if key and math.isfinite(result.score) else None,
        "match_probability": min(max(probability or 0.0, 0.0), 1.0) if is_known else None,
        "irrelevant_share": result.irrelevant_share if is_known else None,
        "duplicates": list(result.duplicates),
    }


def new_vote(index: str, key: QueryKey, item: IndexItem, relevant: bool | None) -> Judgment:
    """Create a vote.

    Args:
        index: Name of the index.
        key: The query.
        item: The item.
        relevant: Whether the item is relevant. None withdraws the vote.

    Returns:
        The vote, with a new name.
    """
    return Judgment(_now(), index, key, item.key, item.content, relevant, vote=secrets.token_hex(8))


class VoteStore:
    """The current votes in memory, and all of them in the feedback file.

    Args:
        file: Feedback file. None: votes are not saved.
        metrics: Metrics of the server.
    """

    def __init__(self, file: FeedbackFile | None, metrics: ServerMetrics):
        self.file = file
        self.metrics = metrics
        self._votes = votes_not_undone(file.records) if file else {}

    def vote(self, key: QueryKey, item: str) -> bool | None:
        """Look up the current vote.

        Args:
            key: The query.
            item: Key of the item.

        Returns:
            Whether the item was voted relevant. None: no vote.
        """
        votes = self._votes.get((key, item))
        return votes[-1].relevant if votes else None

    def record_vote(
        self, index: str, key: QueryKey, item: IndexItem, relevant: bool | None
    ) -> Judgment:
        """Save a vote.

        Args:
            index: Name of the index.
            key: The query.
            item: The item.
            relevant: Whether the item is relevant. None withdraws the vote.

        Returns:
            The saved vote, with its name.

        Raises:
            HTTPException: If votes are not saved.
            StorageError: If the file cannot be written.
        """
        judgment = new_vote(index, key, item, relevant)
        self._append(judgment)
        self._votes.setdefault((key, item.key), []).append(judgment)
        return judgment

    def undo(self, vote: str) -> bool | None:
        """Undo one vote. Earlier and later votes of others on the same item remain.

        Args:
            vote: Name of the vote.

        Returns:
            The judgment that applies without it. None: no vote.

        Raises:
            HTTPException: If there is no such vote, or votes are not saved.
            StorageError: If the file cannot be written.
        """
        judgments = (judgment for votes in self._votes.values() for judgment in votes)
        undone = next((judgment for judgment in judgments if judgment.vote == vote), None)
        if undone is None or not vote:
            raise HTTPException(
                404,
                f"vote: expected the name of a vote that was not undone, got {vote[:80]!r}. Reload "
                "the page.",
            )
        pair = undone.query, undone.item
        remaining = [judgment for judgment in self._votes[pair] if judgment is not undone]
        relevant = remaining[-1].relevant if remaining else None
        self._append(replace(undone, timestamp=_now(), relevant=relevant, vote="", undoes=vote))
        self._votes[pair] = remaining
        return relevant

    def _append(self, judgment: Judgment) -> None:
        if self.file is None:
            raise HTTPException(409, "Votes are not saved. Start the server with --feedback FILE.")
        self.file.append(judgment)
        self.metrics.votes.labels("relevant").inc()


class ModelWork(NamedTuple):
    """Work that waits for the thread of the models.

    Attributes:
        served: The index, whose model encodes the texts.
        texts: Texts to encode together with those of other work.
        run: Does the work. It receives a function that returns the vectors of the texts.
        key: Equal for work with the same result, which is done once.
        future: Receives the result.
    """

    served: ServedIndex
    texts: Sequence[str]
    run: Callable[[EncodeTexts], Any]
    key: Hashable
    future: Future[Any]


class SearchService:
    """Search and feedback for one index, or for two indexes in a blind comparison.

    Args:
        indexes: One or two indexes.
        feedback: Feedback file. None: votes are not saved.
        limits: Sizes and timeouts.
        metrics: Metrics of the server.
    """

    def __init__(
        self,
        indexes: Sequence[ServedIndex],
        feedback: FeedbackFile | None,
        limits: ServerLimits,
        metrics: ServerMetrics,
    ):
        self.indexes = list(indexes)
        self.limits = limits
        self.metrics = metrics
        # The numbers of the indexes must not reveal their order on the command line.
        if len(self.indexes) > 1 and secrets.randbelow(2):
            self.indexes.reverse()
        self.votes = VoteStore(feedback, metrics)
        self.images = ImageCache(limits, metrics)
        self._recent = RecentQueries()
        # Items of results, which pages show after an update of the index.
        # Each has two entries: with and without the version of its content.
        self._shown = LRUCache[IndexItem](2 * SHOWN_ITEMS)
        # When the results of a query expire, how many were searched for, and the results.
        self._results = LRUCache[tuple[float, int, SearchResults]](CACHED_QUERIES)
        self._secret = secrets.token_bytes(16)
        self._model_thread = ThreadPoolExecutor(1, "model")
        self._limit = WaitingLimit(limits.max_waiting)
        self._waiting = deque[ModelWork]()
        for index in self.indexes:
            metrics.items.labels(index.name).set(index.count)

    @property
    def is_comparison(self) -> bool:
        """Whether there are two indexes, shown without their names."""
        return len(self.indexes) == 2

    def side_order(self, key: QueryKey) -> list[int]:
        """Order the indexes from left to right, at random but fixed for a query while the server
        runs.

        Args:
            key: The query.

        Returns:
            Numbers of the indexes.
        """
        numbers = list(range(len(self.indexes)))
        if not self.is_comparison:
            return numbers
        # Keyed, so that nobody can compute which index is on the left.
        digest = hmac.digest(self._secret, repr(key).encode("utf-8", "surrogatepass"), "sha256")
        return numbers[::-1] if digest[0] & 1 else numbers

    def index(self, number: int) -> ServedIndex:
        """Look up an index.

        Args:
            number: Number of the index.

        Returns:
            The index.

        Raises:
            HTTPException: If the number is invalid.
        """
        if number >= len(self.indexes):
            raise HTTPException(
                404,
                f"index: expected 0{' or 1' * self.is_comparison}, got {number}. Pass the number "
                "of a served index.",
            )
        return self.indexes[number]

    async def follow_updates(self, seconds: float = UPDATE_SECONDS) -> None:
        """Open each new version of the indexes, until the task is cancelled. A version that cannot
        be opened is tried again, after twice as long each time.

        Args:
            seconds: Time between two checks.
        """
        problems = [""] * len(self.indexes)
        waits = [0.0] * len(self.indexes)
        retries = [0.0] * len(self.indexes)
        while True:
            await asyncio.sleep(seconds)
            for number, served in enumerate(self.indexes):
                if time.monotonic() < retries[number]:
                    continue
                try:
                    newer = await asyncio.to_thread(served.newer)
                    if newer is None:
                        continue
                    await asyncio.wrap_future(
                        self._model_thread.submit(self._replace, number, newer)
                    )
                except Exception as error:  # noqa: BLE001 - the old version is still served
                    if str(error) != problems[number]:
                        logging.getLogger(__name__).warning(
                            "%s: the new version cannot be opened. The old one stays until it can: "
                            "%s",
                            served.name,
                            error,
                        )
                    problems[number] = str(error)
                    waits[number] = min(max(2 * waits[number], seconds), MAX_RETRY_SECONDS)
                    retries[number] = time.monotonic() + waits[number]
                    continue
                problems[number] = ""
                waits[number] = 0.0
                self.metrics.items.labels(newer.name).set(newer.count)
                # No search uses it any more, and no other code of this thread is running.
                served.index.close()

    def _replace(self, number: int, newer: ServedIndex) -> None:
        """Serve a new version. This runs on the thread of the models, which the first search uses,
        and between the searches, so that none mixes two versions.
        """
        try:
            newer.warm_up()
        except VisavisError:
            newer.index.close()
            raise
        self.indexes[number] = newer

    def item(self, number: int, key: str, content_version: str = "") -> IndexItem:
        """Look up an item, or one that a page still shows after an update of the index.

        Args:
            number: Number of the index.
            key: Key of the item.
            content_version: Beginning of the hash of its file. Empty: any file of this key.

        Returns:
            The item. If its file was moved, the item of the new place.

        Raises:
            HTTPException: If the key is unknown.
        """
        served = self.index(number)
        item = served.index.store.get([key]).get(key)
        if item is not None and item.content.startswith(content_version):
            return item
        former = self._shown.get((number, key, content_version))
        if former is not None:
            item = served.find_content(former.content) or former
        if item is None:
            raise HTTPException(
                404,
                f"key: expected the key of an item of this index, got {key[:80]!r}. Copy a key "
                "from search results.",
            )
        return item

    def present(self, number: int, results: Sequence[SearchResult]) -> list[SearchResult]:
        """Select the results whose files exist. Others were moved or removed after the last update
        of the index.

        Args:
            number: Number of the index.
            results: The results.

        Returns:
            Results with a file.
        """
        served = self.indexes[number]
        return [result for result in results if not served.is_missing(result.item)]

    async def search(
        self, number: int, key: QueryKey, item_filter: ItemFilter, top: int, client: str = ""
    ) -> SearchResults:
        """Search one index.

        Args:
            number: Number of the index.
            key: The query.
            item_filter: Conditions on the items.
            top: Number of results that are needed.
            client: Name of the client.

        Returns:
            At least ``top`` results, or all.

        Raises:
            HTTPException: If too many requests of the client are waiting, or the image of the query is no longer
                cached.
            VisavisError: If the query is invalid.
        """
        served = self.indexes[number]
        result_key = (number, served.version, key, repr(item_filter))
        expires, fetched, cached = self._results.get(result_key) or (0.0, 0, None)
        if cached is not None and fetched >= top and time.monotonic() < expires:
            return cached
        image = self.images.uploaded(key.image_hash)
        # Whole blocks, so that the next page of the same query comes from the cache.
        fetched = -(-top // RESULT_BLOCK) * RESULT_BLOCK

        def search(encode_texts: EncodeTexts) -> SearchResults:
            # An update may have replaced the index, and its model, while the search waited.
            current = self.indexes[number]
            encode = encode_texts if current is served else current.encode_texts
            with self.metrics.search_seconds.time():
                return current.search(key, image, fetched, item_filter, encode)

        texts = [text for _, text in parse_query(key.text)]
        results = await self.run_model(served, search, texts, (*result_key, fetched), client)
        # After the search, because a failed one must not be cached.
        self._results.put(result_key, (time.monotonic() + CACHE_SECONDS, fetched, results))
        self._recent.add(key, number, results)
        return results

    async def run_model(
        self,
        served: ServedIndex,
        run: Callable[[EncodeTexts], T],
        texts: Sequence[str] = (),
        key: Hashable = None,
        client: str = "",
    ) -> T:
        """Do work on the thread of the models.

        Args:
            served: The index, whose model encodes the texts.
            run: Does the work. It receives a function that returns the vectors of texts.
            texts: Texts to encode together with those of other work that waits.
            key: Equal for work with the same result, which is done once. None: unlike all other.
            client: Name of the client.

        Returns:
            The result of ``run``.

        Raises:
            HTTPException: If too many requests of the client are waiting.
        """
        with self._limit.waiting(client), self.metrics.searches_waiting.track_inprogress():
            future: Future[T] = Future()
            self._waiting.append(ModelWork(served, texts, run, key, future))
            self._model_thread.submit(self._run_waiting)
            return await asyncio.wrap_future(future)

    def _run_waiting(self) -> None:
        """Do the work that has arrived by now. Its texts are encoded in one batch."""
        batch = list[ModelWork]()
        num_texts = 0
        # Only this thread removes work. A deque is safe for one appending and one removing thread.
        # Each work submits one call of this method, so that none is left over.
        while self._waiting and num_texts < MAX_TEXTS_AT_ONCE:
            work = self._waiting.popleft()
            if work.future.set_running_or_notify_cancel():
                batch.append(work)
                num_texts += len(work.texts)
        encoders = dict[ServedIndex, EncodeTexts]()
        for served in dict.fromkeys(work.served for work in batch):
            vectors = dict[str, Tensor]()
            with suppress(Exception):  # each work reports its own error
                vectors = served.encode_known(
                    [text for work in batch if work.served is served for text in work.texts]
                )
            encoders[served] = partial(_look_up, vectors, served.encode_texts)
        # Several clients may wait for the same results.
        results = dict[Hashable, Any]()
        for work in batch:
            key = work.future if work.key is None else work.key
            try:
                if key not in results:
                    results[key] = work.run(encoders[work.served])
                work.future.set_result(results[key])
            except Exception as error:  # noqa: BLE001 - the client that waits for the results gets it
                work.future.set_exception(error)

    async def encode_texts(
        self, served: ServedIndex, texts: Sequence[str], client: str = ""
    ) -> tuple[Tensor, int]:
        """Encode texts together with those of other requests. Other requests are served between
        the parts of a long list.

        Args:
            served: The index. Its model encodes all texts, also if an update replaces the index.
            texts: The texts.
            client: Name of the client.

        Returns:
            Unit vectors, shape ``[N, D]``, and the number of tokens that the model read.

        Raises:
            HTTPException: If too many requests of the client are waiting.
            VisavisError: If the model knows no word of a text, or has several vectors per text.
        """
        model = served.index.model
        _require_single_vectors(served)
        parts = list[Tensor]()
        num_tokens = 0
        # Rounding depends on the place in a batch, so that equal texts would have different vectors.
        distinct = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        repeats = Counter(texts)
        for chunk in chunk_slices(len(distinct), TEXTS_PER_TURN):
            part = list(distinct)[chunk]

            def encode(encode_texts: EncodeTexts, part: Sequence[str] = part) -> tuple[Tensor, int]:
                for text in part:
                    model.unknown_words(text)
                return torch.stack(list(encode_texts(part))), sum(
                    count * repeats[text]
                    for text, count in zip(part, model.count_tokens(part), strict=True)
                )

            vectors, count = await self.run_model(served, encode, part, client=client)
            parts.append(vectors)
            num_tokens += count
        return torch.cat(parts)[[distinct[text] for text in texts]], num_tokens

    async def encode_images(self, served: ServedIndex, images: Sequence[ImageInput]) -> Tensor:
        """Encode images, as ``Retriever.encode_images`` does.

        Args:
            served: The index.
            images: The images.

        Returns:
            Unit vectors, shape ``[N, D]``.

        Raises:
            HTTPException: If too many requests of the client are waiting.
            DataError: If the content of an image is not one.
            VisavisError: If the model has several vectors per image.
        """
        model = served.index.model
        _require_single_vectors(served)
        return torch.cat(await self.map_images(served, images, [model.encode_images]))

    async def map_images(
        self,
        served: ServedIndex,
        images: Sequence[ImageInput],
        functions: Sequence[Callable[[list[PILImage]], T]],
    ) -> list[T]:
        """Decode images, and call functions on the thread of the models with a few of them. Other
        requests are served between the calls.

        Args:
            served: The index.
            images: Images of one request.
            functions: The functions.

        Returns:
            Results of all functions for the first images, then for the next ones.

        Raises:
            HTTPException: If too many requests of the client are waiting.
            DataError: If the content of an image is not one, or the images are too large.
        """
        model = served.index.model
        client = images[0].client
        results = list[T]()
        # The processor may be loaded with the whole model.
        min_side = await self.run_model(served, lambda _: model.processor.min_side, client=client)
        pixels = await self.images.pixels(images, min_side)
        for chunk in _turns(pixels, self.limits.max_decoded_pixels):
            # Decoded images take far more memory than their files.
            async with self.images.turns.turn(client, sum(pixels[chunk])) as turn:
                decoded = [
                    await self.images.decode(image, min_side, turn) for image in images[chunk]
                ]
                for run in functions:
                    # No name may keep the images while the next ones are decoded.
                    result = await self.run_model(
                        served, partial(_call, run, decoded), client=client
                    )
                    results.append(result)
                del decoded
        return results

    async def score_pairs(
        self, served: ServedIndex, query: str | ImageInput, items: Sequence[str | ImageInput]
    ) -> tuple[Tensor, int]:
        """Score images for a text, or texts for an image, with the score of the model. A model with
        two stages scores all of them with its second one.

        Args:
            served: The index.
            query: Text or image.
            items: Images or texts.

        Returns:
            Scores, shape ``[N]``, and the number of tokens that the model read.

        Raises:
            HTTPException: If too many requests of the client are waiting.
            VisavisError: If the model knows no word of a text, or the content of an image is not one.
        """
        model = served.index.model
        given = [query, *items]
        texts = [item for item in given if isinstance(item, str)]
        images = [item for item in given if isinstance(item, ImageInput)]
        direction: Direction = "t2i" if isinstance(query, str) else "i2t"

        def score(columns: slice, decoded: list[PILImage]) -> Tensor:
            for text in texts[columns]:
                model.unknown_words(text)
            parts = [
                model.score(decoded[rows], texts[columns], direction=direction).flatten()
                for rows in chunk_slices(len(decoded), limit)
            ]
            return torch.cat(parts)

        client = images[0].client
        # No more candidates at once than the second stage scores. One side is the query.
        limit = await self.run_model(
            served, lambda _: model.matcher.rerank_top_k or TEXTS_PER_TURN, client=client
        )
        functions = [partial(score, columns) for columns in chunk_slices(len(texts), limit)]
        scores = await self.map_images(served, images, functions)
        num_tokens = await self.run_model(
            served, lambda _: sum(model.count_tokens(texts)), client=client
        )
        return torch.cat(scores), num_tokens

    def model_numbers(self) -> dict[str, int]:
        """Name the served models.

        Returns:
            Number of an index of each model, by the name of the model.
        """
        prints = {
            (index.model_name, index.index.manifest.query_model.fingerprint)
            for index in self.indexes
        }
        # Different models in folders of the same name are named by the names of their indexes.
        are_unique = len(prints) == len({name for name, _ in prints})
        numbers = dict[str, int]()
        for number, index in enumerate(self.indexes):
            numbers.setdefault(index.model_name if are_unique else index.name, number)
        return dict(sorted(numbers.items()))

    def record_preference(self, key: QueryKey, side: str) -> tuple[str, str]:
        """Save which side is better.

        Args:
            key: The query.
            side: ``"left"``, ``"right"`` or ``"neither"``.

        Returns:
            Names of the left and of the right index.

        Raises:
            HTTPException: If there is only one index.
            StorageError: If the feedback file cannot be written.
        """
        if not self.is_comparison:
            raise HTTPException(409, "Preferences need two indexes. Start the server with two.")
        left, right = (self.indexes[number].name for number in self.side_order(key))
        if self.votes.file is not None:
            self.votes.file.append(
                Preference(_now(), key, left, right, {"left": left, "right": right}.get(side))
            )
            self.metrics.votes.labels("preference").inc()
        return left, right

    def uncertain_pairs(self, count: int) -> list[UncertainPair]:
        """Select pairs of a recent query and an item whose vote would be most informative.

        Args:
            count: Maximum number of pairs.

        Returns:
            Pairs without a vote, the most uncertain first.
        """
        return self._recent.most_uncertain(
            count, lambda key, item: self.votes.vote(key, item) is not None
        )

    def to_hit(self, number: int, key: QueryKey, result: SearchResult) -> HitResponse:
        """Convert a result to the form of the API.

        Args:
            number: Number of the index.
            key: The query.
            result: The result.

        Returns:
            The result with its vote.
        """
        item = result.item
        version = item.content[:12]
        self._shown.put((number, item.key, version), item)
        self._shown.put((number, item.key, ""), item)
        return HitResponse(
            **result_values(key, result),
            name=item.path.rpartition("/")[2],
            path=item.path,
            vote=self.votes.vote(key, item.key),
            content_version=version,
        )

    def close(self) -> None:
        """Stop the threads, and the searches that wait."""
        self._model_thread.shutdown(wait=False, cancel_futures=True)
        for work in tuple(self._waiting):
            work.future.cancel()
        self.images.close()


def _require_single_vectors(served: ServedIndex) -> None:
    if served.index.manifest.late_interaction is not None:
        raise VisavisError(
            f"{served.model_name}: expected a model with one vector per item, got one with several. "
            "Use /v1/rerank, or serve an index of another model."
        )


def _turns(pixels: Sequence[int], max_pixels: int) -> Iterator[slice]:
    """Images of one request that are decoded at once."""
    start = 0
    total = 0
    for position, count in enumerate(pixels):
        if position > start and (position - start == IMAGES_PER_TURN or total + count > max_pixels):
            yield slice(start, position)
            start = position
            total = 0
        total += count
    yield slice(start, len(pixels))


def _call(run: Callable[[list[PILImage]], T], images: list[PILImage], _: EncodeTexts) -> T:
    return run(images)


def _look_up(
    vectors: Mapping[str, Tensor], encode_texts: EncodeTexts, texts: Sequence[str]
) -> Sequence[Tensor]:
    """Vectors of texts that were encoded with those of other requests."""
    if all(text in vectors for text in texts):
        return [vectors[text] for text in texts]
    return encode_texts(texts)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


MAX_QUERIES = 50
"""Number of recent queries that are stored."""
RESULTS_PER_QUERY = 40
"""Number of results per query from which pairs are selected."""
FIRST_PAGE_SIZE = 10
"""Number of results on the first page. A score at its end is the most uncertain one."""
MAX_PAIRS_PER_QUERY = 2
"""Number of pairs that one query contributes to a selection."""


@dataclass(frozen=True)
class UncertainPair:
    """A query and an item whose relevance is uncertain.

    Attributes:
        query: The query.
        index: Number of the searched index.
        result: The search result.
        uncertainty: Uncertainty of the relevance, from 0 to 1.
    """

    query: QueryKey
    index: int
    result: SearchResult
    uncertainty: float


class RecentQueries:
    """The most recent text queries with their results, for the thread of the requests.

    A query that continues an earlier one replaces it: the intermediate states of typing ("be",
    "beac") are not queries.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[QueryKey, int, Sequence[SearchResult]]] = deque(
            maxlen=MAX_QUERIES
        )

    def add(self, query: QueryKey, index: int, results: Sequence[SearchResult]) -> None:
        """Store the results of a query. Queries with images or items are ignored.

        Args:
            query: The query.
            index: Number of the searched index.
            results: Search results, best first.
        """
        if not query.text or query.similar_to or query.image_hash:
            return
        # "be", "beac" and "beach" are one query that was typed slowly.
        continued = [
            entry
            for entry in self._entries
            if entry[1] == index and query.text.startswith(entry[0].text)
        ]
        for entry in continued:
            self._entries.remove(entry)
        self._entries.append((query, index, results[:RESULTS_PER_QUERY]))

    def most_uncertain(
        self, count: int, is_labeled: Callable[[QueryKey, str], bool]
    ) -> list[UncertainPair]:
        """Select the most uncertain pairs that are not judged yet.

        Args:
            count: Maximum number of pairs.
            is_labeled: Whether the pair of a query and an item key is judged already.

        Returns:
            Pairs, most uncertain first, at most `MAX_PAIRS_PER_QUERY` per query.
        """
        pairs = list[UncertainPair]()
        for query, index, results in self._entries:
            candidates = [
                UncertainPair(query, index, result, uncertainty)
                for result, uncertainty in zip(results, uncertainties(results), strict=True)
                if not is_labeled(query, result.key)
            ]
            pairs += sorted(candidates, key=lambda pair: -pair.uncertainty)[:MAX_PAIRS_PER_QUERY]
        return sorted(pairs, key=lambda pair: -pair.uncertainty)[:count]


def uncertainties(results: Sequence[SearchResult]) -> list[float]:
    """Estimate how uncertain the relevance of each search result is.

    Formula:
        With a match probability p: $1 - 2 |p - 0.5|$. Without: $exp(-|score - edge| / std)$,
        where ``edge`` is the mean of the 10th and the 11th score, the end of the first page, and
        ``std`` the standard deviation of the scores.

    Args:
        results: Results of one query, best first.

    Returns:
        Uncertainty of each result, from 0 to 1.
    """
    scores = [result.score for result in results]
    around_page_end = scores[FIRST_PAGE_SIZE - 1 : FIRST_PAGE_SIZE + 1]
    edge = (
        sum(around_page_end) / len(around_page_end) if around_page_end else min(scores, default=0.0)
    )
    mean = sum(scores) / max(len(scores), 1)
    std = math.sqrt(sum((score - mean) ** 2 for score in scores) / max(len(scores), 1)) or 1.0
    return [
        math.exp(-abs(result.score - edge) / std)
        if result.match_probability is None
        else 1 - 2 * abs(result.match_probability - 0.5)
        for result in results
    ]
