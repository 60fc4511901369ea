"""CLIP and SigLIP as they come: our scores beside those of transformers called directly."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import normalize

import visavis
from visavis.errors import DataError, RunError
from visavis.models import CLIP
from visavis.models.clip import export, find_dual_encoder, open_dual_encoder
from visavis.models.pretrained import model_folder
from visavis.models.retriever import Retriever

transformers = pytest.importorskip("transformers")

SENTENCES = [
    "a red circle",
    "a blue square and a small green star",
    "star",
    "a large circle and a large circle and a large circle and a star",
]
kinds = pytest.mark.parametrize("kind", ["clip", "siglip"])


@pytest.fixture
def pictures():
    noise = np.random.default_rng(0)
    return [Image.fromarray(noise.integers(0, 255, (40, 52, 3), np.uint8)) for _ in range(3)]


def by_hand(folder, pictures, sentences):
    """Unit vectors of both sides from the model itself, every sentence alone, as its authors feed it."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    padding = {"padding": "max_length"} if model.config.model_type == "siglip" else {}
    resized = np.stack([np.asarray(picture.resize((32, 32), 2)) for picture in pictures]).astype(np.float32) / 255
    pixels = torch.from_numpy((resized - np.array([0.5, 0.4, 0.3])) / np.array([0.5, 0.6, 0.7])).permute(0, 3, 1, 2).float()
    texts = []
    with torch.no_grad():
        images = model.get_image_features(pixel_values=pixels).pooler_output
        for sentence in sentences:
            ids = tokenizer(sentence, truncation=True, max_length=12, return_tensors="pt", **padding)["input_ids"]
            texts.append(model.get_text_features(input_ids=ids).pooler_output)
    return normalize(images), normalize(torch.cat(texts))


@kinds
def test_vectors_and_scores_are_those_of_the_model_itself(dual_encoders, kind, pictures):
    model = visavis.load(dual_encoders / kind)
    images, texts = by_hand(dual_encoders / kind, pictures, SENTENCES)
    torch.testing.assert_close(model.encode_images(pictures), images, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.encode_texts(SENTENCES), texts, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.score(pictures, SENTENCES), images @ texts.T, rtol=0, atol=1e-5)
    assert model.score(pictures, SENTENCES).std() > 0.01, "a model that says one thing of everything proves nothing"


@pytest.mark.parametrize("text", ["a \ud800 circle", None, b"a circle"])
def test_what_is_no_text_is_a_sentence(dual_encoders, text):
    with pytest.raises(DataError, match=r"text 1 is .*, expected text: it is of another type, or holds half a character"):
        visavis.load(dual_encoders / "clip").encode_texts(["a circle", text])


@kinds
def test_its_parts_are_two_and_its_temperature_is_no_part_of_it(dual_encoders, kind):
    matcher, _ = open_dual_encoder(str(dual_encoders / kind))
    by_part = matcher.parameters_by_part()
    assert by_part.keys() == {"visual", "text"}
    assert all(("text_" in name) == (part == "text") for part, parameters in by_part.items() for name, _ in parameters)
    assert not any("logit" in name for name in matcher.state_dict())
    assert matcher.score_is_cosine


@kinds
def test_older_weights_are_read_as_tensors_alone(dual_encoders, kind, pictures, tmp_path):
    folder = tmp_path / kind
    shutil.copytree(dual_encoders / kind, folder)
    (folder / "model.safetensors").unlink()
    torch.save(transformers.AutoModel.from_pretrained(dual_encoders / kind).state_dict(), folder / "pytorch_model.bin")
    assert torch.equal(visavis.load(folder).score(pictures, SENTENCES), visavis.load(dual_encoders / kind).score(pictures, SENTENCES))


