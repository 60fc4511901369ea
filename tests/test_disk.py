"""All changes of files go through one object of ``core.storage``, which a test can replace."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path

import pytest

from visavis.core import storage
from visavis.core.errors import StorageError

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "visavis"
THE_DISK = "core/storage/disk.py"
# It runs in other programs, without visavis.
NOT_OURS = "training/export/exported_files/"
THROUGH_STORAGE = {"storage", "disk", "current_disk()", "storage.current_disk()"}
"""What the methods of a change may be called on."""
CHANGES = {
    *("write_text", "write_bytes", "unlink", "rename", "mkdir", "makedirs", "rmdir", "removedirs"),
    *("rmtree", "touch", "chmod", "link", "symlink", "symlink_to", "hardlink_to", "utime"),
    *("copyfile", "copytree", "copy2", "move", "fsync", "ftruncate", "posix_fallocate", "tofile"),
    *("mkstemp", "mkdtemp", "TemporaryFile", "NamedTemporaryFile", "TemporaryDirectory"),
    *("FileLock", "FileHandler", "savez", "savez_compressed", "to_csv", "to_parquet"),
    # Libraries that write a file by themselves.
    *("save", "save_file", "save_pretrained", "ParquetWriter", "SummaryWriter", "savefig"),
    *("quantize_dynamic", "snapshot_download", "hf_hub_download"),
}
OUR_NAMES = {"write_text", "write_bytes", "move", "save"}
TAKES_MODE = {"open", "fdopen", "memmap", "open_memmap", "TarFile", "ZipFile"}
IN_ATOMIC = "a library writes into a path of atomic_file or atomic_folder"
MODEL_FILES = "transformers writes a configuration next to tensors of write_tensors"
IN_MEMORY = "into memory"
EXCEPTIONS = {
    "core/storage/writing.py: np.save(file, array, allow_pickle=False)": "an open file of the disk",
    "core/storage/writing.py: save_file(": IN_ATOMIC,
    "core/storage/folders.py: tempfile.TemporaryFile(dir=existing)": "tests a folder, has no name",
    "data/photo_worker.py: os.fdopen(os.dup(1), 'wb')": "a pipe",
    "data/synthetic/scene_dataset.py: render_scene(": IN_ATOMIC,
    "data/hub_files.py: snapshot_download(": "the library's own cache",
    "data/hub_files.py: hf_hub_download(": "the library's own cache",
    "models/encoders/pretrained_files.py: snapshot_download(": "the library's own cache",
    "models/text_tower_export.py: quantize_dynamic(": IN_ATOMIC,
    "models/embedding_model.py: super().save_pretrained(": MODEL_FILES,
    "models/embedding_model.py: model.save(": MODEL_FILES,
    "models/clip/model.py: super().save_pretrained(": MODEL_FILES,
    "models/processor.py: matcher.save_pretrained(": "our own, which calls write_tensors",
    "models/retriever.py: self.processor.save(": "our own, which calls write_tensors",
    "models/retriever.py: self.save(": "our own, which calls write_tensors",
    "models/retriever.py: TemporaryDirectory()": "a copy for an upload, which nothing reads later",
    "papers/models/xvlm_conversion.py: processor.save(": "our own, which calls write_tensors",
    "papers/relevance/fine_tuning.py: encoder.": IN_ATOMIC,
    "papers/relevance/estimator_quality.py: tempfile.TemporaryDirectory(": "an empty cache for a time measurement",
    "papers/relevance/estimator_quality.py: link.symlink_to(": "an empty cache for a time measurement",
    "papers/relevance/estimator_quality.py: shutil.copytree(": "an empty cache for a time measurement",
    "retrieval/build/index_export.py: pq.ParquetWriter(part": IN_ATOMIC,
    "training/export/export_model.py: torch.export.save(": IN_ATOMIC,
    "training/export/export_model.py: program.save(": IN_ATOMIC,
    "training/export/export_model.py: processor.save(": "our own, which calls write_tensors",
    "training/monitoring/tracking.py: SummaryWriter(": "the library's own files",
    "training/trainer.py: self.data_module.processor.save(": "our own, which calls write_tensors",
    "training/training_run.py: data_module.processor.save(": "our own, which calls write_tensors",
    "research/experiments/screening.py: self.save(": "our own, which calls write_json",
    "core/data_uris.py: image.save(raw": IN_MEMORY,
    "papers/probes.py: image.convert('RGB').save(raw": IN_MEMORY,
    "research/attention_maps.py: figure.savefig(raw": IN_MEMORY,
    "research/audit/duplicates.py: image.save(buffer": IN_MEMORY,
    "research/reports/html_report.py: figure.savefig(raw": IN_MEMORY,
    "research/reports/html_report.py: Pillow.open(raw)": IN_MEMORY,
    "retrieval/server/image_cache.py: image.convert('RGB').save(file": IN_MEMORY,
}
"""Calls outside of the disk by their beginning, each with the reason."""


def mode_of(call: ast.Call, name: str) -> str:
    """The mode of a call that opens a file. It is "?" if it is computed."""
    modes = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    is_method = isinstance(call.func, ast.Attribute) and name == "open"
    place = 0 if is_method and len(call.args) == 1 else 2 if name == "memmap" else 1
    modes += call.args[place : place + 1]
    if not modes:
        return "r"
    value = modes[0].value if isinstance(modes[0], ast.Constant) else "?"
    return value if isinstance(value, str) else "?"


def changes(tree: ast.AST) -> list[str]:
    """The calls of a module that change files without the disk."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        receiver = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        text = ast.unparse(node)
        if receiver in THROUGH_STORAGE:
            continue
        is_change = (
            # Our own functions of these names are called without a module, or without a path.
            (
                name in CHANGES
                and (name not in OUR_NAMES or (receiver and (node.args or node.keywords)))
            )
            # Not str.replace, which takes two texts, or the one of a data class or a time.
            or (name == "replace" and receiver and len(node.args) == 1 and not node.keywords)
            or (
                name in {"remove", "replace", "truncate", "rename", "copy"}
                and receiver in {"os", "shutil"}
            )
            or (name == "connect" and receiver == "sqlite3" and "':memory:'" not in text)
            or (
                name in TAKES_MODE
                # A class with a method ``open`` of ours, or a file of a kind that is only read.
                and (not receiver or receiver in {"os", "io", "np"} or receiver[:1].islower())
                and receiver != "webbrowser"
                and set(mode_of(node, name)) & set("wax+?" if not receiver else "wax+")
            )
        )
        if is_change:
            found.append(text)
    return found


