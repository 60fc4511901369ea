"""API functions: one per command, deterministic results, and complete run folders."""

import contextlib
import importlib
import inspect
import json
import pkgutil
import re
import tomllib

import numpy as np
import pytest
import torch
from PIL import Image
from tests.fixtures.recipes import write_recipe

import visavis
from visavis import api, cli
from visavis.api import catalog_entries
from visavis.api.catalog_entries import docstring_arguments, docstring_summary
from visavis.cli.commands import COMMANDS, registered_commands
from visavis.core import storage
from visavis.core.errors import (
    MissingExtra,
    RecipeError,
    RefusedOverwrite,
    RunError,
    SpecError,
    VisavisError,
)
from visavis.core.progress import NoProgress
from visavis.data.dataset_reader import open_dataset
from visavis.evaluation.metrics import CATALOG as METRICS
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.initial_model import DERIVED_MODEL_KEYS


class RecordedProgress(NoProgress):
    def __init__(self):
        self.updates, self.steps = [], []

    def update(self, task, done, total, items_per_second):
        self.updates.append((task, done, total))

    def training_step(self, step):
        self.steps.append(step)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    phase = {"epochs": 2, "objective": "Unified(gamma=20)", "optimizer": {"lr": 0.01}}
    return write_recipe(
        tmp_path_factory.mktemp("recipe") / "tiny.toml",
        phase,
        visual={"granularity": "regions"},
        model={"kind": "VSEInfinity", "word_dropout": 0.1},
    )


@pytest.fixture(scope="module")
def progress():
    return RecordedProgress()


@pytest.fixture(scope="module")
def trained(recipe, few_scenes, progress, tmp_path_factory):
    return visavis.train(
        recipe, data=few_scenes, out=tmp_path_factory.mktemp("runs") / "run", progress=progress
    )


def weights(run):
    return (run / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda recipe, data: visavis.compare(recipe, data=data, overrides={"seed": 5}),
            "seed: expected none, .* set --seeds",
        ),
        (
            lambda recipe, data: visavis.compare(recipe, data=data, grid="seed=[1, 2]"),
            "seed: expected none, .* set --seeds",
        ),
        (
            lambda recipe, data: visavis.papers_reproduce("goal/3", overrides=["seed=5"]),
            "seed: expected none, .* set --seeds",
        ),
        *(
            (
                lambda recipe, data, key=key: visavis.train(
                    recipe, data=data, overrides={f"model.{key}": 3}
                ),
                f"model.{key}: expected none",
            )
            for key in DERIVED_MODEL_KEYS
        ),
    ],
)
def test_settings_without_effect_are_rejected(
    call, message, recipe, few_scenes, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=message):
        call(recipe, few_scenes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("training.epochs", "epochs=2"),
        ("batch_size", r"training\.batch_size=2"),
        ("phases.0.lr", r"phases\.0\.optimizer\.lr=2"),
        ("data.seed", "seed=2"),
        ("training.optimizer", r"phases\.0\.optimizer"),
    ],
)
def test_unknown_key_suggests_key_of_other_section(key, suggestion, recipe):
    with pytest.raises(
        RecipeError, match=rf"{key} is not a key of recipes: did you mean {suggestion}\?$"
    ):
        read_recipe(recipe, {key: 2})


def test_features_rejects_run_folder(trained, few_scenes):
    before = sorted(trained.run.iterdir())
    with pytest.raises(
        RefusedOverwrite, match=r"expected a new folder or one of features, got .* in it\. Name"
    ):
        visavis.features(few_scenes, visual="scenes", out=trained.run)
    assert sorted(trained.run.iterdir()) == before


def test_api_functions_survive_the_import_of_every_module():
    for module in pkgutil.walk_packages(visavis.__path__, "visavis."):
        if module.name != "visavis.__main__":
            with contextlib.suppress(MissingExtra):  # LangChain and LlamaIndex
                importlib.import_module(module.name)
    for name in api.__all__:
        assert getattr(visavis, name) is getattr(api, name)
        assert inspect.isfunction(getattr(visavis, name))
        assert name in dir(visavis)


