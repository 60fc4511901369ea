"""Which items may be found, in the ways that stores can say it: a mask of the rows of an Arrow table, and a condition in SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from visavis.retrieval.item import Where, tag

if TYPE_CHECKING:
    import pyarrow as pa


def allowed_rows(table: pa.Table, where: Where) -> np.ndarray:
    """The rows of a table of items that ``where.allows``, as truth values ``[N]``."""
    import pyarrow.compute as pc

    allowed = np.ones(len(table), bool)
    if where.path:
        allowed &= pc.match_like(table["path"], like(where.path)).to_numpy()
    if where.kind is not None:
        allowed &= pc.equal(table["kind"], where.kind).to_numpy()
    if where.after is not None:
        allowed &= table["modified_ns"].to_numpy() >= where.after
    if where.before is not None:
        allowed &= table["modified_ns"].to_numpy() < where.before
    if where.metadata:
        tags = table["metadata"].combine_chunks()
        rows = pc.list_parent_indices(tags).to_numpy()
        texts = pc.list_flatten(tags)
        for name, value in where.metadata.items():
            has = np.zeros(len(table), bool)
            has[rows[pc.equal(texts, tag(name, value)).to_numpy(zero_copy_only=False)]] = True
            allowed &= has
    return allowed


def like(pattern: str) -> str:
    r"""A pattern of ``Where`` as one of SQL's LIKE, in which a backslash takes the meaning from a sign.

    >>> print(like("a_b/*.jp?g"))
    a\_b/%.jp_g
    """
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return escaped.replace("*", "%").replace("?", "_")


def quoted(text: str) -> str:
    """A text in SQL.

    >>> quoted("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


def sql(where: Where) -> str:
    """What ``where`` allows as a condition for Lance; empty where it restricts nothing.

    >>> sql(Where(kind="video", metadata={"camera": "X"}))
    "kind = 'video' AND array_has(metadata, 'camera=X')"
    """
    conditions = []
    if where.path:
        conditions.append(f"path LIKE {quoted(like(where.path))} ESCAPE '\\'")
    if where.kind is not None:
        conditions.append(f"kind = {quoted(where.kind)}")
    if where.after is not None:
        conditions.append(f"modified_ns >= {in_64_bits(where.after)}")
    if where.before is not None:
        conditions.append(f"modified_ns < {in_64_bits(where.before)}")
    conditions += [f"array_has(metadata, {quoted(tag(name, value))})" for name, value in where.metadata.items()]
    return " AND ".join(conditions)


def in_64_bits(number: int) -> int:
    """The nearest whole number that a store can compare with."""
    return max(-(2**63) + 1, min(number, 2**63 - 1))
