"""A stopped run goes on with the very same recipe and contents, or not at all; what only looks changed is no matter."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

import visavis
from visavis import storage
from visavis.data.features import FeatureStore
from visavis.errors import RunError, VisavisError
from visavis.runs.record import FREE
from visavis.training.data_module import open_data_module
from visavis.training.recipe_files import read_recipe
from visavis.training.stopping import Stopped


@pytest.fixture
def world(scenes, tmp_path) -> Path:
    """The drawn world, to be changed."""
    return Path(shutil.copytree(scenes, tmp_path / "scenes"))


@pytest.fixture
def begun(recipe, world, stop_at, tmp_path):
    """A run on it that was stopped after some steps, with its overrides."""

    def begin(**overrides):
        with pytest.raises(Stopped):
            visavis.train(recipe, data=world, out=tmp_path / "run", overrides=overrides, progress=stop_at(6))
        return tmp_path / "run"

    return begin


def repaint(picture: Path) -> None:
    """Another picture in its place."""
    with Image.open(picture) as image:
        Image.effect_noise(image.size, 50).convert("RGB").save(picture)


def test_another_picture_is_refused(begun, world):
    run = begun()
    repaint(world / "images" / "000007.png")
    with pytest.raises(RunError, match=rf"the pictures changed since {run} began \(data: {world}\): start a new run, or bring back"):
        visavis.train(resume=run)


def test_pictures_that_were_only_touched_or_moved_are_the_same(begun, world, outcome, uninterrupted):
    run = begun()
    os.utime(world / "images" / "000007.png", (1, 1))
    elsewhere = world.parent / "elsewhere" / "scenes"
    shutil.move(world, elsewhere)
    (run / "run.toml").write_text((run / "run.toml").read_text().replace(str(world), str(elsewhere)))
    visavis.train(resume=run)
    assert outcome(run) == outcome(uninterrupted(False))


@pytest.mark.parametrize("kind", ["stored features", "degrees"])
def test_other_numbers_in_a_file_are_refused_and_the_same_ones_are_not(begun, recipe, world, tmp_path, kind):
    """Features that the recipe names, and degrees that a supervision reads."""
    file, size = tmp_path / "numbers.npy", len((world / "captions.jsonl").read_text().splitlines())
    if kind == "degrees":
        np.save(file, np.random.default_rng(0).random((size, 3 * size), np.float32))
        graded = {"objective": "Ladder(thresholds=(0.5,))", "supervision": f"GradedSupervision(degrees=\"GivenDegrees(path='{file}')\")"}
        run = begun(**{f"phases.0.{key}": value for key, value in graded.items()})
        sentence = "what the supervision of phase 0 reads changed"
    else:
        data_module = open_data_module(read_recipe(recipe, {"data.path": str(world)}))
        assert isinstance(data_module.visual, FeatureStore)
        np.save(file, data_module.visual.read(np.arange(size)).vectors.numpy())
        run = begun(**{"visual.features": str(file)})
        sentence = "the stored features changed"
    numbers = np.load(file)
    np.save(file, numbers[::-1])
    with pytest.raises(RunError, match=sentence):
        visavis.train(resume=run)
    np.save(file, numbers)
    visavis.train(resume=run)


def test_another_encoder_is_refused(dual_encoders, world, tmp_path, stop_at):
    """Its weights, its preprocessing or its tokenizer."""
    clip, run = Path(shutil.copytree(dual_encoders / "clip", tmp_path / "clip")), tmp_path / "run"
    (tmp_path / "clip.toml").write_text(f"""
name = "clip"
visual = {{ tower = "{clip}", view = "pixels" }}
text = {{ tower = "{clip}", view = "tokens" }}
model = {{ kind = "CLIP" }}
training = {{ batch_size = 8, probe_batches = 1, threads = 1 }}
phases = [{{ epochs = 1, objective = "VLC()" }}]
""")
    with pytest.raises(Stopped):
        visavis.train(tmp_path / "clip.toml", data=world, out=run, progress=stop_at(1))
    file = clip / "preprocessor_config.json"
    own, other = file.read_text(), json.dumps(json.loads(file.read_text()) | {"image_mean": [0.1, 0.1, 0.1]})
    file.write_text(other)
    with pytest.raises(RunError, match="the encoder of the images changed"):
        visavis.train(resume=run)
    file.write_text(own)
    visavis.train(resume=run)
    ranked = visavis.evaluate(run).metrics
    file.write_text(other)
    assert visavis.evaluate(run).metrics == ranked  # by the preparation that the run keeps


def test_a_run_on_a_frozen_encoder_is_evaluated_by_that_one_alone(dual_encoders, world, tmp_path):
    clip, run = Path(shutil.copytree(dual_encoders / "clip", tmp_path / "clip")), tmp_path / "run"
    (tmp_path / "linear.toml").write_text(f"""
