"""Decoding of video files to upright RGB frames at a fixed rate, with PyAV (FFmpeg).

Frame k of a result is the last frame that is shown at ``k / rate`` seconds after the first one. So a video of s seconds has
``floor(s * rate) + 1`` frames at any frame rate of its own, and a video of one frame has one.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from PIL.Image import Image as PILImage

from visavis import storage
from visavis.data.images import COPY_AGAIN, MAX_PIXELS, decoder_version
from visavis.data.suffixes import VIDEO_SUFFIXES
from visavis.errors import DataError, requires_extra

VideoSource = Path | bytes | BinaryIO
# Frames of a video are read at once. This limits the memory.
MAX_FRAMES_PER_VIDEO = 1024
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,asf,flv,ogg"
# Seconds that may be missing at the end: the duration in a container is rarely exact.
_SLACK_S = 2.0
_CONVERT = "or convert it to mp4 (h264)"


class VideoError(DataError):
    """A video is unusable.

    Args:
        problem: End of the sentence "video NAME ...", and the fix.
        name: Name of the video.
    """

    def __init__(self, problem: str, name: str):
        super().__init__(f"video {name} {problem}.")
        self.problem = problem


def decoder_versions() -> str:
    """Return the versions of all that determines whether an image or video can be decoded.

    Returns:
        Versions of visavis, Pillow and PyAV, and the image formats.
    """
    versions = [decoder_version()]
    for package in ("visavis", "av"):
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return ", ".join(versions)


def is_video(name: str) -> bool:
    """Return whether a file is a video, by its suffix.

    Args:
        name: File name.

    Returns:
        Whether it is a video.
    """
    return name.lower().endswith(VIDEO_SUFFIXES)


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


def count_frames(source: VideoSource, name: str, frames_per_second: float) -> int:
    """Count the frames of a video at a rate, without decoding.

    Args:
        source: A path, its content, or an open file.
        name: Name of the video, for errors.
        frames_per_second: The rate.

    Returns:
        The number of frames.

    Raises:
        VideoError: If the source is not a video, or has no frames or too many.
        MissingExtra: If PyAV is not installed.
    """
    with _open_stream(source, name) as (container, stream):
        return _num_frames(_frame_times(container, stream, name), frames_per_second, name)


def video_duration(source: VideoSource, name: str) -> float:
    """Return the time between the first and the last frame, without decoding.

    Args:
        source: A path, its content, or an open file.
        name: Name of the video, for errors.

    Returns:
        Seconds.

    Raises:
        VideoError: If the source is not a video or has no frames.
        MissingExtra: If PyAV is not installed.
    """
    with _open_stream(source, name) as (container, stream):
        times = _frame_times(container, stream, name)
        return max(times) - min(times)


def frame_size(source: VideoSource, name: str) -> tuple[int, int]:
    """Return the size of the frames that the container declares, without decoding.

    Args:
        source: A path, its content, or an open file.
        name: Name of the video, for errors.

    Returns:
        Width and height in pixels. A rotation is not applied.

    Raises:
        VideoError: If the source is not a video.
        MissingExtra: If PyAV is not installed.
    """
    with _open_stream(source, name) as (_, stream):
        return stream.width, stream.height


def read_frames(source: VideoSource, name: str, frames_per_second: float) -> list[PILImage]:
    """Decode the frames of a video at a rate.

    Args:
        source: A path, its content, or an open file.
        name: Name of the video, for errors.
        frames_per_second: The rate.

    Returns:
        Upright RGB images, as many as ``count_frames`` returns.

    Raises:
        VideoError: If the source is not a video, has too many frames, or cannot be decoded.
        MissingExtra: If PyAV is not installed.
    """
    with _open_stream(source, name) as (container, stream):
        times = _frame_times(container, stream, name)
        expected, start = _num_frames(times, frames_per_second, name), min(times)
        container.seek(0, any_frame=False, backward=True)
        frames: list[PILImage] = []
        last: Any = None
        for frame in container.decode(stream):
            time = start if frame.time is None else frame.time
            while last is not None and len(frames) < expected and time > start + len(frames) / frames_per_second + 1e-6:
                frames.append(_to_image(last))
            last = frame
        if last is None:
            raise VideoError(f"has no frame that can be decoded. {COPY_AGAIN}, {_CONVERT}", name)
        if (missing := max(times) - (last.time or 0)) > _SLACK_S:
            raise VideoError(f"is damaged: the last {missing:.0f} seconds of its frames cannot be decoded. {COPY_AGAIN}", name)
        return frames + [_to_image(last)] * (expected - len(frames))


def first_frame(source: VideoSource, name: str) -> PILImage:
    """Decode the first frame of a video.

    Args:
        source: A path, its content, or an open file.
        name: Name of the video, for errors.

    Returns:
        An upright RGB image.

    Raises:
        VideoError: If no frame can be decoded.
        MissingExtra: If PyAV is not installed.
    """
    with _open_stream(source, name) as (container, stream):
        for frame in container.decode(stream):
            return _to_image(frame)
    raise VideoError(f"has no frame that can be decoded. {COPY_AGAIN}, {_CONVERT}", name)


def frame_at(source: VideoSource, name: str, seconds: float) -> PILImage:
    """Decode the frame that is shown at a time.

    Args:
        source: A path, its content, or an open file.
        name: Name of the video, for errors.
        seconds: Time after the first frame. The last frame is used if the video is shorter.

    Returns:
        An upright RGB image.

    Raises:
        VideoError: If no frame can be decoded.
        MissingExtra: If PyAV is not installed.
    """
    if seconds <= 0:
        return first_frame(source, name)
    with _open_stream(source, name) as (container, stream):
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
    """Open a container and its first video stream. Formats that refer to other files, such as playlists, are not allowed."""
    with requires_extra("video", f"reading the video {name}"):
        import av
    with _file(source) as file:
        if not file.read(1):
            raise VideoError(f"is empty (0 bytes). {COPY_AGAIN}", name)
        file.seek(0)
        try:
            with av.open(file, options={"format_whitelist": _FORMATS}) as container:
                if not container.streams.video:
                    raise VideoError(
                        "has no frames: it contains only sound, or nothing. Replace it by a video with frames, or remove it", name
                    )
                stream = container.streams.video[0]
                if stream.codec_context is None:
                    raise VideoError("has a codec that this FFmpeg does not support. Convert it to mp4 (h264)", name)
                if stream.width * stream.height > MAX_PIXELS:
                    problem = f"has frames of {stream.width} x {stream.height} pixels, expected at most {MAX_PIXELS:,}"
                    raise VideoError(f"{problem}. Reduce its size", name)
                stream.thread_type = "AUTO"
                yield container, stream
        except av.error.FFmpegError as error:
            reason = str(error.strerror or error).rstrip(".")
            problem = f"is damaged or not a supported container (mp4, webm, mkv, avi, mov, mpg, ...): {reason}"
            raise VideoError(f"{problem}. {COPY_AGAIN}, {_CONVERT}", name) from None


@contextmanager
def _file(source: VideoSource) -> Iterator[Any]:
    if isinstance(source, Path):
        with storage.open_file(source) as file:
            yield file
    else:
        yield io.BytesIO(source) if isinstance(source, bytes) else source


def _frame_times(container: Any, stream: Any, name: str) -> list[float]:
    """Return when each frame is shown, in seconds."""
    packets = [packet for packet in container.demux(stream) if packet.size]
    if not packets:
        raise VideoError(f"has no frames. {COPY_AGAIN}", name)
    stamps = [packet.pts if packet.pts is not None else packet.dts for packet in packets]
    times = [float(stamp * stream.time_base) for stamp in stamps if stamp is not None] or [0.0]
    declared = 0.0 if stream.duration is None else float(stream.duration * stream.time_base)
    if (available := max(times) - min(times)) < declared - _SLACK_S:
        raise VideoError(f"is truncated: {available:.0f} of its {declared:.0f} seconds are available. {COPY_AGAIN}", name)
    return times


def _num_frames(times: list[float], rate: float, name: str) -> int:
    seconds = max(times) - min(times)
    count = math.floor(seconds * rate + 1e-6) + 1
    if count > MAX_FRAMES_PER_VIDEO:
        raise VideoError(
            f"has {count:,} frames in {seconds:,.0f} seconds at {rate:g} frames per second, expected at most {MAX_FRAMES_PER_VIDEO:,}. "
            "Cut it, or lower visual.frames_per_second",
            name,
        )
    return count


def _to_image(frame: Any) -> PILImage:
    """Convert to an upright RGB image. Phones store the rotation of frames as metadata."""
    image: PILImage = frame.to_image()
    return image.rotate(frame.rotation, expand=True) if frame.rotation % 360 else image
