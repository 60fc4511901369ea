"""Correction of the text search of an index for hubs: a bias of each item.

An index has at most one correction, for one query model. Two files hold it: the biases, which a
search reads, and the bank, from which an update of the index computes them again. See
`visavis.losses.corrections` and `visavis.retrieval.make_correction`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from visavis.core import storage
from visavis.core.errors import RunError
from visavis.retrieval.items import ItemFilter
from visavis.retrieval.stores.arrow_tables import find_keys
from visavis.retrieval.stores.base import Neighbor, Queries, StoreDigest, VectorStore

if TYPE_CHECKING:
    import pyarrow as pa

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
    keys: pa.Array
    bias: np.ndarray
    is_hub: np.ndarray | None = None

    def nearest(
        self, store: VectorStore, queries: Queries, count: int, item_filter: ItemFilter
    ) -> list[Neighbor]:
        """Find the items with the highest corrected scores, exactly.

        Args:
            store: Store of the index.
            queries: One encoded text.
            count: Maximum number of items.
            item_filter: Conditions on the items.

        Returns:
            Items with corrected scores, best first.
        """
        depth = FIRST_DEPTH * count
        lowest = self.bias.min()
        while True:
            [found] = store.search(queries, depth, item_filter)
            if not found:
                return []
            scores = np.array([score for _, score in found])
            rows = find_keys(self.keys, [key for key, _ in found])
            if self.is_hub is not None and not self.is_hub[rows[scores == scores[0]]].any():
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


def open_correction(
    path: Path, fingerprint: str, digest: StoreDigest | None, store: VectorStore
) -> IndexCorrection | None:
    """Read the correction of an index.

    Args:
        path: The file.
        fingerprint: Fingerprint of the query model of the index.
        digest: Content of the store as in the manifest. None: the index is unfinished.
        store: The store.

    Returns:
        The correction. None if it is off, or if it is not one of the current items and model, which
        is logged.

    Raises:
        RunError: If the file is damaged.
    """
    tensors, settings = read_correction_file(path)
    keys = store.table()["key"].combine_chunks()
    hubs = tensors.get("is_hub")
    problem, fix = "", "Run visavis index again to compute it."
    if settings.fingerprint != fingerprint:
        problem = "belongs to another query model"
        fix = "Make one for this model with visavis indexes correct."
    elif (
        digest is None
        or len(keys) != len(tensors["bias"])
        or not tensors["digest"].equal(digest_tensors(digest)["digest"])
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
    return IndexCorrection(
        settings, keys, tensors["bias"].numpy(), None if hubs is None else hubs.numpy()
    )


def write_correction_file(
    path: Path, settings: CorrectionSettings, tensors: dict[str, Tensor]
) -> None:
    """Write tensors and settings to one file, so that they always belong together.

    Args:
        path: The file.
        settings: Settings.
        tensors: Tensors by name.
    """
    content = torch.frombuffer(bytearray(json.dumps(asdict(settings)).encode()), dtype=torch.uint8)
    storage.write_tensors(path, {**tensors, "settings": content})


def read_correction_file(path: Path) -> tuple[dict[str, Tensor], CorrectionSettings]:
    """Read a file of `write_correction_file`.

    Args:
        path: The file.

    Returns:
        Tensors and settings.

    Raises:
        RunError: If the file is damaged.
    """
    tensors = storage.read_tensors(path, error=RunError)
    content = tensors.pop("settings").numpy().tobytes()
    return tensors, storage.parse_json(content, CorrectionSettings, str(path), error=RunError)


def digest_tensors(digest: StoreDigest) -> dict[str, Tensor]:
    """Convert the digest of a store to tensors.

    Args:
        digest: The digest.

    Returns:
        Tensors by name, for a file of `write_correction_file`.
    """
    return {"digest": torch.tensor([digest.num_items, *bytes.fromhex(digest.digest)])}