name = "linear"
visual = {{ tower = "{clip}", view = "pooled" }}
text = {{ tower = "{clip}", view = "pooled" }}
model = {{ kind = "Heads", width = 8, depth = 0 }}
training = {{ batch_size = 8, probe_batches = 1, threads = 1 }}
phases = [{{ epochs = 1, objective = "VLC()" }}]
""")
    visavis.train(tmp_path / "linear.toml", data=world, out=run)
    file = clip / "model.safetensors"
    storage.write_tensors(file, {name: 2 * tensor for name, tensor in load_file(file).items()}, for_transformers=True)
    with pytest.raises(
        RunError, match=f"^the encoder of the images is not the one that {run} was trained with: bring its old weights back"
    ):
        visavis.evaluate(run)


@pytest.mark.parametrize(
    ("line", "edited", "sentence"),
    [
        ("lr = 0.01", "lr = 0.02", r"phases\.0\.optimizer\.lr is 0\.02, and was 0\.01 when the run began"),
        ("batch_size = 16", "batch_size = 12", r"training\.batch_size is 12, and was 16"),
        ('name = "AdamW"', 'name = "SGD"', r"phases\.0\.optimizer\.name is 'SGD', and was 'AdamW'"),
        (
            '"Triplet(margin=0.2, ',
            '"Triplet(margin=0.3, ',
            r"phases\.0\.objective is .Triplet\(margin=0\.3, .*, and was .Triplet\(margin=0\.2",
        ),
        ("seed = 9", "seed = 8", "seed is 8, and was 9"),
        ("milestones = [\n    1,\n]", "milestones = []", r"phases\.1\.schedule\.milestones is \[\], and was \[1\]"),
        ("width = 16", "width = 32", r"model\.width is 32, and was 16"),
    ],
)
def test_an_edited_recipe_is_refused(begun, line, edited, sentence):
    run = begun()
    text = (run / "run.toml").read_text()
    assert line in text
    (run / "run.toml").write_text(text.replace(line, edited, 1))
    with pytest.raises(RunError, match=f"{re.escape(str(run / 'run.toml'))}: {sentence}.*: a run keeps its recipe; write it as it was"):
        visavis.train(resume=run)


def test_what_changes_no_step_may_be_edited(begun, outcome, uninterrupted):
    run = begun()
    text = (run / "run.toml").read_text().replace("checkpoint_s = 0", "checkpoint_s = 60").replace('about = ""', 'about = "mine"')
    (run / "run.toml").write_text(text.replace('memory = ""', 'memory = "1GiB"'))
    visavis.train(resume=run)
    assert outcome(run)["model"] == outcome(uninterrupted(False))["model"]


def test_other_versions_are_said(begun, listener):
    run = begun()
    known = json.loads((run / "environment.json").read_text())
    known["versions"] |= {"torch": "1.0", "visavis": "0.0.1"}
    (run / "environment.json").write_text(json.dumps(known))
    visavis.train(resume=run, progress=listener)
    said = next(sentence for sentence in listener.said if "begun with" in sentence)
    assert re.match(r"this run was begun with visavis 0\.0\.1 \(now \S+\), torch 1\.0 \(now \S+\): the result may differ", said)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", r"environment\.json is not JSON"),
        ("[]", r"environment\.json: its content is \[\]"),
        ("{}", r"environment\.json: threads is missing"),
        ('{"threads": "1", "data_fingerprint": "x"}', r"environment\.json: threads is '1': input should be a valid integer"),
        ('{"threads": 1, "data_fingerprint": "x", "inputs": {"the pictures": 3}}', r"environment\.json: inputs\.the pictures is 3"),
        ('{"threads": 1, "data_fingerprint": "x", "recipe": {"name": "y"}}', r"environment\.json, recipe: visual is missing"),
    ],
)
def test_a_damaged_record_is_a_sentence(uninterrupted, tmp_path, content, sentence):
    run = Path(shutil.copytree(uninterrupted(False), tmp_path / "run"))
    (run / "environment.json").write_text(content)
    with pytest.raises(VisavisError, match=sentence):
        visavis.train(resume=run)


def test_the_page_names_every_key_that_may_be_edited():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "recipes.md").read_text()
    named = page.partition("keys may be edited: ")[2].partition(".\n")[0]
    assert set(re.findall(r"`([\w.]+)`", named)) == set(FREE)
