"""Image encoders trained from pixels: sizes, random crops, VSE-infinity on a grid, and loss warmup."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tests.fixtures.recipes import recipe_text

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import RecipeError
from visavis.data.dataset_reader import open_dataset
from visavis.data.images import decode_image
from visavis.data.random_transforms import CROP_FUNCTIONS
from visavis.models import CATALOG
from visavis.models.encoders import cnn_backbones as small_cnn
from visavis.models.encoders.encoder_spec import EncoderSpec, open_preprocessing
from visavis.models.encoders.feature_extraction import feature_store_folder
from visavis.models.encoders.frozen_encoders import open_encoder
from visavis.models.encoders.preprocessing import Preprocessing
from visavis.training.checkpoint import Checkpoint, complete_checkpoints
from visavis.training.recipes.files import read_recipe
from visavis.training.stop_signals import Stopped


def noise(width, height, seed=0):
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    )


def test_ten_random_crops_depend_on_image():
    preprocessing = Preprocessing(resize=(14,), crop=(14, 14), mean=(0.5,) * 3, std=(0.5,) * 3)
    image = noise(16, 16)
    whole = Preprocessing(resize=None, crop=None, mean=(0.5,) * 3, std=(0.5,) * 3)(image)
    drawn = preprocessing(image, 10, random_crops=True)
    assert drawn.shape == (10, 3, 14, 14)
    assert torch.equal(preprocessing(image.copy(), 10, random_crops=True), drawn)
    windows = {
        (top, left): whole[:, top : top + 14, left : left + 14]
        for top in range(3)
        for left in range(3)
    }
    places = [
        [place for place, window in windows.items() if torch.equal(window, crop)] for crop in drawn
    ]
    assert all(len(place) == 1 for place in places) and len({place[0] for place in places}) > 1, (
        "crops are different windows of the image"
    )
    assert {index for place in places for index in place[0]} == {0, 1, 2}, "crops reach the edges"
    assert not torch.equal(preprocessing(noise(16, 16, 1), 10, random_crops=True), drawn)
    assert preprocessing(noise(50, 20), 10, random_crops=True).shape == (10, 3, 14, 14)


def test_images_are_resized_to_given_size(scenes):
    spec = EncoderSpec("visual", "small-cnn", "regions", image_size=96)
    assert open_preprocessing(spec)([noise(40, 30)]).shape == (1, 3, 96, 96)
    assert open_preprocessing(spec, already_cropped=True)([noise(20, 30)]).shape == (1, 3, 96, 96)
    assert open_encoder(spec).encode([noise(40, 30)]).vectors.shape == (1, 36, 256)
    data = open_dataset(scenes)
    names = {
        feature_store_folder(
            data,
            EncoderSpec(
                "visual", "x", crops=10, random_crops=drawn, image_size=size, full_decoding=full
            ),
        )
        for drawn in (False, True)
        for size in (0, 96)
        for full in (False, True)
    }
    assert len(names) == 8


def test_crops_by_sides_keep_shape(generator):
    boxes = [CROP_FUNCTIONS["random_sides"]((100, 50), generator) for _ in range(200)]
    sizes = [(right - left, bottom - top) for left, top, right, bottom in boxes]
    assert all(abs(width - 2 * height) <= 2 for width, height in sizes)
    assert min(sizes)[0] in range(60, 63) and max(sizes)[0] in range(98, 101)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            "{ encoder = 'small-cnn', granularity = 'pixels', random_crops = true }",
            "visual.random_crops: expected with visual.crops = 10",
        ),
        (
            "{ encoder = 'x', features = 'x.npy', crops = 10, random_crops = true }",
            "visual.random_crops: expected with visual.crops = 10",
        ),
        ("{ encoder = 'x', image_size = -1 }", "visual.image_size: expected an integer .*, got -1"),
    ],
)
def test_invalid_pixel_recipe_is_rejected(settings, sentence, tmp_path):
    (tmp_path / "x.toml").write_text(
        f'name = "x"\nvisual = {settings}\nmodel = "VSE++()"\nphases = [{{ epochs = 1, objective = "VLC()" }}]\n'
    )
    with pytest.raises(RecipeError, match=sentence):
        read_recipe(tmp_path / "x.toml")


def test_vse_infinity_on_grid_keeps_backbone_statistics():
    config = {
        "visual_granularity": "pixels",
        "visual_input_dim": 256,
        "backbone": "small-cnn",
        "text_granularity": "tokens",
        "text_input_dim": 9,
        "embedding_dim": 8,
    }
    matcher = CATALOG["VSEInfinity"](CATALOG["VSEInfinity"].Config(**config, word_dim=4)).train()
    before = {name: buffer.clone() for name, buffer in matcher.backbone.named_buffers()}
    images, texts = Encoded(torch.randn(6, 3, 64, 64)), Encoded(torch.randint(1, 9, (6, 5)))
    matcher.score(
        matcher.encode_visual(images), matcher.encode_text(texts)
    ).square().sum().backward()
    assert before and all(
        torch.equal(buffer, before[name]) for name, buffer in matcher.backbone.named_buffers()
    )
    assert set(matcher.parameters_by_part()) == {"visual", "text", "backbone"}
    assert all(parameter.grad is not None for parameter in matcher.backbone.parameters())
    assert isinstance(matcher.visual, torch.nn.Linear), "the grid goes through one linear map"


def test_grid_dropout_is_sampled_per_image():
    config = {
        "visual_input_dim": 4,
        "text_granularity": "tokens",
        "text_input_dim": 9,
        "embedding_dim": 8,
    }
    matcher = CATALOG["VSEInfinity"](CATALOG["VSEInfinity"].Config(**config)).train()
    shares = 1 - matcher._keep_mask(
        Encoded(torch.randn(4000, 100, 4)), from_image=True
    ).float().mean(1)
    assert abs((shares == 0).float().mean() - 0.2) < 0.03, "a fifth of the images stay whole"
    assert abs(shares.mean() - 0.2 * (1 - 0.2**2) / 2) < 0.01
    assert shares.max() < 0.4


def test_heads_read_pooled_vector_and_its_dim(few_scenes, monkeypatch, tmp_path):
    """The pooled vector of VGG19 has more dimensions than a region. Here it has fewer."""

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
    assert (config["visual_input_dim"], config["backbone"]) == (4, "small-cnn")
    assert visavis.load(tmp_path / "run").encode_images([noise(30, 30)]).shape == (1, 8)


def test_model_keeps_full_decoding(few_scenes, tmp_path):
    (tmp_path / "heads.toml").write_text(HEADS)
    photo = noise(40, 30).resize((400, 300))
    photo.save(tmp_path / "photo.jpg")
    decoded = decode_image((tmp_path / "photo.jpg").read_bytes(), "photo.jpg")
    for full_decoding in (False, True):
        run = tmp_path / f"run-{full_decoding}"
        changes = {"visual.full_decoding": full_decoding}
        visavis.train(tmp_path / "heads.toml", data=few_scenes, out=run, overrides=changes)
        model = visavis.load(run)
        assert model.processor.visual_spec.full_decoding == full_decoding
        for reader in (model, model.with_full_decoding()):
            is_full = full_decoding or reader is not model
            assert (
                torch.equal(
                    reader.encode_images([tmp_path / "photo.jpg"]), model.encode_images([decoded])
                )
                == is_full
            )


HEADS = recipe_text(
    {"objective": "Triplet()", "trainable": ["visual", "text"]},
    {"objective": "TripletHN()", "initial_weights": "best"},
    name="heads",
    visual={"encoder": "small-cnn", "granularity": "pixels", "image_size": 32},
    text={"encoder": "minilm", "granularity": "pooled", "min_count": None},
    model={"kind": "Heads", "hidden_dim": 8, "word_dim": None},
    training={"batch_size": 12},
)
RECIPE = recipe_text(
    {
        "objective": "Triplet()",
        "trainable": ["visual", "text"],
        "optimizer": {"name": "AdamW", "lr": 1e-3, "lr_multipliers": {"backbone": 0.01}},
    },
    {
        "epochs": 2,
        "objective": "TripletHN()",
        "loss_warmup_epochs": 1.0,
        "keep_optimizer": True,
        "optimizer": {"name": "SGD", "lr": 1e-2, "lr_multipliers": {"backbone": 0.01}},
    },
    name="regions",
    visual={
        "encoder": "small-cnn",
        "granularity": "pixels",
        "image_size": 48,
        "augment": True,
        "augment_crop": "random_sides",
    },
    model={"kind": "VSEInfinity", "embedding_dim": 16, "word_dim": 8},
    training={"batch_size": 6, "checkpoint_s": 0},  # four steps per epoch of few_scenes
)


@pytest.mark.slow
def test_frozen_backbone_and_loss_warmup_resume_exactly(few_scenes, outcome, stop_at, tmp_path):
    (tmp_path / "grid.toml").write_text(RECIPE)
    visavis.train(tmp_path / "grid.toml", data=few_scenes, out=tmp_path / "whole")
    with pytest.raises(Stopped):
        visavis.train(
            tmp_path / "grid.toml", data=few_scenes, out=tmp_path / "run", progress=stop_at(4)
        )
    frozen, ramped = (
        Checkpoint.read(path) for path in complete_checkpoints(tmp_path / "run" / "checkpoint")
    )
    assert (frozen.state.phase, ramped.state.phase_step) == (
        0,
        0,
    ) or frozen.state.step < ramped.state.step
    with pytest.raises(Stopped):
        visavis.train(resume=tmp_path / "run", progress=stop_at(1))
    visavis.train(resume=tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_loss_warmup_starts_at_zero(few_scenes, stop_at, tmp_path):
    (tmp_path / "grid.toml").write_text(RECIPE)

    def first_weights(ramp):
        """Weights before the second phase, and after its first and second step."""
        run, weights = tmp_path / str(ramp), []
        overrides = {"phases.0.epochs": 1, "phases.1.loss_warmup_epochs": ramp}
        for given in (
            {
                "recipe": tmp_path / "grid.toml",
                "data": few_scenes,
                "out": run,
                "overrides": overrides,
            },
            {"resume": run},
            {"resume": run},
        ):
            with pytest.raises(Stopped):
                visavis.train(**given, progress=stop_at(1 if weights else 4))
            weights.append(
                Checkpoint.read(complete_checkpoints(run / "checkpoint")[-1]).weights[
                    "visual.weight"
                ]
            )
        return weights

    start, one, two = first_weights(1.0)
    start_at_once, one_at_once, two_at_once = first_weights(0.0)
    assert torch.equal(start, start_at_once)
    assert torch.equal(one, start) and not torch.equal(one_at_once, start)
    assert 0 < (two - start).norm() < (two_at_once - start).norm()
