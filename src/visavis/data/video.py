"""Decoding of video files to upright RGB frames at a fixed rate, with PyAV (FFmpeg).

Frame k of a result is the last frame that is shown at ``k / rate`` seconds after the first one.
With s seconds between its first and last frame, a video has ``floor(s * rate) + 1`` frames at any
frame rate of its own. A last frame that is shown for longer than a second, as in a slideshow, is
repeated until its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from PIL.Image import Image as PILImage

from visavis.core import storage
from visavis.core.errors import DataError, requires_extra
from visavis.data.file_names import is_video
from visavis.data.images import COPY_AGAIN, decoder_version
from visavis.data.upright_images import MAX_PIXELS

VideoSource = Path | BinaryIO
# Maximum number of frames that a model reads at once. This limits the memory.
MAX_FRAMES_PER_VIDEO = 1024
# Maximum duration of a video. Longer ones have wrong time stamps.
MAX_SECONDS = 7 * 24 * 3600
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,asf,flv,ogg"
# Seconds that may be missing at the end: the duration in a container is rarely exact.
_SLACK_S = 2.0
# A last frame that is shown for more seconds counts for its duration. With a shorter one, the
# number of frames of an ordinary video would depend on its frame rate.
_SLIDE_S = 1.0
# Codecs of covers and thumbnails, whose streams are not always marked as such.
_IMAGE_CODECS = ("mjpeg", "png", "bmp", "gif", "webp", "tiff")
# Number that changes with the decoding here, so that a video that it refused is tried again.
_DECODING_VERSION = 2
_CONVERT = "or convert it to mp4 (h264)"
_NO_FRAME = f"has no frame that can be decoded. {COPY_AGAIN}, {_CONVERT}"


class VideoError(DataError):
    """A video is unusable.

    Args:
        problem: End of the sentence "video NAME ...", and the fix.
        name: Name of the video.
    """

    def __init__(self, problem: str, name: str):
        super().__init__(f"video {name} {problem}.")
        self.problem = problem


def _require(condition: object, problem: str, name: str) -> None:
    """Raise VideoError unless a condition holds."""
    if not condition:
        raise VideoError(problem, name)


def decoder_versions() -> str:
    """Return the versions of all that determines whether an image or video can be decoded."""
    versions = [decoder_version(), f"videos {_DECODING_VERSION}"]
    for package in ("visavis", "av"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return ", ".join(versions)


def video_id(name: str) -> str:
    """Return the name of a video without its suffix, as published features name it.

    Args:
        name: File name.

    Returns:
        The name without a video suffix.

    Example:
        >>> video_id("video7.mp4"), video_id("-4wsuPCjDBc_5_15"), video_id("clip.1")
        ('video7', '-4wsuPCjDBc_5_15', 'clip.1')
    """
    return name.rpartition(".")[0] if is_video(name) else name


@dataclass(frozen=True)
class _Timeline:
    """When frames are shown, in seconds.

    Attributes:
        first: Time of the first frame.
        last: Time of the last frame.
        end: End of the last frame if it is shown for longer than ``_SLIDE_S``, else its time.
    """

    first: float
    last: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration of the video."""
        return self.end - self.first

    def num_frames(self, rate: float) -> int:
        """Number of frames at a rate."""
        return max(
            math.floor((self.last - self.first) * rate + 1e-6) + 1,
            math.ceil(self.seconds * rate - 1e-6),
        )


def count_frames(source: VideoSource, name: str, frames_per_second: float) -> int:
    """Count the frames of a video at a rate, without decoding. Too many are an error."""
    limited = open_frames(source, name, frames_per_second, max_frames=MAX_FRAMES_PER_VIDEO)
    with limited as (count, _):
        return count


def video_duration(source: VideoSource, name: str) -> float:
    """Return the seconds from the first to the last frame, or to the end of a last frame that is
    shown for longer than a second, without decoding.
    """
    with _open_stream(source, name) as (container, stream):
        return _read_timeline(container, stream, name).seconds


def recording_time(source: VideoSource, name: str) -> str:
    """Read the time at which a clip was recorded, as ``format_time``. Empty if it has none."""
    from visavis.data.capture_time import format_time, utc_time

    with _open_stream(source, name) as (container, _):
        time, has_clock = _read_time(container)
    if time is None:
        return ""
    return format_time(time) if has_clock else utc_time(time)


def _read_time(container: Any) -> tuple[datetime | None, bool]:
    """Time in the metadata of a clip, and whether it is by the clock at the place. Without it, it
    is in UTC.
    """
    from visavis.data.capture_time import parse_time

    # Phones of Apple also write the offset to UTC.
    for key, has_clock in (("com.apple.quicktime.creationdate", True), ("creation_time", False)):
        time = parse_time(container.metadata.get(key, ""))
        # Without a clock, a camera writes the start of 1904 or 1970.
        if time is not None and time.year not in (1903, 1904, 1969, 1970):
            return (time, True) if has_clock else (time.replace(tzinfo=time.tzinfo or UTC), False)
    return None, False


