"""Hostile samples in streams: the limits of ordinary data sets hold, errors name the sample, and
memory stays small.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import pickle
import subprocess
import sys
import tarfile
import warnings

import numpy as np
import pytest
from PIL import Image
from tests.platforms import posix

from visavis import data_convert
from visavis.core.errors import DataError, VisavisError
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.formats.arrow_tables import arrow_rows
from visavis.data.formats.listing import MAX_CAPTION_CHARS, Listing
from visavis.data.formats.table_columns import MAX_TEXT_BYTES
from visavis.data.shard_stream import ShardStream

from .test_streams import make_loader, numbers

pa = pytest.importorskip("pyarrow", reason="PyArrow is not installed: pip install 'visavis[large]'")
pq = pytest.importorskip("pyarrow.parquet")

LONG = "a" * (MAX_CAPTION_CHARS + 1)
HUGE = "a" * 30_000_000
BAD = 3


def image_bytes(number):
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (number, 0, 7)).save(content, "PNG")
    return content.getvalue()


def write_tar(path, bad, name=b"00003"):
    """Seven samples. The fourth one has members of its own, and maybe a name of its own."""
    with tarfile.open(path, "w", errors="surrogateescape") as archive:
        for number in range(7):
            members = (
                bad
                if number == BAD
                else {"png": image_bytes(number), "txt": f"caption {number}".encode()}
            )
            for extension, content in members.items():
                key = name.decode(errors="surrogateescape") if number == BAD else f"{number:05d}"
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


TAR = {
    "long": ({"txt": LONG.encode()}, "the caption has 20,001 characters, expected at most 20,000"),
    "long list": ({"json": json.dumps(["a", LONG]).encode()}, "the caption has 20,001 characters"),
    "huge": ({"txt": HUGE.encode()}, f"expected at most {MAX_TEXT_BYTES:,} bytes, got 30,000,000"),
    "huge JSON": (
        {"json": json.dumps({"caption": HUGE}).encode()},
        f"expected at most {MAX_TEXT_BYTES:,} bytes",
    ),
    "surrogate": (
        {"json": rb'{"caption": "a \ud800 red"}'},
        r"the caption 'a \\ud800 red' is not UTF-8",
    ),
    "surrogate list": ({"json": rb'["a", {"raw": "a \udcff red"}]'}, "is not UTF-8"),
    "bytes": ({"txt": b"a \xff red"}, "is not readable: 'utf-8' codec"),
    "deep": ({"json": b"[" * 100_000}, "is not readable"),
    "digits": ({"json": b"9" * 5_000}, "is not readable"),
    "number": ({"json": b"3"}, "expected a caption, got 3"),
}


def check_stream(source, message, caplog):
    with pytest.raises(DataError, match=message) as error:
        list(make_loader(source).epoch(1))
    assert len(str(error.value).encode()) < 2 * MAX_CAPTION_CHARS
    with caplog.at_level(logging.WARNING, "visavis"):
        batches = list(make_loader(source, skip_bad=True).epoch(1))
    assert sorted(numbers(*batches)) == [0, 1, 2, 4, 5, 6]
    assert "1 unusable items" in caplog.messages[-1]


@pytest.mark.parametrize("case", TAR)
def test_hostile_member_is_one_unusable_item(case, tmp_path, caplog):
    content, message = TAR[case]
    write_tar(tmp_path / "train-0.tar", {"png": image_bytes(BAD), **content})
    check_stream(tmp_path / "train-0.tar", message, caplog)
    losses = [finding for finding in check_dataset(tmp_path).findings if finding.loses_data]
    assert losses and all("00003" in str(loss) for loss in losses)
    assert len(open_dataset(tmp_path, skip_bad=True).images) == (
        7 if case in ("long list", "surrogate list") else 6
    )


def drop_in_a_cycle(hold):
    """Drop an object that only the garbage collector frees, after collections that sorted it behind
    its parts. Return the warnings.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def make():
            held = hold()
            cycle = [held, lambda: cycle]
            gc.collect()
            gc.collect()

        make()
        gc.collect()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("case", TAR)
def test_error_of_a_member_leaves_no_file_open(case, tmp_path):
    """The error, its cause and their frames hold the reader and its file."""
    write_tar(tmp_path / "train-0.tar", {"png": image_bytes(BAD), **TAR[case][0]})

    def error():
        try:
            return list(make_loader(tmp_path / "train-0.tar").epoch(1))
        except DataError as found:
            return found

    assert drop_in_a_cycle(error) == []


