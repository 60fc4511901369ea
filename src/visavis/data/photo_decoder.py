"""Decoding of photos of phones and cameras (HEIF, JPEG XL, camera raw) in processes that may die.

Their decoders are native libraries that Pillow does not contain. A damaged file can crash them or
let them run without end. So they run in processes of their own, with limits of time and memory, and
a crash becomes the problem of one file.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import queue
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from PIL import Image

from visavis.core.errors import DataError, MissingExtra
from visavis.data.file_names import PHOTO_SUFFIXES, RAW_SUFFIXES
from visavis.data.parallel import cpu_cores

PhotoFormat = Literal["HEIF", "JPEG XL", "camera raw"]
PACKAGES: dict[PhotoFormat, tuple[str, str]] = {
    "HEIF": ("pillow-heif", "pillow_heif"),
    "JPEG XL": ("pillow-jxl-plugin", "pillow_jxl"),
    "camera raw": ("rawpy", "rawpy"),
}
"""Package that decodes a format, and its module."""
# An image of 64 million pixels took 2.1 s as HEIF and 2.4 s as JPEG XL.
MAX_SECONDS = 60.0
# Private memory of a process. These images took 0.8 GiB each.
MAX_BYTES = 4 * 2**30
_SIGKILL = 9
# How long a crashed process may take to end.
_END_SECONDS = 5.0
MAX_PROCESSES = 4
"""Number of processes that decode at once."""
_MAX_HEADER_BYTES = 2**16
# RGBA, or a float.
_MAX_PIXEL_BYTES = 4
_HEIF_BRANDS = (
    *(b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"),
    *(b"avci", b"avcs", b"jpeg", b"jpgs", b"j2ki", b"j2is", b"vvic", b"vvis", b"mif2"),
)
_GENERIC_BRANDS = (b"mif1", b"msf1")
_JXL_CONTAINER = b"\0\0\0\x0cJXL \r\n\x87\n"
# Canon CR2, Fujifilm, Olympus, Panasonic and Minolta.
_RAW_PATTERNS = ((8, b"CR\2"), (0, b"FUJIFILM"), (0, b"IIRO"), (0, b"IIRS"), (0, b"MMOR"))
_MORE_RAW_PATTERNS = ((0, b"IIU\0"), (0, b"\0MRM"), (0, b"FOVb"), (6, b"HEAPCCDR"))
_DNG_VERSION = 50706
# Formats that cameras do not use for raw images, whatever the suffix of a file.
_OTHER_MAGIC_BYTES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF")


class PhotoHeader(NamedTuple):
    """Header of a photo.

    Attributes:
        size: Width and height of the upright image in pixels.
        exif: EXIF with the capture time, or empty.
    """

    size: tuple[int, int]
    exif: bytes


@dataclass(frozen=True)
class DecodedPhoto:
    """A decoded photo.

    Attributes:
        image: Upright image of any mode, with ``icc_profile`` and ``exif`` in its ``info``.
        color: Code points of primaries and transfer function (ITU-T H.273) without a profile.
    """

    image: Image.Image
    color: tuple[int, int] | None


class DamagedPhotoError(Exception):
    """The content of a photo cannot be decoded. The message is the reason."""


class LargePhotoError(Exception):
    """A photo has too many pixels.

    Args:
        size: Width and height in pixels.
        limit: Largest number of pixels.
    """

    def __init__(self, size: tuple[int, int], limit: int):
        super().__init__(size, limit)
        self.size = size
        self.limit = limit


def photo_format(content: bytes, name: str) -> PhotoFormat | None:
    """Return the format of a photo by its first bytes. None: Pillow may decode it. The suffix counts
    only for raw formats that are variants of TIFF.
    """
    if content[4:8] == b"ftyp":
        length = min(int.from_bytes(content[:4]), 256)
        brands = [content[start : start + 4] for start in range(16, length - 3, 4)]
        major = content[8:12]
        if major == b"crx ":
            return "camera raw"
        if major in _HEIF_BRANDS or (
            major in _GENERIC_BRANDS and any(brand in _HEIF_BRANDS for brand in brands)
        ):
            return "HEIF"
        return None
    if content.startswith((b"\xff\x0a", _JXL_CONTAINER)):
        return "JPEG XL"
    patterns = (*_RAW_PATTERNS, *_MORE_RAW_PATTERNS)
    is_raw = any(content.startswith(magic, start) for start, magic in patterns)
    has_suffix = name.lower().endswith(RAW_SUFFIXES)
    if content.startswith((b"II*\0", b"MM\0*")):
        # The first directory of a TIFF has the version of DNG. Some files are named .tif.
        order = "<" if content.startswith(b"II") else ">"
        with suppress(struct.error):
            [start] = struct.unpack_from(f"{order}I", content, 4)
            [count] = struct.unpack_from(f"{order}H", content, start)
            tags = struct.unpack_from(f"{order}{'H10x' * count}", content, start + 2)
            is_raw |= _DNG_VERSION in tags
    if is_raw or (has_suffix and content and not content.startswith(_OTHER_MAGIC_BYTES)):
        return "camera raw"
    return None


def format_of_suffix(name: str) -> PhotoFormat | None:
    """Return the format of a photo by its suffix. None: Pillow may decode it."""
    suffix = name[name.rfind(".") :].lower()
    if suffix not in PHOTO_SUFFIXES:
        return None
    if suffix in RAW_SUFFIXES:
        return "camera raw"
    return "JPEG XL" if suffix == ".jxl" else "HEIF"


def is_installed(kind: PhotoFormat) -> bool:
    """Return whether the decoder of a format is installed, without importing it."""
    return importlib.util.find_spec(PACKAGES[kind][1]) is not None


def decode_photo(
    content: bytes, kind: PhotoFormat, name: str, max_pixels: int, min_side: int = 0
) -> DecodedPhoto:
    """Decode a photo in another process, reduced to a shorter side of ``min_side`` pixels or more. 0:
    in full.
    """
    reply, parts = _ask(content, kind, name, max_pixels, min_side)
    image = Image.frombytes(reply["mode"], tuple(reply["size"]), parts[0])
    image.info.update(
        {key: value for key, value in zip(("icc_profile", "exif"), parts[1:], strict=True) if value}
    )
    color = reply["color"]
    return DecodedPhoto(image, None if color is None else (int(color[0]), int(color[1])))


def read_header(content: bytes, kind: PhotoFormat, name: str, max_pixels: int) -> PhotoHeader:
    """Read size and EXIF of a photo in another process, without decoding it."""
    reply, [exif] = _ask(content, kind, name, max_pixels, 0, header_only=True)
    width, height = reply["size"]
    return PhotoHeader((int(width), int(height)), exif)


def _ask(
    content: bytes,
    kind: PhotoFormat,
    name: str,
    max_pixels: int,
    min_side: int,
    *,
    header_only: bool = False,
) -> tuple[dict[str, Any], list[bytes]]:
    """Let a process decode. A process that dies after it has decoded other files is replaced, and
    the file is tried again, because an earlier file may have damaged its memory.
    """
    if not is_installed(kind):
        raise MissingExtra(PACKAGES[kind][0], "photos", f"{name}: decoding {kind}")
    request = {
        "format": kind,
        "max_pixels": max_pixels,
        "min_side": min_side,
        "header_only": header_only,
    }
    with _processes_of(os.getpid()).use() as slot:
        for is_last in (slot.process is None, True):
            try:
                reply, parts = slot.ask(request, content)
                break
            except TimeoutError:
                raise DataError(
                    f"image {name}: decoding takes longer than {MAX_SECONDS:.0f} s. Reduce its "
                    "size."
                ) from None
            except _ProcessEnded as error:
                if not is_last:
                    continue
                # Only the system itself kills a process like this, when memory is short.
                if error.exit_code == -_SIGKILL:
                    raise MemoryError from None
                raise DamagedPhotoError(
                    f"the decoder has crashed (exit code {error.exit_code})"
                ) from None
    problem = reply.get("problem")
    if problem == "size":
        raise LargePhotoError(tuple(reply["size"]), reply["limit"])
    if problem == "memory":
        raise MemoryError
    if problem == "import":
        raise DataError(
            f"image {name}: the package {PACKAGES[kind][0]} cannot be imported "
            f"({reply['reason']}). Install it again: pip install --force-reinstall "
            f"'visavis[photos]'."
        )
    if problem is not None:
        raise DamagedPhotoError(reply["reason"])
    return reply, parts


class _ProcessEnded(Exception):
    """A process ended while it decoded, or sent an invalid reply."""

    def __init__(self, exit_code: int):
        super().__init__(exit_code)
        self.exit_code = exit_code


class _Slot:
    """A process that decodes one photo after the other. It starts with the first one."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], content: bytes) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request, and return header and parts of the reply."""
        if self.process is None:
            # A script, because a module would import visavis.
            command = [sys.executable, "-P", str(Path(__file__).with_name("photo_worker.py"))]
            flags = 0
            if sys.platform == "win32":
                flags = subprocess.CREATE_NEW_PROCESS_GROUP
            self.process = subprocess.Popen(
                [*command, str(MAX_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Decoders print warnings about each damaged file.
                stderr=subprocess.DEVNULL,
                # Ctrl-C in a terminal reaches only this process, which then closes the pipes.
                process_group=None if sys.platform == "win32" else 0,
                creationflags=flags,
            )
        process = self.process
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(MAX_SECONDS, end)
        timer.daemon = True
        timer.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            header = json.dumps({**request, "length": len(content)}).encode()
            process.stdin.write(struct.pack(">I", len(header)) + header)
            process.stdin.write(content)
            process.stdin.flush()
            return _read_reply(process.stdout, request["max_pixels"])
        except (OSError, EOFError):
            # The process has closed its pipes, so it ends.
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            self.close()
            if is_late.is_set():
                raise TimeoutError from None
            raise _ProcessEnded(process.returncode) from None
        except (ValueError, KeyError, TypeError):
            # An invalid reply. The rest of the pipe cannot be interpreted.
            self.close()
            raise _ProcessEnded(process.returncode) from None
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the process."""
        process = self.process
        self.process = None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                # Flushing a request to an ended process fails.
                with suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            process.wait()


def _read_reply(file: IO[bytes], max_pixels: int) -> tuple[dict[str, Any], list[bytes]]:
    """Read a reply, and no more than a decoder may send."""
    [length] = struct.unpack(">I", _read_exactly(file, 4))
    if length > _MAX_HEADER_BYTES:
        raise ValueError
    reply = json.loads(_read_exactly(file, length))
    parts = reply["parts"]
    if not all(0 <= size <= max_pixels * _MAX_PIXEL_BYTES for size in parts):
        raise ValueError
    return reply, [_read_exactly(file, size) for size in parts]


def _read_exactly(file: IO[bytes], count: int) -> bytes:
    content = file.read(count)
    if len(content) < count:
        raise EOFError
    return content


class _Processes:
    """The decoding processes of this process, at most ``MAX_PROCESSES``. The one that was used last
    is used first, so that a single thread needs one.
    """

    def __init__(self, owner: int):
        self.owner = owner
        self.slots = [_Slot() for _ in range(max(1, min(MAX_PROCESSES, cpu_cores())))]
        self.idle: queue.LifoQueue[_Slot] = queue.LifoQueue()
        for slot in self.slots:
            self.idle.put(slot)

    @contextmanager
    def use(self) -> Iterator[_Slot]:
        """Wait for an idle slot."""
        slot = self.idle.get()
        try:
            yield slot
        finally:
            self.idle.put(slot)

    def close(self) -> None:
        """End all processes."""
        # A fork of this process has the pipes, too, but the processes belong to its parent.
        if self.owner == os.getpid():
            for slot in self.slots:
                slot.close()


@cache
def _processes_of(process_id: int) -> _Processes:
    """The decoding processes of a process, which its forks do not share."""
    processes = _Processes(process_id)
    atexit.register(processes.close)
    return processes