def commands_of(app, words=()):
    """Every command of the command line, by its words."""
    if app.registered_callback is not None:
        yield words, app.registered_callback.callback
    for command in app.registered_commands:
        yield (*words, command.name or command.callback.__name__), command.callback
    for group in app.registered_groups:
        yield from commands_of(group.typer_instance, (*words, group.name))


def test_commands_have_the_parameters_of_api_functions():
    """``visavis data check`` is ``visavis.data_check``. The options of output are options of the
    command line alone.
    """
    commands = {
        "_".join(words).replace("-", "_"): command
        for words, command in commands_of(cli.app)
        if words
    }
    known = COMMANDS | registered_commands()
    assert commands.keys() == known.keys() == set(api.__all__) - {"load"}
    for name, command in commands.items():
        parameters = set(inspect.signature(getattr(api, name)).parameters) - {"progress"}
        assert (
            set(inspect.signature(command).parameters)
            - {"json", "print_all", "context", "verbose", "quiet"}
            == parameters
        ), name


def test_api_functions_have_at_most_12_options():
    for name in api.__all__:
        options = [
            key
            for key, parameter in inspect.signature(getattr(api, name)).parameters.items()
            if parameter.kind == parameter.KEYWORD_ONLY and key not in ("progress", "overrides")
        ]
        assert len(options) <= 12, name


def test_api_docstrings_describe_every_parameter():
    for name in api.__all__:
        function = getattr(api, name)
        texts = docstring_arguments(function)
        assert list(texts) == list(inspect.signature(function).parameters), name
        assert docstring_summary(function).endswith("."), name
        for parameter, text in texts.items():
            default = inspect.signature(function).parameters[parameter].default
            assert text.endswith("."), f"{name}({parameter})"
            assert (
                default is not None
                or parameter in ("progress", "visual", "text", "kind")
                or "Default" in text
            ), f"{name}({parameter})"


