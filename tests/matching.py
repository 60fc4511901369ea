"""Patterns for the essential parts of an error message."""

from __future__ import annotations

import re


def mentions(*parts: object) -> str:
    """A pattern for ``pytest.raises(match=)``: the message contains all parts, in any order.

    >>> bool(re.search(mentions("k", 3), "k: expected an integer >= 5, got 3."))
    True
    """
    return "(?s)^" + "".join(
        rf"(?=.*(?<!\w){re.escape(str(part))}(?!\w))"
        if str(part).isalnum()
        else f"(?=.*{re.escape(str(part))})"
        for part in parts
    )
