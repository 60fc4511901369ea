"""Images of the server: JPEGs of items, and uploaded query images, both cached in memory."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from starlette.exceptions import HTTPException

from visavis.core.errors import DataError, VisavisError
from visavis.core.memory_budget import chunk_slices
from visavis.data.image_file import ByteRange
from visavis.data.images import decode_image, decoded_pixels, make_thumbnail
from visavis.data.video import frame_at
from visavis.retrieval.index_folder import Index
from visavis.retrieval.items import IndexItem
from visavis.retrieval.server.limits import (
    FairTurns,
    LRUCache,
    ServerLimits,
    ServerMetrics,
    Turn,
)

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

T = TypeVar("T")
ImageSize = Literal["thumbnail", "image"]
MAX_SIDE: dict[ImageSize, int] = {"thumbnail": 480, "image": 1600}
"""Longer side of a JPEG in pixels."""
JPEG_QUALITY: dict[ImageSize, int] = {"thumbnail": 80, "image": 88}
MAX_UPLOAD_SIDE = 640
"""Longer side of an uploaded query image in pixels, after it is scaled down."""
DECODER_THREADS = 2
HEADERS_AT_ONCE = 64
"""Number of headers that one call on a thread reads."""


class ImageInput(NamedTuple):
    """An image of a request.

    Attributes:
        content: Content of the file.
        name: Name in errors, such as ``input[3]``.
        client: Address of the client. Clients take turns.
    """

    content: bytes
    name: str
    client: str = ""


def render_jpeg(location: ByteRange, item: IndexItem, size: ImageSize) -> bytes:
    """Render an item as JPEG without metadata. Clips and moments show their first frame."""
    side = MAX_SIDE[size]
    if item.kind == "image":
        image = make_thumbnail(location.read(), item.path, side)
    else:
        with location.open() as file:
            image = frame_at(file, item.path, item.start or 0.0)
        image.thumbnail((side, side))
        # Pillow would write profiles and comments of the frame into the JPEG.
        image.info.clear()
    file = io.BytesIO()
    image.convert("RGB").save(
        file, "JPEG", quality=JPEG_QUALITY[size], optimize=True, progressive=True
    )
    return file.getvalue()


class ImageCache:
    """Decodes images on separate threads, and caches JPEGs of items and uploaded query images.

    Args:
        limits: Sizes and timeouts.
        metrics: Metrics of the server.

    Attributes:
        turns: Turns of the images of requests, in pixels. An image is in memory during its turn.
    """

    def __init__(self, limits: ServerLimits, metrics: ServerMetrics):
        self.limits = limits
        self.metrics = metrics
        self.turns = FairTurns(limits.max_decoded_pixels, limits.max_waiting)
        self._pool = ThreadPoolExecutor(DECODER_THREADS, "images")
        # Images of the collection do not wait for those of requests.
        self._request_pool = ThreadPoolExecutor(DECODER_THREADS, "request images")
        self._jpegs = LRUCache[bytes](limits.max_cached_bytes, len)
        self._uploads = LRUCache["PILImage"](limits.max_uploads)

    async def jpeg(self, index: Index, number: int, item: IndexItem, size: ImageSize) -> bytes:
        """Render an item, or return the cached JPEG."""
        key = (number, item.key, item.content, size)
        content = self._jpegs.get(key)
        self.metrics.images.labels(str(content is not None).lower()).inc()
        if content is None:
            try:
                content = await self._run(
                    self._pool, lambda: render_jpeg(index.locate(item), item, size)
                )
            except VisavisError as error:
                raise HTTPException(404, str(error)) from None
            self._jpegs.put(key, content)
        return content

    async def upload(self, content: bytes, client: str = "") -> str:
        """Decode and cache a query image. Return the SHA-256 of its content, which names it."""
        digest = hashlib.sha256(content).hexdigest()
        if self._uploads.get(digest) is None:
            upload = ImageInput(content, "of the query", client)
            [pixels] = await self.pixels([upload], MAX_UPLOAD_SIDE)
            async with self.turns.turn(client, pixels) as turn:
                image = await self._run(
                    self._request_pool,
                    lambda: make_thumbnail(
                        content, upload.name, MAX_UPLOAD_SIDE, max_pixels=self.limits.max_pixels
                    ),
                    turn,
                )
            self._uploads.put(digest, image)
        return digest

    async def pixels(self, images: Sequence[ImageInput], min_side: int) -> list[int]:
        """Count the pixels that each image has in memory, from its header. A JPEG is reduced to the
        shorter side that the model needs.
        """
        counts = list[int]()
        for chunk in chunk_slices(len(images), HEADERS_AT_ONCE):
            part = images[chunk]
            counts += await self._run(
                self._request_pool, partial(self._count_pixels, part, min_side)
            )
            if sum(counts) > self.limits.max_request_pixels:
                limit = self.limits.max_request_pixels / 1e6
                raise DataError(
                    f"{images[len(counts) - 1].name}: expected at most {limit:,.0f} million pixels "
                    f"in all images of a request, got {sum(counts) / 1e6:,.0f} million up to this "
                    "one. Send fewer images at once, or reduce their size."
                )
        return counts

    def _count_pixels(self, images: Sequence[ImageInput], min_side: int) -> list[int]:
        limit = self.limits.max_pixels
        return [
            decoded_pixels(image.content, image.name, min_side=min_side, max_pixels=limit)
            for image in images
        ]

    async def decode(self, image: ImageInput, min_side: int, turn: Turn) -> PILImage:
        """Decode an image as ``Retriever.encode_images`` does, and do not cache it."""
        return await self._run(
            self._request_pool,
            lambda: decode_image(
                image.content,
                image.name,
                min_side=min_side,
                allow_animated=True,
                max_pixels=self.limits.max_pixels,
            ),
            turn,
        )

    def uploaded(self, digest: str) -> PILImage | None:
        """Look up an uploaded query image by its SHA-256. Empty: the query has no image."""
        image = self._uploads.get(digest)
        if digest and image is None:
            raise HTTPException(404, "The image of this query is no longer cached. Send it again.")
        return image

    async def _run(
        self, pool: ThreadPoolExecutor, work: Callable[[], T], turn: Turn | None = None
    ) -> T:
        """Work on a thread, up to the time limit. It continues after the limit, during its turn."""
        future = pool.submit(work)
        if turn is not None:
            turn.running = future
        try:
            result = await asyncio.wait_for(
                asyncio.wrap_future(future), self.limits.decode_timeout_s
            )
        except TimeoutError:
            raise DataError(
                f"Decoding the image takes longer than {self.limits.decode_timeout_s:.0f} s. Send "
                "a smaller image."
            ) from None
        if turn is not None:
            turn.running = None  # it would keep the image in memory
        return result

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._pool, self._request_pool):
            pool.shutdown(wait=False, cancel_futures=True)
