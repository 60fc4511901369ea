"""Retriever: same vectors for all batch sizes and memory settings, and errors about invalid input."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import visavis
from visavis.core.encoded import Encoded
from visavis.core.errors import (
    DataError,
    RefusedOverwrite,
    RunError,
    ShapeError,
    SpecError,
    VisavisError,
)
from visavis.data.vocabulary import Vocabulary
from visavis.models import Matcher
from visavis.models.base import get_vectors
from visavis.models.device import choose_device
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.image_text.global_matchers import VSEPlusPlus
from visavis.models.inference import encode_items, equal_batches, score_all_pairs
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever, read_image
from visavis.retrieval.zero_shot import rank_texts

SENTENCES = ["a dog runs", "two red cats", "a boat", "the dog and the boat", "cats"]


class Attention(Matcher):
    """Each word scores its best region, so that the cost grows with both."""

    name = "Attention"
    Config = VSEPlusPlus.Config
    visual_granularities = ("regions",)
    text_granularities = ("tokens",)

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.text_input_dim, config.visual_input_dim)
        self.largest = (0, 0)

    def parts(self):
        return {"text": [self.words]}

    def encode_visual(self, items):
        return items

    def encode_text(self, items):
        return Encoded(self.words(items.vectors), items.mask)

    def score(self, visual, text):
        self.largest = max(self.largest, (len(visual), len(text)), key=np.prod)
        fits = torch.einsum("vrd,twd->vtrw", get_vectors(visual), get_vectors(text)).amax(2)
        return (fits * text.mask).sum(-1) / text.mask.sum(-1)


@pytest.fixture
def processor():
    return {
        view: Processor(
            EncoderSpec("visual", "scenes", view),
            None,
            Vocabulary.from_captions(SENTENCES, min_count=1),
        )
        for view in ("pooled", "regions")
    }


@pytest.fixture
def images():
    noise = np.random.default_rng(0)
    return [Image.fromarray(noise.integers(0, 255, (24, 24, 3), np.uint8)) for _ in range(7)]


@pytest.fixture
def model(processor):
    config = VSEPlusPlus.Config(
        visual_input_dim=192,
        text_granularity="tokens",
        text_input_dim=len(processor["pooled"].vocabulary),
        embedding_dim=8,
        word_dim=5,
    )
    return Retriever(VSEPlusPlus(config), processor["pooled"])


@pytest.fixture
def attention(processor):
    config = VSEPlusPlus.Config(
        visual_granularity="regions",
        visual_input_dim=192,
        text_granularity="tokens",
        text_input_dim=len(processor["regions"].vocabulary),
    )
    return Retriever(Attention(config), processor["regions"])


def test_retriever_scores_are_cosines_of_vectors(model, images):
    expected = model.encode_images(images) @ model.encode_texts(SENTENCES).T
    torch.testing.assert_close(model.score(images, SENTENCES), expected)


def test_retriever_without_vectors_scores_pairs(attention, images):
    scores = attention.score(images, SENTENCES)
    assert scores.shape == (7, 5)
    for row, column in ((0, 0), (6, 3)):
        torch.testing.assert_close(
            attention.score([images[row]], [SENTENCES[column]])[0, 0], scores[row, column]
        )
    with pytest.raises(
        ShapeError, match=r"^Attention scores pairs: .* Use score\(images, texts\), .*--rerank"
    ):
        attention.encode_images(images)


def test_retriever_rejects_single_text_and_unknown_direction(model, images):
    # Each letter would be a text.
    for method in (
        model.encode_texts,
        model.encode,
        lambda text: rank_texts(model, images[0], text),
    ):
        with pytest.raises(SpecError, match=r"^(texts|items): expected a list, got 'red'. Pass"):
            method("red")
    # The texts would be the queries whose candidates are ordered.
    with pytest.raises(SpecError, match=r"^direction: expected 'i2t' or 't2i', got 'I2T'."):
        model.score(images[:1], ["red"], direction="I2T")


@pytest.mark.parametrize("method", ["encode_texts", "encode", "count_tokens", "score"])
@pytest.mark.parametrize("kind", ["words", "attention", "clip", "siglip"])
def test_texts_that_cannot_be_read_are_named(kind, method, model, attention, images, request):
    if kind in ("clip", "siglip"):
        model = visavis.load(request.getfixturevalue("dual_encoders") / kind)
    model = attention if kind == "attention" else model
    read = partial(model.score, images) if method == "score" else getattr(model, method)
    for text, got in (
        ("a \ud800", r"half of a surrogate pair in 'a \\ud800'"),
        ("\udfff\ud800", r"half of a surrogate pair"),
        ("", "got ''"),
        (" \n\u3000", r"got ' \\n\\u3000'"),
    ):
        with pytest.raises(DataError, match=rf"^texts\[1\]: expected .*{got}"):
            read(["a dog", text])


def test_encoding_names_texts_of_unknown_words(model, recwarn):
    model.encode_texts(["a dog", "a zzz dog"])
    assert not recwarn
    with pytest.warns(UserWarning, match="the model knows no word of") as warned:
        model.encode_texts(["a dog", "zzzz", "...", "two cats"])
    assert [str(each.message) for each in warned] == [
        "texts: the model knows no word of 2 of 4 texts ('zzzz', '...'). Use words of its captions."
    ]
    assert model.unknown_words("a zzz dog") == ["zzz"]


def test_score_all_pairs_stays_within_memory(attention, images):
    visual, text = attention.encode_visual(images), attention.encode_text(SENTENCES)
    whole = score_all_pairs(attention.matcher, visual, text)
    assert attention.matcher.largest == (7, 5)
    attention.matcher.largest = (0, 0)
    torch.testing.assert_close(
        score_all_pairs(attention.matcher, visual, text, 60_000), whole, rtol=0, atol=1e-6
    )
    height, width = attention.matcher.largest
    pair = 36 * 5 * 4  # regions x words of the longest text, in float32
    assert height * width * pair < 60_000
    with pytest.raises(VisavisError, match=r"memory: expected at least .* to score one pair"):
        score_all_pairs(attention.matcher, visual, text, 100)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
def test_retriever_is_independent_of_batch_size(model, images, batch_size):
    progress = []
    smaller = Retriever(model.matcher, model.processor, batch_size=batch_size)
    torch.testing.assert_close(
        smaller.encode_images(images, lambda *done: progress.append(done)),
        model.encode_images(images),
    )
    assert progress == [(min(7, done), 7) for done in range(batch_size, 7 + batch_size, batch_size)]
    torch.testing.assert_close(smaller.encode_texts(SENTENCES), model.encode_texts(SENTENCES))


def test_encode_items_restores_order(model):
    order = np.random.default_rng(0).permutation(40)
    texts = [SENTENCES[i % 5] for i in range(40)]
    batches = equal_batches(order, 6)
    inputs = (model.processor.process_texts([texts[i] for i in index]) for index in batches)
    shuffled = encode_items(model.matcher, "text", inputs, batches)
    torch.testing.assert_close(shuffled.vectors, model.encode_texts(texts))


def test_encode_items_restores_training_mode(model):
    seen = []
    model.matcher.train()

    def read(_index):
        seen.append(model.matcher.training)
        return model.processor.process_texts(SENTENCES)

    batches = [np.arange(5)]
    encode_items(model.matcher, "text", map(read, batches), batches)
    assert seen == [False]
    assert model.matcher.training


def test_load_rejects_invalid_arguments(model, tmp_path):
    model.processor.save(model.matcher, tmp_path)
    assert visavis.load(tmp_path, device="cpu", batch_size=2, memory="1GiB").batch_size == 2
    with pytest.raises(ShapeError, match="batch_size: expected an integer >= 1, got 0"):
        visavis.load(tmp_path, batch_size=0)
    with pytest.raises(SpecError, match=r"memory: expected .*, got 'much'"):
        visavis.load(tmp_path, memory="much")
    with pytest.raises(RunError, match="device: expected auto, cpu, cuda or mps, got 'tpu9'"):
        visavis.load(tmp_path, device="tpu9")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_choose_device_without_cuda():
    assert choose_device(None) == choose_device("auto") == torch.device("cpu")
    with pytest.raises(
        RunError,
        match=r"^training\.device: expected an available device, got cuda, and torch finds no CUDA device\. Set it to auto or cpu\.$",
    ):
        choose_device("cuda", "training.device")


@pytest.mark.gpu
def test_retriever_on_cuda_matches_cpu(model, attention, images):
    """Convolutions on CUDA round to TensorFloat32, by up to 5e-4 of a value."""
    for each in (model, attention):
        expected = each.score(images, SENTENCES)
        each.matcher.cuda()
        torch.testing.assert_close(
            each.score(images, SENTENCES), expected, rtol=0, atol=1e-3 * expected.abs().max().item()
        )


def test_encode_images_accepts_every_kind_of_image(model, images, tmp_path):
    image = images[0]
    image.save(tmp_path / "image.png")
    pixels = np.asarray(image)
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    kinds = [
        tmp_path / "image.png",
        str(tmp_path / "image.png"),
        (tmp_path / "image.png").read_bytes(),
        pixels,
        tensor,
        tensor / 255,
    ]
    expected = model.encode_images([image])
    for kind in kinds:
        assert torch.equal(model.encode_images([kind]), expected)
        assert torch.equal(model.score([kind], SENTENCES), model.score([image], SENTENCES))
    assert torch.equal(
        model.encode_images(np.stack([pixels, pixels])), model.encode_images([image, image])
    )


def _image_files(folder: Path) -> list[Path]:
    """One file for each mode that a format stores, and files with an orientation, frames or more
    pixels than a model reads.
    """
    pixels = np.random.default_rng(0).integers(0, 256, (24, 36, 4), dtype=np.uint8)
    image, rgb = Image.fromarray(pixels), Image.fromarray(pixels[..., :3])
    deep = pixels[..., 0].astype(np.uint16) * 200
    exif = Image.Exif()
    exif[0x0112] = 6
    palette = rgb.quantize(8)
    large = rgb.resize((1800, 1200))
    files: dict[str, tuple[Image.Image, dict[str, object]]] = {
        "16 bit.png": (Image.fromarray(deep), {}),
        "16 bit.tif": (Image.fromarray(deep), {}),
        "32 bit.tif": (Image.fromarray(deep.astype(np.int32)), {}),
        "float.tif": (Image.fromarray(pixels[..., 0].astype(np.float32) / 255), {}),
        "bits.png": (rgb.convert("1"), {}),
        "gray.png": (rgb.convert("L"), {}),
        "gray with transparency.png": (image.convert("LA"), {}),
        "transparent.png": (image, {}),
        "transparent.webp": (image, {"lossless": True}),
        "transparent color.png": (rgb, {"transparency": tuple(pixels[0, 0, :3].tolist())}),
        "palette.png": (palette, {}),
        "palette with transparency.png": (palette, {"transparency": 3}),
        "palette with levels.png": (palette, {"transparency": bytes(range(0, 256, 32))}),
        "palette.gif": (palette, {"transparency": 3}),
        "moving.gif": (palette, {"save_all": True, "append_images": [rgb.rotate(90).quantize(8)]}),
        "pages.tif": (rgb, {"save_all": True, "append_images": [rgb.rotate(90)]}),
        "print.jpg": (rgb.convert("CMYK"), {}),
        "print.tif": (rgb.convert("CMYK"), {}),
        "lab.tif": (rgb.convert("LAB"), {}),
        "large.jpg": (large, {}),
        "large turned.jpg": (large, {"exif": exif}),
        "large preview.mpo": (large, {"exif": exif, "save_all": True, "append_images": [rgb]}),
        **{f"turned{suffix}": (rgb, {"exif": exif}) for suffix in (".jpg", ".png", ".webp")},
        "turned.tif": (rgb, {"tiffinfo": {0x0112: 6}}),
    }
    for name, (content, options) in files.items():
        content.save(folder / name, **options)
    return [folder / name for name in files]


def _open_image(file: Path) -> Image.Image:
    return Image.open(io.BytesIO(file.read_bytes()))


def test_encode_images_reads_a_pillow_image_as_its_file(model, tmp_path):
    files = _image_files(tmp_path)
    expected = model.encode_images(files)
    pixels = [
        model.processor.preprocess([read_image(file, "x", model.processor.min_side)])
        for file in files
    ]
    assert len({row.numpy().tobytes() for row in pixels}) > len(files) // 2, (
        "most images must differ"
    )
    assert torch.equal(model.encode_images([file.read_bytes() for file in files]), expected)
    opened = list(map(_open_image, files))
    assert torch.equal(model.encode_images(opened), expected)
    for image, file in zip(opened, files, strict=True):
        assert (image.size, image.mode) == (_open_image(file).size, _open_image(file).mode), (
            "the image must not change"
        )
        image.load()
    small = [number for number, file in enumerate(files) if not file.name.startswith("large")]
    # A large JPEG that is decoded has more pixels than one that is decoded at a reduced size.
    arrays = [np.asarray(read_image(image, "x")) for image in opened]
    tensors = [torch.from_numpy(array.copy()).permute(2, 0, 1) for array in arrays]
    for kind in (opened, arrays, tensors, [tensor / 255 for tensor in tensors]):
        rows = model.encode_images(kind)
        assert torch.equal(rows[small], expected[small])
        torch.testing.assert_close(rows, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("suffix", ["png", "gif", "tif", "jpg"])
def test_read_image_reads_an_opened_image_several_times(suffix, tmp_path):
    """Threads that decode one opened image at once damage it."""
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((600, 400)).save(tmp_path / f"image.{suffix}")
    with Image.open(tmp_path / f"image.{suffix}") as image, ThreadPoolExecutor(8) as threads:
        first, *others = threads.map(lambda _: read_image(image, "x").tobytes(), range(32))
    assert others == [first] * 31


def test_encode_images_uses_the_current_frame(model, tmp_path):
    frames = [Image.new("RGB", (24, 24), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    image = _open_image(tmp_path / "moving.gif")
    image.seek(1)
    assert torch.equal(model.encode_images([image]), model.encode_images(frames[1:]))


def test_encode_images_names_a_closed_image(model, images, tmp_path):
    images[0].save(tmp_path / "image.png")
    with Image.open(tmp_path / "image.png") as image:
        pass
    with pytest.raises(
        DataError, match=r"^image images\[1\] is closed, expected an open one\. Pass its path"
    ):
        model.encode_images([images[0], image])


@pytest.mark.parametrize(
    ("odd", "given"),
    [
        (np.zeros((3, 24, 24), np.uint8), r"uint8 of shape \[3, 24, 24\]"),
        (np.zeros((24, 24, 3)), r"float64 of shape \[24, 24, 3\]"),
        (torch.zeros(24, 24, 3), r"float32 of shape \[24, 24, 3\]"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"int64 of shape \[3, 4, 4\]"),
        (torch.full((3, 4, 4), 255.0), r"got 255 to 255\. Divide"),
        (torch.full((3, 4, 4), torch.nan), r"got NaN or infinity\. Replace"),
        (b"not an image", "is not an image"),
    ],
)
def test_encode_images_names_the_invalid_image(model, images, odd, given):
    with pytest.raises(DataError, match=rf"images\[1\].*{given}"):
        model.encode_images([images[0], odd])


def test_encode_chooses_by_type(model, images, tmp_path):
    images[0].save(tmp_path / "image.png")
    assert torch.equal(model.encode(SENTENCES), model.encode_texts(SENTENCES))
    assert torch.equal(
        model.encode([tmp_path / "image.png", images[1]]), model.encode_images(images[:2])
    )
    with pytest.raises(ShapeError, match=r"^items: expected at least one"):
        model.encode([])


def test_similarity_computes_cosines(model, images):
    rows, texts = model.encode(images), model.encode(SENTENCES)
    torch.testing.assert_close(model.similarity(rows * 3, texts), model.score(images, SENTENCES))
    for odd in (texts[0], texts[None], texts[:, :5]):
        with pytest.raises(
            ShapeError, match=r"^first, second: expected vectors .* got shapes \[\d, 8\] and \["
        ):
            model.similarity(rows, odd)


def test_save_writes_folder_that_load_reads(model, images, tmp_path):
    folder = model.save(tmp_path / "saved")
    loaded = visavis.load(folder)
    assert torch.equal(loaded.encode(images), model.encode(images))
    assert torch.equal(loaded.encode(SENTENCES), model.encode(SENTENCES))
    with pytest.raises(RefusedOverwrite, match=r"saved already exists"):
        model.save(folder)
