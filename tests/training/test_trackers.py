"""Each tracker, read back from its own files: every validation once, also of a training that was
stopped and resumed.
"""

from __future__ import annotations

import io
import json
import os
import sqlite3
import struct
from functools import partial

import numpy as np
import pytest
from PIL import Image
from PIL.ImageColor import getrgb

import visavis
from visavis.core.errors import MissingExtra
from visavis.losses.scoring import score_matrix
from visavis.models.inference import device_score
from visavis.training.monitoring.tracking import (
    BORDER,
    IMAGE_SIDE,
    RELEVANT,
    TEXT_HEIGHT,
    TRACKERS,
    Tracking,
    retrieved_images,
)
from visavis.training.recipes.files import read_recipe
from visavis.training.runs.run_folder import RunFolder
from visavis.training.stop_signals import Stopped
from visavis.training.training_run import prepare_training


def examples(step):
    return {"retrieved/caption_1": ("a red circle", Image.new("RGB", (8, 6), (255, step, 0)))}


def rows(*steps):
    lr = {"lr": {"text": 0.5}}
    return [
        {
            "step": step,
            "rsum": 100.0 + step,
            "objective": "VLC()",
            "health": {"alerts": [], "loss": float("nan")},
            **lr,
        }
        for step in steps
    ]