def test_every_change_of_files_goes_through_the_disk():
    used = set()
    direct = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        if module == THE_DISK or module.startswith(NOT_OURS):
            continue
        for text in changes(ast.parse(path.read_text())):
            call = f"{module}: {text}"
            exception = next((start for start in EXCEPTIONS if call.startswith(start)), None)
            used.add(exception)
            direct += [call[:160]] if exception is None else []
    assert direct == []
    assert sorted(EXCEPTIONS.keys() - used) == [], "exceptions without a call"


@pytest.mark.parametrize(
    "code",
    [
        'open(path, "w")',
        'open(path, mode="ab")',
        "open(path, mode)",
        'path.open("r+b")',
        'path.open("x")',
        'io.open(path, "wb", 0)',
        "path.write_text(text)",
        "(folder / name).unlink(missing_ok=True)",
        "os.remove(path)",
        "os.replace(part, path)",
        "part.replace(path)",
        "part.rename(path)",
        "folder.mkdir(parents=True)",
        "os.makedirs(folder)",
        "shutil.rmtree(folder)",
        "os.link(source, target)",
        "shutil.copy(source, target)",
        "os.fsync(file.fileno())",
        "sqlite3.connect(path, timeout=1)",
        'np.lib.format.open_memmap(path, mode="w+")',
        'np.memmap(path, dtype, "r+")',
        "values.tofile(path)",
        "save_file(tensors, path)",
    ],
)
def test_change_without_the_disk_is_found(code):
    assert len(changes(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "open(path)",
        'path.open("rb")',
        'text.replace("a", "b")',
        "replace(manifest, digest=None)",
        "time.replace(tzinfo=UTC)",
        "storage.write_text(path, text)",
        "storage.current_disk().unlink(path)",
        'disk.open(path, "wb")',
        'sqlite3.connect(":memory:")',
        'np.memmap(path, dtype, "r", 8, shape)',
        "names.remove(name)",
        "copy(self)",
    ],
)
def test_calls_without_a_change_are_allowed(code):
    assert changes(ast.parse(code)) == []


class RecordingDisk(storage.Disk):
    """Records the names of its calls."""

    def __init__(self):
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("_") and name != "calls":
            self.calls.append(name)
        return super().__getattribute__(name)


def test_replaced_disk_sees_each_change_of_a_file(tmp_path):
    disk = RecordingDisk()
    with storage.replaced_disk(disk):
        storage.write_json(tmp_path / "folder" / "a.json", 1)
    assert disk.calls == [
        *("sync_path", "mkdir", "sync_path"),
        *("open", "open", "sync_path", "replace", "sync_path", "unlink"),
    ]
    with storage.replaced_disk(disk):
        assert storage.current_disk() is disk
    assert storage.current_disk() is not disk
    storage.write_json(tmp_path / "folder" / "a.json", 2)
    assert len(disk.calls) == 9


def test_disk_that_refuses_a_call_leaves_the_old_file(tmp_path):
    class FullDisk(storage.Disk):
        def sync_path(self, path):
            raise OSError(28, os.strerror(28), str(path))

    storage.write_json(tmp_path / "a.json", 1)
    with (
        storage.replaced_disk(FullDisk()),
        pytest.raises(storage.writing.StorageError, match="No space left"),  # type: ignore[attr-defined]
    ):
        storage.write_json(tmp_path / "a.json", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert storage.read_json(tmp_path / "a.json", int) == 1


class UnflushableFolders(storage.Disk):
    """A file system that cannot flush folders, or refuses to open them."""

    def __init__(self, code):
        self.code = code

    def sync_path(self, path):
        real = os.fsync, os.open

        def refuse(*_args):
            raise OSError(self.code, os.strerror(self.code))

        if os.path.isdir(path):
            os.fsync = os.open = refuse
        try:
            super().sync_path(path)
        finally:
            os.fsync, os.open = real


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_folder_that_cannot_be_flushed_takes_files(code, tmp_path):
    with storage.replaced_disk(UnflushableFolders(code)):
        storage.write_text(tmp_path / "new" / "a.txt", "a")
        with storage.folder_lock(tmp_path / "locked" / "a", wait=False):
            pass
        assert storage.create_numbered_folder(tmp_path / "run").name == "run-1"
    assert (tmp_path / "new" / "a.txt").read_text() == "a"


def test_failing_disk_is_an_error_when_a_folder_is_flushed(tmp_path):
    with (
        storage.replaced_disk(UnflushableFolders(errno.EIO)),
        pytest.raises(StorageError, match="cannot be written"),
    ):
        storage.write_text(tmp_path / "a.txt", "a")
