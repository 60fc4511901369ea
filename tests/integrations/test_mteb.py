"""MtebEncoder on the task classes of mteb, with local data: retrieval, compositionality and
zero-shot classification.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.fixtures.recipes import write_recipe
from tests.matching import mentions
from typer.testing import CliRunner

import visavis
from visavis.cli import app
from visavis.core.errors import DataError, RunError, VisavisError
from visavis.data.dataset_reader import open_dataset
from visavis.integrations.mteb import MtebEncoder

mteb = pytest.importorskip("mteb", reason="mteb is installed by make slow")
datasets = pytest.importorskip("datasets")
from mteb.abstasks.image.image_text_pair_classification import AbsTaskImageTextPairClassification  # noqa: E402
from mteb.abstasks.retrieval import AbsTaskRetrieval  # noqa: E402
from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData  # noqa: E402
from mteb.abstasks.task_metadata import TaskMetadata  # noqa: E402
from mteb.abstasks.zeroshot_classification import AbsTaskZeroShotClassification  # noqa: E402
from mteb.models import EncoderProtocol  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::UserWarning",
        "ignore::sklearn.exceptions.UndefinedMetricWarning",
    ),
]


@pytest.fixture(scope="module")
def split(scenes):
    return open_dataset(scenes).split("test")


@pytest.fixture(scope="module")
def run(scenes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    visavis.train(write_recipe(folder / "tiny.toml"), data=scenes, out=folder / "run")
    return folder / "run"


@pytest.fixture
def model(request, dual_encoders, run):
    return run if request.param == "run" else dual_encoders / request.param


every_model = pytest.mark.parametrize("model", ["run", "clip"], indirect=True)


def metadata(name, kind, category, main_score):
    return TaskMetadata(
        name=name,
        type=kind,
        category=category,
        main_score=main_score,
        description="Local data.",
        reference=None,
        dataset={"path": "local/data", "revision": "1"},
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        date=("2020-01-01", "2020-12-31"),
        domains=[],
        task_subtypes=[],
        license="cc0-1.0",
        annotations_creators="derived",
        dialect=[],
        modalities=["image", "text"],
        sample_creation="created",
        bibtex_citation="",
    )


def pixels(data, image):
    """The image of a data set, as the task's data hold it."""
    from PIL import Image

    return Image.open(data.images[image].location.path).convert("RGB")


def retrieval_task(data, direction):
    """A task of the class AbsTaskRetrieval. ``i2t``: images are queries."""
    images = datasets.Dataset.from_dict(
        {
            "id": [f"i{i}" for i in range(len(data.images))],
            "image": [pixels(data, i) for i in range(len(data.images))],
        }
    )
    texts = datasets.Dataset.from_dict(
        {"id": [f"t{i}" for i in range(len(data.captions))], "text": list(data.captions)}
    )
    of_text = {f"t{text}": f"i{image}" for text, image in enumerate(data.image_of.tolist())}
    if direction == "t2i":
        queries, corpus, relevant = (
            texts,
            images,
            {text: {image: 1} for text, image in of_text.items()},
        )
    else:
        queries, corpus, relevant = images, texts, {}
        for text, image in of_text.items():
            relevant.setdefault(image, {})[text] = 1

    class Scenes(AbsTaskRetrieval):
        def load_data(self, **_):
            self.dataset = {
                "default": {
                    "test": RetrievalSplitData(
                        queries=queries, corpus=corpus, relevant_docs=relevant, top_ranked=None
                    )
                }
            }
            self.data_loaded = True

    Scenes.metadata = metadata(
        f"Scenes{direction.upper()}", "Any2AnyRetrieval", direction, "ndcg_at_10"
    )
    return Scenes()