@pytest.mark.parametrize("kind", ["tar", "parquet"])
@pytest.mark.parametrize("num_batches", [0, 1])
def test_stream_dropped_in_the_middle_leaves_no_file_open(kind, num_batches, tmp_path):
    path = tmp_path / f"train-0.{kind}"
    if kind == "tar":
        write_tar(path, {"png": image_bytes(BAD), "txt": b"caption 3"})
    else:
        pq.write_table(pa.table(table("caption 3")), path)

    def batches():
        epoch = make_loader(path, batch_size=2).epoch(1)
        return epoch, [next(epoch) for _ in range(num_batches)]

    assert drop_in_a_cycle(batches) == []


@pytest.mark.parametrize("case", TAR)
def test_listing_of_a_bad_shard_leaves_no_file_open(case, tmp_path):
    write_tar(tmp_path / "train-0.tar", {"png": image_bytes(BAD), **TAR[case][0]})
    assert (
        drop_in_a_cycle(lambda: (check_dataset(tmp_path), open_dataset(tmp_path, skip_bad=True)))
        == []
    )


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_rows_dropped_in_the_middle_leave_no_file_open(suffix, rows, tmp_path):
    path = tmp_path / f"train-0{suffix}"
    made = pa.table(table("caption 3"))
    if suffix == ".parquet":
        pq.write_table(made, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, made.schema) as writer:
            writer.write_table(made)

    def first_rows():
        generator = arrow_rows(path, tmp_path, path.name, Listing(path))
        return generator, [next(generator) for _ in range(rows)]

    assert drop_in_a_cycle(first_rows) == []


def test_member_name_that_is_not_utf8_is_one_unusable_item(tmp_path, caplog):
    write_tar(
        tmp_path / "train-0.tar", {"png": image_bytes(BAD), "txt": b"caption 3"}, name=b"00003\xff"
    )
    check_stream(tmp_path / "train-0.tar", r"00003\\xff: expected a name in UTF-8", caplog)
    assert len(open_dataset(tmp_path, skip_bad=True).images) == 6


def test_header_that_declares_a_huge_name_is_damage(tmp_path):
    write_tar(tmp_path / "train-0.tar", {"png": image_bytes(BAD), "txt": b"a"})
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 2**33
    with open(tmp_path / "train-0.tar", "r+b") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.truncate(2**33 + 10_240)
    with pytest.raises(
        DataError, match="expected a header of at most 1,048,576 bytes, got 8,589,934,592"
    ):
        ShardStream.open(str(tmp_path / "train-0.tar"), max_open=2)


def table(bad, kind=None):
    rows = range(7)
    captions = [bad if row == BAD else f"caption {row}" for row in rows]
    return {
        "image": pa.array([{"bytes": image_bytes(row), "path": f"{row}.png"} for row in rows]),
        "caption": pa.array(
            captions
            if kind != "list"
            else [caption if isinstance(caption, list) else [caption] for caption in captions]
        ),
    }


def damaged_text():
    """A column of text with bytes that are not UTF-8."""
    return pa.array(
        [b"a \xff red" if row == BAD else b"caption %d" % row for row in range(7)], pa.binary()
    ).view(pa.string())


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (lambda: table(LONG), "row 3: the caption has 20,001 characters"),
        (lambda: table([LONG, "a"], "list"), "row 3: the caption has 20,001 characters"),
        (
            lambda: table("a" * (MAX_TEXT_BYTES + 1)),
            rf"row 3, caption: expected at most {MAX_TEXT_BYTES:,} bytes, got",
        ),
        (
            lambda: table(["abc"] * 2_000_000, "list"),
            rf"row 3, caption: expected at most {MAX_TEXT_BYTES:,} bytes, got",
        ),
        (
            lambda: {**table(""), "caption": damaged_text()},
            "row 3, caption: expected text in UTF-8",
        ),
        (lambda: table(None), "row 3: expected a caption, got None"),
    ],
    ids=["long", "long list", "huge", "huge list", "bytes", "null"],
)
def test_hostile_row_is_one_unusable_item(columns, message, dictionary, tmp_path, caplog):
    made = pa.table(columns())
    if (
        dictionary
        and pa.types.is_string(made.schema.field("caption").type)
        and "UTF-8" not in message
    ):
        made = made.set_column(1, "caption", made["caption"].dictionary_encode())
    pq.write_table(made, tmp_path / "train-0.parquet")
    check_stream(tmp_path / "train-0.parquet", message, caplog)


