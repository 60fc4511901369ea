"""Vectors of clips of any length: the same for each division into sections, with bounded memory."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from fractions import Fraction

import numpy as np
import pytest
import torch
from tests.platforms import posix

from visavis.core import storage
from visavis.core.encoded import unit_rows
from visavis.data.image_file import ByteRange
from visavis.data.video import MAX_SECONDS, VideoError, count_frames, iter_frames, open_frames
from visavis.data.vocabulary import Vocabulary
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.image_text.global_matchers import VSEInfinity, VSEPlusPlus
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.retrieval.build import encoding
from visavis.retrieval.source_files import list_source_files

from ..videos import gray, write_video

pytest.importorskip("av")
NUM_FRAMES = 23


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A clip with one frame per second."""
    folder = tmp_path_factory.mktemp("clips")
    noise = np.random.default_rng(0).integers(0, 255, (NUM_FRAMES, 48, 64, 3), dtype=np.uint8)
    write_video(folder / "a.mkv", noise, rate=1, codec="mpeg4")
    return folder


def make_model(kind):
    words = Vocabulary.from_captions(["a red dog"], min_count=1)
    view = (
        {"granularity": "pooled"}
        if kind == "images"
        else {"granularity": "frames", "frames_per_second": 1.0}
    )
    torch.manual_seed(0)
    model = VSEPlusPlus if kind == "images" else VSEInfinity
    sizes = {
        "visual_input_dim": 192,
        "text_input_dim": len(words),
        "text_granularity": "tokens",
        "embedding_dim": 8,
        "word_dim": 5,
    }
    return Retriever(
        model(model.Config(**sizes)),
        Processor(EncoderSpec("visual", "scenes", **view), None, words),
    )


def encode(model, folder, moment_seconds):
    shard = encoding.encode_shard(model, list_source_files(folder).files, moment_seconds)
    assert not shard.unreadable
    return {
        item.key: (item, torch.from_numpy(vector))
        for item, vector in zip(shard.items, shard.vectors, strict=True)
    }


@pytest.mark.parametrize(
    ("max_frames", "moment_seconds"), [(1024, 4), (8, 4), (3, 4), (8, 11), (1, 1), (8, 60)]
)
@pytest.mark.slow
def test_clip_vectors_are_means_of_frames(folder, monkeypatch, max_frames, moment_seconds):
    model = make_model("images")
    frames = model.encode_images(list(iter_frames(folder / "a.mkv", "a", 1.0)))
    monkeypatch.setattr(encoding, "MAX_FRAMES_PER_VIDEO", max_frames)
    rows = encode(model, folder, moment_seconds)
    starts = range(0, NUM_FRAMES, moment_seconds) if moment_seconds < NUM_FRAMES else ()
    spans = {
        f"a.mkv#t={start},{min(start + moment_seconds, NUM_FRAMES)}": slice(
            start, start + moment_seconds
        )
        for start in starts
    }
    spans["a.mkv"] = slice(None)
    assert rows.keys() == spans.keys()
    for key, span in spans.items():
        assert torch.allclose(rows[key][1], unit_rows(frames[span].mean(0)), atol=1e-6), key


@pytest.mark.parametrize("moment_seconds", [4, 11])
def test_video_model_encodes_long_clips_in_parts(folder, monkeypatch, moment_seconds):
    model = make_model("clips")
    frames = list(iter_frames(folder / "a.mkv", "a", 1.0))
    expected = encode(model, folder, moment_seconds)
    together = model.to_unit_rows(model.encode_visual([frames, frames[:moment_seconds]]))
    assert torch.allclose(
        torch.stack([expected["a.mkv"][1], expected[f"a.mkv#t=0,{moment_seconds}"][1]]),
        together,
        atol=1e-6,
    )
    monkeypatch.setattr(encoding, "MAX_FRAMES_PER_VIDEO", 8)
    rows = encode(model, folder, moment_seconds)
    assert [(key, item.dhash) for key, (item, _) in rows.items()] == [
        (key, item.dhash) for key, (item, _) in expected.items()
    ]
    if moment_seconds == 4:
        parts = model.to_unit_rows(
            model.encode_visual([frames[start : start + 8] for start in range(0, NUM_FRAMES, 8)])
        )
        lengths = torch.tensor([8.0, 8.0, 7.0])[:, None]
        assert torch.allclose(rows["a.mkv"][1], unit_rows((parts * lengths).sum(0)), atol=1e-6)
        assert all(
            torch.allclose(rows[key][1], vector, atol=1e-6)
            for key, (_, vector) in expected.items()
            if "#" in key
        )


def test_clip_larger_than_one_read_is_indexed(folder, monkeypatch):
    """The bytes of a clip are never in memory as a whole, in a file of its own or in an archive."""
    content = (folder / "a.mkv").read_bytes()
    monkeypatch.setattr(storage, "MAX_BYTES", len(content) - 1)
    assert len(encode(make_model("images"), folder, 4)) == 7


def test_part_of_an_archive_reads_as_its_bytes(folder, tmp_path):
    content = (folder / "a.mkv").read_bytes()
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in ("a.mkv", "b.mkv", "c.mkv"):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with tarfile.open(tmp_path / "a.tar") as archive:
        offset = archive.getmember("b.mkv").offset_data
    part, random = ByteRange(tmp_path / "a.tar", offset, len(content)), np.random.default_rng(0)
    assert part.sha256() == ByteRange(folder / "a.mkv").sha256()
    with part.open() as file, io.BytesIO(content) as expected:
        for _ in range(300):
            whence = int(random.integers(3))
            position = (
                int(random.integers(len(content))) * (-1 if whence == 2 else 1) // (whence + 1)
            )
            assert file.seek(position, whence) == expected.seek(position, whence)
            size = int(random.integers(-1, 2 * len(content)))
            assert file.read(size) == expected.read(size)
            assert file.tell() == expected.tell()
        assert count_frames(file, "b.mkv", 1.0) == NUM_FRAMES


def test_wrong_time_stamps_do_not_make_endless_moments(tmp_path):
    path = write_video(tmp_path / "a.avi", [gray(0), gray(8)], rate=Fraction(1, 400_000))
    with (
        pytest.raises(
            VideoError, match=rf"has 800,000 seconds, expected at most {MAX_SECONDS:,}\. Cut it"
        ),
        open_frames(path, "a", 1.0),
    ):
        pass


def test_shards_have_few_clips(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02d} clip.mp4").touch()
        (tmp_path / f"{number:02d}.png").touch()
    files = list_source_files(tmp_path).files
    shards = encoding.divide_into_shards(files)
    assert [file for shard in shards for file in shard] == list(files)
    assert [sum(file.is_video for file in shard) for shard in shards] == [8, 8, 4]


@posix
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_memory_of_a_long_clip_is_bounded(tmp_path):
    """Sixty frames of 1920 x 1080 pixels take 370 MB, and their pixels for the model 9 MB."""
    write_video(
        tmp_path / "a.mp4",
        (np.roll(gray(number, 8).repeat(135, 0).repeat(240, 1), 1) for number in range(60)),
        rate=1,
        codec="mpeg4",
    )
    program = f"""
import PIL.Image
from tests.processes import peak_memory
from tests.retrieval.test_clip_encoding import encode, make_model
for kind in ("images", "clips"):
    model = make_model(kind)
    model.encode_visual([PIL.Image.new("RGB", (8, 8))])
    before = peak_memory()
    encode(model, {str(tmp_path)!r}, 4)
    print(peak_memory() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert all(int(line) < 150e6 for line in done.stdout.split()), done.stdout
