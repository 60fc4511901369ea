"""CLIP and SigLIP: scores equal to those of transformers, and saved models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import normalize

import visavis
from visavis.core import storage
from visavis.core.errors import DataError, RunError, SpecError, VisavisError
from visavis.models.clip.model import (
    CLIP,
    export_to_transformers,
    open_dual_encoder,
)
from visavis.models.encoders.encoder_spec import EncoderSpec, open_preprocessing
from visavis.models.encoders.frozen_encoders import open_encoder
from visavis.models.encoders.pretrained_files import find_dual_encoder, model_folder
from visavis.models.retriever import Retriever
from visavis.training.export.export_model import export_model

transformers = pytest.importorskip("transformers")

SENTENCES = [
    "a red circle",
    "a blue square and a small green star",
    "star",
    "a large circle and a large circle and a large circle and a star",
]
kinds = pytest.mark.parametrize("kind", ["clip", "siglip"])


@pytest.fixture
def images():
    noise = np.random.default_rng(0)
    return [Image.fromarray(noise.integers(0, 255, (40, 52, 3), np.uint8)) for _ in range(3)]


def by_hand(folder, images, sentences):
    """Compute unit vectors of both sides with transformers, each text alone."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    padding = {"padding": "max_length"} if model.config.model_type == "siglip" else {}
    resized = (
        np.stack([np.asarray(image.resize((32, 32), 2)) for image in images]).astype(np.float32)
        / 255
    )
    pixels = (
        torch.from_numpy((resized - np.array([0.5, 0.4, 0.3])) / np.array([0.5, 0.6, 0.7]))
        .permute(0, 3, 1, 2)
        .float()
    )
    texts = []
    with torch.no_grad():
        images = model.get_image_features(pixel_values=pixels).pooler_output
        for sentence in sentences:
            ids = tokenizer(
                sentence, truncation=True, max_length=12, return_tensors="pt", **padding
            )["input_ids"]
            texts.append(model.get_text_features(input_ids=ids).pooler_output)
    return normalize(images), normalize(torch.cat(texts))


@kinds
def test_clip_vectors_and_scores_match_transformers(dual_encoders, kind, images):
    model = visavis.load(dual_encoders / kind)
    image_rows, text_rows = by_hand(dual_encoders / kind, images, SENTENCES)
    torch.testing.assert_close(model.encode_images(images), image_rows, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.encode_texts(SENTENCES), text_rows, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        model.score(images, SENTENCES), image_rows @ text_rows.T, rtol=0, atol=1e-5
    )
    assert model.score(images, SENTENCES).std() > 1e-3, "a constant model proves nothing"


@kinds
def test_clip_has_two_parts_without_temperature(dual_encoders, kind):
    matcher, _ = open_dual_encoder(str(dual_encoders / kind))
    by_part = matcher.parameters_by_part()
    assert by_part.keys() == {"visual", "text"}
    assert all(
        ("text_" in name) == (part == "text")
        for part, parameters in by_part.items()
        for name, _ in parameters
    )
    assert not any("logit" in name for name in matcher.state_dict())
    assert matcher.score_is_cosine


@kinds
def test_bin_weights_are_read_as_tensors_only(dual_encoders, kind, images, tmp_path):
    folder = tmp_path / kind
    shutil.copytree(dual_encoders / kind, folder)
    (folder / "model.safetensors").unlink()
    torch.save(
        transformers.AutoModel.from_pretrained(dual_encoders / kind).state_dict(),
        folder / "pytorch_model.bin",
    )
    assert torch.equal(
        visavis.load(folder).score(images, SENTENCES),
        visavis.load(dual_encoders / kind).score(images, SENTENCES),
    )


