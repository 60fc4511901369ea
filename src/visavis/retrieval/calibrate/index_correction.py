"""Correction of the text search of an index for hubs: a bias of each item.

An index has at most one correction, for one query model. Two files hold it: the biases, which a
search reads, and the bank, from which an update of the index computes them again. See
`visavis.losses.corrections` and `visavis.retrieval.build.make_correction`.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from visavis.core import storage
from visavis.core.errors import RunError
from visavis.retrieval.items import ItemFilter
from visavis.retrieval.stores.base import Neighbor, Queries, StoreDigest, VectorStore

FIRST_DEPTH, DEPTH_FACTOR = 4, 4
"""Results per requested result that are corrected first, and the growth of this number."""


@dataclass(frozen=True)
class CorrectionSettings:
    """What the correction of an index consists of.

    Attributes:
        correction: Spec, such as "CSLS(k=10)".
        bank: Description of the bank.
        fingerprint: Fingerprint of the model that encoded the bank.
        is_on: Whether searches are corrected, because the check shows a gain.
        check: Result of the check in one sentence.
    """

    correction: str
    bank: str
    fingerprint: str
    is_on: bool
    check: str

    def __str__(self) -> str:
        """Name the correction, its bank and its kind."""
        return f"{self.correction} over {self.bank} (fixed-bank)"


@dataclass(frozen=True, eq=False)
class IndexCorrection:
    """Bias of each item of an index for text queries.

    Attributes:
        settings: Settings.
        keys: Keys of the items, ascending.
        bias: Bias of each item in the order of keys, float64, shape ``[N]``.
        is_hub: Items whose queries are corrected, bool, shape ``[N]``. None: all queries are.
    """

    settings: CorrectionSettings
    keys: Sequence[str]
    bias: np.ndarray
    is_hub: np.ndarray | None = None

    def nearest(
        self, store: VectorStore, queries: Queries, count: int, item_filter: ItemFilter
    ) -> list[Neighbor]:
        """Find the items with the highest corrected scores for one encoded text, exactly."""
        depth = FIRST_DEPTH * count
        lowest = self.bias.min()
        while True:
            [found] = store.search(queries, depth, item_filter)
            if not found:
                return []
            scores = np.array([score for _, score in found])
            rows = self._rows([key for key, _ in found])
            # The query is corrected only if its best item, or one of equal score, is a hub.
            if (
                self.is_hub is not None
                and not self.is_hub[rows[(scores == scores[0]) & (rows >= 0)]].any()
            ):
                return found[:count]
            # A shared store may have got an item since the index was opened.
            bias = np.where(rows < 0, self.bias.mean(), self.bias[rows])
            corrected = scores - bias
            order = np.argsort(-corrected, kind="stable")[:count]
            # An item that was not found scores at most as high as the last one, less its bias.
            is_exact = len(order) == count and corrected[order[-1]] > scores[-1] - lowest
            if is_exact or len(found) < depth:
                return [Neighbor(found[i].key, float(corrected[i])) for i in order.tolist()]
            depth *= DEPTH_FACTOR

    def _rows(self, keys: Sequence[str]) -> np.ndarray:
        """Positions of keys among the items, -1 for unknown ones."""
        found = [bisect_left(self.keys, key) for key in keys]
        return np.array(
            [
                row if row < len(self.keys) and self.keys[row] == key else -1
                for row, key in zip(found, keys, strict=True)
            ],
            np.int64,
        )


def open_correction(
    path: Path, fingerprint: str, digest: StoreDigest | None, store: VectorStore
) -> IndexCorrection | None:
    """Read the correction of an index. None: it is off, or not of the current items and model,
    which is logged.
    """
    arrays, settings = read_correction_file(path)
    keys = store.table().keys()
    problem, fix = "", "Run visavis index again to compute it."
    if settings.fingerprint != fingerprint:
        problem = "belongs to another query model"
        fix = "Make one for this model with visavis indexes correct."
    elif (
        digest is None
        or len(keys) != len(arrays["bias"])
        or not np.array_equal(arrays["digest"], digest_array(digest))
    ):
        problem = "does not cover all items, because an update was interrupted or is running"
    if problem and settings.is_on:
        logging.getLogger(__name__).warning(
            "%s: the correction %s. Results are not corrected. %s",
            path.parent,
            problem,
            fix,
        )
    if problem or not settings.is_on or not len(keys):
        return None
    return IndexCorrection(settings, keys, arrays["bias"], arrays.get("is_hub"))


def write_correction_file(
    path: Path, settings: CorrectionSettings, arrays: dict[str, np.ndarray]
) -> None:
    """Write arrays and settings to one file, so that they always belong together."""
    content = np.frombuffer(json.dumps(asdict(settings)).encode(), np.uint8)
    storage.write_arrays(path, {**arrays, "settings": content})


def read_correction_file(path: Path) -> tuple[dict[str, np.ndarray], CorrectionSettings]:
    """Read a file of `write_correction_file`."""
    arrays = storage.read_arrays(path, error=RunError)
    content = arrays.pop("settings").tobytes()
    return arrays, storage.parse_json(content, CorrectionSettings, str(path), error=RunError)


def digest_array(digest: StoreDigest) -> np.ndarray:
    """Convert the digest of a store to an array."""
    return np.array([digest.num_items, *bytes.fromhex(digest.digest)], np.int64)
