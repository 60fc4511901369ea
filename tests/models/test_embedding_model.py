"""Embedding models: vectors equal those of sentence-transformers, at any batch and after any way
through a file.
"""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.embedders import KINDS, PROMPTS, write_vision_language_model

import visavis
from visavis.core.errors import DataError
from visavis.models.embedding_model import EmbeddingModel
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.frozen_encoders import open_encoder
from visavis.models.encoders.pretrained_files import (
    find_dual_encoder,
    is_embedding_model,
    weights_fingerprint,
)

pytest.importorskip("sentence_transformers")
FOLDERS = ("plain", "embedder", "dense", "router")
TEXTS = ["a red circle", "a large blue square and a small green star and a red circle", "star"]


def images():
    """Images of different sizes, so that they have different numbers of patches."""
    random = np.random.default_rng(0)
    shapes = [(40, 30), (30, 90), (64, 64), (20, 20), (50, 31)]
    return [Image.fromarray(random.integers(0, 256, (*shape, 3), np.uint8)) for shape in shapes]


def reference(folder):
    """The model as sentence-transformers opens it."""
    from visavis.models.encoders.sentence_encoders import load_sentence_transformers_model

    return load_sentence_transformers_model(folder, dtype=torch.float32)


def encode(model, items, prompt):
    return torch.from_numpy(model.encode(items, prompt=prompt, normalize_embeddings=True))