@dataclass(frozen=True)
class Recording:
    """Metadata of a clip.

    Attributes:
        seconds: Declared duration, infinite if there is none.
        time: Time at which it was recorded. None: not known.
        has_clock: Whether the time is by the clock at the place. Otherwise it is in UTC.
        identifier: Apple's identifier of the Live Photo that it belongs to. Empty: none.
    """

    seconds: float
    time: datetime | None
    has_clock: bool
    identifier: str


def read_recording(source: VideoSource, name: str) -> Recording:
    """Read the metadata of a clip."""
    with _open_stream(source, name) as (container, _):
        # FFmpeg counts the duration of a container in microseconds.
        seconds = math.inf if container.duration is None else container.duration / 10**6
        identifier = container.metadata.get("com.apple.quicktime.content.identifier", "")
        return Recording(seconds, *_read_time(container), identifier)


def frame_size(source: VideoSource, name: str) -> tuple[int, int]:
    """Return width and height of the frames as the container declares them. They are not rotated."""
    with _open_stream(source, name) as (_, stream):
        return stream.width, stream.height


@contextmanager
def open_frames(
    source: VideoSource, name: str, frames_per_second: float, *, max_frames: int | None = None
) -> Iterator[tuple[int, Iterator[PILImage]]]:
    """Open a video: the number of frames at a rate, and upright RGB images, decoded one at a time."""
    with _open_stream(source, name) as (container, stream):
        timeline = _read_timeline(container, stream, name)
        count = timeline.num_frames(frames_per_second)
        _require(
            max_frames is None or count <= max_frames,
            f"has {count:,} frames in {timeline.seconds:,.0f} seconds at {frames_per_second:g} "
            f"frames per second, expected at most {max_frames or 0:,}. Cut it, or train with a "
            "lower visual.frames_per_second",
            name,
        )
        yield count, _decode(container, stream, name, timeline, count, frames_per_second)


def _decode(
    container: Any, stream: Any, name: str, timeline: _Timeline, count: int, rate: float
) -> Iterator[PILImage]:
    # The time line has read all packets.
    container.seek(0, any_frame=False, backward=True)
    # A frame is converted once, however often it is shown.
    number = 0
    shown = None
    image = None
    for frame in container.decode(stream):
        time = timeline.first if frame.time is None else frame.time
        while shown is not None and number < count and time > timeline.first + number / rate + 1e-6:
            image = image or _to_image(shown)
            yield image
            number += 1
        shown = frame
        image = None
    if shown is None:
        raise VideoError(_NO_FRAME, name)
    missing = timeline.last - (shown.time or 0)
    _require(
        missing <= _SLACK_S,
        f"is damaged: the last {missing:.0f} seconds of its frames cannot be decoded. {COPY_AGAIN}",
        name,
    )
    # The last frame is shown until the end.
    yield from [_to_image(shown)] * (count - number)


def iter_frames(source: VideoSource, name: str, frames_per_second: float) -> Iterator[PILImage]:
    """Decode the frames of a video that a model reads at once, as many as ``count_frames`` returns."""
    limited = open_frames(source, name, frames_per_second, max_frames=MAX_FRAMES_PER_VIDEO)
    with limited as (_, frames):
        yield from frames


def first_frame(source: VideoSource, name: str) -> PILImage:
    """Decode the first frame of a video."""
    with _open_stream(source, name) as (container, stream):
        for frame in container.decode(stream):
            return _to_image(frame)
    raise VideoError(_NO_FRAME, name)


def frame_at(source: VideoSource, name: str, seconds: float) -> PILImage:
    """Decode the frame that is shown at a time, in seconds after the first frame. A shorter video
    shows its last frame.
    """
    if seconds <= 0:
        return first_frame(source, name)
    with _open_stream(source, name) as (container, stream):
        # Times of frames count from here.
        start = 0.0 if stream.start_time is None else float(stream.start_time * stream.time_base)
        container.seek(round((start + seconds) * 1e6), backward=True)
        last: Any = None
        for frame in container.decode(stream):
            if last is not None and frame.time is not None and frame.time > start + seconds + 1e-6:
                break
            last = frame
        if last is not None:
            return _to_image(last)
    return first_frame(source, name)


