"""What other forms of an index's vectors would cost and find, measured on its own items: bytes, milliseconds a query, recall of the true top 10.

A form is a first pass: whole vectors in float32 or 8 bits (exact, as the search does by itself), one bit a number, or the first numbers
alone of vectors that were trained for it. What a first pass finds is scored again by the whole float32 vectors: so many candidates as
are enough to find what is wanted, if any number is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from visavis.memory import Memory, spans
from visavis.retrieval.ann import NOISE, TOP, WANTED, fewest, perturbed, sample
from visavis.retrieval.bits import Bits
from visavis.retrieval.exact import Exact
from visavis.retrieval.index import Index
from visavis.retrieval.reduced import NARROWEST, InInt8, multiplies_int8

TIMED, WARM = 50, 3
"""Queries whose median time is taken, after some that are not counted."""
MOST = 1024
"""Candidates of a first pass that are scored again at most."""
FASTER = 0.9
"""The share of a time below which another is told to be faster."""

Nearest = Callable[[np.ndarray, int], np.ndarray]
"""``(query [D], number) -> rows``, the nearest first."""


@dataclass(frozen=True)
class Form:
    """What a search by one form of vectors costs, and finds.

    first_bytes: that a first pass reads of each vector; bytes: that are kept of it in all. rescored: candidates of a query that are scored
    again by whole vectors in float32; 0: none, the first pass is the search. recall_at_10: of the true top 10 by whole vectors, in percent.
    own_at_10: of the queries that are captions, those whose own item is among the first 10, in percent. ms: of one query, the median.
    """

    name: str
    width: int
    first_bytes: float
    bytes: float
    rescored: int
    recall_at_10: float
    own_at_10: float | None
    ms: float


@dataclass(frozen=True)
class Curve:
    """Forms of vectors side by side. asked: what the queries were. advice: which form to take, in words."""

    items: int
    queries: int
    asked: str
    forms: tuple[Form, ...]
    advice: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(index: Index, memory: Memory = None) -> Curve:
    """The curve of an index.

    Queries: the captions of a sample of its items, where all have one (those of a data set), else stored vectors of a sample with noise.
    """
    keys = sample(list(index.items))
    rows, captions = index.store.rows(), [index.items[key].metadata.get("caption", "") for key in keys]
    if captions and all(map(str.strip, captions)):
        place = {key: row for row, key in enumerate(index.items)}
        queries, own = index.model.encode_texts(captions).float().numpy(), [place[key] for key in keys]
        asked = "captions of its own items"
    else:
        queries, own = perturbed(index.store.vectors(keys)), None
        asked = f"its own vectors with noise of length {NOISE:g}"
    widths = () if index.model.width else index.model.matcher.widths[:-1]
    return curve_of(rows, queries, widths, own=own, asked=asked, memory=memory)


def curve_of(
    rows: np.ndarray,
    queries: np.ndarray,
    widths: Sequence[int] = (),
    *,
    own: Sequence[int] | None = None,
    asked: str = "queries",
    memory: Memory = None,
) -> Curve:
    """The curve of vectors ``[N, D]`` for queries ``[Q, D]``. own: the row that each query is of."""
    asking = _Asking(rows, queries, own, memory)
    whole = rows.shape[1]
    forms = [asking.exactly("float32", Exact(rows, memory=memory), whole, 4 * whole)]
    if multiplies_int8():
        forms.append(asking.exactly("8 bits", _in_8_bits(rows, memory), whole, whole, kept=5 * whole))
    if len(rows):
        bits = Bits(rows)
        forms.append(asking.again("1 bit", bits.nearest, whole, bits.bytes))
    for width in widths:
        short = _unit(rows[:, :width])
        reduced = multiplies_int8() and width >= NARROWEST
        search = _in_8_bits(short, memory) if reduced else Exact(short, memory=memory)
        name, size = (f"first {width}, 8 bits", width) if reduced else (f"first {width}, float32", 4 * width)
        forms += [asking.again(name, _nearest(search, width), width, size), asking.alone(f"first {width} alone", search, width, size)]
    return Curve(len(rows), len(queries), asked, tuple(forms), advice(forms))


def advice(forms: Sequence[Form]) -> str:
    """Which form to take: of those that an index can have, the fewest bytes that lose next to nothing; else what it does by itself."""
    exact = [form for form in forms if form.rescored == 0 and form.width == forms[0].width]
    best, plain = min(exact, key=lambda form: form.ms), forms[0]
    itself = f"{best.name}, {best.ms:.2g} ms a query, always the true top {TOP}"
    short = [form for form in forms if form.width < plain.width and form.rescored == 0]
    for form in sorted(short, key=lambda form: form.bytes):
        measured, whole, what = (
            (form.recall_at_10, 100.0, f"of the true top {TOP}")
            if form.own_at_10 is None or plain.own_at_10 is None
            else (form.own_at_10, plain.own_at_10, f"of the captions' own items among the first {TOP}")
        )
        if measured >= WANTED * whole:
            return (
                f"An index with --width {form.width}: {measured:.1f} % {what}, where whole vectors find {whole:.1f} %, by {form.bytes:,.0f} "
                f"bytes a vector instead of {plain.bytes:,.0f}, {form.ms:.2g} ms a query."
            )
    again = [form for form in forms if form.rescored and form.recall_at_10 >= 100 * WANTED and form.ms < FASTER * best.ms]
    if not again:
        return f"Leave it as it is: {itself}; no form finds {100 * WANTED:.0f} % of them faster."
    fast = min(again, key=lambda form: form.ms)
    return (
        f"Leave it as it is: {itself}. Certainty costs {best.ms - fast.ms:.2g} ms of that: {fast.name}, with {fast.rescored} candidates scored "
        f"again, finds {fast.recall_at_10:.1f} % of them in {fast.ms:.2g} ms."
    )


class _Asking:
    """Queries with their true answers, by which every form is measured."""

    def __init__(self, rows: np.ndarray, queries: np.ndarray, own: Sequence[int] | None, memory: Memory):
        self.rows, self.queries, self.top = rows, np.ascontiguousarray(queries, np.float32), min(TOP, len(rows))
        self.own = own
        true = Exact(rows, memory=memory).search(self.queries, TOP)[0] if len(rows) else np.empty((len(queries), 0))
        self.least = true[:, -1] if self.top else np.zeros(len(queries))

    def exactly(self, name: str, search: Exact, width: int, size: int, kept: int = 0) -> Form:
        return self._form(name, _nearest(search, width), width, size, kept or size, 0)

    def alone(self, name: str, search: Exact, width: int, size: int) -> Form:
        return self._form(name, _nearest(search, width), width, size, size if size == 4 * width else size + 4 * width, 0)

    def again(self, name: str, nearest: Nearest, width: int, size: float) -> Form:
        """With as many candidates scored again as are enough, at most ``MOST``."""
        most = min(MOST, len(self.rows))
        found = [nearest(query, most) for query in self.queries]
        good = [self._scores(number, rows) >= self.least[number] for number, rows in enumerate(found)]
        rescored, _ = fewest(lambda number: self._share([hits[:number] for hits in good]), most, WANTED)
        rescored = max(rescored, self.top)

        def search(query: np.ndarray, top: int) -> np.ndarray:
            rows = np.sort(nearest(query, rescored))
            scores = _scores(self.rows, query, rows)
            best: np.ndarray = rows[np.lexsort((rows, -scores))[:top]]
            return best

        return self._form(name, search, width, size, size + 4 * self.rows.shape[1], rescored)

    def _form(self, name: str, nearest: Nearest, width: int, size: float, kept: float, rescored: int) -> Form:
        found = [nearest(query, self.top) for query in self.queries]
        good = [self._scores(number, rows) >= self.least[number] for number, rows in enumerate(found)]
        own = None if self.own is None else 100 * float(np.mean([row in rows for row, rows in zip(self.own, found, strict=True)]))
        return Form(name, width, size, kept, rescored, 100 * self._share(good), own, self._ms(nearest))

    def _share(self, good: Sequence[np.ndarray]) -> float:
        return float(np.mean([min(int(hits.sum()), self.top) / self.top for hits in good])) if self.top and len(good) else 1.0

    def _scores(self, number: int, rows: np.ndarray) -> np.ndarray:
        return _scores(self.rows, self.queries[number], rows)

    def _ms(self, nearest: Nearest) -> float:
        seconds = []
        for query in [*self.queries[:WARM], *self.queries[:TIMED]]:
            started = time.perf_counter()
            nearest(query, self.top)
            seconds.append(time.perf_counter() - started)
        return 1000 * float(np.median(seconds[min(WARM, len(self.queries)) :])) if seconds else 0.0


def _nearest(search: Exact, width: int) -> Nearest:
    """The nearest by the first numbers of a query, its length left as it is: it changes no order."""
    return lambda query, top: search.search(query[None, :width], max(top, 1))[1][0]


def _in_8_bits(rows: np.ndarray, memory: Memory) -> Exact:
    return Exact(rows, reduced=InInt8.of(rows), memory=memory)


def _scores(rows: np.ndarray, query: np.ndarray, some: np.ndarray) -> np.ndarray:
    """True scores, as ``exact`` has them."""
    scores: np.ndarray = np.einsum("nd,d->n", rows[some].astype(np.float64), query.astype(np.float64)).astype(np.float32)
    return scores


def _unit(rows: np.ndarray) -> np.ndarray:
    made = np.empty(rows.shape, np.float32)
    for some in spans(len(rows), 2**14):
        length = np.linalg.norm(rows[some], axis=1, keepdims=True)
        made[some] = rows[some] / np.where(length == 0, 1, length)
    return made
