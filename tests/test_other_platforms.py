"""Calls that Windows or macOS lack, hidden one by one. ``make test-platforms`` hides all of them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.fixtures.recipes import recipe_text
from tests.platforms import linux_calls

import visavis
from visavis.cli import terminal
from visavis.core import storage
from visavis.core.environment import quote_argument, shell_command
from visavis.core.errors import DataError
from visavis.core.memory_budget import UNKNOWN_MEMORY_BYTES, available_memory, free_bytes
from visavis.core.storage import writing
from visavis.data import workers
from visavis.data.dataset_check import check_dataset
from visavis.data.dataset_reader import open_dataset
from visavis.data.feedback.records import Judgment, QueryKey
from visavis.data.feedback.sources import read_feedback, write_feedback
from visavis.data.parallel import cpu_cores
from visavis.papers.relevance.caption_estimators import read_word_vectors
from visavis.retrieval.source_files import list_source_files
from visavis.training.recipes.files import read_recipe

HIDDEN_FOLDERS = ("/proc/", "/sys/fs/cgroup/")


@pytest.fixture
def no_proc(monkeypatch):
    """Hide /proc and control groups, as on macOS."""
    real_open, real_readlink = open, os.readlink

    def check(path):
        if str(path).startswith(HIDDEN_FOLDERS):
            raise FileNotFoundError(errno.ENOENT, "hidden", str(path))

    def open_file(path, *arguments, **options):
        check(path)
        return real_open(path, *arguments, **options)

    def readlink(path, **options):
        check(path)
        return real_readlink(path, **options)

    monkeypatch.setattr("io.open", open_file)
    monkeypatch.setattr(os, "readlink", readlink)


def test_read_at_without_pread_serves_threads(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "pread", raising=False)
    content = np.random.default_rng(0).bytes(40_000)
    (tmp_path / "rows").write_bytes(content)
    failed = []

    def read(start: int) -> None:
        failed.extend(
            place
            for place in range(start, 39_000, 777)
            if storage.read_at(file, 100, place) != content[place : place + 100]
        )

    with open(tmp_path / "rows", "rb") as file:
        threads = [threading.Thread(target=read, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert storage.read_at(file, 100, 39_950) == content[39_950:]
    assert not failed


def test_files_are_flushed_without_opening_folders(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECTORY", raising=False)
    real_open, flags_of = os.open, {}

    def open_descriptor(path, flags, *arguments, **options):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        flags_of[Path(path).name] = flags
        return real_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", open_descriptor)
    storage.write_text(tmp_path / "a.txt", "one")
    with storage.atomic_folder(tmp_path / "folder") as part:
        (part / "inside").mkdir()
        (part / "inside" / "b.txt").write_bytes(b"two")
    assert (tmp_path / "a.txt").read_bytes() == b"one"
    assert (tmp_path / "folder" / "inside" / "b.txt").read_bytes() == b"two"
    # Windows flushes only files that are open for writing.
    assert flags_of["b.txt"] & os.O_RDWR


def test_file_that_is_briefly_open_is_replaced(tmp_path, monkeypatch):
    real, refused = os.replace, [2]

    def replace(source, target):
        if refused[0]:
            refused[0] -= 1
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    storage.write_text(tmp_path / "a.txt", "old")
    refused[0] = 2
    storage.write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_bytes() == b"new"
    monkeypatch.setattr(writing, "RENAME_DELAYS_S", (0.0,))
    refused[0] = 9
    with pytest.raises(storage.writing.StorageError, match=r"a\.txt cannot be written: Permission"):
        storage.write_text(tmp_path / "a.txt", "newer")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_bytes() == b"new"


def test_empty_folder_is_replaced_where_rename_cannot(tmp_path, monkeypatch):
    real = os.replace

    def replace(source, target):
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, "Permission denied", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    (tmp_path / "out").mkdir()
    with storage.atomic_folder(tmp_path / "out") as part:
        (part / "a").write_bytes(b"1")
    assert os.listdir(tmp_path / "out") == ["a"]


def test_folder_that_cannot_be_removed_stays_complete(tmp_path, monkeypatch):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a").write_bytes(b"1")

    def refuse(source, target):
        raise PermissionError(errno.EACCES, "Permission denied", str(source))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        storage.remove_folder(tmp_path / "part")
    assert (tmp_path / "part" / "a").read_bytes() == b"1"
    storage.remove_folder(tmp_path / "part")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "path", ["nul", "runs/NUL.txt", "C:/aux .toml", "com1", "a./b", "a/b ", "LPT9.x.y", "prn"]
)
def test_names_of_windows_devices_are_rejected(path):
    assert writing._is_windows_device(PureWindowsPath(path))
    assert not writing._is_windows_device(PurePosixPath(path))


@pytest.mark.parametrize("path", ["C:/runs/null.txt", "../console/com", ".", "a.b/.c", "D:\\"])
def test_other_names_are_written_on_windows(path):
    assert not writing._is_windows_device(PureWindowsPath(path))


def test_array_is_created_without_fallocate(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    storage.create_array(tmp_path / "a.npy", shape=(5, 3), dtype="float32")
    array = storage.read_array(tmp_path / "a.npy", dimensions=2)
    assert array.shape == (5, 3)
    assert not array.any()


@linux_calls
@pytest.mark.usefixtures("no_proc")
def test_memory_without_proc_is_estimated(monkeypatch):
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_memory() is None
    assert free_bytes(torch.device("cpu")) == total // 2
    monkeypatch.delattr(os, "sysconf")
    assert free_bytes(torch.device("cpu")) == UNKNOWN_MEMORY_BYTES


KARPATHY = {
    "images": [
        {
            "filename": f"{name}.png",
            "imgid": number,
            "split": "val",
            "sentences": [{"raw": f"a {name}, é"}],
        }
        for number, name in enumerate("ab")
    ]
}
COCO = {
    "images": [{"id": number, "file_name": f"{name}.png"} for number, name in enumerate("ab")],
    "annotations": [
        {"id": number, "image_id": number, "caption": f"a {name}, é"}
        for number, name in enumerate("ab")
    ],
}
MSRVTT = {
    "videos": [{"video_id": f"video{number}", "split": "train"} for number in range(2)],
    "sentences": [
        {"sen_id": number, "video_id": f"video{number}", "caption": f"a {number}, é"}
        for number in range(2)
    ],
}
TEXT_DATA_SETS = {
    "table": {"captions.csv": 'filename,caption\na.png,"a dog, é"\nb.png,a cat\nb.png,one\n'},
    "JSON lines": {
        "captions.jsonl": "".join(
            json.dumps({"filename": f"{name}.png", "captions": [f"a {name}, é", "one"]}) + "\n"
            for name in "ab"
        )
    },
    "Karpathy": {"dataset_x.json": json.dumps(KARPATHY, indent=1)},
    "MS-COCO": {"captions_val2017.json": json.dumps(COCO, indent=1)},
    "Flickr": {"results_20130124.token": "a.png#0\ta dog, é\na.png#1\tone\nb.png#0\ta cat\n"},
    "MSR-VTT": {"train_val_videodatainfo.json": json.dumps(MSRVTT, indent=1)},
    "MSVD": {
        "AllVideoDescriptions.txt": "# MSVD\n\nv1 a dog, é\nv1 one\nv2 a cat\n",
        "train_list.txt": "v1\n",
        "val_list.txt": "v2\n",
        "test_list.txt": "",
    },
    "features": {"dev_caps.txt": "a dog, é\none\na cat\nanother\n"},
}
windows_texts = pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
"""Texts with the line ends of Windows, without and with a byte order mark."""


def write_as_on_windows(file, text, encoding):
    file.write_text(text, encoding=encoding, newline="\r\n")


@windows_texts
@pytest.mark.parametrize("kind", TEXT_DATA_SETS)
def test_windows_line_ends_give_the_same_data_set(tmp_path, kind, encoding):
    data = []
    for folder in (tmp_path / "posix", tmp_path / "windows"):
        folder.mkdir()
        if kind == "features":
            np.save(folder / "dev_ims.npy", np.eye(2, dtype=np.float32))
        elif kind not in {"MSR-VTT", "MSVD"}:
            for name in "ab":
                Image.new("RGB", (2, 2)).save(folder / f"{name}.png")
        for name, text in TEXT_DATA_SETS[kind].items():
            if folder.name == "posix":
                (folder / name).write_text(text, encoding="utf-8", newline="\n")
            else:
                write_as_on_windows(folder / name, text, encoding)
        data.append(open_dataset(folder))
    posix, windows = data
    assert posix.captions[0].endswith("é")
    assert windows.fingerprint == posix.fingerprint
    assert windows.captions == posix.captions
    assert [image.name for image in windows.images] == [image.name for image in posix.images]
    assert check_dataset(tmp_path / "windows").ok == check_dataset(tmp_path / "posix").ok


@windows_texts
def test_windows_line_ends_in_shards_give_the_same_captions(tmp_path, encoding):
    Image.new("RGB", (2, 2)).save(tmp_path / "image.png")
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for name, text in (("0.txt", "a dog, é\n"), ("1.json", '{\n"caption": "a cat"\n}\n')):
            tar.add(tmp_path / "image.png", f"{name[0]}.png")
            write_as_on_windows(tmp_path / "caption", text, encoding)
            tar.add(tmp_path / "caption", name)
    assert open_dataset(tmp_path / "shard.tar").captions == ("a dog, é\n", "a cat")


@windows_texts
def test_windows_line_ends_give_the_same_recipe(tmp_path, encoding):
    extending = 'extends = "base.toml"\nname = "é"\nabout = """\nfirst\nsecond"""\n'
    recipes = []
    for folder in (tmp_path / "posix", tmp_path / "windows"):
        folder.mkdir()
        for name, text in (("base.toml", recipe_text()), ("own.toml", extending)):
            if folder.name == "posix":
                (folder / name).write_text(text, encoding="utf-8", newline="\n")
            else:
                write_as_on_windows(folder / name, text, encoding)
        recipes.append(read_recipe(folder / "own.toml"))
    assert recipes[0] == recipes[1]
    assert recipes[0].name == "é"


@windows_texts
def test_windows_line_ends_give_the_same_attributes(tmp_path, encoding):
    Image.new("RGB", (2, 2)).save(tmp_path / "a.png")
    write_as_on_windows(tmp_path / "attributes.csv", "filename,color\na.png,blau é\n", encoding)
    (file,) = list_source_files(tmp_path).files
    assert dict(file.metadata) == {"color": "blau é"}


@windows_texts
def test_windows_line_ends_give_the_same_word_vectors(tmp_path, encoding):
    write_as_on_windows(tmp_path / "vectors.txt", "a 1 2\né 3 4\n", encoding)
    vectors = read_word_vectors(tmp_path / "vectors.txt", ["a", "é"])
    assert {word: vector.tolist() for word, vector in vectors.items()} == {"a": [1, 2], "é": [3, 4]}


@windows_texts
def test_windows_line_ends_give_the_same_labels(tmp_path, dual_encoders, encoding):
    pytest.importorskip("transformers")
    Image.new("RGB", (40, 40), "red").save(tmp_path / "a.png")
    write_as_on_windows(tmp_path / "labels.txt", "a red circle\n\na blue star\n", encoding)
    model, image = dual_encoders / "clip", tmp_path / "a.png"
    expected = visavis.classify(model, image, ["a red circle", "a blue star"])
    assert visavis.classify(model, image, tmp_path / "labels.txt") == expected


@windows_texts
def test_windows_line_ends_give_the_same_feedback(tmp_path, encoding):
    record = Judgment("2026-01-01T10:00:00Z", "photos", QueryKey("é"), "a.png", "c0ffee", True)
    write_feedback(tmp_path / "feedback.jsonl", [record, replace(record, item="b.png")])
    text = (tmp_path / "feedback.jsonl").read_text(encoding="utf-8")
    write_as_on_windows(tmp_path / "copied.jsonl", text, encoding)
    assert read_feedback(tmp_path / "copied.jsonl") == [record, replace(record, item="b.png")]


@pytest.mark.usefixtures("no_proc")
def test_file_outside_is_rejected_without_proc(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_bytes(b"1")
    (tmp_path / "root" / "inside").write_bytes(b"2")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    assert storage.read_bytes(tmp_path / "root" / "inside", tmp_path / "root") == b"2"
    with pytest.raises(DataError, match="points outside"):
        storage.read_bytes(tmp_path / "root" / "link", tmp_path / "root")


def test_cores_without_affinity_are_all(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cpu_cores() == 6


def test_workers_spawn_without_fork_server(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert workers._context().get_start_method() == "spawn"


def test_workers_do_not_need_shared_memory(monkeypatch):
    monkeypatch.setattr(workers, "cpu_cores", lambda: 8)
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "isdir", lambda _: False)
        assert workers.choose_workers(-1, 1000, has_gpu=False) == 8
    monkeypatch.setattr(os.path, "isdir", lambda _: True)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26))
    assert workers.choose_workers(-1, 1000, has_gpu=False) == 0


def test_closed_pipe_of_windows_ends_quietly(monkeypatch):
    class Closed:
        encoding = "utf-8"

        def write(self, _):
            raise OSError(errno.EINVAL, "Invalid argument")

        flush = write

    def leave():
        raise SystemExit(141)

    monkeypatch.setattr(terminal, "exit_quietly", leave)
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(SystemExit):
        terminal.print_line("text")


def test_quoted_arguments_follow_the_shell(monkeypatch):
    assert quote_argument("my runs/a") == "'my runs/a'"
    monkeypatch.setattr(os, "name", "nt")
    assert quote_argument("C:\\my runs\\a") == '"C:\\my runs\\a"'
    assert quote_argument("runs\\a") == "runs\\a"


def test_shell_command_is_found_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(Path(sys.prefix))
    assert shell_command().replace("\\", "/").split("/")[0] in {"bin", "Scripts"}


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "cp437", "utf-8"])
def test_output_is_valid_in_each_console_encoding(encoding):
    code = (
        "from visavis.cli import terminal\n"
        "terminal.escape_unencodable_output()\n"
        "terminal.print_json({'name': 'Zürich 東京 🦀'})\n"
        "terminal.print_line('東京 🦀')\n"
        "from rich.console import Console\n"
        "from rich.table import Table\n"
        "table = Table('東京')\n"
        "table.add_row('🦀 Zürich')\n"
        "Console().print(table)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
    )
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert storage.parse_json(first, dict[str, str], "stdout")["name"].startswith("Zürich 東京 🦀")
    done.stdout.decode(encoding)
