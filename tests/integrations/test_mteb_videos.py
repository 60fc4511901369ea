"""Video tasks of mteb by their own classes, with local clips instead of the data that they load
from the hub.
"""

from __future__ import annotations

import importlib
import sys
from functools import cached_property
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.fixtures.recipes import write_recipe
from tests.matching import mentions
from tests.videos import write_video

import visavis
from visavis.core.errors import VisavisError
from visavis.data.dataset_reader import open_dataset
from visavis.integrations.mteb import MtebEncoder

av = pytest.importorskip("av")
mteb = pytest.importorskip("mteb", reason="mteb is installed by make slow")
datasets = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::UserWarning",
        "ignore::sklearn.exceptions.UndefinedMetricWarning",
    ),
]

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
TASKS = ("MSVDT2VRetrieval", "MSVDV2TRetrieval", "MSRVTTT2V", "MSRVTTV2T")


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Clips of two colors with one caption each, and two frames per second as the model reads them."""
    folder, rows = tmp_path_factory.mktemp("clips"), ["filename,caption,split"]
    for number, (first, second) in enumerate((a, b) for a in COLORS for b in COLORS if a != b):
        frames = [
            np.full((48, 48, 3), COLORS[name], np.uint8)
            for name in [first] * 2 + [second] * (2 + number % 3)
        ]
        write_video(folder / f"{number}.mp4", frames, rate=2)
        rows.append(
            f"{number}.mp4,{first} then {second},{('train', 'val', 'test', 'test')[number % 4]}"
        )
    (folder / "captions.csv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def split(clips):
    return open_dataset(clips).split("test")


@pytest.fixture(scope="module")
def run(clips, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    recipe = write_recipe(
        folder / "clips.toml",
        {"epochs": 8, "objective": "Unified(gamma=20)", "optimizer": {"lr": 0.01}},
        name="clips",
        visual={
            "granularity": "frames",
            "frames_per_second": 2.0,
            "standardize": "zscore",
        },
        model={"kind": "VSEInfinity", "embedding_dim": 16, "word_dim": 8},
        training={"metric_batches": None},
    )
    return visavis.train(recipe, data=clips, out=folder / "run").run


class Decoder:
    """The part of torchcodec's ``VideoDecoder`` that mteb reads. ``datasets`` decodes videos with
    torchcodec, which needs FFmpeg.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @cached_property
    def frames(self) -> torch.Tensor:
        with av.open(self.path) as container:
            return torch.stack(
                [
                    torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
                    for frame in container.decode(video=0)
                ]
            )

    @property
    def metadata(self) -> SimpleNamespace:
        return SimpleNamespace(num_frames=len(self.frames), end_stream_seconds=len(self.frames) / 2)

    def get_frames_at(self, indices: list[int]) -> SimpleNamespace:
        return SimpleNamespace(data=self.frames[indices])


def paths(split) -> list[str]:
    return [str(image.location.path) for image in split.images]


@pytest.fixture
def local_data(split, monkeypatch):
    """The classes read this table instead of the one of the hub."""
    table = datasets.Dataset.from_dict({"video": paths(split), "caption": list(split.captions)})
    table.set_transform(
        lambda rows: (
            rows | ({"video": list(map(Decoder, rows["video"]))} if "video" in rows else {})
        )
    )
    for module in {type(mteb.get_task(name)).__module__ for name in TASKS}:
        monkeypatch.setattr(importlib.import_module(module), "load_dataset", lambda *_, **__: table)


@pytest.mark.slow
def test_mteb_video_retrieval_equals_evaluate(run, clips, local_data, tmp_path):
    report = visavis.mteb(run, tasks=list(TASKS), out=tmp_path)
    ours = visavis.evaluate(run, data=clips)
    for name in TASKS:
        direction, ranks = ("t2i", ours.text_ranks) if "T2V" in name else ("i2t", ours.image_ranks)
        [scores] = next(
            each for each in report.result.task_results if each.task_name == name
        ).scores["test"]
        for k in (1, 5):
            assert scores[f"hit_rate_at_{k}"] == pytest.approx(
                ours.metrics[f"{direction}_r{k}"] / 100, abs=1e-5
            ), name
        assert scores["ndcg_at_10"] == pytest.approx(
            np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0).mean(), abs=1e-5
        ), name
        assert report.scores[name] == pytest.approx(scores["ndcg_at_10"])
    assert {f"{name}.json" for name in TASKS} <= {
        path.name for path in report.folder.glob("*.json")
    }