@pytest.mark.slow
def test_huge_column_is_not_read(tmp_path):
    """The metadata has the size of a column."""
    pq.write_table(
        pa.table({"image": [image_bytes(1)], "caption": ["a" * 70_000_000]}),
        tmp_path / "train-0.parquet",
    )
    stream = ShardStream.open(str(tmp_path / "train-0.parquet"), max_open=2)
    with pytest.raises(
        DataError, match=r"caption: expected at most 67,108,864 bytes, got 70,\d+,\d+\. Remove"
    ):
        stream.captions(0)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("repeated", ["image", "caption", "split", "filename", "other"])
def test_columns_of_one_name_are_refused_if_they_are_read(tmp_path, suffix, repeated):
    values = {
        "image": pa.array([image_bytes(row) for row in range(3)]),
        **{name: pa.array(list("abc")) for name in ("caption", "split", "filename", "other")},
    }
    names = [*values, repeated]
    made = pa.Table.from_arrays([values[name] for name in names], names=names)
    path = tmp_path / f"train{suffix}"
    if suffix == ".parquet":
        pq.write_table(made, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, made.schema) as writer:
            writer.write_table(made)
    if repeated == "other":
        assert len(open_dataset(tmp_path).images) == 3
        return
    (finding,) = check_dataset(tmp_path).findings
    assert (
        f"expected one column {repeated}, got 2. Rename the others" in finding.message
        or "expected a column with the image" in finding.message
    )
    with pytest.raises(DataError):
        open_dataset(tmp_path, skip_bad=True)
    if suffix == ".parquet" and repeated != "split":
        with pytest.raises(VisavisError):
            list(make_loader(path, skip_bad=True).epoch(1))


@posix
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_hostile_samples_need_little_memory(tmp_path):
    write_tar(tmp_path / "train-0.tar", {"png": image_bytes(BAD), "txt": HUGE.encode() * 10})
    pq.write_table(pa.table(table("a" * 60_000_000)), tmp_path / "train-0.parquet")
    for name in ("train-0.tar", "train-0.parquet"):
        program = f"""
from tests.data.test_hostile_streams import make_loader
from tests.processes import peak_memory
list(make_loader({str(tmp_path / name)!r}, skip_bad=True).epoch(1))
print(peak_memory())
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        assert int(done.stdout) < 1e9


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("repeated", ["caption", "split", "filename", "other"])
def test_columns_of_one_name_in_a_table_of_files(tmp_path, suffix, repeated):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    values = {"filename": ["a.png"], "caption": ["a"], "split": ["train"], "other": ["x"]}
    names = [*values, repeated]
    made = pa.Table.from_arrays([pa.array(values[name]) for name in names], names=names)
    path = tmp_path / f"captions{suffix}"
    if suffix == ".parquet":
        pq.write_table(made, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, made.schema) as writer:
            writer.write_table(made)
    (finding,) = check_dataset(path).findings
    assert f"expected one column {repeated}, got 2. Rename the others" in finding.message
    with pytest.raises(DataError):
        open_dataset(path, skip_bad=True)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("video_id", "a name and split in UTF-8"),
        ("split", "a name and split in UTF-8"),
        ("caption", "the caption of"),
    ],
)
def test_surrogate_in_a_list_is_refused_by_conversion(tmp_path, field, message):
    content = {
        "videos": [{"video_id": "v0", "split": "train"}],
        "sentences": [{"video_id": "v0", "caption": "a dog"}],
    }
    for entry in (*content["videos"], *content["sentences"]):
        if field in entry:
            entry[field] += "\ud800"
    (tmp_path / "videodatainfo.json").write_text(json.dumps(content))
    (tmp_path / "rgb.pickle").write_bytes(pickle.dumps({"v0": np.ones((2, 3), np.float32)}))
    with pytest.raises(DataError, match=f"videodatainfo.json.*expected {message}"):
        data_convert(
            [str(tmp_path / "rgb.pickle"), str(tmp_path / "videodatainfo.json")],
            out=tmp_path / "out",
        )
    assert not (tmp_path / "out").exists()