def pair_task(data):
    """Two images and two captions in each row, as in Winoground."""
    rows = np.arange(len(data.images)).reshape(-1, 2)
    captions = [data.captions[own[0]] for own in data.captions_of]

    class Pairs(AbsTaskImageTextPairClassification):
        images_column_names = ("first", "second")
        texts_column_names = ("caption_0", "caption_1")

        def load_data(self, **_):
            columns = {
                "first": [pixels(data, i) for i in rows[:, 0]],
                "second": [pixels(data, i) for i in rows[:, 1]],
            }
            columns |= {
                f"caption_{side}": [captions[i] for i in rows[:, side]] for side in range(2)
            }
            self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(columns)})
            self.data_loaded = True

    Pairs.metadata = metadata("ScenePairs", "Compositionality", "i2t", "accuracy")
    return Pairs(), rows, captions


LABELS = ["a red circle", "a blue square", "a green star"]


def zero_shot_task(data):
    class Shapes(AbsTaskZeroShotClassification):
        def load_data(self, **_):
            columns = {
                "image": [pixels(data, i) for i in range(len(data.images))],
                "label": [i % 3 for i in range(len(data.images))],
            }
            self.dataset = datasets.DatasetDict({"test": datasets.Dataset.from_dict(columns)})
            self.data_loaded = True

        def get_candidate_labels(self):
            return LABELS

    Shapes.metadata = metadata("SceneShapes", "ZeroShotClassification", "i2t", "accuracy")
    return Shapes()


def paths(data):
    return [data.images[i].location.path for i in range(len(data.images))]


@every_model
def test_mteb_retrieval_equals_evaluate(model, scenes, split, tmp_path):
    report = visavis.mteb(
        model, tasks=[retrieval_task(split, way) for way in ("i2t", "t2i")], out=tmp_path
    )
    ours = visavis.evaluate(model, data=scenes)
    for result, direction, ranks in zip(
        report.result.task_results, ("i2t", "t2i"), (ours.image_ranks, ours.text_ranks), strict=True
    ):
        [scores] = result.scores["test"]
        # Most words are unknown to the tiny CLIP, and many captions have equal scores. visavis
        # counts ties against the model, mteb does not.
        ours_best = {
            f"hit_rate_at_{k}": ours.metrics[f"{direction}_r{k}"] / 100 for k in (1, 5, 10)
        }
        ours_best["mrr_at_10"] = np.where(ranks <= 10, 1 / ranks, 0).mean()
        differences = [scores[name] - value for name, value in ours_best.items()]
        assert min(differences) > -1e-5
        if direction == "t2i" or model.name == "run":
            assert max(differences) < 1e-5
        if (
            direction == "t2i"
        ):  # one positive per query: recall is R@K, and nDCG depends on its rank only
            assert scores["recall_at_5"] == pytest.approx(ours.metrics["t2i_r5"] / 100, abs=1e-5)
            assert scores["ndcg_at_10"] == pytest.approx(
                np.where(ranks <= 10, 1 / np.log2(ranks + 1), 0).mean(), abs=1e-5
            )
    files = sorted(path.name for path in report.folder.glob("*.json"))
    assert {"ScenesI2T.json", "ScenesT2I.json"} <= set(files)
    assert json.loads((report.folder / "ScenesT2I.json").read_text())["scores"]["test"][0][
        "main_score"
    ] == pytest.approx(report.scores["ScenesT2I"])


@every_model
def test_mteb_compositionality_equals_scores_of_model(model, split, tmp_path):
    task, rows, captions = pair_task(split)
    [result] = visavis.mteb(model, tasks=[task], out=tmp_path).result.task_results
    [scores] = result.scores["test"]
    opened, files = visavis.load(model), paths(split)
    matrices = [opened.score([files[i] for i in row], [captions[i] for i in row]) for row in rows]
    of_images = [bool((matrix.argmax(1) == torch.arange(2)).all()) for matrix in matrices]
    of_texts = [bool((matrix.argmax(0) == torch.arange(2)).all()) for matrix in matrices]
    assert scores["text_acc"] == pytest.approx(np.mean(of_images))
    assert scores["image_acc"] == pytest.approx(np.mean(of_texts))
    assert scores["accuracy"] == pytest.approx(np.mean(np.array(of_images) & np.array(of_texts)))


