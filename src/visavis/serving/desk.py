"""What the service does behind its doors: searches, pictures and votes, on threads of their own, so that the event loop lives."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from visavis.data.judgements import Asked, Judgement, JudgementFile, Preference, last_words
from visavis.data.pictures import small_copy
from visavis.errors import DataError, VisavisError
from visavis.retrieval.item import Where
from visavis.retrieval.searching import Result, Results
from visavis.serving.asking import Pair, RecentQueries
from visavis.serving.collection import Collection, changed
from visavis.serving.figures import Figures
from visavis.serving.limits import Limits
from visavis.serving.pictures import Kept, shown
from visavis.serving.refusals import Refused
from visavis.serving.shapes import Hit

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

T = TypeVar("T")
BLOCK, REMEMBERED, REMEMBERED_S = 120, 64, 300.0
"""Results are fetched so many at a time, and those of so many queries are kept so many seconds, for the next page."""
UPLOAD_SIDE = 640


class Desk:
    """The state of a service: one or two collections, what was asked lately, and the votes."""

    def __init__(self, collections: Sequence[Collection], judgements: JudgementFile | None, limits: Limits, figures: Figures):
        self.collections, self.file, self.limits, self.figures = list(collections), judgements, limits, figures
        if len(self.collections) > 1 and secrets.randbelow(2):
            self.collections.reverse()  # the numbers of indexes tell nobody which came first
        self.recent = RecentQueries()
        self._secret = secrets.token_bytes(16)
        self._model, self._pictures = ThreadPoolExecutor(1, "model"), ThreadPoolExecutor(2, "pictures")
        self._results: OrderedDict[tuple[object, ...], tuple[float, int, Results]] = OrderedDict()
        self._uploads: OrderedDict[str, Picture] = OrderedDict()
        self._small = Kept(limits.cached_bytes)
        self._votes = last_words(judgements.lines) if judgements else {}
        self._waiting = 0
        for collection in self.collections:
            figures.items.labels(collection.name).set(len(collection.items))

    @property
    def blind(self) -> bool:
        """Whether there are two indexes, shown without their names."""
        return len(self.collections) == 2

    def order(self, asked: Asked) -> list[int]:
        """The numbers of the indexes from left to right: by lot, and the same for the same query as long as the service runs."""
        numbers = list(range(len(self.collections)))
        mark = hmac.digest(self._secret, repr(asked).encode("utf-8", "surrogatepass"), "sha256")
        return numbers[::-1] if mark[0] & 1 else numbers

    def collection(self, number: int) -> Collection:
        """The collection of a number. Raises Refused."""
        if number >= len(self.collections):
            raise Refused(404, f"there is no index {number} here: expected 0{' or 1' * self.blind}.")
        return self.collections[number]

    async def search(self, number: int, asked: Asked, where: Where, top: int) -> Results:
        """At least ``top`` results where there are so many. Raises Refused, VisavisError."""
        key = (number, asked, where.path, where.kind, where.after, where.before, tuple(sorted(where.metadata.items())))
        at, fetched, results = self._results.get(key, (0.0, 0, Results(())))
        if fetched >= top and time.monotonic() - at < REMEMBERED_S:
            return results
        picture = self._picture(asked)
        if self._waiting >= self.limits.waiting:
            raise Refused(429, "too many searches are waiting: try again in a moment.", retry_after=1)
        fetched = -(-top // BLOCK) * BLOCK
        self._waiting += 1
        self.figures.waiting.inc()
        try:
            results = await self._on(self._model, lambda: self._search(number, asked, picture, fetched, where))
        finally:
            self._waiting -= 1
            self.figures.waiting.dec()
        self._results[key] = (time.monotonic(), fetched, results)
        while len(self._results) > REMEMBERED:
            self._results.popitem(last=False)
        self.recent.add(asked, number, results)
        return results

    def _search(self, number: int, asked: Asked, picture: Picture | None, top: int, where: Where) -> Results:
        with self.figures.searching.time():
            return self.collections[number].search(asked, picture, top, where)

    async def upload(self, content: bytes) -> str:
        """Remember the picture of a query; its name is the SHA-256 of its content. Raises BrokenPicture, Refused."""
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._uploads:
            decode = lambda: small_copy(content, "of the query", UPLOAD_SIDE, max_pixels=self.limits.pixels)  # noqa: E731
            self._uploads[digest] = await self._decoded(decode)
        self._uploads.move_to_end(digest)
        while len(self._uploads) > self.limits.uploads:
            self._uploads.popitem(last=False)
        return digest

    def _picture(self, asked: Asked) -> Picture | None:
        if asked.picture and asked.picture not in self._uploads:
            raise Refused(404, "the picture of this query is no longer known here: send it again.")
        return self._uploads[asked.picture] if asked.picture else None

    async def picture(self, number: int, key: str, how: str) -> bytes:
        """A JPEG of an item. Raises Refused."""
        collection = self.collection(number)
        try:
            item = collection.item(key)
        except KeyError:
            raise Refused(404, f"there is no item {key[:80]!r} in this index.") from None
        mark = (number, key, item.content, how)
        content = self._small.get(mark)
        self.figures.pictures.labels(str(content is not None).lower()).inc()
        if content is None:
            try:
                content = await self._decoded(lambda: shown(collection.place(item), item, how))
            except VisavisError as error:
                raise Refused(404, str(error)) from None
            self._small.put(mark, content)
        return content

    def vote(self, number: int, asked: Asked, key: str, fits: bool | None) -> None:
        """Keep whether an item fits a query. Raises Refused, StorageError."""
        if self.file is None:
            raise Refused(409, "votes are not kept here: start the service with --judgements FILE.")
        if not asked:
            raise Refused(422, "an empty query fits nothing and everything: ask for something first.")
        collection = self.collection(number)
        try:
            item = collection.item(key)
        except KeyError:
            raise Refused(404, f"there is no item {key[:80]!r} in this index.") from None
        judgement = Judgement(_now(), collection.name, asked, key, item.content, fits)
        self.file.add(judgement)
        self.figures.votes.labels("fits").inc()
        if fits is None:
            self._votes.pop((asked, key), None)
        else:
            self._votes[asked, key] = judgement

    def prefer(self, asked: Asked, side: str) -> tuple[str, str]:
        """Keep which side was better, and say which index was left and which was right. Raises Refused, StorageError."""
        if not self.blind:
            raise Refused(409, "there is one index here, and nothing to prefer it to: start the service with two.")
        left, right = (self.collections[number].name for number in self.order(asked))
        if self.file is not None:
            self.file.add(Preference(_now(), asked, left, right, {"left": left, "right": right}.get(side)))
            self.figures.votes.labels("prefers").inc()
        return left, right

    def doubtful(self, count: int) -> list[Pair]:
        """Pairs to ask about."""
        return self.recent.doubtful(count, lambda asked, key: (asked, key) in self._votes)

    def hit(self, asked: Asked, result: Result) -> Hit:
        """A result as it is shown."""
        item, judgement = result.item, self._votes.get((asked, result.item.key))
        return Hit(
            key=item.key,
            name=item.path.rpartition("/")[2],
            path=item.path,
            kind=item.kind,
            changed=changed(item),
            start=item.start,
            end=item.end,
            score=result.score if asked and math.isfinite(result.score) else None,
            match=None if result.match is None or not math.isfinite(result.match) else min(max(result.match, 0.0), 1.0),
            vote=None if judgement is None else judgement.fits,
            duplicates=list(result.duplicates),
            metadata=dict(item.metadata),
            version=item.content[:12],
        )

    async def _decoded(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.wait_for(self._on(self._pictures, work), self.limits.decode_s)
        except TimeoutError:
            raise DataError(f"the picture takes longer than {self.limits.decode_s:.0f} s to decode.") from None

    async def _on(self, pool: ThreadPoolExecutor, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """End the threads."""
        for pool in (self._model, self._pictures):
            pool.shutdown(wait=False, cancel_futures=True)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
