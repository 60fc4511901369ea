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
from datetime import UTC
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
from starlette.exceptions import HTTPException

from visavis.core import storage
from visavis.core.errors import DataError, VisavisError
from visavis.core.memory_budget import chunk_slices
from visavis.data.capture_time import TAKEN, UNREADABLE_TIME, modified_time
from visavis.data.feedback.records import QueryKey
from visavis.retrieval.index_folder import CORRECTION_FILE, Index, read_manifest
from visavis.retrieval.items import (
    COMPANIONS,
    DATABASE,
    NO_FILTER,
    IndexItem,
    ItemFilter,
)
from visavis.retrieval.open_index import open_index
from visavis.retrieval.search import (
    EncodeTexts,
    NamedResult,
    SearchQuery,
    SearchResult,
    SearchResults,
    content_text,
    grouped_results,
    parse_query,
    search_collection,
    unknown_words,
)
from visavis.retrieval.server.image_cache import ImageCache, ImageInput
from visavis.retrieval.server.limits import LRUCache, ServerLimits, ServerMetrics, WaitingLimit
from visavis.retrieval.server.schemas import ApiError, FacetsResponse, HitResponse, NamedResponse
from visavis.retrieval.server.vote_store import VoteStore

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

T = TypeVar("T")
AnyResult = TypeVar("AnyResult", SearchResult, NamedResult)
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
NO_VOTES: Mapping[str, bool | None] = {}


