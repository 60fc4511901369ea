"""Where a run may lie: told before any work, whole on a full disk, and never at the cost of what is the user's."""

from __future__ import annotations

import shutil

import pytest

import visavis
from visavis.errors import DataError, RefusedOverwrite, StorageError, VisavisError
from visavis.training.checkpoint import Checkpoint
from visavis.training.run_files import RunFiles
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
def test_a_folder_that_cannot_be_is_refused_before_any_work(recipe, tmp_path, monkeypatch, out, error, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(error, match=sentence):
        visavis.train(recipe, data="no such data", out=out)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_made_for_a_run_that_never_began_is_removed_and_nothing_else(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "linked").symlink_to("mine")
    for out in (None, "mine", "linked", "new/deep/run"):
        with pytest.raises(DataError, match="does not exist"):
            visavis.train(recipe, data="no such data", out=out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["linked", "mine"]


def test_a_run_that_fails_at_once_leaves_an_empty_folder_of_the_users_empty(recipe, scenes, tmp_path, monkeypatch):
    def fail(self):
        raise VisavisError("the first validation cannot be.")

    monkeypatch.setattr(Trainer, "_validate", fail)
    (tmp_path / "mine").mkdir()
    for out in ("mine", "new"):
        with pytest.raises(VisavisError, match="first validation"):
            visavis.train(recipe, data=scenes, out=tmp_path / out)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_a_run_may_lie_on_a_mount_point_and_behind_a_link(recipe, scenes, small_disk, uninterrupted, outcome, tmp_path):
    (tmp_path / "link").symlink_to(small_disk)
    visavis.train(recipe, data=scenes, out=tmp_path / "link")
    assert outcome(small_disk) == outcome(uninterrupted(False))


@pytest.mark.parametrize("kilobytes", [0, 16, 60, 170, 290])
def test_a_full_disk_is_one_sentence_and_with_room_the_run_goes_on(recipe, scenes, small_disk, uninterrupted, outcome, kilobytes):
    """Full before the run, and while its log, its model and its checkpoints are written."""
    run, ballast = small_disk / "run", small_disk / "ballast"
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - kilobytes * 1024))
    with pytest.raises(StorageError, match=rf"^{run}.* cannot be written: No space left on device; make room"):
        visavis.train(recipe, data=scenes, out=run)
    assert not list(small_disk.rglob(".*.part")), "what could not be finished is gone"
    if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size:
        assert RunFiles(run).read_log()
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