def test_train_writes_a_complete_run_folder(trained, few_scenes):
    run = trained.run
    assert sorted(path.name for path in run.iterdir() if not path.name.endswith(".lock")) == [
        "checkpoint",
        "environment.json",
        "metrics.jsonl",
        "model",
        "ranks.safetensors",
        "result.json",
        "run.toml",
    ]
    assert sorted(path.name for path in (run / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    resolved = tomllib.loads((run / "run.toml").read_text())
    assert resolved["data"]["path"] == str(few_scenes)
    assert resolved["phases"][0]["objective"].startswith("Unified(margin=0.2, gamma=20.0")
    environment = json.loads((run / "environment.json").read_text())
    assert environment.keys() >= {
        "versions",
        "git_commit",
        "threads",
        "device",
        "seed",
        "data_fingerprint",
        "parameters",
    }
    assert json.loads((run / "result.json").read_text()) == json.loads(
        json.dumps(trained.to_json())
    )


def test_train_logs_losses_similarities_and_gradients(trained):
    """Epoch 0 is the untrained model. Both splits have losses, similarities and gradients."""
    log = [json.loads(line) for line in (trained.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in log] == [0, 1, 2]
    assert [row["step"] for row in log] == [0, 3, 6]
    assert log[0]["running_loss"] is None
    for row in log:
        assert row.keys() >= {metric.name for metric in METRICS if "_K" not in metric.name}
        for split in ("train", "val"):
            curves = {"loss", "gradient_i2t", "gradient_t2i"}
            curves |= {
                f"{name}_{what}"
                for name in ("positive", "hardest_i2t", "hardest_t2i")
                for what in ("mean", "std")
            }
            assert row[split].keys() == curves
        assert row["similarity"].keys() == {
            key for key in curves if key.endswith(("_mean", "_std"))
        }
    best = max(log, key=lambda row: row["rsum"])
    assert (trained.best_step, trained.validation_rsum) == (best["step"], best["rsum"])


def test_train_depends_on_the_seed_alone(trained, recipe, few_scenes, tmp_path):
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002 - the global generator must not matter
    again = visavis.train(recipe, data=few_scenes, out=tmp_path / "again")
    assert weights(again.run) == weights(trained.run)
    assert again.test.metrics == trained.test.metrics
    other = visavis.train(recipe, data=few_scenes, out=tmp_path / "other", overrides={"seed": 1})
    assert weights(other.run) != weights(trained.run)


def test_train_takes_overrides_and_numbers_default_run_folders(
    recipe, few_scenes, tmp_path, monkeypatch
):
    """Overrides are a dict or texts."""
    monkeypatch.chdir(tmp_path)
    one = visavis.train(
        recipe, data=few_scenes, overrides={"objective": "VLC(gamma=10)", "epochs": 1}
    )
    two = visavis.train(recipe, data=few_scenes, overrides=["objective=VLC(gamma=10)", "epochs=1"])
    assert [str(one.run), str(two.run)] == ["runs/tiny-1", "runs/tiny-2"]
    assert one.objective == two.objective
    assert one.objective.startswith("VLC(gamma=10.0")
    assert weights(one.run) == weights(two.run)


def test_evaluate_reproduces_the_test_metrics_of_train(trained):
    result = visavis.evaluate(trained.run)
    assert result.metrics == trained.test.metrics
    assert (result.protocol, result.num_images, result.num_texts, result.captions_per_image) == (
        "plain",
        8,
        16,
        2,
    )
    validation = visavis.evaluate(trained.run, split="val")
    assert validation.metrics["rsum"] == pytest.approx(trained.validation_rsum)
    assert validation.num_images == 4


def test_train_reports_every_step(trained, progress):
    assert [(step.epoch, step.step) for step in progress.steps] == [
        (epoch, step) for epoch in range(2) for step in range(1, 4)
    ]
    assert {(step.phase, step.phases, step.epochs, step.steps) for step in progress.steps} == {
        (0, 1, 2, 3)
    }
    assert progress.steps[-1].seconds_left == 0
    assert all(step.rsum is not None and step.pairs_per_second > 0 for step in progress.steps)


def test_features_are_computed_once(few_scenes, tmp_path):
    first, second = RecordedProgress(), RecordedProgress()
    (store,) = visavis.features(
        few_scenes, visual="scenes", out=tmp_path / "stores", progress=first
    )
    assert store.folder == tmp_path / "stores" / "visual"
    assert (len(store), store.embedding_dim) == (24, 192)
    assert first.updates[-1][1:] == (24, 24)
    visavis.features(few_scenes, visual="scenes", out=tmp_path / "stores", progress=second)
    assert second.updates == []
    with pytest.raises(VisavisError, match="Pass --visual or --text"):
        visavis.features(few_scenes)


def test_data_check_accepts_a_valid_data_set(few_scenes):
    report = visavis.data_check(few_scenes)
    assert report.ok
    assert {name: count.images for name, count in report.splits.items()} == {
        "train": 12,
        "val": 4,
        "test": 8,
    }


@pytest.mark.parametrize("clips", [False, True])
def test_data_scenes_writes_a_data_set(clips, tmp_path):
    progress = RecordedProgress()
    folder = visavis.data_scenes(
        tmp_path / "world",
        clips=clips,
        num_train=4,
        num_val=2,
        num_test=2,
        size=32,
        progress=progress,
    )
    assert progress.updates[-1][1:] == (8, 8)
    assert sorted(path.name for path in folder.iterdir()) == (
        ["clips.jsonl", "dataset.json", "experts", "frames"]
        if clips
        else ["captions.jsonl", "images", "scenes.jsonl"]
    )
    data = open_dataset(folder)
    assert {name: len(data.split(name).images) for name in data.splits} == {
        "train": 4,
        "val": 2,
        "test": 2,
    }


def test_load_and_search_take_a_run_folder(trained, few_scenes):
    model = visavis.load(trained.run)
    rows = model.encode_images(
        [Image.new("RGB", (50, 70), "red"), few_scenes / "images" / "000000.png"]
    )
    assert rows.shape == (2, 8)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(2))
    assert len(visavis.search(trained.run, "a red circle", top=3)) == 3


def test_catalog_cache_is_replaced_when_a_source_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path))
    expected = catalog_entries.objectives()
    assert catalog_entries.catalog_entries("objectives") == expected
    file = tmp_path / "catalog" / "objectives.json"
    stored = storage.read_checksummed_json(file, dict)
    storage.write_checksummed_json(file, stored | {"entries": []})
    assert catalog_entries.catalog_entries("objectives") == []
    storage.write_checksummed_json(file, {"key": "another", "entries": []})
    assert catalog_entries.catalog_entries("objectives") == expected
    file.write_text("{}")
    assert catalog_entries.catalog_entries("objectives") == expected