class ServedIndex:
    """An index that is served.

    Args:
        index: The index.
        name: Name that is shown when two indexes are compared. Default: the name of the folder.
        needs_probabilities: Whether the results of texts must have match probabilities.
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
        needs_probabilities: bool = False,
        stores: Sequence[str | Path] = (),
    ):
        self.index = index
        self.count = index.store.count()
        self.needs_probabilities = needs_probabilities
        self.stores = stores
        self.name = name or index.folder.name
        self._text_vectors = LRUCache[np.ndarray](CACHED_TEXTS)
        self._files = _file_states(index.folder)
        # The first check reads the manifest: an update may have ended since the index was opened.
        self._checked = list[_FileState]()
        opened = repr((index.manifest, self._files[1]))
        self.version = hashlib.sha256(opened.encode()).hexdigest()[:16]

    def newer(self) -> ServedIndex | None:
        """Open the index again after an update. None: it has no new version, or is still updated."""
        files = _file_states(self.index.folder)
        if files == self._checked:
            return None
        manifest = read_manifest(self.index.folder)
        is_same = manifest == self.index.manifest and files[1] == self._files[1]
        if is_same or manifest.digest is None:
            self._remember(files)
            return None
        opened = self.index.manifest
        is_same_model = (
            manifest.query_model == opened.query_model
            and manifest.fingerprint == opened.fingerprint
            and manifest.embedding_dim == opened.embedding_dim
        )
        model = self.index.model if is_same_model else None
        index = open_index(self.index.folder, store=self.stores, encoder=model)
        if index.is_unfinished:  # another update began
            index.close()
            self._remember(files)
            return None
        # Not recorded as checked: after an error, the next call opens it again.
        newer = ServedIndex(
            index, self.name, needs_probabilities=self.needs_probabilities, stores=self.stores
        )
        if index.model is self.index.model:
            newer._text_vectors = self._text_vectors
        return newer

    def _remember(self, files: list[_FileState]) -> None:
        """Do not check files again until they change."""
        # Times of files have steps. A file that just changed may change again without a new time. A
        # clock that was wrong may have written times of the future.
        now_ns = storage.current_disk().time_ns()
        times = [state[1] for state in files if state is not None]
        if all(abs(now_ns - time_ns) > storage.TIME_RESOLUTION_NS for time_ns in times):
            self._checked = files

    def find_content(self, content: str) -> IndexItem | None:
        """Find an item by the hash of its file, which stays the same when the file is moved."""
        return self.index.store.table().find_content(content)

    def is_missing(self, item: IndexItem) -> bool:
        """Check whether the file of an item was moved or removed since the index was updated. The
        files of a data set are not checked.
        """
        return not self.index.manifest.is_dataset and not os.path.isfile(self.index.place(item))

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
        matcher = self.index.model.whole.matcher
        return matcher.score_is_cosine and not matcher.rerank_top_k

    def search(
        self,
        key: QueryKey,
        image: PILImage | None,
        top: int,
        item_filter: ItemFilter,
        encode_texts: EncodeTexts | None = None,
    ) -> SearchResults:
        """Find the best items, or the newest ones for an empty query."""
        if not key:
            with self.index.one_version():
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
        results = search_collection(
            self.index,
            query,
            top,
            item_filter,
            encode_texts=encode_texts or self.encode_texts,
        )
        return replace(results, unknown_words=unknown_words(self.index.model, query))

    def video_path(self, item: IndexItem) -> Path:
        """Find the file of a video, or of the video of a moment. Its path has no links."""
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
        items = self.index.store.table().newest(count, item_filter)
        return [SearchResult(item, 0.0) for item in items], len(items) == count

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode texts at once to unit vectors ``[D]``, or ``[n, D]`` of a late-interaction model.
        Texts of recent queries are taken from a cache.
        """
        vectors = {
            text: vector for text in texts if (vector := self._text_vectors.get(text)) is not None
        }
        if missing := list(dict.fromkeys(text for text in texts if text not in vectors)):
            vectors |= zip(missing, self.index.model.encode_texts(missing), strict=True)
        for text, vector in vectors.items():
            self._text_vectors.put(text, vector)
        return [vectors[text] for text in texts]

    def encode_known(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Encode the texts of several requests at once."""
        known = list[str]()
        for text in dict.fromkeys(texts):
            # A text whose words are all unknown is left out. Its request reports it.
            with suppress(VisavisError):
                self.index.model.unknown_words(text)
                known.append(text)
        return dict(zip(known, self.encode_texts(known), strict=True))

    def shorten(self, vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
        """Shorten unit vectors ``[N, D]`` to their first dimensions, if the model was trained so."""
        full = vectors.shape[1]
        if dimensions in (None, full):
            return vectors
        dims = self.index.model.whole.matcher.matryoshka_dims
        trained = [dim for dim in dims if dim < full] + [full]
        if dimensions not in trained:
            raise ApiError(
                400,
                f"dimensions: expected {' or '.join(map(str, trained))}, the dimensions that the "
                f"model was trained for, got {dimensions}. Use one of them, or omit dimensions.",
                param="dimensions",
            )
        shortened = vectors[:, :dimensions]
        return np.asarray(shortened / np.linalg.norm(shortened, axis=1, keepdims=True))

    def warm_up(self) -> None:
        """Run a first search, which is slower than later ones."""
        if self.needs_probabilities:
            _ = self.index.match_scale(None)  # may raise an error
        first_key = self.index.store.table().first_key()
        first_items = [] if first_key is None else [QueryKey(similar_to=first_key)]
        for key in [*first_items, QueryKey("an image")]:
            with suppress(VisavisError):  # a vocabulary may contain no word of the text
                self.search(key, None, 1, NO_FILTER)

    @cached_property
    def facets(self) -> FacetsResponse:
        """Values to filter by."""
        facets = self.index.store.table().facets(
            max_folders=MAX_FOLDERS,
            max_values=MAX_METADATA_VALUES,
            hidden=(TAKEN, UNREADABLE_TIME, COMPANIONS),
        )
        return FacetsResponse(
            kinds=facets.kinds,
            folders=facets.folders,
            years={str(year): count for year, count in facets.years.items()},
            metadata=facets.metadata,
        )


_FileState = tuple[int, int, int] | None


def _file_states(folder: Path) -> list[_FileState]:
    """State of the files of an index that change with its version."""
    states = list[_FileState]()
    for name in (DATABASE, CORRECTION_FILE):
        try:
            state = os.stat(folder / name)
        except OSError:
            states.append(None)
        else:
            states.append((state.st_ino, state.st_mtime_ns, state.st_size))
    return states


def item_values(item: IndexItem) -> dict[str, Any]:
    """Convert an item to the values of ``ItemModel``."""
    values = {name: getattr(item, name) for name in ("key", "kind", "start", "end")}
    modified = modified_time(item.modified_ns).astimezone(UTC)
    return values | {"modified": modified, "metadata": dict(item.metadata)}


def result_values(key: QueryKey, result: SearchResult) -> dict[str, Any]:
    """Convert a result to the values of ``HitModel``."""
    probability = result.match_probability
    is_known = probability is not None and math.isfinite(probability)
    return item_values(result.item) | {
        "score": result.score if key and math.isfinite(result.score) else None,
        "match_probability": min(max(probability or 0.0, 0.0), 1.0) if is_known else None,
        "irrelevant_share": result.irrelevant_share if is_known else None,
        "duplicates": list(result.duplicates),
    }


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
        limits: Sizes and timeouts.
        metrics: Metrics of the server.
        saves_votes: Whether clients may vote. Votes are saved in the indexes.
    """

    def __init__(
        self,
        indexes: Sequence[ServedIndex],
        limits: ServerLimits,
        metrics: ServerMetrics,
        *,
        saves_votes: bool = False,
    ):
        self.indexes = list(indexes)
        self.limits = limits
        self.metrics = metrics
        # The numbers of the indexes must not reveal their order on the command line.
        if len(self.indexes) > 1 and secrets.randbelow(2):
            self.indexes.reverse()
        voted = [index.index.folder for index in self.indexes] if saves_votes else []
        self.votes = VoteStore(voted, metrics)
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
        """
        numbers = list(range(len(self.indexes)))
        if not self.is_comparison:
            return numbers
        # Keyed, so that nobody can compute which index is on the left.
        digest = hmac.digest(self._secret, repr(key).encode("utf-8", "surrogatepass"), "sha256")
        return numbers[::-1] if digest[0] & 1 else numbers

    def index(self, number: int) -> ServedIndex:
        """Look up an index."""
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

    async def read(self, number: int, function: Callable[[ServedIndex], T]) -> T:
        """Read an index on the thread of the searches. A search may hold its database, and an
        update closes it between the searches only.
        """
        self.index(number)  # may raise an error
        return await asyncio.wrap_future(
            self._model_thread.submit(lambda: function(self.indexes[number]))
        )

    async def item(self, number: int, key: str, content_version: str = "") -> IndexItem:
        """Look up an item, or one that a page still shows after an update of the index."""
        former = self._shown.get((number, key, content_version))

        def find(served: ServedIndex) -> IndexItem | None:
            item = served.index.store.get([key]).get(key)
            # The version is the beginning of the hash of the file. Empty: any file of this key.
            if item is not None and item.content.startswith(content_version):
                return item
            if former is None:
                return item
            # If the file was moved, the item of the new place.
            return served.find_content(former.content) or former

        item = await self.read(number, find)
        if item is None:
            raise HTTPException(
                404,
                f"key: expected the key of an item of this index, got {key[:80]!r}. Copy a key "
                "from search results.",
            )
        return item

    def present(self, number: int, results: Sequence[AnyResult]) -> list[AnyResult]:
        """Select the results whose files exist. Others were moved or removed after the last update
        of the index.
        """
        served = self.indexes[number]
        return [result for result in results if not served.is_missing(result.item)]

    async def search(
        self, number: int, key: QueryKey, item_filter: ItemFilter, top: int, client: str = ""
    ) -> SearchResults:
        """Search one index for at least ``top`` results, or all."""
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

        texts = [content_text(text) for _, text in parse_query(key.text)]
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
        """Do work on the thread of the models, as ``ModelWork`` describes it."""
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
            vectors = dict[str, np.ndarray]()
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
    ) -> tuple[np.ndarray, int]:
        """Encode texts to unit vectors ``[N, D]``, and count the tokens that the model read. Other
        requests are served between the parts of a long list.
        """
        # This model encodes all texts, also if an update replaces the index.
        model = served.index.model
        _require_single_vectors(served)
        parts = list[np.ndarray]()
        num_tokens = 0
        # Rounding depends on the place in a batch, so that equal texts would have different vectors.
        distinct = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        repeats = Counter(texts)
        for chunk in chunk_slices(len(distinct), TEXTS_PER_TURN):
            part = list(distinct)[chunk]

            def encode(
                encode_texts: EncodeTexts, part: Sequence[str] = part
            ) -> tuple[np.ndarray, int]:
                for text in part:
                    model.unknown_words(text)
                return np.stack(encode_texts(part)), sum(
                    count * repeats[text]
                    for text, count in zip(part, model.count_tokens(part), strict=True)
                )

            vectors, count = await self.run_model(served, encode, part, client=client)
            parts.append(vectors)
            num_tokens += count
        return np.concatenate(parts)[[distinct[text] for text in texts]], num_tokens

    async def encode_images(self, served: ServedIndex, images: Sequence[ImageInput]) -> np.ndarray:
        """Encode images to unit vectors ``[N, D]``."""
        model = served.index.model
        _require_single_vectors(served)
        parts = await self.map_images(served, images, [model.encode_images])
        return np.stack([vector for part in parts for vector in part])

    async def map_images(
        self,
        served: ServedIndex,
        images: Sequence[ImageInput],
        functions: Sequence[Callable[[list[PILImage]], T]],
    ) -> list[T]:
        """Decode images, and call functions on the thread of the models with a few of them. Other
        requests are served between the calls.
        """
        model = served.index.model
        client = images[0].client
        # Of all functions for the first images, then for the next ones.
        results = list[T]()
        # The processor may be loaded with the whole model.
        min_side = await self.run_model(
            served, lambda _: model.image_model.processor.min_side, client=client
        )
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
    ) -> tuple[np.ndarray, int]:
        """Score images for a text, or texts for an image: ``[N]``, and the number of tokens. A model
        with two stages scores all of them with its second one.
        """
        model = served.index.model
        given = [query, *items]
        texts = [item for item in given if isinstance(item, str)]
        images = [item for item in given if isinstance(item, ImageInput)]
        direction: Literal["t2i", "i2t"] = "t2i" if isinstance(query, str) else "i2t"

        def score(columns: slice, decoded: list[PILImage]) -> np.ndarray:
            for text in texts[columns]:
                model.unknown_words(text)
            parts = [
                model.score(decoded[rows], texts[columns], direction).ravel()
                for rows in chunk_slices(len(decoded), limit)
            ]
            return np.concatenate(parts)

        client = images[0].client
        # No more candidates at once than the second stage scores. One side is the query.
        limit = await self.run_model(
            served, lambda _: model.whole.matcher.rerank_top_k or TEXTS_PER_TURN, client=client
        )
        functions = [partial(score, columns) for columns in chunk_slices(len(texts), limit)]
        scores = await self.map_images(served, images, functions)
        num_tokens = await self.run_model(
            served, lambda _: sum(model.count_tokens(texts)), client=client
        )
        return np.concatenate(scores), num_tokens

    def model_numbers(self) -> dict[str, int]:
        """Number of an index of each served model, by the name of the model."""
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

    def record_preference(self, key: QueryKey, side: str) -> tuple[str, str, bool]:
        """Save which side is better, if votes are saved. Return the names of the left and of the
        right index, and whether it was saved.
        """
        if not self.is_comparison:
            raise HTTPException(409, "Preferences need two indexes. Start the server with two.")
        left, right = (self.indexes[number].name for number in self.side_order(key))
        preferred = {"left": left, "right": right}.get(side)
        return left, right, self.votes.record_preference(key, left, right, preferred)

    async def uncertain_pairs(self, count: int) -> list[UncertainPair]:
        """Select pairs of a recent query and an item without a vote, the most uncertain first."""
        queries = self._recent.queries()
        votes = await asyncio.to_thread(
            lambda: {(key, number): self.votes.of_query(number, key) for key, number in queries}
        )
        return self._recent.most_uncertain(
            count,
            # A query may have arrived since.
            lambda key, number, item: votes.get((key, number), {}).get(item) is not None,
        )

    def to_hit(
        self,
        number: int,
        key: QueryKey,
        result: SearchResult,
        votes: Mapping[str, bool | None] = NO_VOTES,
    ) -> HitResponse:
        """Convert a result to the form of the API, with its vote."""
        item = result.item
        version = item.content[:12]
        self._shown.put((number, item.key, version), item)
        self._shown.put((number, item.key, ""), item)
        return HitResponse(
            **result_values(key, result),
            name=item.path.rpartition("/")[2],
            path=item.path,
            vote=votes.get(item.key),
            content_version=version,
        )

    def to_named(
        self, number: int, key: QueryKey, named: NamedResult, votes: Mapping[str, bool | None]
    ) -> NamedResponse:
        """Convert an item that was found by name or caption to the form of the API."""
        hit = self.to_hit(number, key, SearchResult(named.item, math.nan), votes)
        return NamedResponse(**vars(hit), found_by=named.found_by, text=named.text)

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
    vectors: Mapping[str, np.ndarray], encode_texts: EncodeTexts, texts: Sequence[str]
) -> Sequence[np.ndarray]:
    """Vectors of texts that were encoded with those of other requests."""
    if all(text in vectors for text in texts):
        return [vectors[text] for text in texts]
    return encode_texts(texts)


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
        """Store the results of a query. Queries with images or items are ignored."""
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

    def queries(self) -> list[tuple[QueryKey, int]]:
        """Return the queries, each with the number of its index."""
        return [(query, index) for query, index, _ in self._entries]

    def most_uncertain(
        self, count: int, is_labeled: Callable[[QueryKey, int, str], bool]
    ) -> list[UncertainPair]:
        """Select the most uncertain pairs that are not judged yet."""
        pairs = list[UncertainPair]()
        for query, index, results in self._entries:
            candidates = [
                UncertainPair(query, index, result, uncertainty)
                for result, uncertainty in zip(results, uncertainties(results), strict=True)
                if not is_labeled(query, index, result.key)
            ]
            pairs += sorted(candidates, key=lambda pair: -pair.uncertainty)[:MAX_PAIRS_PER_QUERY]
        return sorted(pairs, key=lambda pair: -pair.uncertainty)[:count]


def uncertainties(results: Sequence[SearchResult]) -> list[float]:
    """Estimate how uncertain the relevance of each result is, 0 to 1. The results are best first."""
    scores = [result.score for result in results]
    # Without a match probability, the most uncertain score is at the end of the first page: the
    # mean of the 10th and the 11th one.
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
