"""Video files become pictures at a steady rate; what is none, has none, or lost some is one sentence."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from PIL import Image as Pictures

from visavis.data import check_dataset
from visavis.data.clips import BrokenClip, clip_frames, first_frame, frames_in
from visavis.data.reading import list_dataset, open_dataset
from visavis.errors import DataError, MissingExtra

from ..videos import damaged, gray, random_clip, write_sound, write_video

pytest.importorskip("av")


def levels(pictures):
    return [round(np.asarray(picture).mean() / 8) for picture in pictures]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Three seconds, ten pictures a second, each 8 levels of gray brighter than the one before."""
    return write_video(tmp_path_factory.mktemp("clips") / "clip.mp4", [gray(8 * number) for number in range(30)])


@pytest.mark.parametrize(("rate", "shown"), [(1, [0, 10, 20]), (2.5, [0, 4, 8, 12, 16, 20, 24, 28]), (0.1, [0])])
def test_pictures_come_at_the_rate_that_is_asked_for(clip, rate, shown):
    assert levels(clip_frames(clip, "clip", rate)) == shown
    assert levels(clip_frames(clip.read_bytes(), "clip", rate)) == shown
    assert frames_in(clip, "clip", rate) == len(shown)


def test_a_rate_above_the_own_one_repeats_pictures(clip):
    assert levels(clip_frames(clip, "clip", 20))[:6] == [0, 0, 1, 1, 2, 2]
    assert len(clip_frames(clip, "clip", 20)) == frames_in(clip, "clip", 20) == 59


@pytest.mark.parametrize(("file", "codec"), [("a.webm", "libvpx"), ("a.avi", "mpeg4"), ("a.mkv", "libx264")])
def test_containers_and_codecs(tmp_path, file, codec):
    path = write_video(tmp_path / file, [gray(8 * number) for number in range(30)], codec=codec)
    assert levels(clip_frames(path, file, 1)) == [0, 10, 20]
    assert first_frame(path, file).size == (48, 48)


def test_a_clip_of_one_picture_is_one(tmp_path):
    assert levels(clip_frames(write_video(tmp_path / "a.mp4", [gray(80)]), "a", 5)) == [10]


@pytest.mark.parametrize(("turned", "bright"), [(90, (0, 1)), (180, (1, 0)), (-90, (0, -1))])
def test_a_clip_of_a_phone_is_upright(tmp_path, turned, bright):
    """The upper half is bright as it is stored; turned counterclockwise it comes to lie left, below, or right."""
    stored = np.concatenate([np.full((24, 64, 3), 255, np.uint8), np.zeros((24, 64, 3), np.uint8)])
    picture = np.asarray(clip_frames(write_video(tmp_path / "a.mp4", [stored] * 3, turned=turned), "a", 1)[0].convert("L")).astype(float)
    down, left = bright
    assert picture.shape == ((64, 48) if turned % 180 else (48, 64))
    assert np.array_split(picture, 2)[1].mean() - np.array_split(picture, 2)[0].mean() == pytest.approx(255 * down, abs=20)
    assert np.array_split(picture, 2, 1)[0].mean() - np.array_split(picture, 2, 1)[1].mean() == pytest.approx(255 * left, abs=20)


