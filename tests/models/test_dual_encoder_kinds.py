"""Every kind of dual encoder: vectors, scores, image sizes and texts equal to those of
transformers.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests import dual_encoder_kinds
from tests.dual_encoder_kinds import DAILY_KINDS, KINDS, LENGTH, PAIRS, SENTENCES, by_hand
from torch.nn.functional import normalize

import visavis
from visavis.core.errors import DataError, SpecError, VisavisError
from visavis.models.clip.model import CLIP, open_dual_encoder
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.encoders.frozen_encoders import open_encoder
from visavis.models.retriever import Retriever
from visavis.training.export.export_model import export_model

transformers = pytest.importorskip("transformers")

LONG = " and ".join(["a large red circle on the left of a small star"] * 5)
TEXTS = [*SENTENCES, "a", "A RED Circle", "Größe?! 🐈", LONG]


@pytest.fixture(scope="module")
def images():
    """Photos of several sizes and modes."""
    noise = np.random.default_rng(0)
    made = [
        Image.fromarray(noise.integers(0, 255, (*size, 3), np.uint8))
        for size in ((40, 52), (90, 33), (32, 32), (7, 130))
    ]
    return [*made, made[0].convert("L"), made[1].convert("P")]


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [*KINDS, *PAIRS])
@pytest.mark.slow
def test_vectors_and_logits_equal_transformers(kind, kind_folders, images):
    folder = kind_folders(kind)
    model = visavis.load(folder)
    output, image_rows, text_rows = by_hand(folder, images, TEXTS)
    close(model.encode_images(images), image_rows)
    close(model.encode_texts(TEXTS), text_rows)
    close(image_rows, output.image_embeds)
    close(text_rows, output.text_embeds)
    start = model.matcher.pretrained_logits
    assert ("bias" in start) == kind.startswith("siglip")
    logits = start["scale"] * model.score(images, TEXTS) + start.get("bias", 0.0)
    torch.testing.assert_close(logits, output.logits_per_image, rtol=1e-6, atol=1e-4)
    assert model.score(images, TEXTS).std() > 1e-3, "a constant model proves nothing"
    # Alone as in a batch, whatever the padding.
    close(model.encode_texts(TEXTS[:1]), text_rows[:1])
    close(model.encode_images(images[1:2]), image_rows[1:2])


@pytest.mark.parametrize("kind", DAILY_KINDS)
def test_export_loads_in_transformers_with_equal_vectors(kind, kind_folders, images, tmp_path):
    matcher, processor = open_dual_encoder(str(kind_folders(kind)))
    with torch.no_grad():
        for parameter in matcher.parameters():
            parameter.mul_(1.1)
    processor.save(matcher, tmp_path / "saved")
    model = visavis.load(tmp_path / "saved")
    assert isinstance(model.matcher, CLIP)
    export_model(model, tmp_path / "saved", "hub", tmp_path / "hub")
    _, image_rows, text_rows = by_hand(tmp_path / "hub", images, TEXTS)
    close(model.encode_images(images), image_rows)
    close(model.encode_texts(TEXTS), text_rows)
    assert not torch.allclose(
        visavis.load(kind_folders(kind)).encode_texts(TEXTS), text_rows, atol=1e-3
    )
    # The names of the weights are those of the published file.
    before, after = (
        load_file(folder / "model.safetensors") for folder in (kind_folders(kind), tmp_path / "hub")
    )
    assert before.keys() == after.keys()
    again = visavis.load(tmp_path / "hub")
    assert torch.equal(again.encode_images(images), model.encode_images(images))
    assert again.matcher.pretrained_logits == model.matcher.pretrained_logits


def at_size(model, **fields):
    """The same model with another image size or number of patches."""
    visual = replace(model.processor.visual_spec, **fields)
    return Retriever(model.matcher, replace(model.processor, visual=visual))


SQUARE_KINDS = [kind for kind in [*KINDS, *PAIRS] if kind != "siglip2-naflex"]


@pytest.mark.parametrize("kind", SQUARE_KINDS)
@pytest.mark.parametrize("size", [pytest.param(16, marks=pytest.mark.slow), 72])
@pytest.mark.slow
def test_other_image_size_equals_transformers(kind, size, kind_folders, images, tmp_path):
    folder = kind_folders(kind)
    model = at_size(visavis.load(folder), image_size=size)
    interpolates_always = kind == "dinov2+bert"
    options = {} if interpolates_always else {"interpolate_pos_encoding": True}
    hub = transformers.AutoModel.from_pretrained(folder).eval()
    squares = [image.convert("RGB").resize((size, size), 3) for image in images]
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = processor(squares, do_resize=False, do_center_crop=False, return_tensors="pt")
    with torch.no_grad():
        expected = normalize(hub.get_image_features(**pixels, **options).pooler_output)
    close(model.encode_images(squares), expected)
    # The exported folder has this size as its own.
    export_model(model, folder, "hub", tmp_path / "hub")
    _, rows, _ = by_hand(tmp_path / "hub", squares, TEXTS)
    close(rows, expected)
    close(visavis.load(tmp_path / "hub").encode_images(squares), expected)


@pytest.mark.parametrize("patches", [4, 30])
def test_other_number_of_patches_equals_transformers(patches, kind_folders, images, tmp_path):
    folder = kind_folders("siglip2-naflex")
    model = at_size(visavis.load(folder), max_num_patches=patches)
    hub = transformers.AutoModel.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    pixels = processor(
        [image.convert("RGB") for image in images], max_num_patches=patches, return_tensors="pt"
    )
    shapes = pixels["spatial_shapes"].tolist()
    assert len(set(map(tuple, shapes))) > 2, "images keep their aspect ratios"
    with torch.no_grad():
        expected = normalize(hub.get_image_features(**pixels).pooler_output)
    close(model.encode_images(images), expected)
    export_model(model, folder, "hub", tmp_path / "hub")
    close(by_hand(tmp_path / "hub", images, TEXTS)[1], expected)
    close(visavis.load(tmp_path / "hub").encode_images(images), expected)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("siglip2-naflex", {"image_size": 64}, r"image_size: expected none, got 64, .*max_num_pat"),
        ("siglip2-naflex", {"crops": 10}, r"crops: expected 1, got 10"),
        ("chinese_clip", {"max_num_patches": 64}, r"max_num_patches: .*Set visual\.image_size"),
    ],
)
def test_settings_of_another_kind_are_rejected(kind, fields, message, kind_folders):
    with pytest.raises(SpecError, match=message):
        open_encoder(EncoderSpec("visual", str(kind_folders(kind)), **fields))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_encoders_give_features_of_transformers(kind, kind_folders, images):
    folder = kind_folders(kind)
    _, image_rows, text_rows = by_hand(folder, images, TEXTS)
    visual = open_encoder(EncoderSpec("visual", str(folder)))
    rgb = [image.convert("RGB") for image in images]
    close(normalize(visual.encode(rgb).vectors), image_rows)
    text = open_encoder(EncoderSpec("text", str(folder)))
    close(normalize(text.encode(TEXTS).vectors), text_rows)


@pytest.mark.parametrize("kind", ["chinese_clip", "siglip2-naflex"])
def test_processor_file_of_transformers_5_is_read(kind, kind_folders, images, tmp_path):
    """One file for images and texts, which is preferred if there are both."""
    folder = shutil.copytree(kind_folders(kind), tmp_path / "model")
    expected = visavis.load(folder).encode_images(images)
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    file.write_text(json.dumps(settings | {"image_mean": [0.1, 0.2, 0.3]}))
    assert torch.equal(visavis.load(folder).encode_images(images), expected)
    file.unlink()
    model = visavis.load(folder)
    assert torch.equal(model.encode_images(images), expected)
    export_model(model, folder, "hub", tmp_path / "hub")
    close(by_hand(tmp_path / "hub", images, TEXTS)[1], expected)


@pytest.mark.parametrize("kind", DAILY_KINDS)
def test_adapters_are_on_both_encoders_and_merge(kind, kind_folders, images, tmp_path):
    pytest.importorskip("peft")
    config = open_dual_encoder(str(kind_folders(kind)))[0].config
    _, processor = open_dual_encoder(str(kind_folders(kind)))
    matcher = CLIP(replace(config, lora_rank=2, scale="learned")).eval()
    by_part = matcher.parameters_by_part()
    # Queries, keys and values of two layers, two matrices each.
    assert [len(by_part[part]) for part in ("visual", "text", "scale")] == [12, 12, 1]
    model = Retriever(matcher, processor)
    plain = visavis.load(kind_folders(kind))
    torch.testing.assert_close(model.encode_texts(TEXTS), plain.encode_texts(TEXTS))
    with torch.no_grad():
        for parameter in matcher.parameters():
            parameter.add_(0.1)
    assert not torch.allclose(model.encode_texts(TEXTS), plain.encode_texts(TEXTS), atol=1e-3)
    export_model(model, tmp_path / "run", "hub", tmp_path / "hub")
    _, image_rows, text_rows = by_hand(tmp_path / "hub", images, TEXTS)
    torch.testing.assert_close(model.encode_images(images), image_rows, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.encode_texts(TEXTS), text_rows, rtol=0, atol=1e-5)


def test_adapters_export_with_another_image_size(kind_folders, images, tmp_path):
    pytest.importorskip("peft")
    matcher, processor = open_dual_encoder(str(kind_folders("chinese_clip")))
    matcher = CLIP(replace(matcher.config, lora_rank=2)).eval()
    with torch.no_grad():
        for parameter in matcher.parameters():
            parameter.add_(0.1)
    model = at_size(Retriever(matcher, processor), image_size=64)
    export_model(model, tmp_path / "run", "hub", tmp_path / "hub")
    _, rows, _ = by_hand(tmp_path / "hub", images, TEXTS)
    torch.testing.assert_close(model.encode_images(images), rows, rtol=0, atol=1e-5)


def test_adapters_on_one_encoder_are_rejected(kind_folders):
    pytest.importorskip("peft")
    config = open_dual_encoder(str(kind_folders("chinese_clip")))[0].config
    with pytest.raises(SpecError, match=r"in each encoder, got none of the text .*Add .*query"):
        CLIP(replace(config, lora_rank=2, lora_layers=("out_proj",)))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_hold_all_parameters(kind, kind_folders):
    matcher, _ = open_dual_encoder(str(kind_folders(kind)))
    by_part = matcher.parameters_by_part()
    assert by_part.keys() == {"visual", "text"}
    for part, parameters in by_part.items():
        assert all(("model.text_" in name) == (part == "text") for name, _ in parameters)
    names = {name for parameters in by_part.values() for name, _ in parameters}
    assert names == {name for name, _ in matcher.named_parameters()}


@pytest.mark.parametrize("kind", ["altclip", "clip+xlm-roberta"])
def test_long_texts_are_cut_at_last_position(kind, kind_folders, tmp_path):
    """Of a tokenizer without a maximum, where positions start after the padding token."""
    folder = shutil.copytree(kind_folders(kind), tmp_path / "model")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["model_max_length"]
    file.write_text(json.dumps(settings))
    model = visavis.load(folder)
    assert model.processor.pretrained_tokenizer.max_length == LENGTH
    assert torch.equal(
        model.encode_texts([LONG]), visavis.load(kind_folders(kind)).encode_texts([LONG])
    )


@pytest.mark.parametrize("kind", DAILY_KINDS)
def test_code_of_model_card_gives_equal_vectors(kind, kind_folders, images, tmp_path):
    visavis.export(kind_folders(kind), format="hub", out=tmp_path / "hub")
    card = (tmp_path / "hub" / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    images[0].save(tmp_path / "photo.png")
    for written, given in (
        ("path/to/this/folder", str(tmp_path / "hub")),
        ("photo.jpg", str(tmp_path / "photo.png")),
        ('["two dogs on a beach", "a red car"]', repr(TEXTS)),
    ):
        assert written in code
        code = code.replace(written, given)
    names = {}
    exec(code, names)  # as a reader of the card runs it
    model = visavis.load(kind_folders(kind))
    close(names["images"], model.encode_images(images[:1]))
    close(names["texts"], model.encode_texts(TEXTS))


@pytest.mark.parametrize("kind", ["siglip2-naflex", "metaclip_2"])
def test_longer_texts_keep_vectors_of_short_ones(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(dual_encoder_kinds, "LENGTH", 24)
    folder = dual_encoder_kinds.write_dual_encoder(kind, tmp_path / "model")
    visavis.papers_convert(folder, tmp_path / "long", max_length=40)
    model, longer = visavis.load(folder), visavis.load(tmp_path / "long")
    assert longer.processor.pretrained_tokenizer.max_length == 40
    assert not torch.allclose(longer.encode_texts([LONG]), model.encode_texts([LONG]), atol=1e-3)
    if kind == "metaclip_2":  # SigLIP reads its padding, so that longer texts are other texts
        close(longer.encode_texts(SENTENCES[:1]), model.encode_texts(SENTENCES[:1]))


def test_models_of_other_texts_are_not_extended(kind_folders, tmp_path):
    with pytest.raises(DataError, match=r"expected a CLIP, SigLIP or MetaCLIP model, got .*altcli"):
        visavis.papers_convert(kind_folders("altclip"), tmp_path / "long", max_length=40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sentence_transformers_folder_gives_equal_vectors(kind, kind_folders, images, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    visavis.export(kind_folders(kind), format="sentence-transformers", out=tmp_path / "out")
    exported = package.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    model = visavis.load(kind_folders(kind))
    rgb = [image.convert("RGB") for image in images]
    close(torch.from_numpy(exported.encode(rgb)), model.encode_images(images))
    close(torch.from_numpy(exported.encode(TEXTS)), model.encode_texts(TEXTS))


@pytest.mark.parametrize("kind", ["onnx", "torch-export"])
def test_graphs_of_patches_are_not_exported(kind, kind_folders, tmp_path):
    with pytest.raises(VisavisError, match=r"expected hub or sentence-transformers .* aspect rat"):
        visavis.export(kind_folders("siglip2-naflex"), format=kind, out=tmp_path / "out")
