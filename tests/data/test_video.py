"""Video decoding: frames at a fixed rate, and errors for broken videos."""

from __future__ import annotations

import io
import sys
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image as Pictures

from visavis.core.errors import DataError, MissingExtra
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import list_dataset, open_dataset
from visavis.data.image_validation import open_valid_dataset
from visavis.data.video import (
    VideoError,
    count_frames,
    first_frame,
    frame_at,
    frame_size,
    iter_frames,
    video_duration,
)

from ..videos import damaged, gray, random_clip, write_sound, write_video

av = pytest.importorskip("av")

CONTAINERS = [
    ("a.mp4", "libx264"),
    ("a.mov", "libx264"),
    ("a.webm", "libvpx"),
    ("a.avi", "mpeg4"),
    ("a.mkv", "libx264"),
]


def levels(frames):
    return [round(np.asarray(frame).mean() / 8) for frame in frames]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Three seconds with ten frames per second, each 8 gray levels brighter than the previous one."""
    return write_video(
        tmp_path_factory.mktemp("clips") / "clip.mp4", [gray(8 * number) for number in range(30)]
    )


@pytest.mark.parametrize(
    ("rate", "shown"), [(1, [0, 10, 20]), (2.5, [0, 4, 8, 12, 16, 20, 24, 28]), (0.1, [0])]
)
def test_iter_frames_follows_the_frame_rate(clip, rate, shown):
    assert levels(iter_frames(clip, "clip", rate)) == shown
    assert levels(iter_frames(io.BytesIO(clip.read_bytes()), "clip", rate)) == shown
    assert count_frames(clip, "clip", rate) == len(shown)


def test_iter_frames_repeats_frames_at_high_rates(clip):
    assert levels(iter_frames(clip, "clip", 20))[:6] == [0, 0, 1, 1, 2, 2]
    assert len(list(iter_frames(clip, "clip", 20))) == count_frames(clip, "clip", 20) == 59


@pytest.mark.parametrize(("file", "codec"), CONTAINERS)
def test_video_containers_and_codecs(tmp_path, file, codec):
    path = write_video(tmp_path / file, [gray(8 * number) for number in range(30)], codec=codec)
    assert levels(iter_frames(path, file, 1)) == [0, 10, 20]
    assert first_frame(path, file).size == (48, 48)


def test_video_of_one_frame(tmp_path):
    assert levels(iter_frames(write_video(tmp_path / "a.mp4", [gray(80)]), "a", 5)) == [10]


@pytest.mark.parametrize("num_slides", [1, 4])
@pytest.mark.parametrize("seconds", [5, 600])
@pytest.mark.parametrize(("file", "codec"), CONTAINERS)
def test_last_slide_is_shown_for_its_duration(tmp_path, file, codec, num_slides, seconds):
    slides = [gray(40 * number) for number in range(num_slides)]
    path = write_video(tmp_path / file, slides, rate=Fraction(1, seconds), codec=codec)
    assert levels(iter_frames(path, file, 5 / seconds)) == [
        5 * number for number in range(num_slides) for _ in range(5)
    ]
    assert video_duration(path, file) == pytest.approx(num_slides * seconds, abs=0.01)
    assert levels([frame_at(path, file, num_slides * seconds - 1)]) == [5 * (num_slides - 1)]


@pytest.mark.parametrize(("file", "codec"), CONTAINERS)
@pytest.mark.parametrize("rate", [Fraction(1, 5), 10])
@pytest.mark.slow
def test_truncated_video_is_detected_in_each_container(tmp_path, file, codec, rate):
    noise = np.random.default_rng(0).integers(0, 255, (60, 48, 48, 3), dtype=np.uint8)
    options = {"movflags": "faststart"} if file.endswith(("mp4", "mov")) else None
    path = write_video(tmp_path / file, noise, rate=rate, codec=codec, options=options)
    content = path.read_bytes()
    assert count_frames(io.BytesIO(content), file, 1 / 3) == 60 / rate // 3
    with pytest.raises(
        VideoError, match=rf"is truncated: \d+ of its {int(60 / rate)} seconds are available"
    ):
        count_frames(io.BytesIO(content[: len(content) // 2]), file, 1 / 3)


def test_frames_before_the_start_are_not_shown(tmp_path):
    """Phones trim a video by a new start in its header."""
    path = write_video(tmp_path / "a.mp4", [gray(8 * number) for number in range(30)], skip=10)
    assert levels(iter_frames(path, "a", 1)) == [10, 20]


@pytest.mark.parametrize(("rotation", "bright"), [(90, (0, 1)), (180, (1, 0)), (-90, (0, -1))])
def test_rotated_video_is_upright(tmp_path, rotation, bright):
    """The upper half is stored bright. Rotated counterclockwise it is left, below, or right."""
    stored = np.concatenate([np.full((24, 64, 3), 255, np.uint8), np.zeros((24, 64, 3), np.uint8)])
    path = write_video(tmp_path / "a.mp4", [stored] * 3, rotation=rotation)
    frame = np.asarray(next(iter_frames(path, "a", 1)).convert("L")).astype(float)
    down, left = bright
    assert frame.shape == ((64, 48) if rotation % 180 else (48, 64))
    assert np.array_split(frame, 2)[1].mean() - np.array_split(frame, 2)[0].mean() == pytest.approx(
        255 * down, abs=20
    )
    assert np.array_split(frame, 2, 1)[0].mean() - np.array_split(frame, 2, 1)[
        1
    ].mean() == pytest.approx(255 * left, abs=20)


@pytest.mark.parametrize(
    "flags", [0, 1, 1024, 1025], ids=["unmarked", "default", "cover", "default cover"]
)
@pytest.mark.parametrize("file", ["a.mkv", "a.mp4", "a.mov", "a.avi"])
def test_video_with_cover_is_read_as_a_player_shows_it(tmp_path, file, flags):
    path = write_video(
        tmp_path / file, [gray(8 * number) for number in range(30)], codec="mpeg4", cover=flags
    )
    assert levels(iter_frames(path, file, 1)) == [0, 10, 20]
    assert count_frames(path, file, 1) == 3
    assert (
        first_frame(path, file).size
        == frame_at(path, file, 1).size
        == frame_size(path, file)
        == (48, 48)
    )


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_sound_with_cover_is_read_as_its_cover(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    with av.open(str(path), "w") as container:
        sound, still = container.add_stream("aac", rate=8000), container.add_stream("mjpeg", rate=1)
        still.height, still.width, still.pix_fmt, still.disposition = 64, 64, "yuvj420p", 1024
        container.mux(
            [
                *still.encode(
                    av.VideoFrame.from_ndarray(gray(128, 64), "rgb24").reformat(format="yuvj420p")
                ),
                *still.encode(),
            ]
        )
        silence = av.AudioFrame.from_ndarray(
            np.zeros((1, 8000 * 9), np.float32), format="fltp", layout="mono"
        )
        silence.sample_rate = 8000
        container.mux([*sound.encode(silence), *sound.encode()])
    assert levels(iter_frames(path, "a", 1)) == [16]


def bad(folder):
    """Invalid videos, each with its expected error."""
    whole = random_clip(folder / "whole.mp4", options={"movflags": "faststart"}).read_bytes()
    Pictures.new("RGB", (8, 8)).save(folder / "frame.png")
    return {
        "sound.mp4": (
            write_sound(folder / "s.mp4").read_bytes(),
            "has no frames: it contains only sound",
        ),
        "text.mp4": (b"a dog runs\n" * 99, "is damaged or not a supported container"),
        "empty.mp4": (b"", "is empty"),
        "playlist.mp4": (
            b"#EXTM3U\n#EXTINF:9,\nwhole.mp4\n#EXT-X-ENDLIST\n",
            "not a supported container",
        ),
        "list.mp4": (b"ffconcat version 1.0\nfile whole.mp4\n", "not a supported container"),
        "frame.mp4": ((folder / "frame.png").read_bytes(), "not a supported container"),
        "cut.mp4": (whole[: len(whole) // 2], r"is truncated: \d of its 6 seconds are available"),
        "head.mp4": (whole[:300], "has no frames"),
        "damaged.mp4": (damaged(whole), "is damaged"),
    }


def test_invalid_videos_raise_video_error(tmp_path):
    for name, (content, sentence) in bad(tmp_path).items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(VideoError, match=f"^video {name} .*{sentence}") as error:
            list(iter_frames(tmp_path / name, name, 2))
        assert "\n" not in str(error.value)


def test_too_many_frames_are_refused(clip):
    with pytest.raises(
        VideoError,
        match=r"has 2,901 frames in 3 seconds at 1000 frames per second, expected at most 1,024",
    ):
        count_frames(clip, "clip", 1000)


def test_missing_pyav_names_the_extra(clip, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        MissingExtra, match=r"reading the video clip needs the package av.*visavis\[video\]"
    ):
        count_frames(clip, "clip", 1)


@pytest.fixture
def folder(tmp_path, clip):
    """A data set of two videos and one image with captions."""
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())
    write_video(tmp_path / "b.mp4", [gray(200)] * 5)
    Pictures.new("RGB", (48, 48)).save(tmp_path / "c.png")
    (tmp_path / "captions.csv").write_text(
        "filename,caption,split\na.mp4,it gets brighter,train\nb.mp4,all "
        "white,val\nc.png,black,test\n"
    )
    return tmp_path


def test_dataset_has_videos_and_images(folder):
    clips = open_valid_dataset(folder)
    assert [image.is_video for image in clips.images] == [True, True, False]
    assert [image.num_frames(1) for image in clips.images] == [3, 1, 1]
    assert levels(clips.images[0].frames(1)) == [0, 10, 20]
    assert [image.preview().size for image in clips.images] == [(48, 48)] * 3
    assert len(clips.images[2].frames(5)) == 1
    with pytest.raises(
        DataError,
        match=r'a\.mp4: expected an image, got a video\. Read its frames with visual\.granularity = "frames"',
    ):
        clips.images[0].open()


def test_name_without_suffix_matches_a_video(folder):
    (folder / "captions.csv").write_text(
        "filename,caption,split\na,it gets brighter,train\nb,all white,val\n"
    )
    clips = open_dataset(folder).images
    assert [(image.name, image.location.path.name, image.is_video) for image in clips] == [
        ("a", "a.mp4", True),
        ("b", "b.mp4", True),
    ]
    (folder / "a.webm").touch()
    with pytest.raises(DataError, match=r"the video could be a\.mp4 or a\.webm\. List its suffix"):
        open_dataset(folder)


def test_broken_videos_are_findings(folder):
    write_sound(folder / "b.mp4")
    with pytest.raises(
        DataError,
        match=r"1 x broken video.*b\.mp4: the video has no frames: it contains only sound",
    ):
        open_valid_dataset(folder)
    assert len(open_valid_dataset(folder, skip_bad=True).images) == 2
    (folder / "d.mp4").write_bytes((folder / "a.mp4").read_bytes())
    assert any(
        finding.location == "d.mp4" and "does not list it" in finding.message
        for finding in list_dataset(folder).findings
    )


def test_long_video_is_refused_at_high_frame_rate(folder):
    """A video of 59 seconds. Without a known rate, the highest allowed rate is noted."""
    write_video(folder / "b.mp4", (gray(4 * number) for number in range(60)), rate=1)
    assert len(open_valid_dataset(folder, frames_per_second=17).images) == 3
    with pytest.raises(
        DataError, match=r"b\.mp4: the video has 1,063 frames in 59 seconds at 18 frames per second"
    ):
        open_valid_dataset(folder, frames_per_second=18)
    report = check_dataset(folder)
    assert report.ok
    (note,) = (finding for finding in report.findings if finding.kind == "long video")
    assert (
        note.location,
        "59 seconds and allows up to 17.33 frames per second" in note.message,
    ) == ("b.mp4", True)


def test_decoding_all_frames_finds_late_damage(folder):
    whole = random_clip(folder / "b.mp4", options={"movflags": "faststart"}).read_bytes()
    assert check_dataset(folder).ok
    (folder / "b.mp4").write_bytes(damaged(whole))
    assert len(open_valid_dataset(folder).images) == 3
    with pytest.raises(DataError, match=r"b\.mp4: the video is damaged"):
        open_valid_dataset(folder, decode_all_frames=True)
    assert [
        finding.location for finding in check_dataset(folder).findings if finding.loses_data
    ] == ["b.mp4"]
