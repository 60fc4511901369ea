"""A trained image encoder: the run folder reads images without the pretrained model."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from tests.fixtures.recipes import write_recipe

import visavis
from visavis.data.images import decode_image

transformers = pytest.importorskip("transformers")


def write_encoder(folder, kind):
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    made = {
        "vit": lambda: transformers.ViTModel(
            transformers.ViTConfig(**small, image_size=32, patch_size=8)
        ),
        "vit without pooler": lambda: transformers.ViTModel(
            transformers.ViTConfig(**small, image_size=32, patch_size=8), add_pooling_layer=False
        ),
        "resnet": lambda: transformers.ResNetModel(
            transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
        ),
    }
    transformers.utils.logging.disable_progress_bar()
    made[kind]().save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()
    pixels = {
        "size": {"height": 32, "width": 32},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))


@pytest.mark.parametrize(
    ("kind", "region_pool"),
    [("vit", "encoder"), ("vit without pooler", "encoder"), ("resnet", "mean")],
    ids=["pooler", "class token", "resnet"],
)
@pytest.mark.slow
def test_run_folder_reads_images_without_pretrained_encoder(
    kind, region_pool, few_scenes, tmp_path
):
    write_encoder(tmp_path / "encoder", kind)
    rates = {"lr_multipliers": {"backbone": 0.1}}
    recipe = write_recipe(
        tmp_path / "kept.toml",
        {"objective": "Triplet()", "optimizer": rates},
        name="kept",
        visual={"encoder": None, "granularity": "pixels"},
        text={"encoder": None},
        model={"word_dim": 8, "region_pool": region_pool},
        training={"batch_size": 6},
    )
    trained = visavis.train(
        recipe,
        data=few_scenes,
        out=tmp_path / "run",
        overrides={"visual.encoder": str(tmp_path / "encoder")},
    )
    images = [
        decode_image(path.read_bytes(), path.name) for path in sorted(few_scenes.rglob("*.png"))[:3]
    ]
    before = visavis.load(tmp_path / "run").encode_images(images)
    shutil.rmtree(tmp_path / "encoder")
    assert torch.equal(visavis.load(tmp_path / "run").encode_images(images), before)
    assert visavis.evaluate(tmp_path / "run").metrics == trained.test.metrics