def bad(folder):
    """Files that are no clips, each with what is said of it."""
    whole = random_clip(folder / "whole.mp4", options={"movflags": "faststart"}).read_bytes()
    Pictures.new("RGB", (8, 8)).save(folder / "picture.png")
    return {
        "sound.mp4": (write_sound(folder / "s.mp4").read_bytes(), "has no frames: it holds only sound"),
        "text.mp4": (b"a dog runs\n" * 99, "is damaged, or no video of a known container"),
        "empty.mp4": (b"", "is empty"),
        "playlist.mp4": (b"#EXTM3U\n#EXTINF:9,\nwhole.mp4\n#EXT-X-ENDLIST\n", "no video of a known container"),
        "list.mp4": (b"ffconcat version 1.0\nfile whole.mp4\n", "no video of a known container"),
        "picture.mp4": ((folder / "picture.png").read_bytes(), "no video of a known container"),
        "cut.mp4": (whole[: len(whole) // 2], r"is cut short: \d of its 6 seconds are there"),
        "head.mp4": (whole[:300], "has no frames"),
        "damaged.mp4": (damaged(whole), "is damaged"),
    }


def test_what_is_no_clip_is_named_in_one_sentence(tmp_path):
    for name, (content, sentence) in bad(tmp_path).items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BrokenClip, match=f"^video {name} .*{sentence}") as error:
            clip_frames(tmp_path / name, name, 2)
        assert "\n" not in str(error.value)


def test_more_pictures_than_can_be_are_refused(clip):
    with pytest.raises(
        BrokenClip, match=r"gives 2,901 pictures in its 3 seconds, expected at most 1,024: cut it, or read fewer than 1000 a second"
    ):
        frames_in(clip, "clip", 1000)


def test_without_pyav_the_extra_is_named(clip, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MissingExtra, match=r"reading the video clip needs the package av.*visavis\[video\]"):
        frames_in(clip, "clip", 1)


@pytest.fixture
def folder(tmp_path, clip):
    """Two clips, a picture and captions of them."""
    (tmp_path / "a.mp4").write_bytes(clip.read_bytes())
    write_video(tmp_path / "b.mp4", [gray(200)] * 5)
    Pictures.new("RGB", (48, 48)).save(tmp_path / "c.png")
    (tmp_path / "captions.csv").write_text("filename,caption,split\na.mp4,it gets brighter,train\nb.mp4,all white,val\nc.png,black,test\n")
    return tmp_path


def test_a_data_set_holds_clips_and_pictures(folder):
    clips = open_dataset(folder, pixels=True)
    assert [image.is_clip for image in clips.images] == [True, True, False]
    assert [image.num_frames(1) for image in clips.images] == [3, 1, 1]
    assert levels(clips.images[0].frames(1)) == [0, 10, 20]
    assert [image.preview().size for image in clips.images] == [(48, 48)] * 3
    assert len(clips.images[2].frames(5)) == 1
    with pytest.raises(DataError, match=r'a\.mp4 is a video, expected a picture: read its frames, with visual\.view = "frames"'):
        clips.images[0].open()


def test_a_name_without_an_ending_may_be_that_of_a_video(folder):
    (folder / "captions.csv").write_text("filename,caption,split\na,it gets brighter,train\nb,all white,val\n")
    clips = open_dataset(folder).images
    assert [(image.name, image.bytes.path.name, image.is_clip) for image in clips] == [("a", "a.mp4", True), ("b", "b.mp4", True)]
    (folder / "a.webm").touch()
    with pytest.raises(DataError, match=r"the video could be a\.mp4 or a\.webm; list it with its ending"):
        open_dataset(folder)


def test_broken_clips_are_findings(folder):
    write_sound(folder / "b.mp4")
    with pytest.raises(DataError, match=r"1 x broken video.*b\.mp4: the video has no frames: it holds only sound"):
        open_dataset(folder, pixels=True)
    assert len(open_dataset(folder, pixels=True, skip_bad=True).images) == 2
    (folder / "d.mp4").write_bytes((folder / "a.mp4").read_bytes())
    assert any(finding.where == "d.mp4" and "does not list it" in finding.what for finding in list_dataset(folder).findings)


def test_a_clip_is_too_long_at_the_rate_at_which_it_is_read(folder):
    """Of 59 seconds; who does not know the rate is told up to which one may go."""
    write_video(folder / "b.mp4", (gray(4 * number) for number in range(60)), rate=1)
    assert len(open_dataset(folder, pixels=True, rate=17).images) == 3
    with pytest.raises(DataError, match=r"b\.mp4: the video gives 1,063 pictures in its 59 seconds, .* read fewer than 18 a second"):
        open_dataset(folder, pixels=True, rate=18)
    report = check_dataset(folder)
    assert report.ok
    (note,) = (finding for finding in report.findings if finding.kind == "long video")
    assert (note.where, "59 seconds, is read at up to 17.33 pictures a second" in note.what) == ("b.mp4", True)


def test_a_clip_that_is_damaged_after_its_first_frame_is_found_where_all_are_decoded(folder):
    whole = random_clip(folder / "b.mp4", options={"movflags": "faststart"}).read_bytes()
    assert check_dataset(folder).ok
    (folder / "b.mp4").write_bytes(damaged(whole))
    assert len(open_dataset(folder, pixels=True).images) == 3
    with pytest.raises(DataError, match=r"b\.mp4: the video is damaged"):
        open_dataset(folder, pixels=True, whole=True)
    assert [finding.where for finding in check_dataset(folder).findings if finding.loses] == ["b.mp4"]
