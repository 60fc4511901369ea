"""Video retrieval: frame features are cached, and a model trains on them and reads new videos."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from tests.fixtures.recipes import write_recipe
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import DataError, RecipeError, SpecError
from visavis.data.dataset_reader import open_dataset
from visavis.data.features.store import FeatureStore
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.feature_extraction import cache_features, feature_store_folder
from visavis.models.encoders.frozen_encoders import open_encoder

from ..videos import damaged, random_clip, write_sound, write_video

pytest.importorskip("av")

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}


def colored(name):
    return np.full((48, 48, 3), COLORS[name], np.uint8)


@pytest.fixture
def folder(tmp_path):
    """A video of one to three seconds for each pair of colors, shown one after the other."""
    rows = ["filename,caption,split"]
    for number, (first, second) in enumerate((a, b) for a in COLORS for b in COLORS if a != b):
        write_video(
            tmp_path / f"{number}.mp4",
            [colored(first)] * 5 + [colored(second)] * (5 + 10 * (number % 3)),
        )
        split = ("val", "test")[number % 2] if number >= 8 else "train"
        rows += [
            f"{number}.mp4,{first} then {second},{split}",
            f"{number}.mp4,first {first} and {second} at last,{split}",
        ]
    (tmp_path / "captions.csv").write_text("\n".join(rows) + "\n")
    return tmp_path


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(
        tmp_path / "videos.toml",
        {"epochs": 3, "objective": "Unified(gamma=20)", "optimizer": {"lr": 0.01}},
        name="videos",
        visual={
            "granularity": "frames",
            "frames_per_second": 2.0,
            "standardize": "zscore",
        },
        model={"kind": "VSEInfinity", "embedding_dim": 16, "word_dim": 8},
        training={"metric_batches": None},
    )


def test_frames_of_clips_are_cached(folder):
    data, spec = (
        open_dataset(folder),
        EncoderSpec("visual", "scenes", "frames", frames_per_second=2.0),
    )
    store = cache_features(data, spec)
    read = store.read(store.rows(image.name for image in data.images[:3]))
    assert read.mask.sum(1).tolist() == [2, 4, 6]
    images = open_encoder(EncoderSpec("visual", "scenes")).encode(data.images[1].frames(2.0))
    assert torch.allclose(read.vectors[1, :4], images.vectors, atol=2e-3)
    assert (
        FeatureStore.open(feature_store_folder(data, spec)).description.preprocessing[
            "frames_per_second"
        ]
        == 2
    )
    assert feature_store_folder(data, spec) != feature_store_folder(
        data, EncoderSpec("visual", "scenes", "frames", frames_per_second=1.0)
    )


def test_video_model_trains_loads_and_searches(folder, recipe, tmp_path):
    run = tmp_path / "run"
    trained = visavis.train(recipe, data=folder, out=run)
    assert trained.test is not None
    assert visavis.evaluate(run).to_json()["rsum"] == trained.test.metrics["rsum"]
    model = visavis.load(run)
    videos = [folder / f"{number}.mp4" for number in (0, 4)]
    rows = model.encode_videos(videos)
    assert torch.allclose(rows.norm(dim=1), torch.ones(2))
    assert torch.allclose(
        model.score(videos, ["red then green"]),
        rows @ model.encode_texts(["red then green"]).T,
        atol=1e-6,
    )
    assert torch.allclose(model.encode_videos(videos[1:]), rows[1:], atol=1e-5)
    assert model.encode_images([Image.new("RGB", (48, 48))]).shape == (1, 16)
    new = tmp_path / "new"
    new.mkdir()
    write_video(new / "mine.mp4", [colored("red")] * 20)
    found = CliRunner().invoke(
        app, ["search", str(run), "red then green", "--collection", str(new), "--json"]
    )
    assert found.exit_code == 0, found.output
    assert [hit["name"] for hit in json.loads(found.output)["hits"]] == ["mine.mp4"]
    write_sound(new / "sound.mp4")
    with pytest.raises(DataError, match=r"sound\.mp4 has no frames: it contains only sound"):
        model.encode_videos([new / "sound.mp4"])


def test_negatives_of_clips_are_mined_and_trained_with(folder, recipe, tmp_path):
    run = visavis.train(recipe, data=folder, out=tmp_path / "run").run
    report = visavis.data_mine(run, num_negatives=3, max_ratio=0, out=tmp_path / "n.safetensors")
    assert [(each.queries, each.negatives) for each in report.directions] == [(8, 3), (16, 3)]
    assert all(example.negative.endswith(".mp4") for example in report.examples)
    changes = {
        "phases.0.supervision": f"MinedNegativeSupervision(file='{report.file}')",
        "phases.0.epochs": 1,
    }
    assert (
        str(report.file)
        in visavis.train(recipe, data=folder, out=tmp_path / "mined", overrides=changes).supervision
    )


def test_clip_without_frames_stops_training_before_start(folder, recipe, tmp_path):
    write_sound(folder / "3.mp4")
    with pytest.raises(DataError, match=r"1 x broken video.*3\.mp4: the video has no frames"):
        visavis.train(recipe, data=folder, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_damaged_clip_can_be_skipped(folder, recipe, tmp_path, listener):
    whole = random_clip(folder / "3.mp4", options={"movflags": "faststart"}).read_bytes()
    (folder / "3.mp4").write_bytes(damaged(whole))
    with pytest.raises(
        DataError,
        match=r"video 3\.mp4 is damaged.* Copy it again .* To continue without it, .* pass --skip-bad to `visavis train`, .*\.$",
    ):
        visavis.train(recipe, data=folder, out=tmp_path / "run")
    run = tmp_path / "another"
    assert visavis.train(recipe, data=folder, out=run, skip_bad=True).test is not None
    loose = tmp_path / "loose"
    loose.mkdir()
    for name in ("3.mp4", "4.mp4"):
        (folder / name).rename(loose / name)
    hits = visavis.search(run, "red then green", collection=loose, progress=listener)
    assert [hit.name for hit in hits] == ["4.mp4"]
    assert any(
        sentence.startswith("Skipped: 3.mp4: the video is damaged")
        for sentence in listener.messages
    )


def test_too_long_clip_is_rejected_at_recipe_rate(folder, recipe, tmp_path):
    write_video(folder / "3.mp4", (colored("red") for _ in range(60)), rate=1)
    with pytest.raises(DataError, match=r"3\.mp4: the video has 1,181 frames in 59 seconds"):
        visavis.train(
            recipe, data=folder, out=tmp_path / "run", overrides={"visual.frames_per_second": 20.0}
        )


def test_videos_without_recipe_are_rejected(folder, tmp_path):
    with pytest.raises(
        RecipeError,
        match=r"expected images, found the video 0\.mp4, which no default recipe reads\. Pass a recipe with visual = ",
    ):
        visavis.train(data=folder, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_frame_features_need_rate(folder):
    with pytest.raises(
        SpecError,
        match="frames_per_second: expected a rate above 0, such as 1, for granularity frames",
    ):
        visavis.features(folder, visual="scenes", granularity="frames")
    (store,) = visavis.features(
        folder, visual="scenes", granularity="frames", frames_per_second=1.0
    )
    assert store.description.granularity == "frames"


def test_image_model_rejects_videos(dual_encoders, folder):
    model = visavis.load(dual_encoders / "clip")
    with pytest.raises(DataError, match=r"0\.mp4: expected an image, got a video"):
        model.encode_videos([folder / "0.mp4"])


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            {"visual.frames_per_second": 0.0},
            'expected a rate > 0 with granularity "frames" only, without visual.features and visual.crops, got 0',
        ),
        ({"visual.granularity": "pooled"}, 'got 2 with granularity "pooled"'),
        ({"visual.crops": 10}, "without visual.features and visual.crops"),
        ({"visual.fps": 1.0}, "visual.fps is not a key of recipes"),
    ],
)
def test_invalid_frame_rates_are_rejected(folder, recipe, overrides, sentence):
    with pytest.raises(RecipeError, match=sentence):
        visavis.train(recipe, data=folder, overrides=overrides)


@pytest.mark.slow
@pytest.mark.data
def test_msvd_mini_trains_and_ranks(data_folder, recipe, tmp_path):
    """Thirteen clips of eight stored frames, encoded as mp4 at two frames per second."""
    source, folder, rows = data_folder / "msvd_mini", tmp_path / "msvd", []
    folder.mkdir()
    with tarfile.open(source / "frames-0000.tar") as frames:
        for number, video in enumerate(
            json.loads((source / "dataset_msvd_mini.json").read_text())["videos"]
        ):
            images = [
                np.asarray(Image.open(io.BytesIO(frames.extractfile(name).read())).convert("RGB"))
                for name in video["frames"]
            ]
            height, width = (side // 2 * 2 for side in images[0].shape[:2])
            write_video(
                folder / f"{video['video']}.mp4",
                [image[:height, :width] for image in images],
                rate=2,
            )
            split = {0: "test", 1: "val"}.get(number % 5, "train")
            rows.append(
                {
                    "filename": f"{video['video']}.mp4",
                    "captions": [one["raw"] for one in video["sentences"]],
                    "split": split,
                }
            )
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    trained = visavis.train(recipe, data=folder, out=run, overrides={"text.min_count": 2})
    assert trained.test.num_images == 3
    assert trained.test.num_texts == sum(
        len(row["captions"]) for row in rows if row["split"] == "test"
    )
    hits = visavis.search(run, "a man is cooking", collection=folder, top=5)
    assert len({hit.name for hit in hits}) == 5
    scores = visavis.load(run).score([folder / hit.name for hit in hits], ["a man is cooking"])[
        :, 0
    ]
    assert scores.tolist() == pytest.approx([hit.score for hit in hits], abs=2e-3)
