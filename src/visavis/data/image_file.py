"""An image or a clip where it is stored: a file, or a range of bytes in an archive, which is read in
place.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.core import storage
from visavis.core.errors import DataError
from visavis.data.file_names import is_video

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

MAX_IMAGE_BYTES = 2**29
"""Maximum size of an image file: 64 megapixels of eight bytes each."""


@dataclass(frozen=True)
class ByteRange:
    """Location of an image's bytes: a whole file, or a part of an archive.

    Attributes:
        path: The file or archive.
        offset: First byte.
        size: Number of bytes. None: the whole file.
        root: Resolved folder that must contain the file, unless ``VISAVIS_IMAGE_ROOTS`` does.
            Checked on every access. None: any place.
    """

    path: Path
    offset: int = 0
    size: int | None = None
    root: Path | None = None

    @property
    def num_bytes(self) -> int:
        """Number of bytes."""
        return self.path.stat().st_size if self.size is None else self.size

    @property
    def content_hash(self) -> str:
        """Hash of the bytes."""
        return self.sha256()[:32]

    def sha256(self) -> str:
        """Compute the SHA-256 of the bytes."""
        with self.open() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def read(self) -> bytes:
        """Read the bytes, at most ``MAX_IMAGE_BYTES``."""
        with self.open(limit=MAX_IMAGE_BYTES) as file:
            return file.read()

    @contextmanager
    def open(self, limit: int | None = None) -> Iterator[io.BufferedReader | io.BytesIO]:
        """Open the bytes as a file. More than ``limit`` bytes are an error."""
        with storage.open_file(
            self.path, self.root, limit=limit if self.size is None else None
        ) as file:
            if self.size is None:
                yield file
            elif limit is not None and self.size > limit:
                raise DataError(
                    f"{self.path}: expected a part of at most {limit:,} bytes, got {self.size:,}. "
                    "Store a smaller file."
                )
            else:
                yield io.BufferedReader(_FilePart(file, self.offset, self.size))


class _FilePart(io.RawIOBase):
    """A part of an open file, which is read in place.

    Args:
        file: The file.
        offset: First byte.
        size: Number of bytes.
    """

    def __init__(self, file: io.BufferedReader, offset: int, size: int):
        self.file = file
        self.offset = offset
        self.size = size
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.position = max(
            0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        )
        return self.position

    def readinto(self, buffer: Any) -> int:
        # The file is shared with other parts, so its own position is unknown.
        self.file.seek(self.offset + self.position)
        count = self.file.readinto(memoryview(buffer)[: max(0, self.size - self.position)])
        self.position += count
        return count


@dataclass(frozen=True)
class Image:
    """An image or a video.

    Attributes:
        name: Name, unique in the data set.
        split: Name of its split.
        location: Location of its bytes. None if only its captions or features are available.
    """

    name: str
    split: str
    location: ByteRange | None = None

    @property
    def is_video(self) -> bool:
        """Whether it is a video, by the suffix of its file name."""
        return is_video(self.name) or (
            self.location is not None
            and self.location.size is None
            and is_video(self.location.path.name)
        )

    def read(self) -> bytes:
        """Read the file of an image. A video is an error."""
        if self.is_video:
            raise DataError(
                f"{self.name}: expected an image, got a video. Read its frames with "
                'visual.granularity = "frames".'
            )
        return self._pixels.read()

    def open(self, min_side: int = 0) -> PILImage:
        """Decode the image, upright and in RGB, reduced as by ``decode_image``."""
        from visavis.data.images import decode_image

        return decode_image(self.read(), self.name, min_side=min_side)

    def iter_frames(self, frames_per_second: float) -> Iterator[PILImage]:
        """Decode frames of a video, one at a time. An image is a video of one frame."""
        if not self.is_video:
            yield self.open()
            return
        from visavis.data.video import iter_frames

        with self._pixels.open() as file:
            yield from iter_frames(file, self.name, frames_per_second)

    def frames(self, frames_per_second: float) -> list[PILImage]:
        """Decode all frames of a video, as ``iter_frames``."""
        return list(self.iter_frames(frames_per_second))

    def num_frames(self, frames_per_second: float) -> int:
        """Count the frames that ``frames`` returns, without decoding them."""
        if not self.is_video:
            return 1
        from visavis.data.video import count_frames

        with self._pixels.open() as file:
            return count_frames(file, self.name, frames_per_second)

    def duration(self) -> float:
        """Read the seconds of a video without decoding it. 0 for an image."""
        if not self.is_video:
            return 0.0
        from visavis.data.video import video_duration

        with self._pixels.open() as file:
            return video_duration(file, self.name)

    def preview(self, min_side: int = 0) -> PILImage:
        """Decode the image, or the first frame of a video, reduced as by ``open``."""
        if not self.is_video:
            return self.open(min_side)
        from visavis.data.video import first_frame

        with self._pixels.open() as file:
            return first_frame(file, self.name)

    @property
    def _pixels(self) -> ByteRange:
        if self.location is None:
            raise DataError(
                f"image {self.name} has no pixels: this data set has only captions or features. "
                "Put the image files next to their list."
            )
        return self.location