def test_mteb_reads_videos_with_an_image_model(dual_encoders, split, local_data, tmp_path):
    clip = dual_encoders / "clip"
    report = visavis.mteb(clip, tasks=["MSVDT2VRetrieval", "MSRVTTV2T"], out=tmp_path)
    model, videos = visavis.load(clip), []
    for path in paths(split):
        frames = Decoder(path).frames
        # Of fewer than eight frames, mteb repeats some.
        images = [
            Image.fromarray(frames[i * len(frames) // 8].permute(1, 2, 0).numpy()) for i in range(8)
        ]
        videos.append(model.encode_images(images).mean(0))
    cosines = (
        torch.nn.functional.normalize(torch.stack(videos), dim=1)
        @ model.encode_texts(list(split.captions)).T
    )
    for name, scores in (("MSVDT2VRetrieval", cosines.T), ("MSRVTTV2T", cosines)):
        # Most words are unknown to the tiny CLIP, and equal scores may be in any order.
        own = scores.diagonal()[:, None]
        best, worst = 1 + (scores > own + 1e-6).sum(1), (scores > own - 1e-6).sum(1)
        gains = [float((1 / (ranks + 1).log2() * (ranks <= 10)).mean()) for ranks in (worst, best)]
        assert gains[0] - 1e-5 <= report.scores[name] <= gains[1] + 1e-5


def test_image_model_reads_videos_as_the_wrapper_of_mteb(
    dual_encoders, split, monkeypatch, local_data
):
    """The wrapper uses one function of torchvision, which has no build here."""
    from mteb._create_dataloaders import create_dataloader
    from mteb.models.video_wrappers import Video2ImagesWrapper

    functional = ModuleType("torchvision.transforms.functional")
    functional.to_pil_image = lambda frame: Image.fromarray(frame.permute(1, 2, 0).numpy())
    for name in ("torchvision", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    model, task = visavis.load(dual_encoders / "clip"), mteb.get_task("MSVDT2VRetrieval")
    task.load_data()
    corpus = task.dataset["default"]["test"]["corpus"]
    options = {"task_metadata": task.metadata, "prompt_type": mteb.types.PromptType.document}
    both = (
        Video2ImagesWrapper(MtebEncoder(model, "clip")),
        MtebEncoder(model, "clip", num_frames=8),
    )
    expected, ours = (
        torch.as_tensor(
            encoder.encode(
                create_dataloader(corpus, **options),
                hf_split="test",
                hf_subset="default",
                **options,
            )
        )
        for encoder in both
    )
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)
    assert both[0].mteb_model_meta.experiment_kwargs == both[1].mteb_model_meta.experiment_kwargs


def test_mteb_reports_missing_packages_and_other_modalities(
    dual_encoders, tmp_path, monkeypatch, split
):
    clip = dual_encoders / "clip"
    table = datasets.Dataset.from_dict({"video": paths(split), "caption": list(split.captions)})
    module = importlib.import_module(type(mteb.get_task("MSVDT2VRetrieval")).__module__)
    monkeypatch.setitem(sys.modules, "torchcodec", None)
    monkeypatch.setattr(datasets.config, "TORCHCODEC_AVAILABLE", False)
    monkeypatch.setattr(
        module, "load_dataset", lambda *_, **__: table.cast_column("video", datasets.Video())
    )
    with pytest.raises(VisavisError, match=mentions("MSVDT2VRetrieval", "torchcodec", "Install")):
        visavis.mteb(clip, tasks="MSVDT2VRetrieval", out=tmp_path)
    with pytest.raises(VisavisError, match=mentions("MSRVTTV2A", "audio", "Choose another task")):
        visavis.mteb(clip, tasks="MSRVTTV2A", out=tmp_path)
