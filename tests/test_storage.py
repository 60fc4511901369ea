"""Storage: atomic writes, and checked reads with clear errors."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.matching import mentions
from tests.platforms import posix

from visavis.core import storage
from visavis.core.errors import DataError, RefusedOverwrite, RunError, StorageError

finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_storage_json_round_trips(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "value.json"
    storage.write_json(path, value)
    assert storage.read_json(path) == value


@given(st.lists(json_values, max_size=5))
def test_storage_json_lines_round_trip(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("log") / "rows.jsonl"
    storage.write_json_lines(path, rows)
    storage.append_json_line(path, {"last": "line\u2028"})
    assert storage.read_json_lines(path) == [*rows, {"last": "line\u2028"}]


def test_storage_skips_truncated_last_line(tmp_path):
    log = tmp_path / "metrics.jsonl"
    for epoch in range(3):
        storage.append_json_line(log, {"epoch": epoch})
    whole = log.read_bytes()
    for cut in range(whole[:-1].rfind(b"\n") + 1, len(whole)):
        log.write_bytes(whole[:cut])
        assert [row["epoch"] for row in storage.read_json_lines(log)] == [0, 1]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of file sizes")
def test_storage_append_is_all_or_nothing_at_any_size_limit(tmp_path):
    """A limit of file sizes stops a write after any byte, as a full disk does."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    chooser = random.Random(0)
    for number in range(200):
        log, acknowledged = tmp_path / f"{number}.jsonl", []
        resource.setrlimit(resource.RLIMIT_FSIZE, (chooser.randrange(1, 2000), before[1]))
        try:
            with pytest.raises(StorageError, match="No space left"):
                for value in range(1000):
                    row = {"value": value, "text": "é" * chooser.randrange(40)}
                    storage.append_json_line(log, row)
                    acknowledged.append(value)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert log.read_bytes()[-1:] in (b"", b"\n")
        storage.append_json_line(log, {"value": -1})
        assert [row["value"] for row in storage.read_json_lines(log)] == [*acknowledged, -1]


def test_storage_append_starts_on_its_own_line(tmp_path):
    log = tmp_path / "metrics.jsonl"
    for content, kept in ((b"", []), (b'{"epoch', []), (b"1\n", [1]), (b'1\n{"epoch": ', [1])):
        log.write_bytes(content)
        storage.append_json_line(log, 2)
        assert storage.read_json_lines(log) == [*kept, 2]