@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_equal_sentence_transformers_in_any_batch(embedders, name):
    model, expected = visavis.load(embedders / name), reference(embedders / name)
    prompts = dict.fromkeys(PROMPTS, "") if name == "plain" else PROMPTS
    for encoded, items, prompt in (
        (model.encode_images, images(), prompts["document"]),
        (model.encode_texts, TEXTS, prompts["query"]),
    ):
        vectors = encoded(items)
        torch.testing.assert_close(vectors, encode(expected, items, prompt), atol=1e-6, rtol=0)
        alone = torch.cat([encoded([item]) for item in items])
        torch.testing.assert_close(vectors, alone, atol=1e-5, rtol=0)
        turned = encoded(items[::-1]).flip(0)
        torch.testing.assert_close(vectors, turned, atol=1e-5, rtol=0)
        assert torch.pdist(vectors).min() > 1e-3, "far more than the tolerances"
    torch.testing.assert_close(
        model.encode_texts(TEXTS), torch.from_numpy(expected.encode_query(TEXTS)), atol=1e-6, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_vision_language_kind_equals_its_last_state(kind, tmp_path):
    import transformers

    folder = write_vision_language_model(tmp_path / kind, kind)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user\na red circle<|im_end|>\n<|im_start|>assistant\n"
    with torch.inference_mode():
        states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state
    expected = torch.nn.functional.normalize(states[:, -1], dim=-1)
    loaded = visavis.load(folder)
    assert isinstance(loaded.matcher, EmbeddingModel)
    torch.testing.assert_close(loaded.encode_texts(TEXTS[:1]), expected, atol=1e-6, rtol=0)
    together = loaded.encode_images(images())
    alone = torch.cat([loaded.encode_images([image]) for image in images()])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_head_of_a_published_model_is_ignored(embedders, tmp_path):
    import transformers

    folder = tmp_path / "published"
    shutil.copytree(embedders / "plain", folder)
    weights = load_file(folder / "model.safetensors")
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.model.load_state_dict(weights)
    model.save_pretrained(folder)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    expected = visavis.load(embedders / "plain").encode_images(images())
    torch.testing.assert_close(visavis.load(folder).encode_images(images()), expected)


@pytest.mark.slow
def test_instructions_change_vectors_and_fingerprint(embedders, tmp_path):
    folder = embedders / "embedder"
    config = {"backbone": str(folder), "visual_input_dim": 16, "text_input_dim": 263}
    processor = visavis.load(folder).processor
    fingerprints = set()
    for side, name in (("text", "query_instruction"), ("visual", "item_instruction")):
        for instruction in (None, "", "Find a circle."):
            matcher = EmbeddingModel(EmbeddingModel.Config(**config, **{name: instruction}))
            adapted = EmbeddingModel.adapt_processor(processor, vars(matcher.config), None)
            model = visavis.models.retriever.Retriever(matcher, adapted, batch_size=2)
            fingerprints.add(model.fingerprint)
            items = TEXTS if side == "text" else images()
            vectors = (model.encode_texts if side == "text" else model.encode_images)(items)
            default = PROMPTS["query" if side == "text" else "document"]
            prompt = default if instruction is None else instruction
            torch.testing.assert_close(
                vectors, encode(reference(folder), items, prompt), atol=1e-6, rtol=0
            )
    assert len(fingerprints) == 5, "the default twice, and two others of each side"
    saved = model.save(tmp_path / "saved")
    assert visavis.load(saved).fingerprint == model.fingerprint
    torch.testing.assert_close(
        visavis.load(saved).encode_images(images()), vectors, atol=1e-6, rtol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_saved_model_needs_no_pretrained_folder(embedders, name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(embedders / name, folder)
    model = visavis.load(folder)
    expected = model.encode_images(images()), model.encode_texts(TEXTS)
    saved = model.save(tmp_path / "saved")
    shutil.rmtree(folder)
    found = visavis.load(saved)
    for before, after in zip(
        expected, (found.encode_images(images()), found.encode_texts(TEXTS)), strict=True
    ):
        torch.testing.assert_close(after, before, atol=1e-6, rtol=0)
    sizes = [file.stat().st_size for file in saved.rglob("*.safetensors")]
    weights = sum(4 * part.numel() for part in model.matcher.state_dict().values())
    assert sum(sizes) < 1.3 * weights + 50_000, "weights are saved once"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedder", "router"])
def test_index_and_search_equal_scores(embedders, name, tmp_path):
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(images()):
        image.save(tmp_path / "photos" / f"{number}.png")
    report = visavis.index(embedders / name, tmp_path / "photos", out=tmp_path / "index")
    assert report.num_items == 5
    files, text = sorted((tmp_path / "photos").iterdir()), TEXTS[0]
    scores = visavis.load(embedders / name).score(files, [text])[:, 0]
    found = visavis.search(tmp_path / "index", text, top=5, filter={"duplicates": "show"})
    assert {hit.name: hit.score for hit in found} == pytest.approx(
        {file.name: score.item() for file, score in zip(files, scores, strict=True)}, abs=1e-5
    )
    assert visavis.search(tmp_path / "index", image=files[2], top=1)[0].name == files[2].name


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.slow
def test_frozen_features_equal_sentence_transformers(embedders, name):
    folder = embedders / name
    prompts = dict.fromkeys(PROMPTS, "") if name == "plain" else PROMPTS
    for side, items, prompt in (
        ("visual", images(), prompts["document"]),
        ("text", TEXTS, prompts["query"]),
    ):
        encoder = open_encoder(EncoderSpec(side, str(folder)))
        assert encoder.preprocessing_config["prompt"] == (
            prompt or None if side == "text" else prompt
        )
        expected = torch.from_numpy(reference(folder).encode(items, prompt=prompt))
        torch.testing.assert_close(encoder.encode(items).vectors, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["plain", "embedder"])
def test_feature_cache_changes_with_prompts_and_template(embedders, name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(embedders / name, folder)
    before = weights_fingerprint(str(folder))
    assert before == weights_fingerprint(str(folder))
    for file in sorted(folder.glob("*.j*")):
        file.write_text(file.read_text() + " ")
        after = weights_fingerprint(str(folder))
        assert after != before, file.name
        before = after


def test_plain_clip_is_no_embedding_model(embedders, dual_encoders):
    assert not is_embedding_model(dual_encoders / "clip")
    assert find_dual_encoder(dual_encoders / "clip")
    for name in FOLDERS:
        assert is_embedding_model(embedders / name)
        assert find_dual_encoder(embedders / name) is None


def test_code_of_folders_is_never_run(embedders, tmp_path):
    for name, file, change in (
        ("embedder", "modules.json", ("sentence_transformers.base.modules.transformer", "evil")),
        (
            "router",
            "router_config.json",
            ("sentence_transformers.base.modules.transformer", "evil"),
        ),
        (
            "embedder",
            "sentence_bert_config.json",
            ("{", '{"model_kwargs": {"attn_implementation": "evil/kernel"},'),
        ),
    ):
        folder = tmp_path / f"{name}-{file}"
        shutil.copytree(embedders / name, folder)
        text = (folder / file).read_text()
        assert change[0] in text
        (folder / file).write_text(text.replace(*change, 1))
        with pytest.raises(DataError, match=r"Such code is never run"):
            visavis.load(folder)


@pytest.mark.slow
def test_damaged_embedding_models_are_rejected(embedders, tmp_path):
    for name in ("plain", "embedder", "router"):
        folder = tmp_path / name
        shutil.copytree(embedders / name, folder)
        file = next(
            file for file in sorted(folder.rglob("model.safetensors")) if "Dense" not in str(file)
        )
        weights = load_file(file)
        key = max(weights)
        save_file({k: v for k, v in weights.items() if k != key}, file, {"format": "pt"})
        with pytest.raises(DataError, match=r"expected all weights of its config\.json, got none"):
            visavis.load(folder)
        save_file(weights | {key: weights[key] * np.nan}, file, {"format": "pt"})
        with pytest.raises(DataError, match=r"expected finite weights"):
            visavis.load(folder)
