"""Fine-tuning of embedding models: every variant of the recipe ``embedding-model`` resumes exactly,
loads, and exports.
"""

from __future__ import annotations

import importlib.util
import runpy
import shutil

import pytest
import torch
from PIL import ExifTags, Image
from safetensors.torch import load_file, save_file

import visavis
from visavis.core.errors import DataError, RecipeError, VisavisError
from visavis.data.dataset_reader import open_dataset
from visavis.models.embedding_model import EmbeddingModel
from visavis.models.encoders.preprocessing import blank_image
from visavis.models.encoders.sentence_encoders import load_sentence_transformers_model

pytest.importorskip("sentence_transformers")
HAS_PEFT = importlib.util.find_spec("peft") is not None
adapters = pytest.mark.skipif(not HAS_PEFT, reason="needs peft")
TEXTS = ["a red circle", "a large blue square and a small green star"]


@pytest.fixture(scope="module")
def small(few_scenes):
    """Overrides for small variants: few images, few and large steps."""
    return {
        "data.path": str(few_scenes),
        "training.batch_size": 6,
        "phases.0.epochs": 2,
        "training.checkpoint_s": 1e6,
        "training.threads": 1,
        "phases.0.optimizer.lr": 0.003,
    }


def encoders(folder):
    return {"visual.encoder": str(folder), "text.encoder": str(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedder", "plain", "router"])
@pytest.mark.parametrize("variant", ["linear", pytest.param("lora", marks=adapters), "full"])
def test_each_variant_resumes_and_loads(
    variant, name, embedders, small, few_scenes, in_pieces, outcome, tmp_path
):
    recipe, overrides = f"embedding-model/{variant}", small | encoders(embedders / name)
    whole = visavis.train(recipe, overrides=overrides, out=tmp_path / "whole")
    assert in_pieces(recipe, tmp_path / "pieces", overrides=overrides) >= 2
    assert outcome(tmp_path / "pieces") == outcome(tmp_path / "whole")
    assert visavis.evaluate(tmp_path / "whole").metrics == whole.test.metrics
    assert len(visavis.search(tmp_path / "whole", TEXTS[0], collection=few_scenes, top=3)) == 3
    vectors = visavis.load(tmp_path / "whole").encode_texts(TEXTS)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    # The best step may be the pretrained model.
    assert whole.best_step >= 0


@pytest.mark.parametrize("name", ["embedder", "dense"])
def test_pretrained_embedder_evaluates_without_training(embedders, few_scenes, name):
    evaluated = visavis.evaluate(embedders / name, data=few_scenes)
    model, data = visavis.load(embedders / name), open_dataset(few_scenes).split("test")
    scores = model.score([image.open() for image in data.images], list(data.captions))
    ranks = (scores > scores.diagonal()[:, None]).sum(1)
    expected = 100 * (ranks < 1).float().mean().item()
    assert evaluated.metrics["i2t_r1"] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param("lora", marks=adapters), "full"])
@pytest.mark.parametrize("name", ["embedder", "router"])
def test_export_equals_sentence_transformers(variant, name, embedders, small, tmp_path):
    overrides = small | encoders(embedders / name)
    own = {"phases.0.epochs": 1, "model.query_instruction": "Find a circle:"}
    visavis.train(f"embedding-model/{variant}", overrides=overrides | own, out=tmp_path / "run")
    model = visavis.load(tmp_path / "run")
    out = visavis.export(tmp_path / "run", format="sentence-transformers", out=tmp_path / "out")
    exported = load_sentence_transformers_model(out.folder)
    assert exported.prompts["query"] == "Find a circle:"
    listed = open_dataset(overrides["data.path"]).split("test").images
    orientation = Image.Exif()
    orientation[ExifTags.Base.Orientation] = 6
    listed[0].open().save(tmp_path / "turned.jpg", exif=orientation)
    images = [*(image.open() for image in listed), tmp_path / "turned.jpg"]
    open_image = runpy.run_path(str(out.folder / "open_image.py"))["open_image"]
    for expected, vectors in (
        (model.encode_texts(TEXTS), exported.encode_query(TEXTS)),
        (
            model.encode_images(images),
            exported.encode_document([open_image(image) for image in images]),
        ),
    ):
        torch.testing.assert_close(torch.from_numpy(vectors), expected, atol=1e-5, rtol=0)
    card = (out.folder / "README.md").read_text()
    assert "trust_remote_code" not in card
    assert 'model.encode_document([open_image("photo.jpg")])' in card
    again = visavis.load(out.folder)
    torch.testing.assert_close(
        again.encode_texts(TEXTS), model.encode_texts(TEXTS), atol=1e-5, rtol=0
    )
    with pytest.raises(VisavisError, match=r"format: expected sentence-transformers"):
        visavis.export(tmp_path / "run", format="onnx", out=tmp_path / "onnx")


@adapters
def test_adapters_start_at_zero_and_are_saved_alone(embedders, tmp_path):
    folder = embedders / "embedder"
    sizes = {"backbone": str(folder), "visual_input_dim": 16, "text_input_dim": 263}
    # Without adapters on the vision model, which then has no parameters.
    model = EmbeddingModel(EmbeddingModel.Config(**sizes, lora_rank=2)).eval()
    names = {name for name, _ in model.named_parameters()}
    assert names == set(model.state_dict())
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    processor = visavis.load(folder).processor
    items, pixels = processor.process_texts(TEXTS), processor.process_images([blank_image()], "")
    model.encode_text(items).vectors[:, 0].sum().backward()
    model.encode_visual(pixels).vectors[:, 0].sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert all((gradients[name] != 0).any() for name in names if ".lora_B." in name)
    plain = EmbeddingModel(EmbeddingModel.Config(**sizes)).eval()
    torch.testing.assert_close(
        model.encode_text(items).vectors, plain.encode_text(items).vectors, atol=1e-6, rtol=0
    )
    model.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == names
    assert not list((tmp_path).glob("*/*"))


@adapters
@pytest.mark.slow
def test_adapters_of_embedder_need_their_weights(embedders, small, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(embedders / "embedder", base)
    own = encoders(base) | {"phases.0.epochs": 1}
    visavis.train("embedding-model/lora", overrides=small | own, out=tmp_path / "run")
    file = base / "model.safetensors"
    weights = {name: weight * 1.01 for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(DataError, match=r"base: expected weights \w{16}, which these adapters"):
        visavis.load(tmp_path / "run")


@pytest.mark.slow
def test_chunks_and_workers_do_not_change_training(embedders, small, outcome, tmp_path):
    runs = []
    for name, own in (
        ("plain", {"training.chunk_size": 0}),
        ("chunks", {"training.chunk_size": 2, "training.workers": 2}),
    ):
        overrides = small | encoders(embedders / "embedder") | own | {"phases.0.epochs": 1}
        visavis.train("embedding-model/full", overrides=overrides, out=tmp_path / name)
        runs.append(visavis.load(tmp_path / name).encode_texts(TEXTS))
    torch.testing.assert_close(*runs, atol=1e-4, rtol=0)


def test_recipe_errors_of_embedding_models(embedders, small, tmp_path):
    overrides = small | encoders(embedders / "dense")
    for own, message in (
        ({"visual.augment": True}, r"visual\.augment: expected false for EmbeddingModel"),
        ({"visual.image_size": 64}, r"without crops and image_size"),
    ):
        with pytest.raises((RecipeError, DataError), match=message):
            visavis.train("embedding-model/full", overrides=overrides | own, out=tmp_path / "run")