def test_catalog_needs_no_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("VISAVIS_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert catalog_entries.catalog_entries("protocols") == catalog_entries.protocols()


def test_doctor_and_catalog_have_entries(trained):
    assert all(check.name and check.value for check in visavis.doctor())
    assert set(visavis.catalog()) >= {"objectives", "models", "metrics", "recipes", "protocols"}
    assert list(visavis.catalog("recipes")) == ["recipes"]


def test_api_functions_raise_visavis_errors(tmp_path, recipe):
    with pytest.raises(RecipeError):
        visavis.train("no-such-recipe")
    with pytest.raises(RunError):
        visavis.evaluate(tmp_path)
    with pytest.raises(RunError):
        visavis.load(tmp_path)
    with pytest.raises(ValueError):
        visavis.catalog("poems")


def test_memory_setting_does_not_change_results(trained, tmp_path):
    few = "300 KB"
    assert (
        visavis.evaluate(trained.run, memory=few).to_json()
        == visavis.evaluate(trained.run).to_json()
    )
    counts = [
        visavis.papers_diagnose(trained.run, max_batches=1, memory=memory).counts[0].mean
        for memory in (few, None)
    ]
    assert counts[0] == pytest.approx(counts[1], nan_ok=True)
    for function in (visavis.evaluate, visavis.papers_diagnose, visavis.papers_coherence):
        with pytest.raises(SpecError, match=r"^memory\b.*'3 lots'"):
            function(trained.run, memory="3 lots")


def test_api_functions_take_numbers_of_numpy(trained, few_scenes, tmp_path, monkeypatch):
    """A result or report of them is JSON, which has no numbers of numpy."""
    monkeypatch.chdir(tmp_path)
    visavis.data_scenes(
        "made", num_train=np.int32(2), num_val=np.int32(0), num_test=np.int64(1), size=np.int32(32)
    )
    visavis.features(
        few_scenes,
        visual="scenes",
        crops=np.int32(1),
        frames_per_second=np.float32(0),
        out="stored",
    )
    diagnosis = visavis.papers_diagnose(
        trained.run, max_batches=np.int32(1), epsilon=np.float32(0.1)
    )
    hits = visavis.search(trained.run, "red", top=np.int64(2))
    coherence = visavis.papers_coherence(
        trained.run,
        relevance="SceneRelevance()",
        queries=np.int32(1),
        top=np.int32(2),
        irrelevant_share=np.float32(0.5),
        seed=np.int64(1),
        out="coherence",
    )
    for result in (diagnosis, hits, coherence):
        assert json.dumps(result.to_json())
    assert (
        len(visavis.load(trained.run, batch_size=np.int64(2)).encode_texts(["a", "red", "star"]))
        == 3
    )
    assert visavis.evaluate(trained.run, memory=np.int64(2**30)).num_images == 8


def test_choices_with_another_result_are_rejected(trained, few_scenes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    index = visavis.index(trained.run, few_scenes, out="index").folder
    calls = {
        "an ONNX graph": lambda: visavis.export(trained.run, format="onx", out="made"),
        "a regression": lambda: visavis.papers_relevance_fit("made", kind="bo", lr=0.1),
        "no item at all": lambda: visavis.search(index, "red", filter={"kind": "foto"}),
    }
    for result, call in calls.items():
        with pytest.raises(SpecError) as error:
            call()
        message = r"(format|kind): expected '.+' or '.+', got '(onx|bo|foto)'\."
        assert re.fullmatch(message, str(error.value)), result
    assert not (tmp_path / "made").exists()


def test_names_of_other_packages_have_a_hint():
    with pytest.raises(
        AttributeError, match=r"no attribute 'Unified'\. Import it from visavis\.obj"
    ):
        visavis.Unified  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'Unifid'$"):
        visavis.Unifid  # noqa: B018