@every_model
def test_mteb_zero_shot_equals_classify(model, split, tmp_path):
    report = visavis.mteb(model, tasks=[zero_shot_task(split)], out=tmp_path)
    chosen = visavis.load(model).score(paths(split), LABELS).argmax(1).numpy()
    assert report.scores["SceneShapes"] == pytest.approx(
        (chosen == np.arange(len(chosen)) % 3).mean()
    )


def test_mteb_command_reads_the_data_of_a_task_from_a_folder(
    run, scenes, split, tmp_path, monkeypatch
):
    """The class Flickr30kT2IRetrieval, whose data set is a folder of the same name in the current
    folder.
    """
    monkeypatch.chdir(tmp_path)
    folder = Path("mteb", "flickr30kt2i")
    tables = {
        "corpus": {
            "id": [f"i{i}" for i in range(len(split.images))],
            "image": [pixels(split, i) for i in range(len(split.images))],
        },
        "queries": {
            "id": [f"q{i}" for i in range(len(split.captions))],
            "text": list(split.captions),
        },
        "qrels": {
            "query-id": [f"q{i}" for i in range(len(split.captions))],
            "corpus-id": [f"i{i}" for i in split.image_of.tolist()],
            "score": [1] * len(split.captions),
        },
    }
    for name, columns in tables.items():
        (folder / name).mkdir(parents=True)
        datasets.Dataset.from_dict(columns).to_parquet(str(folder / name / "test.parquet"))
    configs = "".join(
        f"- {{config_name: {name}, data_files: [{{split: test, path: {name}/test.parquet}}]}}\n"
        for name in tables
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    result = CliRunner().invoke(
        app, ["mteb", str(run), "--tasks", "Flickr30kT2IRetrieval", "--out", "results", "--json"]
    )
    assert result.exit_code == 0, result.output
    [scores] = json.loads(result.stdout)["tasks"]["Flickr30kT2IRetrieval"]["test"]
    ours = visavis.evaluate(run, data=scenes)
    for k in (1, 5, 10):
        assert scores[f"hit_rate_at_{k}"] == pytest.approx(
            ours.metrics[f"t2i_r{k}"] / 100, abs=1e-5
        )


def test_mteb_encoder_follows_protocol(dual_encoders):
    encoder = MtebEncoder(visavis.load(dual_encoders / "clip"), "clip")
    assert isinstance(encoder, EncoderProtocol)
    assert (encoder.mteb_model_meta.name, encoder.mteb_model_meta.modalities) == (
        "visavis/clip",
        ["image", "text"],
    )
    one, two = torch.randn(2, 3, 5).unbind()
    torch.testing.assert_close(
        encoder.similarity(one.numpy(), two).diagonal(),
        encoder.similarity_pairwise(one, two.numpy()),
    )


@pytest.mark.slow
def test_mteb_command_lists_unknown_tasks_and_missing_data(dual_encoders, tmp_path, monkeypatch):
    clip = dual_encoders / "clip"
    with pytest.raises(VisavisError, match=mentions("tasks", "NoSuchTask", "available-tasks")):
        visavis.mteb(clip, tasks="NoSuchTask", out=tmp_path)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(DataError, match=mentions("Flickr30kT2IRetrieval", "hub")):
        visavis.mteb(clip, tasks=["Flickr30kT2IRetrieval"], out=tmp_path)
    with pytest.raises(RunError):
        visavis.mteb(tmp_path, tasks="Flickr30kT2IRetrieval")
    help_text = CliRunner().invoke(app, ["mteb", "--help"]).output
    assert all(option in help_text for option in ("--tasks", "--out", "--name"))
