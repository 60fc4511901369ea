"""A stopped run resumes only with the same recipe and contents. Changes of time or place alone are
accepted.
"""

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
from visavis.core import storage
from visavis.core.errors import RunError, VisavisError
from visavis.data.features.store import FeatureStore
from visavis.training.recipes.files import read_recipe
from visavis.training.recipes.open_data import open_data_module
from visavis.training.runs.record import CHANGEABLE_KEYS
from visavis.training.stop_signals import Stopped


@pytest.fixture
def world(scenes, tmp_path) -> Path:
    """Copy of the synthetic scenes that a test may change."""
    return Path(shutil.copytree(scenes, tmp_path / "scenes"))


@pytest.fixture
def begun(recipe, world, stop_at, tmp_path):
    """Train on the scenes with overrides and stop after some steps."""

    def begin(**overrides):
        with pytest.raises(Stopped):
            visavis.train(
                recipe, data=world, out=tmp_path / "run", overrides=overrides, progress=stop_at(6)
            )
        return tmp_path / "run"

    return begin


def repaint(path: Path) -> None:
    """Replace an image."""
    with Image.open(path) as image:
        Image.effect_noise(image.size, 50).convert("RGB").save(path)


def test_resume_rejects_changed_image(begun, world):
    run = begun()
    repaint(world / "images" / "000007.png")
    with pytest.raises(
        RunError,
        match=rf"{run}: images changed since the run began \(data: {world}\)\. Restore it, or start a new run",
    ):
        visavis.train(resume=run)


@pytest.mark.slow
def test_resume_accepts_touched_or_moved_images(begun, world, outcome, uninterrupted):
    run = begun()
    os.utime(world / "images" / "000007.png", (1, 1))
    elsewhere = world.parent / "elsewhere" / "scenes"
    shutil.move(world, elsewhere)
    (run / "run.toml").write_text(
        (run / "run.toml").read_text().replace(str(world), str(elsewhere))
    )
    visavis.train(resume=run)
    assert outcome(run) == outcome(uninterrupted(False))


@pytest.mark.parametrize("kind", ["stored features", "degrees"])
@pytest.mark.slow
def test_resume_rejects_changed_numbers_in_file(begun, recipe, world, tmp_path, kind):
    """Features that the recipe names, and relevance values that a supervision reads."""
    file, size = tmp_path / "numbers.npy", len((world / "captions.jsonl").read_text().splitlines())
    if kind == "degrees":
        np.save(file, np.random.default_rng(0).random((size, 3 * size), np.float32))
        graded = {
            "objective": "Ladder(thresholds=(0.5,))",
            "supervision": f"GradedSupervision(relevance=\"MatrixRelevance(path='{file}')\")",
        }
        run = begun(**{f"phases.0.{key}": value for key, value in graded.items()})
        sentence = r"phases\.0\.supervision changed"
    else:
        data_module = open_data_module(read_recipe(recipe, {"data.path": str(world)}))
        assert isinstance(data_module.visual, FeatureStore)
        np.save(file, data_module.visual.read(np.arange(size)).vectors.numpy())
        run = begun(**{"visual.features": str(file)})
        sentence = "stored_features changed"
    numbers = np.load(file)
    np.save(file, numbers[::-1])
    with pytest.raises(RunError, match=sentence):
        visavis.train(resume=run)
    np.save(file, numbers)
    visavis.train(resume=run)


def test_resume_rejects_changed_encoder(dual_encoders, world, tmp_path, stop_at):
    """Changed weights, preprocessing or tokenizer."""
    clip, run = Path(shutil.copytree(dual_encoders / "clip", tmp_path / "clip")), tmp_path / "run"
    (tmp_path / "clip.toml").write_text(f"""
name = "clip"
visual = {{ encoder = "{clip}", granularity = "pixels" }}
text = {{ encoder = "{clip}", granularity = "tokens" }}
model = {{ kind = "CLIP" }}
training = {{ batch_size = 8, metric_batches = 1, threads = 1 }}
phases = [{{ epochs = 1, objective = "VLC()" }}]
""")
    with pytest.raises(Stopped):
        visavis.train(tmp_path / "clip.toml", data=world, out=run, progress=stop_at(1))
    file = clip / "preprocessor_config.json"
    own, other = (
        file.read_text(),
        json.dumps(json.loads(file.read_text()) | {"image_mean": [0.1, 0.1, 0.1]}),
    )
    file.write_text(other)
    with pytest.raises(RunError, match="image_encoder changed"):
        visavis.train(resume=run)
    file.write_text(own)
    visavis.train(resume=run)
    ranked = visavis.evaluate(run).metrics
    file.write_text(other)
    assert visavis.evaluate(run).metrics == ranked  # The run stores its preprocessing.


