"""Small video files for tests, encoded where they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np


def write_video(
    path: Path,
    images: Iterable[np.ndarray],
    *,
    rate: int | Fraction = 10,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    rotation: int = 0,
    cover: int | None = None,
    skip: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write images ``[H, W, 3]`` of even sides as a video.

    rotation: degrees counterclockwise at which it is displayed. cover: write a gray image of 64 x
    64 pixels as the first stream, with these flags. skip: number of frames before the start at
    which it is played. metadata: values such as ``creation_time``.
    """
    import av

    with av.open(str(path), "w", options=options or {}) as container:
        container.metadata.update(metadata or {})
        stream = None
        if cover is not None:
            still = container.add_stream("mjpeg", rate=rate)
            still.height, still.width, still.pix_fmt, still.disposition = 64, 64, "yuvj420p", cover
        for number, image in enumerate(images):
            if stream is None:
                stream = container.add_stream(codec, rate=rate)
                stream.height, stream.width = image.shape[:2]
                stream.pix_fmt = "yuv420p"
                if rotation:
                    stream.set_display_rotation(rotation)
                if cover is not None:
                    frame = av.VideoFrame.from_ndarray(gray(128, 64), "rgb24").reformat(
                        format="yuvj420p"
                    )
                    container.mux([*still.encode(frame), *still.encode()])
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), "rgb24")
            frame.pts, frame.time_base = number - skip, 1 / Fraction(rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode() if stream is not None else ())
    return path


def write_sound(path: Path) -> Path:
    """Write a file of a known container that has only sound."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.sample_rate = 44100
        for packet in (*stream.encode(frame), *stream.encode()):
            container.mux(packet)
    return path


def random_clip(path: Path, *, options: dict[str, str] | None = None) -> Path:
    """Write six seconds of noise with ten frames per second."""
    random = np.random.default_rng(0)
    return write_video(
        path,
        [random.integers(0, 255, (48, 48, 3), dtype=np.uint8) for _ in range(60)],
        options=options,
    )


def damaged(whole: bytes) -> bytes:
    """Overwrite the middle of a file, where frames were."""
    content = bytearray(whole)
    content[len(whole) // 2 : len(whole) // 2 + 30_000] = bytes(30_000)
    return bytes(content)


def gray(level: int, side: int = 48) -> np.ndarray:
    return np.full((side, side, 3), level, np.uint8)