def events(folder):
    """Values of TensorBoard by tag and step, as lists, because a step must not occur twice."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    values = {}
    for path in sorted(folder.path.glob("tensorboard/*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                content = make_ndarray(value.tensor)
                values.setdefault(value.tag, {}).setdefault(event.step, []).append(
                    content.item() if content.size == 1 else content
                )
    return values


def read_tensorboard(folder, name):
    return events(folder).get(name, {})


def leveldb_records(content, block=32768):
    """Records of a LevelDB log after the header of the file. Each part has a checksum, its length
    and its type: whole, first, middle, last.
    """
    position, record = 7, b""
    while position + 7 <= len(content):
        length, kind = struct.unpack_from("<HB", content, position + 4)
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if block - position % block < 7:
            position += block - position % block
        if kind in (1, 4):
            yield record
            record = b""


def read_wandb(folder, name):
    from wandb.proto.wandb_internal_pb2 import Record

    values, record = {}, Record()
    for path in sorted(folder.path.glob("wandb/offline-run-*/*.wandb")):
        for content in leveldb_records(path.read_bytes()):
            record.ParseFromString(content)
            items = {
                "/".join(item.nested_key) or item.key: item.value_json
                for item in record.history.item
            }
            if name in items:
                values.setdefault(int(items["_step"]), []).append(json.loads(items[name]))
    return values


def read_mlflow(folder, name):
    from mlflow import MlflowClient

    client, values = MlflowClient(), {}
    (run,) = client.search_runs([client.get_experiment_by_name("visavis").experiment_id])
    for metric in client.get_metric_history(run.info.run_id, name):
        values.setdefault(metric.step, []).append(metric.value)
    return values


def read_trackio(folder, name):
    values = {}
    with sqlite3.connect(os.path.join(os.environ["TRACKIO_DIR"], "visavis.db")) as database:
        found = database.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    assert len({run for run, _, _ in found}) == 1
    for _, step, metrics in found:
        if name in (numbers := json.loads(metrics)):
            values.setdefault(step, []).append(numbers[name])
    return values


READERS = {
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Recipe, and settings that keep all trackers on this machine and in the folder of the test."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)  # MLflow writes artifacts into the current folder
    (tmp_path / "run").mkdir()
    return read_recipe("heads-flickr8k")


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of SQLAlchemy, about MLflow
@pytest.mark.parametrize("name", TRACKERS)
def test_tracker_has_each_validation_once_after_resume(name, settings, listener, tmp_path, capsys):
    pytest.importorskip(name)
    folder = RunFolder(tmp_path / "run")
    for log, new in (([], rows(0, 4)), (rows(0, 4), rows(4, 8)), (rows(0, 4, 8), [])):
        tracking = Tracking(settings, folder, listener)
        with tracking.open([name], log):
            for row in new:
                tracking.log(
                    row,
                    [f"Collapse at step {row['step']}: too small"],
                    partial(examples, row["step"]),
                )
    assert listener.messages == []
    assert READERS[name](folder, "validation/rsum") == {0: [100], 4: [104], 8: [108]}
    assert READERS[name](folder, "lr/text") == {0: [0.5], 4: [0.5], 8: [0.5]}
    assert READERS[name](folder, "health/loss") == {}, "not finite"
    assert capsys.readouterr().out == ""
    assert len(list(tmp_path.rglob("*.png"))) == (0 if name == "tensorboard" else 3), (
        "one image for each validation"
    )
    runs = json.loads(folder.trackers.read_text())
    assert runs[name]["step"] == 8


@pytest.mark.slow
def test_tracker_receives_validations_that_it_missed(settings, listener, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with Tracking(settings, folder, listener).open(["tensorboard"], rows(0, 4)):
        pass
    assert read_tensorboard(folder, "validation/rsum") == {0: [100], 4: [104]}


def test_failed_tracker_is_called_once(settings, listener, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.tensorboard.write_text("a file, where the tracker needs a folder")
    tracking = Tracking(settings, folder, listener)
    with tracking.open(["tensorboard"], []):
        for row in rows(0, 4):
            tracking.log(row)
    (message,) = listener.messages
    assert message.startswith(
        "training.track: tensorboard has failed and is not called again. The training continues. "
    )


@pytest.mark.slow
def test_resume_sends_validation_at_which_tracker_failed(settings, listener, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    log = TRACKERS["tensorboard"].log

    def fail_at_4(tracker, step, *values):
        if step == 4:
            raise ConnectionError("no connection")
        log(tracker, step, *values)

    with monkeypatch.context() as broken:
        broken.setattr(TRACKERS["tensorboard"], "log", fail_at_4)
        tracking = Tracking(settings, folder, listener)
        with tracking.open(["tensorboard"], []):
            for row in rows(0, 4, 8):
                tracking.log(row)
    assert read_tensorboard(folder, "validation/rsum") == {0: [100]}
    with Tracking(settings, folder, listener).open(["tensorboard"], rows(0, 4, 8)):
        pass
    assert read_tensorboard(folder, "validation/rsum") == {0: [100], 4: [104], 8: [108]}


def test_damaged_tracker_file_stops_tracking_only(settings, listener, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.trackers.write_text('{"tensorboard": 3}')
    with Tracking(settings, folder, listener).open(["tensorboard"], rows(0)):
        pass
    assert len(listener.messages) == 1
    assert not folder.tensorboard.exists()


def test_missing_package_of_tracker_names_extra(scenes, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        MissingExtra,
        match=r'training.track = \["wandb"\] needs the package wandb.*visavis\[wandb\]',
    ):
        visavis.train(
            "demo-unified",
            data=scenes,
            out=tmp_path / "run",
            overrides={"training.track": ["wandb"]},
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_resumed_training_is_tracked_as_undisturbed_one(recipe, scenes, stop_at, tmp_path):
    run = tmp_path / "run"
    overrides = {
        "training.track": ["tensorboard"],
        "phases.0.optimizer.lr": 1e-12,
        "phases.1.optimizer.lr": 1e-12,
    }
    with pytest.raises(Stopped):
        visavis.train(recipe, data=scenes, out=run, progress=stop_at(10), overrides=overrides)
    visavis.train(resume=run)
    folder = RunFolder(run)
    log, values = folder.read_log(), events(folder)
    for tag, group, key in (
        ("validation/i2t_r1", None, "i2t_r1"),
        ("train/loss", "train", "loss"),
        ("time/pairs_per_s", "time", "pairs_per_s"),
    ):
        expected = {row["step"]: [(row[group] if group else row)[key]] for row in log}
        if tag == "time/pairs_per_s":
            del expected[0]
        assert values[tag] == {
            step: pytest.approx(numbers) for step, numbers in expected.items()
        }, tag
    assert set(log[1]["lr"]) > {"text"}
    assert values["lr/text"] == {row["step"]: [pytest.approx(row["lr"]["text"])] for row in log[1:]}
    assert [
        b"Collapse" in np.ravel(alert)[0]
        for alerts in values["alerts/text_summary"].values()
        for alert in alerts
    ] == [True]
    images = values["retrieved/caption_1"]
    assert sorted(images) == [row["step"] for row in log]
    width, height, png = images[0][0]
    assert (
        (int(width), int(height))
        == Image.open(io.BytesIO(png)).size
        == (4 * IMAGE_SIDE, TEXT_HEIGHT + IMAGE_SIDE)
    )


def test_retrieved_images_are_best_scored_ones(recipe, scenes):
    data_module, matcher = prepare_training(read_recipe(str(recipe), {"data.path": str(scenes)}))
    data = data_module.validation
    encoded = data_module.encode(matcher, data)
    order = score_matrix(device_score(matcher), *encoded).argsort(0, descending=True)
    drawns = retrieved_images(matcher, *encoded, data)
    assert [caption for caption, _ in drawns.values()] == [
        data.captions[number] for number in (0, 17, 35)
    ]
    for number, (_, drawn) in zip((0, 17, 35), drawns.values(), strict=True):
        for position in range(4):
            x, y = position * IMAGE_SIDE, TEXT_HEIGHT
            is_relevant = int(order[position, number]) == data.image_of[number]
            assert (drawn.getpixel((x, y)) == getrgb(RELEVANT)) == is_relevant
            shown = drawn.crop(
                (x + BORDER, y + BORDER, x + IMAGE_SIDE - BORDER, y + IMAGE_SIDE - BORDER)
            )
            image = (
                data.images[int(order[position, number])]
                .open()
                .resize(shown.size, Image.Resampling.BICUBIC)
            )
            np.testing.assert_allclose(np.asarray(shown, float), np.asarray(image, float), atol=2)