def test_evaluation_rejects_changed_frozen_encoder(dual_encoders, world, tmp_path):
    clip, run = Path(shutil.copytree(dual_encoders / "clip", tmp_path / "clip")), tmp_path / "run"
    (tmp_path / "linear.toml").write_text(f"""
name = "linear"
visual = {{ encoder = "{clip}", granularity = "pooled" }}
text = {{ encoder = "{clip}", granularity = "pooled" }}
model = {{ kind = "Heads", embedding_dim = 8, hidden_layers = 0 }}
training = {{ batch_size = 8, metric_batches = 1, threads = 1 }}
phases = [{{ epochs = 1, objective = "VLC()" }}]
""")
    visavis.train(tmp_path / "linear.toml", data=world, out=run)
    file = clip / "model.safetensors"
    storage.write_tensors(
        file, {name: 2 * tensor for name, tensor in load_file(file).items()}, for_transformers=True
    )
    with pytest.raises(
        RunError, match=f"^{run}: image_encoder changed since the training. Restore its weights"
    ):
        visavis.evaluate(run)


@pytest.mark.parametrize(
    ("line", "edited", "sentence"),
    [
        (
            "lr = 0.01",
            "lr = 0.02",
            r"phases\.0\.optimizer\.lr: expected 0\.01 as at the start of the run, got 0\.02",
        ),
        ("batch_size = 16", "batch_size = 12", r"training\.batch_size: expected 16 .*, got 12"),
        (
            'name = "AdamW"',
            'name = "SGD"',
            r"phases\.0\.optimizer\.name: expected 'AdamW' .*, got 'SGD'",
        ),
        (
            '"Triplet(margin=0.2, ',
            '"Triplet(margin=0.3, ',
            r"phases\.0\.objective: expected .Triplet\(margin=0\.2, .*, got .Triplet\(margin=0\.3",
        ),
        ("seed = 9", "seed = 8", "seed: expected 9 .*, got 8"),
        (
            "milestones = [\n    1,\n]",
            "milestones = []",
            r"phases\.1\.schedule\.milestones: expected \[1\] .*, got \[\]",
        ),
        (
            "embedding_dim = 16",
            "embedding_dim = 32",
            r"model\.embedding_dim: expected 16 .*, got 32",
        ),
    ],
)
def test_resume_rejects_edited_recipe(begun, line, edited, sentence):
    run = begun()
    text = (run / "run.toml").read_text()
    assert line in text
    (run / "run.toml").write_text(text.replace(line, edited, 1))
    with pytest.raises(
        RunError,
        match=f"{re.escape(str(run / 'run.toml'))}: {sentence}.*\\. Restore the value, or start a new run",
    ):
        visavis.train(resume=run)


def test_resume_accepts_edits_that_change_no_step(begun, outcome, uninterrupted):
    run = begun()
    text = (
        (run / "run.toml")
        .read_text()
        .replace("checkpoint_s = 0", "checkpoint_s = 60")
        .replace('about = ""', 'about = "mine"')
    )
    assert "workers = -1" in text
    (run / "run.toml").write_text(
        text.replace('memory = ""', 'memory = "1GiB"').replace("workers = -1", "workers = 1")
    )
    visavis.train(resume=run)
    assert outcome(run)["model"] == outcome(uninterrupted(False))["model"]


def test_resume_reports_changed_versions(begun, listener):
    run = begun()
    known = json.loads((run / "environment.json").read_text())
    known["versions"] |= {"torch": "1.0", "visavis": "0.0.1"}
    (run / "environment.json").write_text(json.dumps(known))
    visavis.train(resume=run, progress=listener)
    warning = next(sentence for sentence in listener.messages if "began with" in sentence)
    assert re.match(
        r"This run began with visavis 0\.0\.1 \(now \S+\), torch 1\.0 \(now \S+\)\. The result may "
        r"differ",
        warning,
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", r"environment\.json is not JSON"),
        ("[]", r"environment\.json: its content is \[\]"),
        ("{}", r"environment\.json: threads is missing"),
        (
            '{"threads": "1", "data_fingerprint": "x"}',
            r"environment\.json: threads is '1': input should be a valid integer",
        ),
        ('{"threads": 1, "data_fingerprint": "x"}', r"environment\.json: versions is missing"),
    ],
)
def test_damaged_input_record_is_reported(uninterrupted, tmp_path, content, sentence):
    run = Path(shutil.copytree(uninterrupted(False), tmp_path / "run"))
    (run / "environment.json").write_text(content)
    with pytest.raises(VisavisError, match=sentence):
        visavis.train(resume=run)


def test_page_lists_every_editable_key():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "resume.md").read_text()
    named = page.partition("You may edit these keys:")[2].partition("## ")[0]
    assert set(re.findall(r"`([\w.]+)`", named)) == set(CHANGEABLE_KEYS)
