"""Reports about pretrained models: image sizes and the end of texts."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis.core.errors import DataError
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.frozen_encoders import open_encoder

pytest.importorskip("transformers")


@pytest.fixture
def photo() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (80, 90, 3), np.uint8))


@pytest.mark.report("mlfoundations/open_clip#985", "a ViT cannot be used with larger images")
def test_clip_reads_larger_images(dual_encoders, photo):
    large = open_encoder(
        EncoderSpec("visual", str(dual_encoders / "clip"), "regions", image_size=64)
    )
    assert large.encode([photo]).vectors.shape[1] == (64 // 8) ** 2


@pytest.mark.report(
    "openai/CLIP#194", "images of another resolution than the pretraining stop the model"
)
@pytest.mark.parametrize("size", [16, 32, 40, 96])
def test_siglip_reads_images_of_any_multiple_of_its_patch(dual_encoders, photo, size):
    vectors = (
        open_encoder(EncoderSpec("visual", str(dual_encoders / "siglip"), image_size=size))
        .encode([photo])
        .vectors
    )
    assert vectors.shape == (1, 16) and vectors.isfinite().all()


@pytest.mark.report(
    "huggingface/transformers#24650",
    "a CLIP reads the vector of a text at another token than its end",
)
def test_clip_with_wrong_end_token_is_rejected(dual_encoders, tmp_path):
    folder = tmp_path / "clip"
    shutil.copytree(dual_encoders / "clip", folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        DataError, match=r"expected texts that end with the token .*text_config\.eos_token_id is 2"
    ):
        visavis.load(folder)
    rows = visavis.load(dual_encoders / "clip").encode_texts(["a red circle", "a red square"])
    assert not torch.allclose(rows[0], rows[1])
