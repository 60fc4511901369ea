"""Files: written whole or not at all, read as what they are declared to be or refused in one sentence."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from visavis import storage
from visavis.errors import DataError, RefusedOverwrite, RunError, StorageError

finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_json_comes_back(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "value.json"
    storage.write_json(path, value)
    assert storage.read_json(path) == value


@given(st.lists(json_values, max_size=5))
def test_json_lines_come_back(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("log") / "rows.jsonl"
    storage.write_json_lines(path, rows)
    storage.append_json_line(path, {"last": "line\u2028"})
    assert storage.read_json_lines(path) == [*rows, {"last": "line\u2028"}]


def test_a_last_line_cut_short_is_left_out(tmp_path):
    log = tmp_path / "metrics.jsonl"
    for epoch in range(3):
        storage.append_json_line(log, {"epoch": epoch})
    whole = log.read_bytes()
    for cut in range(whole[:-1].rfind(b"\n") + 1, len(whole)):
        log.write_bytes(whole[:cut])
        assert [row["epoch"] for row in storage.read_json_lines(log)] == [0, 1]


def test_a_last_line_cut_inside_a_letter_is_left_out(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes('{"epoch": 0}\n{"note": "é'.encode()[:-1])
    assert storage.read_json_lines(log) == [{"epoch": 0}]


def test_toml_arrays_and_tensors_come_back(tmp_path):
    storage.write_toml(tmp_path / "run.toml", {"seed": 1, "text": 'two\nlines "quoted"', "phase": [{"rate": 0.1}]})
    assert storage.read_toml(tmp_path / "run.toml") == {"seed": 1, "text": 'two\nlines "quoted"', "phase": [{"rate": 0.1}]}
    storage.write_array(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    assert np.load(tmp_path / "a.npy").tolist() == [[0, 1, 2], [3, 4, 5]]
    square = torch.arange(4.0).reshape(2, 2)
    storage.write_tensors(tmp_path / "w.safetensors", {"turned": square.T})
    assert torch.equal(storage.read_tensors(tmp_path / "w.safetensors")["turned"], square.T)
    assert all(not entry.name.endswith(".part") for entry in tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    storage.write_text(tmp_path / "a.txt", "old")
    with pytest.raises(RuntimeError), storage.replacing(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise RuntimeError
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_equal_tensors_are_equal_files(tmp_path):
    tensors = {name: torch.arange(12.0) for name in ("weight", "bias", "scale")}
    for number in range(8):
        storage.write_tensors(tmp_path / f"{number}.safetensors", tensors)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_a_process_killed_in_the_middle_of_a_write_leaves_the_old_file(tmp_path):
    storage.write_text(tmp_path / "a.txt", "old")
    program = """
import os, signal, sys
from visavis.storage import replacing
with replacing(sys.argv[1]) as part:
    part.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", program, tmp_path / "a.txt"], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "a.txt").read_text() == "old"
    storage.write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new"


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), storage.replacing_folder(tmp_path / "model") as part:
        (part / "config.json").write_text("{}")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with storage.replacing_folder(tmp_path / "model") as part:
        (part / "inner").mkdir()
        (part / "inner" / "config.json").write_text("{}")
        assert not (tmp_path / "model").exists()
    assert (tmp_path / "model" / "inner" / "config.json").read_text() == "{}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_new_folder_is_never_the_users(tmp_path):
    assert storage.new_folder(tmp_path / "runs" / "mine").is_dir()
    assert storage.new_folder(tmp_path / "runs" / "mine").is_dir(), "an empty folder may be taken"
    (tmp_path / "runs" / "mine" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "runs" / "mine", tmp_path / "file"):
        with pytest.raises(RefusedOverwrite, match=f"^{path} already exists and is not an empty folder; nothing was changed"):
            storage.new_folder(path)
    assert (tmp_path / "runs" / "mine" / "thesis.txt").read_text() == "precious"


def test_numbered_folders_never_repeat(tmp_path):
    (tmp_path / "demo-2").mkdir()
    assert [storage.numbered_folder(tmp_path / "demo").name for _ in range(2)] == ["demo-1", "demo-3"]


def test_the_room_of_an_array_is_taken_when_it_is_created(tmp_path):
    storage.create_array(tmp_path / "store" / "vectors.npy", shape=(1000, 64), dtype="float16")
    status = (tmp_path / "store" / "vectors.npy").stat()
    assert status.st_blocks * 512 >= status.st_size > 1000 * 64 * 2
    assert not storage.read_array(tmp_path / "store" / "vectors.npy").any()


def test_a_full_disk_is_one_sentence_and_leaves_the_old_files(small_disk):
    storage.write_text(small_disk / "a.txt", "old")
    large = torch.zeros(2**20)
    for write in (
        lambda: storage.write_text(small_disk / "a.txt", "new" * 2**20),
        lambda: storage.write_tensors(small_disk / "a.safetensors", {"weight": large}),
        lambda: storage.write_array(small_disk / "a.npy", large.numpy()),
        lambda: storage.create_array(small_disk / "b.npy", shape=(2**20,), dtype="float32"),
        lambda: storage.append_json_line(small_disk / "log.jsonl", "long" * 2**20),
    ):
        with pytest.raises(StorageError, match=r"a\.\w+|b\.npy|log\.jsonl") as caught:
            write()
        assert "No space left on device" in str(caught.value)
        assert "make room" in str(caught.value)
    assert (small_disk / "a.txt").read_text() == "old"
    assert not list(small_disk.glob(".*"))