def test_storage_skips_last_line_truncated_inside_character(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_bytes('{"epoch": 0}\n{"note": "é'.encode()[:-1])
    assert storage.read_json_lines(log) == [{"epoch": 0}]


def test_storage_toml_arrays_and_tensors_round_trip(tmp_path):
    storage.write_toml(
        tmp_path / "run.toml", {"seed": 1, "text": 'two\nlines "quoted"', "phase": [{"rate": 0.1}]}
    )
    assert storage.read_toml(tmp_path / "run.toml") == {
        "seed": 1,
        "text": 'two\nlines "quoted"',
        "phase": [{"rate": 0.1}],
    }
    storage.write_array(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    assert np.load(tmp_path / "a.npy").tolist() == [[0, 1, 2], [3, 4, 5]]
    square = torch.arange(4.0).reshape(2, 2)
    storage.write_tensors(tmp_path / "w.safetensors", {"turned": square.T})
    assert torch.equal(storage.read_tensors(tmp_path / "w.safetensors")["turned"], square.T)
    assert all(not entry.name.endswith(".part") for entry in tmp_path.iterdir())


def test_storage_failed_write_keeps_old_file(tmp_path):
    storage.write_text(tmp_path / "a.txt", "old")
    with pytest.raises(RuntimeError), storage.atomic_file(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise RuntimeError
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_storage_tensor_files_are_deterministic(tmp_path):
    tensors = {name: torch.arange(12.0) for name in ("weight", "bias", "scale")}
    for number in range(8):
        storage.write_tensors(tmp_path / f"{number}.safetensors", tensors)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_storage_reports_read_only_folder_above(tmp_path, monkeypatch):
    make_folder, root = os.mkdir, tmp_path / "cache"

    def refuse(path, *arguments):
        if Path(path) == root:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        make_folder(path, *arguments)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(
        StorageError,
        match=r"value\.json cannot be written: Read-only file system\. Choose another folder",
    ):
        storage.write_json(root / "checks" / "value.json", 1)


@posix
def test_storage_killed_write_keeps_old_file(tmp_path):
    storage.write_text(tmp_path / "a.txt", "old")
    program = """
import os, signal, sys
from visavis.core.storage import atomic_file
with atomic_file(sys.argv[1]) as part:
    part.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    result = subprocess.run([sys.executable, "-c", program, tmp_path / "a.txt"], check=False)
    assert result.returncode == -signal.SIGKILL
    assert (tmp_path / "a.txt").read_text() == "old"
    storage.write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new"


def test_storage_atomic_folder_is_all_or_nothing(tmp_path):
    with pytest.raises(RuntimeError), storage.atomic_folder(tmp_path / "model") as part:
        (part / "config.json").write_text("{}")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with storage.atomic_folder(tmp_path / "model") as part:
        (part / "inner").mkdir()
        (part / "inner" / "config.json").write_text("{}")
        assert not (tmp_path / "model").exists()
    assert (tmp_path / "model" / "inner" / "config.json").read_text() == "{}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_storage_refuses_nonempty_folder(tmp_path):
    assert storage.prepare_empty_folder(tmp_path / "runs" / "mine").is_dir()
    assert storage.prepare_empty_folder(tmp_path / "runs" / "mine").is_dir(), (
        "an empty folder may be taken"
    )
    (tmp_path / "runs" / "mine" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "runs" / "mine", tmp_path / "file"):
        with pytest.raises(RefusedOverwrite, match=mentions(path, "not an empty folder")):
            storage.prepare_empty_folder(path)
    assert (tmp_path / "runs" / "mine" / "thesis.txt").read_text() == "precious"


def test_storage_checks_a_folder_without_creating_it(tmp_path):
    """A command that is killed leaves no folder that looks like its result."""
    path = tmp_path / "runs" / "mine"
    assert storage.prepare_empty_folder(path, will_be_replaced=True) == path
    with storage.create_output_folder(path, "runs/stem", will_be_replaced=True):
        assert list(tmp_path.iterdir()) == []
        with storage.atomic_folder(path) as part:
            (part / "report.html").write_text("page")
            assert not path.exists()
    assert (path / "report.html").read_text() == "page"


def refuse_links(*_):
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
def test_storage_names_a_new_file_together_with_its_content(tmp_path, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(os, "link", refuse_links)
    names = []

    def save(file, text="new"):
        storage.write_text(file, text)
        names.extend(entry.name for entry in tmp_path.iterdir() if entry.name[0] != ".")

    file = tmp_path / "mined.txt"
    assert storage.save_new_file(file, save) == file
    assert (names, file.read_text()) == ([], "new")
    with pytest.raises(RefusedOverwrite, match=r"mined\.txt already exists.*in .*mined-1\.txt\."):
        storage.save_new_file(file, partial(save, text="newer"))
    assert file.read_text() == "new"
    assert (tmp_path / "mined-1.txt").read_text() == "newer"
    assert storage.save_new_file(None, save, stem=file).name == "mined-2.txt"
    with pytest.raises(ZeroDivisionError):
        storage.save_new_file(tmp_path / "failed.txt", lambda _: 1 / 0)
    assert sorted(os.listdir(tmp_path)) == ["mined-1.txt", "mined-2.txt", "mined.txt"]


def test_storage_numbered_folders_never_repeat(tmp_path):
    (tmp_path / "demo-2").mkdir()
    assert [storage.create_numbered_folder(tmp_path / "demo").name for _ in range(2)] == [
        "demo-1",
        "demo-3",
    ]


def test_storage_array_allocates_space_on_creation(tmp_path):
    storage.create_array(tmp_path / "store" / "vectors.npy", shape=(1000, 64), dtype="float16")
    status = (tmp_path / "store" / "vectors.npy").stat()
    assert status.st_blocks * 512 >= status.st_size > 1000 * 64 * 2
    assert not storage.read_array(tmp_path / "store" / "vectors.npy").any()


def test_storage_full_disk_keeps_old_files(small_disk):
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
    assert (small_disk / "a.txt").read_text() == "old"
    assert not list(small_disk.glob(".*"))


def test_storage_reports_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=mentions("file/inner/a.txt", "Not a directory")):
        storage.write_text(tmp_path / "file" / "inner" / "a.txt", "a")


def test_storage_states_fix_of_unwritable_database(tmp_path):
    with (
        pytest.raises(
            StorageError,
            match=r"cannot be written: it cannot be opened\. Choose another folder, or change its permissions\.$",
        ),
        storage.sqlite_database(tmp_path),
    ):
        pass


def test_storage_reports_unreadable_files(tmp_path):
    bad = tmp_path / "bad"
    with pytest.raises(DataError, match="No such file"):
        storage.read_text(bad)
    with pytest.raises(RunError, match="No such file"):
        storage.read_tensors(bad, error=RunError)
    bad.write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=mentions("UTF-8", 2, "0xff")):
        storage.read_text(bad)
    with pytest.raises(DataError, match="TOML"):
        storage.read_toml(_written(bad, b"{\n  1"))
    with pytest.raises(DataError, match="nested"):
        storage.read_toml(_written(bad, b"a = " + b"[" * 50_000))
    with pytest.raises(DataError, match="safetensors"):
        storage.read_tensors(bad)
    with pytest.raises(DataError, match=r"\.npy"):
        storage.read_array(bad)


@dataclass(frozen=True)
class Settings:
    embedding_dim: int
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"{\n  1", ("JSON", "line 2 column 3")),
        (b"[" * 100_000, ("JSON", "recursion limit")),
        (b'"\\ud800"', ("JSON",)),
        (b"", ("JSON", "EOF")),
        (b"null", ("None", "object")),
        (b"{}", ("embedding_dim",)),
        (b'{"embedding_dim": true}', ("embedding_dim", "True", "integer")),
        (b'{"embedding_dim": "64"}', ("embedding_dim", "'64'", "integer")),
        (b'{"embedding_dim": 64, "names": ["a", 5]}', ("names.1", "5", "string")),
    ],
)
def test_storage_json_rejects_undeclared_content(tmp_path, content, parts):
    with pytest.raises(RunError, match=mentions(tmp_path / "config.json", *parts)):
        storage.read_json(_written(tmp_path / "config.json", content), Settings, error=RunError)


def test_storage_ignores_byte_order_mark(tmp_path):
    path = tmp_path / "a.json"
    assert storage.read_json(
        _written(path, b'\xef\xbb\xbf{"embedding_dim": 64, "names": ["a"]}'), Settings
    ) == Settings(64, ("a",))
    assert storage.read_toml(_written(path, b"\xef\xbb\xbfa = 1")) == {"a": 1}


@posix
def test_storage_reads_bounded_regular_files_only(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(40 * 2**30)
    for name, reason in (
        ("pipe", "pipe"),
        ("zero", "device"),
        ("loop", "Too many levels of symbolic links"),
        ("sparse", "42,949,672,960"),
        (".", "folder"),
    ):
        for read in (storage.read_bytes, storage.read_json, storage.read_toml):
            with pytest.raises(DataError, match=reason):
                read(tmp_path / name)
        if name != "sparse":
            for read in (storage.read_array, storage.read_tensors, storage.content_hash):
                with pytest.raises(DataError, match=reason):
                    read(tmp_path / name)


def test_storage_arrays_have_declared_kind(tmp_path):
    path = tmp_path / "a.npy"
    storage.write_array(path, np.arange(6).reshape(2, 3))
    assert storage.read_array(path, dimensions=2, kinds="iu").tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(DataError, match=mentions("int64", "(2, 3)", "floating-point")):
        storage.read_array(path)
    with pytest.raises(DataError, match=mentions("int64", "(2, 3)", "1")):
        storage.read_array(path, dimensions=1, kinds="i")
    storage.write_array(path, np.zeros(3, ">f4"))
    with pytest.raises(DataError, match=mentions(">f4", "(3,)")):
        storage.read_array(path)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 150))
def test_storage_damaged_files_raise_data_error(tmp_path_factory, damage, offset):
    folder = tmp_path_factory.mktemp("damaged")
    storage.write_array(folder / "a.npy", np.arange(12.0).reshape(3, 4))
    storage.write_tensors(folder / "a.safetensors", {"weight": torch.ones(3, 4)})
    for name, read in (("a.npy", storage.read_array), ("a.safetensors", storage.read_tensors)):
        content = bytearray((folder / name).read_bytes())
        content[offset : offset + len(damage)] = damage
        with contextlib.suppress(DataError):
            read(_written(folder / name, bytes(content)))


def test_storage_tensors_match_expected_shapes(tmp_path):
    path = tmp_path / "a.safetensors"
    storage.write_tensors(path, {"weight": torch.ones(2, 3), "bias": torch.ones(3)})
    assert (
        storage.read_tensors(path, {"weight": torch.zeros(2, 3), "bias": torch.zeros(3)})[
            "weight"
        ].sum()
        == 6
    )
    for like, parts in (
        ({"weight": torch.zeros(2, 3)}, ("bias", "[3]")),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(4)}, ("bias", "[3]", "[4]")),
        (
            {"weight": torch.zeros(2, 3).half(), "bias": torch.zeros(3)},
            ("weight", "float32", "float16"),
        ),
    ):
        with pytest.raises(RunError, match=mentions(*parts)):
            storage.read_tensors(path, like, error=RunError)


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("own", "xdg", "folder"),
    [
        ("VISAVIS_CACHE", "XDG_CACHE_HOME", ".cache"),
        ("VISAVIS_CONFIG", "XDG_CONFIG_HOME", ".config"),
    ],
)
def test_user_folder_follows_environment(monkeypatch, own, xdg, folder):
    def found(**variables):
        for name in (own, xdg, "HOME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return storage.user_folder(own, xdg, folder)

    assert found(HOME="/home/ann") == Path(f"/home/ann/{folder}/visavis")
    assert found(**{xdg: "/xdg"}, HOME="relative") == Path("/xdg/visavis"), (
        "the home folder is not needed"
    )
    assert found(**{own: "chosen", xdg: "/xdg"}) == Path("chosen")
    for ignored in ("", "relative", "./relative", "~/cache"):
        assert found(**{xdg: ignored}, HOME="/home/ann") == Path(f"/home/ann/{folder}/visavis")
        with pytest.raises(
            StorageError,
            match=f"^{own}: expected a folder, got none, and this user has no home folder. Set {own}=FOLDER",
        ):
            found(**{xdg: ignored}, HOME="relative")


@posix
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "cache", "expected"),
    [
        ("doctor", {}, ""),
        ("index photos", {}, "visavis: VISAVIS_CACHE: expected a folder, got none"),
        (
            "index photos",
            {"VISAVIS_CACHE": "own"},
            "visavis: HF_HOME: expected a folder for downloads, got none",
        ),
        (
            "data check hf:a/b",
            {"VISAVIS_CACHE": "own"},
            "visavis: HF_HOME: expected a folder for downloads, got none",
        ),
    ],
)
def test_user_without_home_folder_gets_one_line(tmp_path, arguments, cache, expected):
    """A user id without an entry in the list of users, as in containers. It may read all files,
    because Python may be in another home.
    """
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("only root can start a process of another user, by setpriv of util-linux")
    tmp_path.chmod(0o777)
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.png")
    capabilities = "+dac_override,+dac_read_search"
    user = (
        "setpriv",
        "--reuid=54321",
        "--regid=54321",
        "--clear-groups",
        f"--inh-caps={capabilities}",
        f"--ambient-caps={capabilities}",
    )
    source = str(Path(storage.__file__).parents[2])
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": source,
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CACHE_HOME": "cache",
        **cache,
    }
    command = [*user, sys.executable, "-m", "visavis", *arguments.split()]
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "Traceback" not in ended.stderr
    assert ended.stderr.startswith(expected)
    assert len(ended.stderr.splitlines()) == bool(expected)
    assert {file.name for file in tmp_path.iterdir()} <= {"photos", "own"}


@pytest.mark.parametrize(
    "content", ['{"a": 1, "a": 2}', '[{"b": {"c": [{"x": 1, "x": 1}]}}]', '{"a": 1, "\\u0061": 1}']
)
def test_json_with_duplicate_key_is_refused(tmp_path, content):
    path = _written(tmp_path / "a.json", content.encode())
    with pytest.raises(RunError, match=r"a\.json: duplicate key '[ax]'. Remove one of them"):
        storage.read_json(path, error=RunError)
    path.write_bytes(content.encode() + b"\n")
    with pytest.raises(DataError, match=r"a\.json:1: duplicate key"):
        storage.read_json_lines(path)


@given(
    st.recursive(
        st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_with_unique_keys_is_read(value):
    assert storage.parse_json(json.dumps(value).encode(), object, "a") == json.loads(
        json.dumps(value)
    )


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_writing_refuses_impossible_names(tmp_path, name):
    for write in (
        storage.write_text,
        storage.write_json,
        lambda path, _: storage.atomic_folder(path).__enter__(),
    ):
        with pytest.raises(StorageError, match="cannot be a file name"):
            write(tmp_path / name, "x")


def test_similar_path_corrects_each_name(tmp_path, monkeypatch):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path, expected in (
        ("run/mine", "runs/mine"),
        ("runs/min", "runs/mine"),
        ("rusn/mien", "runs/mine"),
        ("runs/mine", "runs/mine"),
        (tmp_path / "run" / "mine", tmp_path / "runs" / "mine"),
    ):
        assert storage.similar_path(path) == Path(expected)
    assert storage.similar_path("elsewhere/mine") is None
    assert storage.similar_path("runs/mine/model") is None


OTHER_PARTS = (".film.mkv.part", ".big.iso.0123abcd.part.part", "a.0123abcd.part", ".0123abcd.part")


@pytest.mark.parametrize("name", OTHER_PARTS)
def test_temporary_files_of_other_programs_stay(name, tmp_path):
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        (folder / name).write_text("of the user")
        (folder / f".{name}.0123abcd.part").write_text("ours")
    storage.remove_partial_files(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([name, name, "sub"])


def test_lock_removes_only_the_parts_of_its_file(tmp_path):
    for name in (".a.0123abcd.part", ".a.b.0123abcd.part", ".film.mkv.part"):
        (tmp_path / name).write_text("")
    with storage.folder_lock(tmp_path / "a", wait=False):
        assert {".a.b.0123abcd.part", ".film.mkv.part"} == {
            path.name for path in tmp_path.iterdir() if path.name != ".a.lock"
        }


@pytest.mark.parametrize("path", [".", "../empty"])
def test_current_folder_is_not_replaced(path, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(RefusedOverwrite, match="the current folder and cannot be replaced"):
        storage.prepare_empty_folder(path, will_be_replaced=True)
    assert storage.prepare_empty_folder(path) == Path(path)


def test_large_files_are_verified_once_until_they_change(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "a"
    file.write_text("a")
    calls = []

    def verify(num_bytes):
        storage.verify_once("test", [file], "sum", num_bytes, lambda: calls.append(1))
        return len(calls)

    large = storage.MAX_BYTES_HASHED_AT_OPEN + 1
    assert [verify(large), verify(large)] == [1, 1]
    assert [verify(1), verify(1)] == [2, 3]
    file.write_text("other")
    assert [verify(large), verify(large)] == [4, 4]


def test_files_are_verified_without_a_writable_cache(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))
    large = storage.MAX_BYTES_HASHED_AT_OPEN + 1
    calls = []
    for _ in range(2):
        storage.verify_once("test", [tmp_path], "sum", large, lambda: calls.append(1))
    assert len(calls) == 2


def test_damage_of_a_large_file_is_an_error_at_each_call(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "cache"))

    def fail():
        raise StorageError("damaged")

    for _ in range(2):
        with pytest.raises(StorageError, match="damaged"):
            storage.verify_once("t", [tmp_path], "s", storage.MAX_BYTES_HASHED_AT_OPEN + 1, fail)