class Trap:
    """Would write a file if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_is_never_opened(dual_encoders, tmp_path):
    folder = tmp_path / "clip"
    shutil.copytree(dual_encoders / "clip", folder)
    (folder / "model.safetensors").unlink()
    torch.save({"text_model.embeddings": Trap(tmp_path / "sprung")}, folder / "pytorch_model.bin")
    said = (
        "holds no model that transformers can read: its weights are damaged, or hold objects, which could run code and are never opened\\.$"
    )
    with pytest.raises(DataError, match=said):
        visavis.load(folder)
    assert not (tmp_path / "sprung").exists()
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(DataError, match=said):
        visavis.load(folder)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("GatedRepoError", "its owners want to be asked on its page there, and you to be logged in (hf auth login)"),
        ("RepositoryNotFoundError", "there is none of this name, or it is not open to you"),
        ("LocalEntryNotFoundError", "it was not fetched before, and the hub is not reached now"),
        ("HFValidationError", "no model there has such a name; bring the folder back, or name another"),
    ],
)
def test_why_the_hub_does_not_give_a_model_is_told_in_our_words(error, why, monkeypatch):
    import huggingface_hub

    kind = getattr(huggingface_hub.errors, error)

    def refused(*_, **__):
        raise kind.__new__(kind, "Repo id must be in the form ...")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(DataError) as told:
        model_folder("gone/folder")
    assert str(told.value) == (
        "gone/folder is no folder with a config.json, no backbone in the cache, and not to be had from the Hugging Face hub: " + why + "."
    )


def test_weights_in_half_precision_are_computed_in_full(dual_encoders, pictures, tmp_path):
    model = transformers.AutoModel.from_pretrained(dual_encoders / "clip").half()
    shutil.copytree(dual_encoders / "clip", tmp_path / "half")
    model.save_pretrained(tmp_path / "half")
    scores = visavis.load(tmp_path / "half").score(pictures, SENTENCES)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, visavis.load(dual_encoders / "clip").score(pictures, SENTENCES), rtol=0, atol=1e-2)


@kinds
def test_a_saved_model_comes_back_with_its_own_weights(dual_encoders, kind, pictures, tmp_path):
    matcher, processor = open_dual_encoder(str(dual_encoders / kind))
    with torch.no_grad():
        for parameter in matcher.parameters():
            parameter.mul_(1.1)
    processor.save(matcher, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["kind"] == "CLIP"
    again = visavis.load(tmp_path)
    assert isinstance(again.matcher, CLIP)
    assert again.matcher.config == matcher.config
    scores = again.score(pictures, SENTENCES)
    assert torch.equal(scores, Retriever(matcher, processor).score(pictures, SENTENCES))
    assert not torch.allclose(scores, visavis.load(dual_encoders / kind).score(pictures, SENTENCES), atol=1e-3)


@kinds
def test_a_saved_model_reads_and_is_exported_without_the_model_that_it_began_with(dual_encoders, kind, pictures, tmp_path):
    shutil.copytree(dual_encoders / kind, tmp_path / "base")
    matcher, processor = open_dual_encoder(str(tmp_path / "base"))
    with torch.no_grad():
        for parameter in matcher.parameters():
            parameter.mul_(1.1)
    processor.save(matcher, tmp_path / "saved")
    shutil.rmtree(tmp_path / "base")
    (tmp_path / "saved").rename(tmp_path / "moved")
    again = visavis.load(tmp_path / "moved")
    scores = Retriever(matcher, processor).score(pictures, SENTENCES)
    assert torch.equal(again.score(pictures, SENTENCES), scores)
    exported = export(again.matcher, tmp_path / "exported")
    assert torch.equal(visavis.load(exported).score(pictures, SENTENCES), scores)
    before, after = (load_file(folder / "model.safetensors") for folder in (dual_encoders / kind, exported))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) == name.startswith("logit_") for name in before)
    again.processor.save(again.matcher, tmp_path / "again")
    assert torch.equal(visavis.load(tmp_path / "again").score(pictures, SENTENCES), scores)


def test_a_model_saved_without_what_is_no_weights_is_read_by_the_model_that_it_began_with(dual_encoders, pictures, tmp_path):
    matcher, processor = open_dual_encoder(str(dual_encoders / "clip"))
    processor.save(matcher, tmp_path)
    shutil.rmtree(tmp_path / "backbone")
    assert torch.equal(visavis.load(tmp_path).score(pictures, SENTENCES), visavis.load(dual_encoders / "clip").score(pictures, SENTENCES))


def test_what_is_written_needs_the_files_of_its_model(dual_encoders, tmp_path):
    shutil.copytree(dual_encoders / "clip", tmp_path / "base")
    matcher, _ = open_dual_encoder(str(tmp_path / "base"))
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(DataError, match=r"base is gone, whose config and preparation belong to what is written: bring it back\.$"):
        export(matcher, tmp_path / "exported")
    assert not any((tmp_path / "exported").iterdir())


def test_what_is_no_dual_encoder_is_none_or_a_sentence(dual_encoders, tmp_path, monkeypatch):
    assert find_dual_encoder(dual_encoders / "clip") == str((dual_encoders / "clip").resolve())
    assert find_dual_encoder(tmp_path) is None
    monkeypatch.chdir(dual_encoders)
    assert find_dual_encoder("siglip") == str(dual_encoders / "siglip")
    assert find_dual_encoder("clip/gone") is None, "a path in a folder that is here is no name of the hub"
    with pytest.raises(DataError, match=r"nobody/nothing is no folder .*, and not to be had from the Hugging Face hub: it was not fetched"):
        find_dual_encoder("nobody/nothing")
    vit = transformers.ViTModel(transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=16))
    vit.save_pretrained(tmp_path)
    assert find_dual_encoder(tmp_path) is None
    with pytest.raises(RunError, match="kind is missing: the file is damaged or of another version"):
        visavis.load(tmp_path)
    with pytest.raises(DataError, match="is a model of kind vit, expected clip or siglip"):
        CLIP(CLIP.Config(backbone=str(tmp_path), visual_width=8, text_width=9))