class Trap:
    """Writes a file if it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_pickle_is_never_opened(dual_encoders, tmp_path):
    folder = tmp_path / "clip"
    shutil.copytree(dual_encoders / "clip", folder)
    (folder / "model.safetensors").unlink()
    torch.save({"text_model.embeddings": Trap(tmp_path / "sprung")}, folder / "pytorch_model.bin")
    message = r"expected a model .*\(its weights are damaged, or contain objects that could run code and are never opened\)\. Download [^.]+\.$"
    with pytest.raises(DataError, match=message):
        visavis.load(folder)
    assert not (tmp_path / "sprung").exists()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match=message):
        visavis.load(folder)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            "GatedRepoError",
            "access is restricted). Request access on its hub page and log in with hf auth login.",
        ),
        (
            "RepositoryNotFoundError",
            "it does not exist, or is private). Correct the name, or log in with hf auth login.",
        ),
        (
            "LocalEntryNotFoundError",
            (
                "it was not downloaded before, and the hub is not reachable). Connect to the network "
                "once."
            ),
        ),
        ("HFValidationError", "invalid name for the hub). Restore the folder or use another name."),
    ],
)
def test_model_folder_explains_why_hub_has_no_model(error, why, monkeypatch):
    import huggingface_hub

    kind = getattr(huggingface_hub.errors, error)

    def refused(*_, **__):
        raise kind.__new__(kind, "Repo id must be in the form ...")

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(DataError) as raised:
        model_folder("gone/folder")
    assert str(raised.value) == (
        "gone/folder: expected a folder with a config.json, a backbone in the cache, or a model "
        f"of the Hugging Face hub, got none ({why}"
    )


def test_half_precision_weights_compute_in_float32(dual_encoders, images, tmp_path):
    model = transformers.AutoModel.from_pretrained(dual_encoders / "clip").half()
    shutil.copytree(dual_encoders / "clip", tmp_path / "half")
    model.save_pretrained(tmp_path / "half")
    scores = visavis.load(tmp_path / "half").score(images, SENTENCES)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(
        scores, visavis.load(dual_encoders / "clip").score(images, SENTENCES), rtol=0, atol=1e-2
    )


@kinds
def test_saved_clip_loads_with_trained_weights(dual_encoders, kind, images, tmp_path):
    matcher, processor = open_dual_encoder(str(dual_encoders / kind))
    with torch.no_grad():
        for parameter in matcher.parameters():
            parameter.mul_(1.1)
    processor.save(matcher, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["kind"] == "CLIP"
    again = visavis.load(tmp_path)
    assert isinstance(again.matcher, CLIP)
    assert again.matcher.config == matcher.config
    scores = again.score(images, SENTENCES)
    assert torch.equal(scores, Retriever(matcher, processor).score(images, SENTENCES))
    assert not torch.allclose(
        scores, visavis.load(dual_encoders / kind).score(images, SENTENCES), atol=1e-3
    )


@kinds
def test_saved_clip_loads_and_exports_without_pretrained_model(
    dual_encoders, kind, images, tmp_path
):
    shutil.copytree(dual_encoders / kind, tmp_path / "base")
    matcher, processor = open_dual_encoder(str(tmp_path / "base"))
    with torch.no_grad():
        for parameter in matcher.parameters():
            parameter.mul_(1.1)
    processor.save(matcher, tmp_path / "saved")
    shutil.rmtree(tmp_path / "base")
    (tmp_path / "saved").rename(tmp_path / "moved")
    again = visavis.load(tmp_path / "moved")
    scores = Retriever(matcher, processor).score(images, SENTENCES)
    assert torch.equal(again.score(images, SENTENCES), scores)
    exported = export_to_transformers(again.matcher, tmp_path / "exported")
    assert torch.equal(visavis.load(exported).score(images, SENTENCES), scores)
    before, after = (
        load_file(folder / "model.safetensors") for folder in (dual_encoders / kind, exported)
    )
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[name], after[name]) == name.startswith("logit_") for name in before
    )
    again.processor.save(again.matcher, tmp_path / "again")
    assert torch.equal(visavis.load(tmp_path / "again").score(images, SENTENCES), scores)


def test_clip_without_config_files_uses_pretrained_model(dual_encoders, images, tmp_path):
    matcher, processor = open_dual_encoder(str(dual_encoders / "clip"))
    processor.save(matcher, tmp_path)
    shutil.rmtree(tmp_path / "backbone")
    assert torch.equal(
        visavis.load(tmp_path).score(images, SENTENCES),
        visavis.load(dual_encoders / "clip").score(images, SENTENCES),
    )


def test_save_pretrained_requires_files_of_pretrained_model(dual_encoders, tmp_path):
    shutil.copytree(dual_encoders / "clip", tmp_path / "base")
    matcher, _ = open_dual_encoder(str(tmp_path / "base"))
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(
        DataError,
        match=r"base: expected the config .*, got no config\.json\. Restore the folder\.$",
    ):
        export_to_transformers(matcher, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def at_size(model, processor, size):
    """The same weights with another image size."""
    return Retriever(model, replace(processor, visual=replace(processor.visual, image_size=size)))


def hub_image_rows(folder, images, size, **options):
    """Compute unit vectors of images with transformers."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    resized = (
        np.stack([np.asarray(image.resize((size, size), 2)) for image in images]).astype(np.float32)
        / 255
    )
    pixels = (
        torch.from_numpy((resized - np.array([0.5, 0.4, 0.3])) / np.array([0.5, 0.6, 0.7]))
        .permute(0, 3, 1, 2)
        .float()
    )
    with torch.no_grad():
        return normalize(model.get_image_features(pixel_values=pixels, **options).pooler_output)