@contextmanager
def _open_stream(source: VideoSource, name: str) -> Iterator[tuple[Any, Any]]:
    """Open a container and the stream that a player shows. Formats that refer to other files, such
    as playlists, are not allowed.
    """
    with requires_extra("video", f"reading the video {name}"):
        import av
    opened = storage.open_file(source) if isinstance(source, Path) else nullcontext(source)
    with opened as file:
        _require(file.read(1), f"is empty (0 bytes). {COPY_AGAIN}", name)
        file.seek(0)
        try:
            # Playlists and similar formats could read other files of this machine.
            with av.open(
                file, options={"format_whitelist": _FORMATS}, metadata_errors="replace"
            ) as container:
                stream = _shown_stream(container)
                _require(
                    stream is not None,
                    "has no frames: it contains only sound, or nothing. Replace it by a video with "
                    "frames, or remove it",
                    name,
                )
                _require(
                    stream.codec_context is not None,
                    "has a codec that this FFmpeg does not support. Convert it to mp4 (h264)",
                    name,
                )
                _require(
                    stream.width * stream.height <= MAX_PIXELS,
                    f"has frames of {stream.width} x {stream.height} pixels, expected at most "
                    f"{MAX_PIXELS:,}. Reduce its size",
                    name,
                )
                # Frame threads, which FFmpeg does not use by default.
                stream.thread_type = "AUTO"
                yield container, stream
        except av.error.FFmpegError as error:
            reason = str(error.strerror or error).rstrip(".")
            problem = f"is damaged or not a supported container (mp4, webm, mkv, avi, mov, mpg, ...): {reason}"
            raise VideoError(f"{problem}. {COPY_AGAIN}, {_CONVERT}", name) from None


def _shown_stream(container: Any) -> Any:
    """Return the stream that a player shows. None: there is none. FFmpeg alone would choose a cover
    or thumbnail that is the default stream.
    """
    from av.stream import Disposition

    best = container.streams.best("video")
    moving = []
    for stream in container.streams.video:
        codec = stream.codec_context.name if stream.codec_context else ""
        is_image = codec in _IMAGE_CODECS and stream.frames <= 1
        if Disposition.attached_pic not in stream.disposition and not is_image:
            moving.append(stream)
    return best if best in moving or not moving else moving[0]


def _read_timeline(container: Any, stream: Any, name: str) -> _Timeline:
    """Read when frames are shown from the packets of all streams."""
    num_packets, interval = 0, 0.0
    first = last = None
    # Start and end of all streams.
    start = math.inf
    end = -math.inf
    for packet in container.demux():
        # Some containers store no presentation time.
        stamp = packet.dts if packet.pts is None else packet.pts
        is_shown = packet.stream_index == stream.index and packet.size > 0
        num_packets += is_shown
        # Players do not show the frames before the start of a video that was trimmed without
        # encoding.
        if stamp is None or packet.is_discard:
            continue
        time = float(stamp * packet.time_base)
        duration = float((packet.duration or 0) * packet.time_base)
        start = min(start, time)
        end = max(end, time + duration)
        if is_shown:
            first = time if first is None else min(first, time)
            if last is None or time >= last:
                last = time
                interval = duration
    _require(num_packets, f"has no frames. {COPY_AGAIN}", name)
    if first is None or last is None:
        # The cover of a file with sound alone.
        return _Timeline(0.0, 0.0, 0.0)
    declared = float(stream.duration * stream.time_base) if stream.duration else 0.0
    if container.format.name == "avi" and stream.average_rate:
        # FFmpeg derives the duration of a truncated file from its size.
        declared = max(declared, float(stream.frames / stream.average_rate))
    total = declared or (container.duration or 0) / 1e6
    # Some containers do not store for how long the last frame is shown.
    interval = (
        interval
        or (
            float(1 / stream.average_rate)
            if stream.average_rate
            else (last - first) / max(1, num_packets - 1)
        )
        or total
    )
    # Without a number of frames, the duration may be of the longest stream.
    available = (
        last + interval - first if stream.frames else max(end, last + interval) - min(start, first)
    )
    _require(
        total - available <= _SLACK_S or 0 < stream.frames <= num_packets,
        f"is truncated: {available:.0f} of its {total:.0f} seconds are available. {COPY_AGAIN}",
        name,
    )
    end = first + declared if declared else last + interval
    timeline = _Timeline(first, last, end if end - last > _SLIDE_S + 1e-6 else last)
    _require(
        timeline.seconds <= MAX_SECONDS,
        f"has {timeline.seconds:,.0f} seconds, expected at most {MAX_SECONDS:,}. Cut it, "
        f"{_CONVERT}",
        name,
    )
    return timeline


def _to_image(frame: Any) -> PILImage:
    """Convert to an upright RGB image. Phones store the rotation of frames as metadata."""
    image: PILImage = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation % 360 else image
