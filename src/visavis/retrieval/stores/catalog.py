"""Catalog of the kinds of vector stores, and opening the store of a location."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.core.errors import DataError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.own_code import loaded_parts
from visavis.core.ragged import MaxSimDirection
from visavis.retrieval.stores.base import VectorStore

if TYPE_CHECKING:
    from visavis.retrieval.stores.set_codec import SetCodec


@dataclass(frozen=True)
class StoreKind:
    """A kind of vector store.

    Attributes:
        place: The class, or its place ``package.module:Class``, which is imported when a store of
            this kind is opened. It is called as ``open_store`` is.
        pattern: Regular expression of its locations.
        locations: Its locations in words, for help and errors.
        extra: Extra of visavis that installs its library. "": it needs none.
        default: Location or name that is used without a choice of the user.
        several_vectors: Whether it stores several vectors per item, for late-interaction models.
        compresses: Whether it is called with ``codec``, too, for an index with compressed vectors.
        repairs: Whether it is called with ``repairs``, too, to remove damaged items.
    """

    place: str | type
    pattern: str
    locations: tuple[str, ...]
    extra: str = ""
    default: str = ""
    several_vectors: bool = False
    compresses: bool = False
    repairs: bool = False

    @property
    def store_class(self) -> Any:
        """The class of the store."""
        if isinstance(self.place, type):
            return self.place
        module, _, name = self.place.partition(":")
        return getattr(import_module(module), name)


CATALOG: dict[str, StoreKind] = {
    "SQLite": StoreKind(
        "visavis.retrieval.stores.sqlite_store:SqliteStore",
        "(?!.*://).*",
        ("a folder",),
        default="the folder of the index",
        several_vectors=True,
        compresses=True,
        repairs=True,
    ),
    "Milvus": StoreKind(
        "visavis.retrieval.stores.milvus_store:MilvusStore",
        r"https?://[^/?#]+(/\w*)?|(?!.*://).*\.db",
        ("FILE.db", "http(s)://HOST:PORT[/COLLECTION]"),
        extra="milvus",
        default="collection items",
    ),
}
"""Kinds of stores by name. A path that no other pattern matches is a folder of SQLite."""


def store_kinds() -> dict[str, StoreKind]:
    """Return all kinds of stores: of visavis, of installed packages and of own code."""
    own = loaded_parts(StoreKind, "stores")
    # A kind of other code has the name of its class.
    return CATALOG | {kind.store_class.__name__: kind for kind in own}


def find_store_kind(uri: str, late_interaction: MaxSimDirection | None = None) -> StoreKind:
    """Choose the kind of store of a location."""
    kinds = store_kinds()
    # Any path can be a folder of SQLite, so that the other kinds come first.
    name = next(
        (
            name
            for name, kind in reversed(kinds.items())
            if re.fullmatch(kind.pattern, uri, re.DOTALL)
        ),
        "SQLite",
    )
    needs_several = late_interaction is not None
    lacks_several = needs_several and not kinds[name].several_vectors
    is_unknown = not uri or ("://" in uri and not re.fullmatch(kinds[name].pattern, uri, re.DOTALL))
    if lacks_several or is_unknown:
        *first, last = (
            location
            for kind in kinds.values()
            if kind.several_vectors or not lacks_several
            for location in kind.locations
        )
        expected = f"expected {', '.join(first)} or {last}"
        raise DataError(
            f"{uri}: {expected} for a model with several vectors per item, got {name}. Omit --store."
            if lacks_several
            else f"store: {expected}, got {uri!r}. Pass one of these."
        )
    return kinds[name]


def open_store(
    uri: str | Path,
    embedding_dim: int | None = None,
    memory: MemoryLimit = None,
    *,
    index_id: str = "",
    late_interaction: MaxSimDirection | None = None,
    codec: SetCodec | None = None,
    repairs: bool = False,
) -> VectorStore:
    """Open the store of a URI, or create it if ``embedding_dim`` is given. ``index_id`` is empty
    for a store of no index.
    """
    kind = find_store_kind(str(uri), late_interaction)
    if codec is not None and not kind.compresses:
        raise DataError(
            f"{uri}: expected a folder for compressed vectors, got another kind of store. "
            "Omit --store."
        )
    store: VectorStore = kind.store_class(
        str(uri),
        embedding_dim,
        memory,
        index_id=index_id,
        late_interaction=late_interaction,
        **({"codec": codec} if codec is not None else {}),
        **({"repairs": repairs} if kind.repairs else {}),
    )
    return store
