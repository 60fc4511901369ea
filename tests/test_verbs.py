"""Every verb as a function: the same names everywhere, the same result every time, a run folder that is complete."""

import importlib
import inspect
import json
import pkgutil
import tomllib

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis import cli, verbs
from visavis.data import open_dataset
from visavis.data.scenes import write_scenes
from visavis.errors import RecipeError, RunError, SpecError, VisavisError
from visavis.metrics import CATALOG as METRICS
from visavis.progress import Silent

RECIPE = """
name = "tiny"
visual = { tower = "scenes", view = "grid" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSEInfinity", width = 8, word_width = 4, word_dropout = 0.1 }
training = { batch_size = 8, probe_batches = 1, threads = 1 }

[[phases]]
epochs = 2
objective = "Unified(gamma=20)"
optimizer = { lr = 0.01 }
"""


class Listener(Silent):
    def __init__(self):
        self.worked, self.moments = [], []

    def work(self, what, done, total, per_s):
        self.worked.append((what, done, total))

    def step(self, step):
        self.moments.append(step)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return write_scenes(tmp_path_factory.mktemp("world") / "scenes", num_train=20, num_val=5, num_test=6, captions_per_image=2, size=32)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def trained(recipe, scenes, tmp_path_factory):
    return visavis.train(recipe, data=scenes, out=tmp_path_factory.mktemp("runs") / "run")


def weights(run):
    return (run / "model" / "model.safetensors").read_bytes()


def test_every_verb_is_a_function_also_after_every_module_is_imported():
    for module in pkgutil.walk_packages(visavis.__path__, "visavis."):
        if module.name != "visavis.__main__":
            importlib.import_module(module.name)
    for name in verbs.__all__:
        assert getattr(visavis, name) is getattr(verbs, name)
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


def test_a_verb_is_named_by_the_words_of_its_command_and_has_its_arguments():
    """``visavis data check`` is ``visavis.data_check``; an option ``--skip-bad`` is the argument ``skip_bad``.

    What only says how results are shown, ``--json`` and ``--all``, is no argument.
    """
    commands = {"_".join(words): command for words, command in commands_of(cli.app)}
    assert commands.keys() == set(verbs.__all__) - {"load"}
    for name, command in commands.items():
        verb = set(inspect.signature(getattr(verbs, name)).parameters) - {"progress"}
        assert set(inspect.signature(command).parameters) - {"json", "every", "context"} == verb, name


def test_no_argument_changes_what_a_verb_returns():
    for name in verbs.__all__:
        assert "|" not in str(inspect.signature(getattr(verbs, name)).return_annotation), name


def test_a_run_folder_is_complete(trained, scenes):
    run = trained.folder
    assert sorted(path.name for path in run.iterdir() if not path.name.endswith(".lock")) == [
        "checkpoint",
        "environment.json",
        "metrics.jsonl",
        "model",
        "ranks.safetensors",
        "result.json",
        "run.toml",
    ]
    assert sorted(path.name for path in (run / "model").iterdir()) == ["config.json", "model.safetensors"]
    resolved = tomllib.loads((run / "run.toml").read_text())
    assert resolved["data"]["path"] == str(scenes)
    assert resolved["phases"][0]["objective"].startswith("Unified(margin=0.2, gamma=20.0")
    environment = json.loads((run / "environment.json").read_text())
    assert environment.keys() >= {"versions", "git", "threads", "device", "seed", "data_fingerprint", "parameters"}
    assert json.loads((run / "result.json").read_text()) == json.loads(json.dumps(trained.to_json()))


def test_the_log_watches_what_the_papers_figures_show(trained):
    """Epoch 0 is the untrained model; both splits have losses, similarities and gradients."""
    log = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in log] == [0, 1, 2]
    assert [row["step"] for row in log] == [0, 5, 10]
    assert log[0]["running_loss"] is None
    for row in log:
        assert row.keys() >= {metric.name for metric in METRICS if metric.reads != "degrees"}
        for split in ("train", "val"):
            curves = {"loss", "gradient_i2t", "gradient_t2i"}
            curves |= {f"{name}_{what}" for name in ("positive", "hardest_i2t", "hardest_t2i") for what in ("mean", "std")}
            assert row[split].keys() == curves
        assert row["similarity"].keys() == {key for key in curves if key.endswith(("_mean", "_std"))}
    best = max(log, key=lambda row: row["rsum"])
    assert (trained.best_step, trained.validation_rsum) == (best["step"], best["rsum"])


def test_a_training_depends_on_its_seed_alone(trained, recipe, scenes, tmp_path):
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002 - it must not matter
    again = visavis.train(recipe, data=scenes, out=tmp_path / "again")
    assert weights(again.folder) == weights(trained.folder)
    assert again.test.metrics == trained.test.metrics
    other = visavis.train(recipe, data=scenes, out=tmp_path / "other", overrides={"seed": 1})
    assert weights(other.folder) != weights(trained.folder)


def test_overrides_are_a_dict_or_a_list_of_texts(recipe, scenes, tmp_path):
    one = visavis.train(recipe, data=scenes, out=tmp_path / "a", overrides={"objective": "VLC(gamma=10)", "epochs": 1})
    two = visavis.train(recipe, data=scenes, out=tmp_path / "b", overrides=["objective=VLC(gamma=10)", "epochs=1"])
    assert one.objective == two.objective
    assert one.objective.startswith("VLC(gamma=10.0")
    assert weights(one.folder) == weights(two.folder)


