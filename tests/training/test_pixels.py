"""Encoders of images trained from pixels: sizes, random crops, VSE-infinity on a grid, and a loss that rises from 0."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis.data.reading import open_dataset
from visavis.errors import RecipeError
from visavis.models import CATALOG, small_cnn
from visavis.models.caching import store_folder
from visavis.models.pixel_source import CROPS
from visavis.models.preprocessing import Preprocessing
from visavis.models.towers import TowerSpec, open_preprocessing
from visavis.training.checkpoint import Checkpoint, complete
from visavis.training.recipe_files import read_recipe
from visavis.training.stopping import Stopped
from visavis.types import Encoded


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))


def test_ten_crops_are_drawn_by_the_picture_itself():
    preprocessing = Preprocessing(resize=(14,), crop=(14, 14), mean=(0.5,) * 3, std=(0.5,) * 3)
    picture = noise(16, 16)
    whole = Preprocessing(resize=None, crop=None, mean=(0.5,) * 3, std=(0.5,) * 3)(picture)
    drawn = preprocessing(picture, 10, drawn=True)
    assert drawn.shape == (10, 3, 14, 14)
    assert torch.equal(preprocessing(picture.copy(), 10, drawn=True), drawn)
    windows = {(top, left): whole[:, top : top + 14, left : left + 14] for top in range(3) for left in range(3)}
    places = [[place for place, window in windows.items() if torch.equal(window, crop)] for crop in drawn]
    assert all(len(place) == 1 for place in places) and len({place[0] for place in places}) > 1, "windows of the picture, not all the same"
    assert {index for place in places for index in place[0]} == {0, 1, 2}, "up to the edges"
    assert not torch.equal(preprocessing(noise(16, 16, 1), 10, drawn=True), drawn)
    assert preprocessing(noise(50, 20), 10, drawn=True).shape == (10, 3, 14, 14)


def test_pictures_become_squares_of_the_size_that_is_said(scenes):
    spec = TowerSpec("visual", "small-cnn", "grid", size=96)
    assert open_preprocessing(spec)([noise(40, 30)]).shape == (1, 3, 96, 96)
    assert open_preprocessing(spec, of_crops=True)([noise(20, 30)]).shape == (1, 3, 96, 96)
    assert spec.open().encode([noise(40, 30)]).vectors.shape == (1, 36, 256)
    data = open_dataset(scenes)
    names = {
        store_folder(data, TowerSpec("visual", "x", crops=10, random_crops=drawn, size=size)) for drawn in (False, True) for size in (0, 96)
    }
    assert len(names) == 4


def test_crops_by_sides_keep_the_shape(generator):
    sizes = [CROPS["sides"](noise(100, 50), generator).size for _ in range(200)]
    assert all(abs(width - 2 * height) <= 2 for width, height in sizes)
    assert min(sizes)[0] in range(60, 63) and max(sizes)[0] in range(98, 101)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("{ tower = 'small-cnn', view = 'pixels', random_crops = true }", "random_crops is for visual.crops = 10"),
        ("{ tower = 'x', features = 'x.npy', crops = 10, random_crops = true }", "random_crops is for visual.crops = 10"),
        ("{ tower = 'x', size = -1 }", "visual.size is -1"),
    ],
)
def test_what_does_not_fit_is_one_sentence(settings, sentence, tmp_path):
    (tmp_path / "x.toml").write_text(
        f'name = "x"\nvisual = {settings}\nmodel = "VSE++()"\nphases = [{{ epochs = 1, objective = "VLC()" }}]\n'
    )
    with pytest.raises(RecipeError, match=sentence):
        read_recipe(tmp_path / "x.toml")


def test_vse_infinity_on_a_grid_keeps_the_statistics_of_its_backbone_and_learns_all_else():
    config = {"visual_view": "pixels", "visual_width": 256, "backbone": "small-cnn", "text_view": "tokens", "text_width": 9, "width": 8}
    matcher = CATALOG["VSEInfinity"](CATALOG["VSEInfinity"].Config(**config, word_width=4)).train()
    before = {name: buffer.clone() for name, buffer in matcher.backbone.named_buffers()}
    images, texts = Encoded(torch.randn(6, 3, 64, 64)), Encoded(torch.randint(1, 9, (6, 5)))
    matcher.score(matcher.encode_visual(images), matcher.encode_text(texts)).square().sum().backward()
    assert before and all(torch.equal(buffer, before[name]) for name, buffer in matcher.backbone.named_buffers())
    assert set(matcher.parameters_by_part()) == {"visual", "text", "backbone"}
    assert all(parameter.grad is not None for parameter in matcher.backbone.parameters())
    assert isinstance(matcher.visual, torch.nn.Linear), "the grid goes through one linear map"


def test_the_grid_is_left_out_by_chances_of_each_image():
    config = {"visual_width": 4, "text_view": "tokens", "text_width": 9, "width": 8}
    matcher = CATALOG["VSEInfinity"](CATALOG["VSEInfinity"].Config(**config)).train()
    shares = 1 - matcher._left_in(Encoded(torch.randn(4000, 100, 4)), of_image=True).float().mean(1)
    assert abs((shares == 0).float().mean() - 0.2) < 0.03, "a fifth of the images stay whole"
    assert abs(shares.mean() - 0.2 * (1 - 0.2**2) / 2) < 0.01
    assert shares.max() < 0.4


def test_heads_read_the_own_vector_of_an_encoder_and_its_width(few_scenes, monkeypatch, tmp_path):
    """Of VGG19 it is wider than a region; here of a network whose vector is narrower."""

    class Narrow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 6, 8, 8)

        def forward(self, pixel_values):
            grid = self.layer(pixel_values)
            return SimpleNamespace(last_hidden_state=grid, pooler_output=grid.amax((2, 3))[:, :4])

    monkeypatch.setattr(small_cnn.SmallCNN, "__new__", lambda kind: Narrow())
    (tmp_path / "heads.toml").write_text(HEADS)
    visavis.train(tmp_path / "heads.toml", data=few_scenes, out=tmp_path / "run")
    config = json.loads((tmp_path / "run/model/config.json").read_text())["architecture"]
    assert (config["visual_width"], config["backbone"]) == (4, "small-cnn")
    assert visavis.load(tmp_path / "run").encode_images([noise(30, 30)]).shape == (1, 8)


HEADS = """
name = "heads"
visual = { tower = "small-cnn", view = "pixels", size = 32 }
text = { tower = "minilm", view = "pooled" }
model = { kind = "Heads", width = 8, hidden = 8 }
training = { batch_size = 12, probe_batches = 1, threads = 1 }
phases = [{ epochs = 1, objective = "Triplet()", trainable = ["visual", "text"] }, { epochs = 1, objective = "TripletHN()", start_from = "best" }]
"""

RECIPE = """
name = "grid"
visual = { tower = "small-cnn", view = "pixels", size = 48, augment = true, augment_crop = "sides" }
text = { min_count = 1 }
model = { kind = "VSEInfinity", width = 16, word_width = 8 }
training = { batch_size = 8, checkpoint_s = 0, probe_batches = 1, threads = 1 }

