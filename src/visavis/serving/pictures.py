"""What a person is shown of an item: a small JPEG made of pixels alone, so that no place, camera or comment leaves with it."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from visavis.data.clips import frame_at
from visavis.data.dataset import Bytes
from visavis.data.pictures import small_copy
from visavis.retrieval.item import Item

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

SIDES = {"thumbnail": 480, "picture": 1600}
"""Pixels of the longer side."""
_QUALITY = {"thumbnail": 80, "picture": 88}


def shown(place: Bytes, item: Item, how: str) -> bytes:
    """A JPEG of an item, of a clip or moment the frame that it begins with. how: a key of ``SIDES``. Raises DataError, MissingExtra."""
    side = SIDES[how]
    if item.kind == "image":
        picture = small_copy(place.read(), item.path, side)
    else:
        picture = frame_at(place.source, item.path, item.start or 0.0)
        picture.thumbnail((side, side))
        picture.info.clear()
    return jpeg(picture, _QUALITY[how])


def jpeg(picture: Picture, quality: int) -> bytes:
    """A picture as a JPEG without metadata."""
    file = io.BytesIO()
    picture.convert("RGB").save(file, "JPEG", quality=quality, optimize=True, progressive=True)
    return file.getvalue()


class Kept:
    """Content by key, the least recently used given up beyond so many bytes; for several threads."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._contents: OrderedDict[tuple[object, ...], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[object, ...]) -> bytes | None:
        """The content of a key, which is now the most recently used; None where it is not kept."""
        with self._lock:
            if key in self._contents:
                self._contents.move_to_end(key)
            return self._contents.get(key)

    def put(self, key: tuple[object, ...], content: bytes) -> None:
        """Keep a content, unless it alone is too large."""
        if len(content) > self.max_bytes:
            return
        with self._lock:
            self.num_bytes += len(content) - len(self._contents.pop(key, b""))
            self._contents[key] = content
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= len(self._contents.popitem(last=False)[1])