def test_runs_are_numbered_where_no_folder_is_named(recipe, scenes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [visavis.train(recipe, data=scenes, overrides={"epochs": 1}).folder for _ in range(2)]
    assert [str(folder) for folder in folders] == ["runs/tiny-1", "runs/tiny-2"]


def test_an_evaluation_is_that_of_the_training_and_of_any_split(trained):
    result = visavis.evaluate(trained.folder)
    assert result.metrics == trained.test.metrics
    assert (result.protocol, result.num_images, result.num_texts, result.captions_per_image) == ("plain", 6, 12, 2)
    validation = visavis.evaluate(trained.folder, split="val")
    assert validation.metrics["rsum"] == pytest.approx(trained.validation_rsum)
    assert validation.num_images == 5


def test_a_watch_sees_every_step_of_the_training(recipe, scenes, tmp_path):
    progress = Listener()
    visavis.train(recipe, data=scenes, out=tmp_path / "run", progress=progress)
    assert [(step.epoch, step.step) for step in progress.moments] == [(epoch, step) for epoch in range(2) for step in range(1, 6)]
    assert {(step.phase, step.phases, step.epochs, step.steps) for step in progress.moments} == {(0, 1, 2, 5)}
    assert progress.moments[-1].seconds_left == 0
    assert all(step.rsum is not None and step.pairs_per_s > 0 for step in progress.moments)


def test_features_are_computed_once_and_where_one_says(scenes, tmp_path):
    first, second = Listener(), Listener()
    (store,) = visavis.features(scenes, visual="scenes", out=tmp_path / "stores", progress=first)
    assert store.folder == tmp_path / "stores" / "visual"
    assert (len(store), store.width) == (31, 192)
    assert first.worked[-1][1:] == (31, 31)
    visavis.features(scenes, visual="scenes", out=tmp_path / "stores", progress=second)
    assert second.worked == []
    with pytest.raises(VisavisError, match="nothing to compute"):
        visavis.features(scenes)


def test_a_good_data_set_is_found_good(scenes):
    report = visavis.data_check(scenes)
    assert report.ok
    assert {name: count.images for name, count in report.splits.items()} == {"train": 20, "val": 5, "test": 6}


@pytest.mark.parametrize("moving", [False, True])
def test_a_world_is_drawn_that_is_a_good_data_set(moving, tmp_path):
    listener = Listener()
    folder = visavis.data_scenes(tmp_path / "world", moving=moving, num_train=4, num_val=2, num_test=2, size=32, progress=listener)
    assert listener.worked[-1][1:] == (8, 8)
    assert sorted(path.name for path in folder.iterdir()) == (
        ["clips.jsonl", "dataset.json", "experts", "frames"] if moving else ["captions.jsonl", "images", "scenes.jsonl"]
    )
    data = open_dataset(folder)
    assert {name: len(data.split(name).images) for name in data.splits} == {"train": 4, "val": 2, "test": 2}


def test_load_and_search_take_a_run(trained, scenes):
    model = visavis.load(trained.folder)
    rows = model.encode_images([Image.new("RGB", (50, 70), "red"), scenes / "images" / "000000.png"])
    assert rows.shape == (2, 8)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(2))
    assert len(visavis.search(trained.folder, "a red circle", top=3)) == 3


def test_doctor_and_catalog_answer(trained):
    assert all(finding.name and finding.value for finding in visavis.doctor())
    assert set(visavis.catalog()) >= {"objectives", "models", "metrics", "recipes", "protocols"}
    assert list(visavis.catalog("recipes")) == ["recipes"]


def test_errors_of_verbs_are_those_of_the_package(tmp_path, recipe):
    with pytest.raises(RecipeError):
        visavis.train("no-such-recipe")
    with pytest.raises(RunError):
        visavis.evaluate(tmp_path)
    with pytest.raises(RunError):
        visavis.load(tmp_path)
    with pytest.raises(ValueError):
        visavis.catalog("poems")


def test_a_memory_setting_changes_blocks_and_no_number(trained, tmp_path):
    few = "300 KB"
    assert visavis.evaluate(trained.folder, memory=few).to_json() == visavis.evaluate(trained.folder).to_json()
    lists = [visavis.search(trained.folder, "a red circle", memory=memory) for memory in (few, None)]
    assert [[hit.name for hit in hits] for hits in lists[:1]] == [[hit.name for hit in hits] for hits in lists[1:]]
    counts = [visavis.diagnose(trained.folder, batches=1, memory=memory).counts[0].mean for memory in (few, None)]
    assert counts[0] == pytest.approx(counts[1], nan_ok=True)
    for verb in (visavis.evaluate, visavis.diagnose, visavis.coherence):
        with pytest.raises(SpecError, match=r"^memory is '3 lots', expected bytes such as"):
            verb(trained.folder, memory="3 lots")
    with pytest.raises(SpecError, match=r"^memory is '3 lots', expected bytes such as"):
        visavis.search(trained.folder, "a red circle", memory="3 lots")