[[phases]]
epochs = 1
objective = "Triplet()"
trainable = ["visual", "text"]
optimizer = { name = "AdamW", lr = 1e-3, lr_multipliers = { backbone = 0.01 } }

[[phases]]
epochs = 2
objective = "TripletHN()"
ramp = 1.0
keep_optimizer = true
optimizer = { name = "SGD", lr = 1e-2, lr_multipliers = { backbone = 0.01 } }
"""


def test_a_backbone_is_frozen_for_an_epoch_and_the_loss_rises_and_it_resumes_exactly(few_scenes, outcome, stop_at, tmp_path):
    (tmp_path / "grid.toml").write_text(RECIPE)
    visavis.train(tmp_path / "grid.toml", data=few_scenes, out=tmp_path / "whole")
    with pytest.raises(Stopped):
        visavis.train(tmp_path / "grid.toml", data=few_scenes, out=tmp_path / "run", progress=stop_at(4))
    frozen, ramped = (Checkpoint.read(path) for path in complete(tmp_path / "run" / "checkpoint"))
    assert (frozen.state.phase, ramped.state.phase_step) == (0, 0) or frozen.state.step < ramped.state.step
    with pytest.raises(Stopped):
        visavis.train(resume=tmp_path / "run", progress=stop_at(1))
    visavis.train(resume=tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_the_first_step_of_a_ramp_moves_nothing_and_the_second_a_little(few_scenes, stop_at, tmp_path):
    (tmp_path / "grid.toml").write_text(RECIPE)

    def moved(steps, ramp):
        run = tmp_path / f"{steps}-{ramp}"
        with pytest.raises(Stopped):
            overrides = {"phases.0.epochs": 1, "phases.1.ramp": ramp}
            visavis.train(tmp_path / "grid.toml", data=few_scenes, out=run, overrides=overrides, progress=stop_at(4 + steps))
        weights = Checkpoint.read(complete(run / "checkpoint")[-1]).weights
        return weights["visual.weight"]

    start = moved(0, 1.0)
    assert torch.equal(moved(1, 1.0), start) and not torch.equal(moved(1, 0.0), start)
    assert 0 < (moved(2, 1.0) - start).norm() < (moved(2, 0.0) - start).norm()
