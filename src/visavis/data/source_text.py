"""The text of lists that users bring, read so that one broken entry does not cost the others."""

from __future__ import annotations

import json
import reprlib
from typing import Any


class RepeatedKey(dict[str, Any]):
    """A JSON object that names a key twice, so that it does not say which value is meant; the last is in it."""


def decode(content: bytes) -> str:
    """Text of a UTF-8 file, byte order mark removed; bytes that are not UTF-8 become lone surrogates, which ``is_unicode`` finds."""
    return content.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape")


def parse_json(text: str) -> Any:
    """JSON in which texts may hold lone surrogates and objects may be a RepeatedKey. Raises ValueError saying what is wrong with it."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """On one line, lone surrogates shown as the bytes they stand for."""
    try:
        content = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # a surrogate that stands for no byte, as JSON can spell it
        content = text.encode(errors="surrogatepass")
    return " ".join(content.decode(errors="backslashreplace").splitlines())


def shown(value: Any) -> str:
    """The beginning of a value of any size and depth."""
    return f"{reprlib.repr(value):.60}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else RepeatedKey(found)
