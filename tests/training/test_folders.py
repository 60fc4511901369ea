"""Run folders: checked before training, intact on a full disk, without damage to files of the user."""

from __future__ import annotations

import shutil

import pytest

import visavis
from visavis.core.errors import DataError, RefusedOverwrite, StorageError, VisavisError
from visavis.training.checkpoint import Checkpoint
from visavis.training.runs.run_folder import RunFolder
from visavis.training.trainer import Trainer


@pytest.mark.parametrize(
    ("out", "error", "sentence"),
    [
        ("full", RefusedOverwrite, "full already exists and is not an empty folder"),
        ("file", RefusedOverwrite, "file already exists and is not an empty folder"),
        ("dangling", RefusedOverwrite, "dangling already exists and is not an empty folder"),
        ("file/run", StorageError, "file/run cannot be written: Not a directory"),
        ("x" * 300, StorageError, "cannot be written: File name too long"),
        ("/proc/nowhere/run", StorageError, "/proc/nowhere/run cannot be written"),
    ],
)
def test_invalid_run_folder_is_rejected_before_training(
    recipe, tmp_path, monkeypatch, out, error, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=sentence):
        visavis.train(recipe, data="no such data", out=out)
    assert sorted(tmp_path.rglob("*")) == before


def test_failed_start_removes_only_created_folders(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "linked").symlink_to("mine")
    for out in (None, "mine", "linked", "new/deep/run"):
        with pytest.raises(DataError, match="expected an existing path"):
            visavis.train(recipe, data="no such data", out=out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linked", "mine"]


@pytest.mark.parametrize("name", ["environment.json", ".run.toml.0a1b2c3d.part"])
def test_start_replaces_what_a_killed_start_left(recipe, scenes, tmp_path, name):
    run = tmp_path / "run"
    run.mkdir()
    (run / name).write_text("{")
    if name == "environment.json":
        with pytest.raises(RefusedOverwrite, match="not an empty folder"):
            visavis.train(recipe, data=scenes, out=run)
        (run / ".run.lock").touch()
    visavis.train(recipe, data=scenes, out=run)
    assert (run / "result.json").exists() and not list(run.glob("*.part"))


def test_failed_start_leaves_existing_folder_empty(recipe, scenes, tmp_path, monkeypatch):
    def fail(self):
        raise VisavisError("the first validation cannot be.")

    monkeypatch.setattr(Trainer, "_validate", fail)
    (tmp_path / "mine").mkdir()
    for out in ("mine", "new"):
        with pytest.raises(VisavisError, match="first validation"):
            visavis.train(recipe, data=scenes, out=tmp_path / out)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_run_folder_may_be_mount_point_or_link(
    recipe, scenes, small_disk, uninterrupted, outcome, tmp_path
):
    (tmp_path / "link").symlink_to(small_disk)
    visavis.train(recipe, data=scenes, out=tmp_path / "link")
    assert outcome(small_disk) == outcome(uninterrupted(False))


@pytest.mark.parametrize(
    "kilobytes",
    [
        0,
        pytest.param(16, marks=pytest.mark.long),
        60,
        pytest.param(170, marks=pytest.mark.long),
        290,
    ],
)
@pytest.mark.slow
def test_full_disk_is_reported_and_run_resumes(
    recipe, scenes, small_disk, uninterrupted, outcome, kilobytes
):
    """The disk is full before the run, or while its log, model or checkpoints are written."""
    run, ballast = small_disk / "run", small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - kilobytes * 1024))
    with pytest.raises(StorageError, match=rf"^{run}.* cannot be written: No space left on device"):
        visavis.train(recipe, data=scenes, out=run)
    assert not list(small_disk.rglob(".*.part")), "unfinished files are removed"
    if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size:
        assert RunFolder(run).read_log()
    if (run / "model" / "config.json").exists():
        visavis.load(run)
    if (run / "checkpoint").exists():
        Checkpoint.latest(run / "checkpoint")
    ballast.unlink()
    if (run / "run.toml").exists():
        visavis.train(resume=run)
    else:
        visavis.train(recipe, data=scenes, out=run)
    assert outcome(run) == outcome(uninterrupted(False))
