"""Catalog of the kinds of vector stores, and opening the store of a location."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.core.encoded import MaxSimDirection
from visavis.core.errors import DataError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.own_code import loaded_parts
from visavis.retrieval.stores.base import StoreDigest, VectorStore

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
        reads_digest: Whether it is called with ``digest``, too.
        compresses: Whether it is called with ``codec``, too, for an index with compressed vectors.
    """

    place: str | type
    pattern: str
    locations: tuple[str, ...]
    extra: str = ""
    default: str = ""
    several_vectors: bool = False
    reads_digest: bool = False
    compresses: bool = False

    @property
    def store_class(self) -> Any:
        """The class of the store."""
        if isinstance(self.place, type):
            return self.place
        module, _, name = self.place.partition(":")
        return getattr(import_module(module), name)


CATALOG: dict[str, StoreKind] = {
    "LanceDB": StoreKind(
        "visavis.retrieval.stores.lancedb_store:LanceStore",
        r"s3://[^/?#]+(/[^?#]+)?",
        ("a folder", "s3://BUCKET/PATH"),
        extra="search",
        default="items.lance in the folder of the index",
        several_vectors=True,
        reads_digest=True,
        compresses=True,
    ),
    "Milvus": StoreKind(
        "visavis.retrieval.stores.milvus_store:MilvusStore",
        r"https?://[^/?#]+(/\w*)?|(?!.*://).*\.db",
        ("FILE.db", "http(s)://HOST:PORT[/COLLECTION]"),
        extra="milvus",
        default="collection items",
    ),
}
"""Kinds of stores by name. A path that no pattern matches is a folder of LanceDB."""


def store_kinds() -> dict[str, StoreKind]:
    """Return all kinds of stores: of visavis, of installed packages and of own code.

    Returns:
        Kinds by name. An own kind has the name of its class.
    """
    own = loaded_parts(StoreKind, "stores")
    return CATALOG | {kind.store_class.__name__: kind for kind in own}


def find_store_kind(uri: str, late_interaction: MaxSimDirection | None = None) -> StoreKind:
    """Choose the kind of store of a location.

    Args:
        uri: Location of the store, see ``open_store``.
        late_interaction: Means of MaxSim for items with several vectors. None: one vector per item.

    Returns:
        The kind.

    Raises:
        DataError: If no kind of store has such a location, or it cannot store several vectors per
            item.
    """
    kinds = store_kinds()
    name = next(
        (name for name, kind in kinds.items() if re.fullmatch(kind.pattern, uri, re.DOTALL)),
        "LanceDB",
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
            f"{uri}: {expected} for a model with several vectors per item, got {name}. Use LanceDB."
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
    verify_files: bool = False,
    digest: StoreDigest | None = None,
    codec: SetCodec | None = None,
) -> VectorStore:
    """Open the store of a URI, or create it if ``embedding_dim`` is given.

    Args:
        uri: A location of ``CATALOG``, such as a folder or ``s3://BUCKET/PATH`` (LanceDB),
            ``FILE.db`` or ``http(s)://HOST:PORT[/COLLECTION]`` (Milvus).
        embedding_dim: Dimension of the vectors of a new store. None: the store must exist.
        memory: Memory limit of a search.
        index_id: Id of the index in hex. A store that is opened for an index and must exist keeps
            its version.
        late_interaction: Which means of MaxSim a score contains, for items with several vectors in
            LanceDB. None: one vector per item.
        verify_files: Whether to verify the snapshot of LanceDB by checksums, instead of by the
            sizes and times of its files.
        digest: Summary of the items, if it is known. LanceDB then opens a local snapshot of these
            items, and the table only for a change.
        codec: Codec that compresses the vectors of items with several.

    Returns:
        The store.

    Raises:
        DataError: If the URI is invalid, the store does not exist and ``embedding_dim`` is None, or
            the kind of store cannot have several vectors per item.
        ShapeError: If the store has vectors of another dimension.
        StorageError: If the store cannot be read or written.
        MissingExtra: If the library of the store is not installed.
    """
    kind = find_store_kind(str(uri), late_interaction)
    if codec is not None and not kind.compresses:
        raise DataError(
            f"{uri}: expected a folder or s3://BUCKET/PATH for compressed vectors, got another kind "
            "of store. Use LanceDB."
        )
    store: VectorStore = kind.store_class(
        str(uri),
        embedding_dim,
        memory,
        index_id=index_id,
        late_interaction=late_interaction,
        verify_files=verify_files,
        **({"digest": digest} if kind.reads_digest else {}),
        **({"codec": codec} if codec is not None else {}),
    )
    return store
