"""Reports about videos and about shards of data."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from visavis.core.errors import DataError
from visavis.data.dataset_check import check_dataset
from visavis.data.shard_stream import ShardStream
from visavis.data.video import count_frames, first_frame, open_frames

from ..videos import gray, write_video


def image_bytes():
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, "PNG")
    return content.getvalue()


def write_tar(path, name, caption):
    with tarfile.open(path, "w") as archive:
        for suffix, content in ((".png", image_bytes()), (".txt", caption)):
            member = tarfile.TarInfo(name + suffix)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


@pytest.mark.report(
    "UltraStar-Deluxe/USDX#948", "the cover of a video is read instead of the video"
)
@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_video_whose_first_stream_is_its_cover(tmp_path, suffix):
    pytest.importorskip("av", reason="reads video files")
    path = write_video(
        tmp_path / f"a{suffix}", [gray(8 * number) for number in range(20)], cover=1024
    )
    assert count_frames(path, "a", 1.0) == 2
    assert first_frame(path, "a").size == (48, 48)


@pytest.mark.report(
    "OpenShot/openshot-qt#3585", "a sequence of images with one image per second or less ends early"
)
def test_slideshow_is_read_to_its_end(tmp_path):
    from fractions import Fraction

    pytest.importorskip("av", reason="reads video files")
    path = write_video(
        tmp_path / "a.mp4", [gray(40 * number) for number in range(4)], rate=Fraction(1, 3)
    )
    with open_frames(path, "a", 1.0) as (count, frames):
        assert [round(np.asarray(frame).mean() / 40) for frame in frames] == [
            0,
            0,
            0,
            1,
            1,
            1,
            2,
            2,
            2,
            3,
            3,
            3,
        ]
    assert count == 12


@pytest.mark.report("tarun005/FLAVR#11", "all frames of a video are in memory")
@pytest.mark.report(
    "showlab/Q2A#3", "features of a long video need more memory than the machine has"
)
@pytest.mark.slow
def test_frames_are_decoded_one_at_a_time(tmp_path):
    pytest.importorskip("av", reason="reads video files")
    path = write_video(
        tmp_path / "a.mkv", (gray(number % 256) for number in range(1_100)), rate=1, codec="mpeg4"
    )
    with open_frames(path, "a", 1.0) as (count, frames):
        assert count == 1_100
        assert sum(1 for _ in frames) == count


@pytest.mark.report(
    "mxmlnkn/ratarmount#32",
    "a name in a tar file that is not UTF-8 ends the program with UnicodeEncodeError",
)
def test_tar_with_a_name_that_is_not_utf8(tmp_path):
    write_tar(tmp_path / "train.tar", b"caf\xe9".decode(errors="surrogateescape"), b"a dog")
    pytest.importorskip("pyarrow", reason="reads shards")
    with pytest.raises(DataError, match=r"caf\\xe9: expected a name in UTF-8"):
        ShardStream.open(str(tmp_path / "train.tar"), max_open=1).ids(np.array([0]))
    assert "broken UTF-8" in {finding.kind for finding in check_dataset(tmp_path).findings}


@pytest.mark.report("rom1504/img2dataset#347", "a caption outside the code page of Windows is lost")
def test_caption_in_japanese_is_read_from_shards(tmp_path):
    pytest.importorskip("pyarrow", reason="reads shards")
    write_tar(tmp_path / "train.tar", "0", "San Pedro アヤワスカ".encode())
    assert ShardStream.open(str(tmp_path / "train.tar"), max_open=1).captions(0) == [
        "San Pedro アヤワスカ"
    ]


@pytest.mark.report(
    "dask/dask#9251", "two columns of one name: an error of Arrow that does not name the column"
)
@pytest.mark.report(
    "pola-rs/polars#27393", "two columns of one name: one of them is dropped without a message"
)
def test_table_with_two_columns_of_one_name(tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    columns = [pa.array([image_bytes()]), pa.array(["a dog"]), pa.array(["a cat"])]
    pq.write_table(
        pa.Table.from_arrays(columns, names=["image", "caption", "caption"]),
        tmp_path / "train.parquet",
    )
    (finding,) = check_dataset(tmp_path).findings
    assert "expected one column caption, got 2. Rename the others." in finding.message


@pytest.mark.slow
@pytest.mark.report("ray-project/ray#22910", "a list of thousands of Parquet files takes minutes")
def test_two_thousand_tables_are_listed_in_seconds(tmp_path):
    import time

    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"image": [image_bytes()], "caption": ["a dog"]})
    for number in range(2_048):
        pq.write_table(table, tmp_path / f"{number}.parquet")
    start = time.process_time()
    assert len(ShardStream.open(str(tmp_path), max_open=1)) == 2_048
    assert time.process_time() - start < 10