@kinds
@pytest.mark.parametrize("size", [16, 64, 72])
@pytest.mark.slow
def test_other_image_size_interpolates_as_transformers(dual_encoders, kind, size, images, tmp_path):
    matcher, processor = open_dual_encoder(str(dual_encoders / kind))
    model = at_size(matcher, processor, size)
    expected = hub_image_rows(dual_encoders / kind, images, size, interpolate_pos_encoding=True)
    torch.testing.assert_close(model.encode_images(images), expected, rtol=0, atol=1e-6)
    model.processor.save(matcher, tmp_path / "saved")
    assert torch.equal(
        visavis.load(tmp_path / "saved").encode_images(images), model.encode_images(images)
    )
    # The exported folder has this size as its own.
    export_model(model, tmp_path / "saved", "hub", tmp_path / "hub")
    torch.testing.assert_close(
        hub_image_rows(tmp_path / "hub", images, size), expected, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        visavis.load(tmp_path / "hub").encode_images(images), expected, rtol=0, atol=1e-6
    )
    encoder = open_encoder(EncoderSpec("visual", str(dual_encoders / kind), image_size=size))
    torch.testing.assert_close(
        normalize(encoder.encode(images).vectors), expected, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(("size", "nearest"), [(3, "8"), (36, "32 or 40"), (63, "56 or 64")])
def test_image_size_between_patches_names_nearest(dual_encoders, size, nearest):
    spec = EncoderSpec("visual", str(dual_encoders / "clip"), "regions", image_size=size)
    with pytest.raises(
        SpecError,
        match=rf"^visual.image_size: expected a multiple of 8, .*, got {size}\. Set the nearest size, {nearest}\.$",
    ):
        open_preprocessing(spec)


def test_find_dual_encoder_rejects_other_models(dual_encoders, tmp_path, monkeypatch):
    assert find_dual_encoder(dual_encoders / "clip") == str((dual_encoders / "clip").resolve())
    assert find_dual_encoder(tmp_path) is None
    monkeypatch.chdir(dual_encoders)
    assert find_dual_encoder("siglip") == str(dual_encoders / "siglip")
    assert find_dual_encoder("clip/gone") is None, "a path within a local folder is not a hub name"
    with pytest.raises(
        DataError,
        match=r"nobody/nothing: expected a folder .* of the Hugging Face hub, got none .it was not downloaded",
    ):
        find_dual_encoder("nobody/nothing")
    vit = transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=16
        )
    )
    vit.save_pretrained(tmp_path)
    assert find_dual_encoder(tmp_path) is None
    with pytest.raises(RunError, match="got a model of type vit"):
        visavis.load(tmp_path)
    with pytest.raises(
        DataError,
        match=r"expected a model of kind clip, siglip, .* or vision-text-dual-encoder, got vit",
    ):
        CLIP(CLIP.Config(backbone=str(tmp_path), visual_input_dim=8, text_input_dim=9))


@pytest.mark.parametrize("steps", [["CLIPModel"], ["CLIPModel", "Normalize"]])
def test_load_opens_the_clip_of_a_sentence_transformers_folder(
    dual_encoders, steps, images, tmp_path
):
    shutil.copytree(dual_encoders / "clip", tmp_path / "st" / "0_CLIPModel")
    modules = [
        {"idx": number, "path": f"{number}_{step}", "type": f"sentence_transformers.models.{step}"}
        for number, step in enumerate(steps)
    ]
    (tmp_path / "st" / "modules.json").write_text(json.dumps(modules))
    assert torch.equal(
        visavis.load(tmp_path / "st").encode_images(images),
        visavis.load(dual_encoders / "clip").encode_images(images),
    )


OTHER_MODELS = {
    "a model of type flava": ("config.json", {"model_type": "flava"}),
    "a model of type jina_clip with code of its own, which is never run": (
        "config.json",
        {"model_type": "jina_clip", "auto_map": {"AutoModel": "jinaai/code--modeling.JinaCLIP"}},
    ),
    "a sentence-transformers model that does not read images": (
        "modules.json",
        [{"type": "sentence_transformers.models.Dense", "path": "0_Dense"}],
    ),
}


@pytest.mark.parametrize("content", OTHER_MODELS)
def test_unsupported_model_is_named(content, tmp_path):
    name, values = OTHER_MODELS[content]
    (tmp_path / name).write_text(json.dumps(values))
    for use in (
        visavis.load,
        lambda folder: visavis.evaluate(folder, data="x"),
        lambda folder: visavis.index(folder, tmp_path),
    ):
        with pytest.raises(VisavisError, match=f"SigLIP.*got {content}"):
            use(tmp_path)


def test_weights_of_a_training_wrapper_are_named(dual_encoders, tmp_path):
    folder = shutil.copytree(dual_encoders / "clip", tmp_path / "clip")
    weights = {
        f"module.{name}": part
        for name, part in storage.read_tensors(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(
        VisavisError,
        match=r"got names that start with module\. as a training wrapper saves them\. Remove this prefix",
    ):
        visavis.load(folder)
