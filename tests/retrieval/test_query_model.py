"""Text queries of CLIP and SigLIP without transformers yield the vectors of the whole model."""

from __future__ import annotations

import copy
import gc
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import visavis
from visavis.core import storage
from visavis.core.errors import RunError, ShapeError, SpecError
from visavis.models.retriever import Retriever
from visavis.retrieval.open_index import open_index
from visavis.retrieval.query_model import TextQueryModel
from visavis.retrieval.search import SearchQuery

TEXTS = ["a red circle", "Star, and  a large BLUE square.", "größer 日本 🐈", "a red " * 40, "a"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


@pytest.fixture(params=["clip", "siglip", "trained clip", "trained siglip"])
def model(request: pytest.FixtureRequest, dual_encoders: Path, tmp_path: Path) -> Path:
    """A copy of a pretrained model, or a model folder with other weights."""
    kind = request.param.split()[-1]
    shutil.copytree(dual_encoders / kind, tmp_path / "pretrained")
    if request.param == kind:
        return tmp_path / "pretrained"
    retriever = Retriever.load(tmp_path / "pretrained")
    with torch.no_grad():
        for parameter in retriever.matcher.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return retriever.save(tmp_path / "trained")


def test_texts_are_encoded_as_by_the_whole_model(model: Path, photos: Path, tmp_path: Path) -> None:
    visavis.index(model, photos, out=tmp_path / "index")
    index, whole = open_index(tmp_path / "index"), Retriever.load(model)
    assert isinstance(index.model, TextQueryModel)
    expected = whole.encode_texts(TEXTS)
    for count in (1, len(TEXTS)):  # with and without padding
        vectors = index.model.encode_texts(TEXTS[:count])
        torch.testing.assert_close(vectors, expected[:count], atol=1e-6, rtol=0)
    assert "_whole" not in vars(index.model)
    image = Image.open(photos / "3.png").convert("RGB")
    query = SearchQuery(images=((1.0, image),), texts=((0.5, "a red circle"),))
    found = visavis.search(tmp_path / "index", "a red circle", image=photos / "3.png", top=6)
    assert len(found.hits) == 6
    assert index.encode_query(query).shape == (1, expected.shape[1])
    torch.testing.assert_close(index.model.with_full_decoding().encode_texts(TEXTS), expected)
    torch.testing.assert_close(copy.copy(index.model).encode_texts(TEXTS), expected)
    assert index.model.fingerprint == whole.fingerprint == index.manifest.fingerprint


def test_shorter_vectors_of_the_same_model(
    dual_encoders: Path, photos: Path, tmp_path: Path
) -> None:
    retriever = Retriever.load(dual_encoders / "clip")
    dim = retriever.encode_texts(["a"]).shape[1]
    retriever.matcher.matryoshka_dims = (4, dim)
    model = retriever.save(tmp_path / "model")
    visavis.index(model, photos, out=tmp_path / "whole")
    visavis.index(model, photos, out=tmp_path / "short", embedding_dim=4)
    for name, length in (("whole", dim), ("short", 4), ("whole", dim), ("short", 4)):
        vectors = open_index(tmp_path / name).model.encode_texts(TEXTS)
        expected = retriever.with_embedding_dim(length).encode_texts(TEXTS)
        torch.testing.assert_close(vectors, expected, atol=1e-6, rtol=0)


def test_invalid_texts_are_refused(dual_encoders: Path, photos: Path, tmp_path: Path) -> None:
    visavis.index(dual_encoders / "clip", photos, out=tmp_path / "index")
    model = open_index(tmp_path / "index").model
    with pytest.raises(ShapeError):
        model.encode_texts([])
    with pytest.raises(SpecError):
        model.encode_texts("a red circle")


@pytest.mark.slow
def test_changed_weights_are_noticed(model: Path, photos: Path, tmp_path: Path) -> None:
    visavis.index(model, photos, out=tmp_path / "index")
    file = model / "model.safetensors"
    # Copies: Windows does not remove a file that is mapped.
    tensors = {name: tensor.clone() for name, tensor in storage.read_tensors(file).items()}
    name = next(name for name in tensors if name.endswith("fc1.weight"))
    tensors[name] = tensors[name] + 1
    gc.collect()
    file.unlink()
    storage.write_tensors(file, tensors, for_transformers=True)
    with pytest.raises(RunError, match="fingerprint"):
        open_index(tmp_path / "index")


@pytest.mark.parametrize("change", ["activation", "heads"])
def test_other_settings_are_left_to_transformers(
    change: str, dual_encoders: Path, photos: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(dual_encoders / "clip", tmp_path / "clip")
    config = storage.read_json(folder / "config.json", dict)
    config["text_config"] |= (
        {"hidden_act": "relu"} if change == "activation" else {"num_attention_heads": 4}
    )
    storage.write_json(folder / "config.json", config)
    visavis.index(folder, photos, out=tmp_path / "index")
    index = open_index(tmp_path / "index")
    assert isinstance(index.model, TextQueryModel) == (change == "heads")
    expected = Retriever.load(folder).encode_texts(TEXTS)
    torch.testing.assert_close(index.model.encode_texts(TEXTS), expected, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_search_does_not_import_transformers(
    dual_encoders: Path, photos: Path, tmp_path: Path
) -> None:
    visavis.index(dual_encoders / "clip", photos, out=tmp_path / "index")
    program = (
        "import sys, visavis; "
        f"print(len(visavis.search({str(tmp_path / 'index')!r}, 'a red circle', top=6))); "
        "print('transformers' in sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == ["6", "False"]
