"""From a video file to upright RGB pictures at a steady rate, or one sentence that says why not; by PyAV, which brings FFmpeg.

Picture k of a clip is the last frame shown at ``k / rate`` seconds after its first one, so that a clip of s seconds gives
``floor(s rate) + 1`` pictures, whatever the rate of its own frames, and a clip of one frame gives one.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis import storage
from visavis.data.pictures import MAX_PIXELS
from visavis.errors import DataError, MissingExtra

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg", ".wmv", ".flv", ".3gp", ".ogv")
MAX_FRAMES = 1024
"""Pictures that one clip may give; they are read at once."""
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,asf,flv,ogg"
_SLACK_S = 2.0  # seconds that may be missing at the end: what a container says of its length is rarely exact


class BrokenClip(DataError):
    """A video cannot be used; ``what`` ends a sentence that begins with its name."""

    def __init__(self, what: str, name: str):
        super().__init__(f"video {name} {what}.")
        self.what = what


def is_video(name: str) -> bool:
    """Whether a file is a video, by the ending of its name."""
    return name.lower().endswith(VIDEO_SUFFIXES)


def video_name(name: str) -> str:
    """The name of a video without the ending of its file, by which published files know it, too.

    >>> video_name("video7.mp4"), video_name("-4wsuPCjDBc_5_15"), video_name("clip.1")
    ('video7', '-4wsuPCjDBc_5_15', 'clip.1')
    """
    return name.rpartition(".")[0] if is_video(name) else name


def frames_in(source: Path | bytes, name: str, rate: float) -> int:
    """How many pictures a clip gives at so many a second; nothing is decoded.

    source: a file, or its content. Raises BrokenClip for what is no video or has no frames, MissingExtra without PyAV.
    """
    with _opened(source, name) as (container, stream):
        return _count(_times(container, stream, name), rate, name)


def seconds_in(source: Path | bytes, name: str) -> float:
    """How long a clip is, from its first frame to its last; nothing is decoded. Raises as ``frames_in``, at any length."""
    with _opened(source, name) as (container, stream):
        times = _times(container, stream, name)
        return max(times) - min(times)


def clip_frames(source: Path | bytes, name: str, rate: float) -> list[Picture]:
    """The pictures of a clip, as many as ``frames_in`` says. Raises as it does, and for frames that cannot be decoded."""
    with _opened(source, name) as (container, stream):
        times = _times(container, stream, name)
        expected, start = _count(times, rate, name), min(times)
        container.seek(0, any_frame=False, backward=True)
        pictures: list[Picture] = []
        last: Any = None
        for frame in container.decode(stream):
            at = start if frame.time is None else frame.time
            while last is not None and len(pictures) < expected and at > start + len(pictures) / rate + 1e-6:
                pictures.append(_picture(last))
            last = frame
        if last is None:
            raise BrokenClip("holds no frame that can be decoded", name)
        if (missing := max(times) - (last.time or 0)) > _SLACK_S:
            raise BrokenClip(f"is damaged: the last {missing:.0f} seconds of its frames cannot be decoded", name)
        return pictures + [_picture(last)] * (expected - len(pictures))


def first_frame(source: Path | bytes, name: str) -> Picture:
    """The first picture of a clip. Raises as ``clip_frames``."""
    with _opened(source, name) as (container, stream):
        for frame in container.decode(stream):
            return _picture(frame)
    raise BrokenClip("holds no frame that can be decoded", name)


def frame_at(source: Path | bytes, name: str, seconds: float) -> Picture:
    """The picture that a clip shows so many seconds after its first one; its last where it is shorter. Raises as ``clip_frames``."""
    if seconds <= 0:
        return first_frame(source, name)
    with _opened(source, name) as (container, stream):
        start = 0.0 if stream.start_time is None else float(stream.start_time * stream.time_base)
        container.seek(round((start + seconds) * 1e6), backward=True)
        last: Any = None
        for frame in container.decode(stream):
            if last is not None and frame.time is not None and frame.time > start + seconds + 1e-6:
                break
            last = frame
        if last is not None:
            return _picture(last)
    return first_frame(source, name)


@contextmanager
def _opened(source: Path | bytes, name: str) -> Iterator[tuple[Any, Any]]:
    """A container and its first video stream. Formats that refer to other files, such as playlists, are none of the known ones."""
    try:
        import av
    except ImportError:
        raise MissingExtra("av", "video", f"reading the video {name}") from None
    with _file(source) as file:
        if not file.read(1):
            raise BrokenClip("is empty", name)
        file.seek(0)
        try:
            with av.open(file, options={"format_whitelist": _FORMATS}) as container:
                if not container.streams.video:
                    raise BrokenClip("has no frames: it holds only sound, or nothing", name)
                stream = container.streams.video[0]
                if stream.codec_context is None:
                    raise BrokenClip("is of a codec that this FFmpeg does not know; convert it to mp4 (h264)", name)
                if stream.width * stream.height > MAX_PIXELS:
                    raise BrokenClip(f"has frames of {stream.width} x {stream.height} pixels, more than the {MAX_PIXELS:,} allowed", name)
                stream.thread_type = "AUTO"
                yield container, stream
        except av.error.FFmpegError as error:
            said = str(error.strerror or error).rstrip(".")
            raise BrokenClip(f"is damaged, or no video of a known container (mp4, webm, mkv, avi, mov, mpg, ...): {said}", name) from None


@contextmanager
def _file(source: Path | bytes) -> Iterator[Any]:
    if isinstance(source, bytes):
        yield io.BytesIO(source)
        return
    with storage.regular_file(source), open(source, "rb") as file:
        yield file


def _times(container: Any, stream: Any, name: str) -> list[float]:
    """When each frame is shown, in seconds, as far as the container says."""
    packets = [packet for packet in container.demux(stream) if packet.size]
    if not packets:
        raise BrokenClip("has no frames", name)
    stamps = [packet.pts if packet.pts is not None else packet.dts for packet in packets]
    times = [float(stamp * stream.time_base) for stamp in stamps if stamp is not None] or [0.0]
    told = 0.0 if stream.duration is None else float(stream.duration * stream.time_base)
    if (there := max(times) - min(times)) < told - _SLACK_S:
        raise BrokenClip(f"is cut short: {there:.0f} of its {told:.0f} seconds are there", name)
    return times


def _count(times: list[float], rate: float, name: str) -> int:
    seconds = max(times) - min(times)
    count = math.floor(seconds * rate + 1e-6) + 1
    if count > MAX_FRAMES:
        raise BrokenClip(
            f"gives {count:,} pictures in its {seconds:,.0f} seconds, expected at most {MAX_FRAMES:,}: cut it, or read fewer than {rate:g} a second "
            "(visual.frames_per_second)",
            name,
        )
    return count


def _picture(frame: Any) -> Picture:
    """RGB, upright: a phone writes how its frames are turned beside them."""
    picture: Picture = frame.to_image()
    return picture.rotate(frame.rotation, expand=True) if getattr(frame, "rotation", 0) % 360 else picture
