"""Small video files for tests, encoded where they are needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np


def write_video(
    path: Path,
    images: Iterable[np.ndarray],
    *,
    rate: int = 10,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    rotation: int = 0,
) -> Path:
    """Write images ``[H, W, 3]`` of even sides as a video. rotation: degrees counterclockwise at which it is displayed."""
    import av

    with av.open(str(path), "w", options=options or {}) as container:
        stream = None
        for image in images:
            if stream is None:
                stream = container.add_stream(codec, rate=rate)
                stream.height, stream.width = image.shape[:2]
                stream.pix_fmt = "yuv420p"
                if rotation:
                    stream.set_display_rotation(rotation)
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), "rgb24")):
                container.mux(packet)
        for packet in stream.encode() if stream is not None else ():
            container.mux(packet)
    return path


def write_sound(path: Path) -> Path:
    """Write a file of a known container that has only sound."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        for packet in (*stream.encode(frame), *stream.encode()):
            container.mux(packet)
    return path


def random_clip(path: Path, *, options: dict[str, str] | None = None) -> Path:
    """Write six seconds of noise with ten frames per second."""
    random = np.random.default_rng(0)
    return write_video(path, [random.integers(0, 255, (48, 48, 3), dtype=np.uint8) for _ in range(60)], options=options)


def damaged(whole: bytes) -> bytes:
    """Overwrite the middle of a file, where frames were."""
    content = bytearray(whole)
    content[len(whole) // 2 : len(whole) // 2 + 30_000] = bytes(30_000)
    return bytes(content)


def gray(level: int, side: int = 48) -> np.ndarray:
    return np.full((side, side, 3), level, np.uint8)