def test_a_folder_that_may_not_be_written_to_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/inner/a\.txt cannot be written: Not a directory"):
        storage.write_text(tmp_path / "file" / "inner" / "a.txt", "a")


def test_unreadable_files_are_named_with_the_place(tmp_path):
    bad = tmp_path / "bad"
    with pytest.raises(DataError, match="No such file"):
        storage.read_text(bad)
    with pytest.raises(RunError, match="No such file"):
        storage.read_tensors(bad, error=RunError)
    bad.write_bytes(b"ab\xff")
    with pytest.raises(DataError, match="is not UTF-8: byte 2 is 0xff"):
        storage.read_text(bad)
    with pytest.raises(DataError, match="is not TOML"):
        storage.read_toml(_written(bad, b"{\n  1"))
    with pytest.raises(DataError, match="nested too deeply"):
        storage.read_toml(_written(bad, b"a = " + b"[" * 50_000))
    with pytest.raises(DataError, match="is not a readable safetensors file"):
        storage.read_tensors(bad)
    with pytest.raises(DataError, match=r"is not a readable \.npy"):
        storage.read_array(bad)


@dataclass(frozen=True)
class Settings:
    width: int
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{\n  1", "is not JSON: .* at line 2 column 3"),
        (b"[" * 100_000, "is not JSON: recursion limit"),
        (b'"\\ud800"', "is not JSON"),
        (b"", "is not JSON: EOF"),
        (b"null", "its content is None: input should be an object"),
        (b"{}", "width is missing: the file is damaged or of another version"),
        (b'{"width": true}', "width is True: input should be a valid integer"),
        (b'{"width": "64"}', "width is '64': input should be a valid integer"),
        (b'{"width": 64, "names": ["a", 5]}', "names.1 is 5: input should be a valid string"),
    ],
)
def test_a_json_file_is_of_the_declared_shape_or_refused_in_words(tmp_path, content, sentence):
    with pytest.raises(RunError, match=f"^{tmp_path / 'config.json'}:? {sentence}"):
        storage.read_json(_written(tmp_path / "config.json", content), Settings, error=RunError)


def test_a_byte_order_mark_is_not_part_of_a_text(tmp_path):
    path = tmp_path / "a.json"
    assert storage.read_json(_written(path, b'\xef\xbb\xbf{"width": 64, "names": ["a"]}'), Settings) == Settings(64, ("a",))
    assert storage.read_toml(_written(path, b"\xef\xbb\xbfa = 1")) == {"a": 1}


def test_only_regular_files_of_bounded_size_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(40 * 2**30)
    for name, what in (
        ("pipe", "is a named pipe"),
        ("zero", "is a device"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("sparse", "is of 42,949,672,960 bytes, expected at most"),
        (".", "is a folder"),
    ):
        for read in (storage.read_bytes, storage.read_json, storage.read_toml):
            with pytest.raises(DataError, match=what):
                read(tmp_path / name)
        if name != "sparse":
            for read in (storage.read_array, storage.read_tensors, storage.content_hash):
                with pytest.raises(DataError, match=what):
                    read(tmp_path / name)


def test_arrays_are_numbers_of_the_declared_kind(tmp_path):
    path = tmp_path / "a.npy"
    storage.write_array(path, np.arange(6).reshape(2, 3))
    assert storage.read_array(path, dimensions=2, kinds="iu").tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(DataError, match=r"holds int64 of shape \(2, 3\), expected floating-point numbers"):
        storage.read_array(path)
    with pytest.raises(DataError, match=r"expected integers of 1 dimensions"):
        storage.read_array(path, dimensions=1, kinds="i")
    storage.write_array(path, np.zeros(3, ">f4"))
    with pytest.raises(DataError, match=r"holds >f4 of shape \(3,\)"):
        storage.read_array(path)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 150))
def test_a_damaged_array_or_tensor_file_is_refused_in_words(tmp_path_factory, damage, place):
    folder = tmp_path_factory.mktemp("damaged")
    storage.write_array(folder / "a.npy", np.arange(12.0).reshape(3, 4))
    storage.write_tensors(folder / "a.safetensors", {"weight": torch.ones(3, 4)})
    for name, read in (("a.npy", storage.read_array), ("a.safetensors", storage.read_tensors)):
        content = bytearray((folder / name).read_bytes())
        content[place : place + len(damage)] = damage
        with contextlib.suppress(DataError):
            read(_written(folder / name, bytes(content)))


def test_tensors_are_those_expected(tmp_path):
    path = tmp_path / "a.safetensors"
    storage.write_tensors(path, {"weight": torch.ones(2, 3), "bias": torch.ones(3)})
    assert storage.read_tensors(path, {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)})["weight"].sum() == 6
    for like, sentence in (
        ({"weight": torch.zeros(2, 3)}, r"bias is float32 of shape \[3\], expected none of that name"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(4)}, r"bias is float32 of shape \[3\], expected float32 of shape \[4\]"),
        ({"weight": torch.zeros(2, 3).half(), "bias": torch.zeros(3)}, r"weight is float32 of .* expected float16"),
    ):
        with pytest.raises(RunError, match=sentence):
            storage.read_tensors(path, like, error=RunError)


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_the_cache_folder_is_the_one_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "chosen"))
    assert storage.cache_folder() == tmp_path / "chosen"
    monkeypatch.delenv("VISAVIS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert storage.cache_folder() == tmp_path / "xdg" / "visavis"
