"""The query encoder of an index yields the vectors of the whole model."""

from __future__ import annotations

import gc
import shutil
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


def test_texts_and_images_are_encoded_as_by_the_whole_model(
    model: Path, photos: Path, tmp_path: Path
) -> None:
    visavis.index(model, photos, out=tmp_path / "index")
    index, whole = open_index(tmp_path / "index"), Retriever.load(model)
    expected = whole.encode_texts(TEXTS).numpy()
    for count in (1, len(TEXTS)):  # with and without padding
        vectors = index.model.encode_texts(TEXTS[:count])
        np.testing.assert_allclose(vectors, expected[:count], atol=1e-6)
    image = Image.open(photos / "3.png").convert("RGB")
    query = SearchQuery(images=((1.0, image),), texts=((0.5, "a red circle"),))
    found = visavis.search(tmp_path / "index", "a red circle", image=photos / "3.png", top=6)
    assert len(found.hits) == 6
    total = whole.encode_images([image]).numpy() + 0.5 * expected[:1]
    np.testing.assert_allclose(index.encode_query(query), total / np.linalg.norm(total), atol=1e-6)
    assert index.model.fingerprint == whole.fingerprint == index.manifest.fingerprint
    assert index.model.count_tokens(TEXTS) == whole.count_tokens(TEXTS)


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
        expected = retriever.with_embedding_dim(length).encode_texts(TEXTS).numpy()
        np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_invalid_texts_are_refused(dual_encoders: Path, photos: Path, tmp_path: Path) -> None:
    visavis.index(dual_encoders / "clip", photos, out=tmp_path / "index")
    model = open_index(tmp_path / "index").model
    with pytest.raises(ShapeError):
        model.encode_texts([])
    with pytest.raises(SpecError):
        model.encode_texts("a red circle")


@pytest.mark.slow
def test_changed_weights_are_noticed_by_an_image_query(
    model: Path, photos: Path, tmp_path: Path
) -> None:
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
        visavis.search(tmp_path / "index", image=photos / "3.png")
