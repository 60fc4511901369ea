"""Videos in several containers: whole, cut, and with damaged bytes."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.inputs.cases import Case, Kind
from tests.mutation import damaged
from tests.videos import write_video

from visavis.data.video import (
    count_frames,
    first_frame,
    iter_frames,
    read_recording,
    video_duration,
)

FORMS: dict[str, dict[str, Any]] = {
    "fast.mp4": {"options": {"movflags": "faststart"}},
    "slow.mp4": {},
    "a.mov": {},
    "a.mkv": {},
    "a.avi": {"codec": "mpeg4"},
    "a.webm": {"codec": "libvpx"},
    "a.mpg": {"codec": "mpeg2video", "rate": 25},
}
DECLARED = ("fast.mp4", "slow.mp4", "a.mov", "a.mkv", "a.avi")
"""Containers that declare the number of frames or the duration, so that a cut is found."""
FRAMES = 40


def prepare(folder: Path) -> dict[str, bytes]:
    """Clips of four seconds of noise."""
    state = np.random.default_rng(0)
    images = [state.integers(0, 255, (32, 48, 3), dtype=np.uint8) for _ in range(FRAMES)]
    return {
        name: write_video(folder / name, images, **form).read_bytes()
        for name, form in FORMS.items()
    }


def read_video(path: Path) -> tuple[int, float]:
    """All that commands read of a video: the number of frames at 5 per second, and the seconds."""
    with path.open("rb") as file:
        seconds = video_duration(file, path.name)
    with path.open("rb") as file:
        count = count_frames(file, path.name, 5.0)
    with path.open("rb") as file:
        first = first_frame(file, path.name)
    with path.open("rb") as file:
        read_recording(file, path.name)
    with path.open("rb") as file:
        frames = 0
        for image in iter_frames(file, path.name, 5.0):
            assert image.mode == "RGB", f"the mode of a frame is {image.mode}"
            frames += 1
    assert frames == count, f"{count} frames were counted, {frames} decoded"
    assert first.mode == "RGB"
    return count, seconds


def check_whole(result: tuple[int, float]) -> str:
    """The duration must be the duration of the clip."""
    count, seconds = result
    is_right = count in (19, 20, 21, 8, 9) and 1.3 < seconds < 4.3
    return "" if is_right else f"{count} frames in {seconds} s"


def make_video(rng: random.Random, folder: Path, clips: dict[str, bytes]) -> Case:
    """A clip, which may be cut or damaged."""
    name = rng.choice(list(clips))
    content = clips[name]
    known: Any = "right"
    way, note, check = rng.random(), "valid", check_whole
    if way < 0.25:
        known, note = "unknown", "cut"
        check = lambda _: ""  # noqa: E731
        size = rng.randrange(1, len(content))
        if name in DECLARED and size < 0.4 * len(content):
            known = "wrong"
            check = lambda result: f"a cut video was accepted: {result}"  # noqa: E731
        content = content[:size]
    elif way < 0.95:
        known, note = "unknown", "damaged bytes"
        check = lambda _: ""  # noqa: E731
        head = rng.choice([len(content), 4096])
        if rng.random() < 0.3:
            # The index of an mp4 may be at its end.
            content = content[:-head] + damaged(content[-head:], rng)
        else:
            content = damaged(content[:head], rng) + content[head:]
    (folder / name).write_bytes(content)
    (folder / "captions.csv").write_text(f"filename,caption,split\n{name},a dog,test\n")
    return Case(partial(read_video, folder / name), known, check, f"{name} {note}")


KINDS = [Kind("videos", make_video, prepare, 500)]
