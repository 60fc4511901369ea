"""Retriever: same vectors for all batch sizes and memory settings, and errors about invalid input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import visavis
from visavis.data.vocabulary import Vocabulary
from visavis.errors import DataError, RefusedOverwrite, RunError, ShapeError, SpecError, VisavisError
from visavis.models import Matcher, VSEPlusPlus
from visavis.models.base import get_vectors
from visavis.models.device import choose_device
from visavis.models.encoders.encoder_spec import EncoderSpec
from visavis.models.inference import encode_items, equal_batches, score_all_pairs
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.types import Encoded

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
        view: Processor(EncoderSpec("visual", "scenes", view), None, Vocabulary.from_captions(SENTENCES, min_count=1))
        for view in ("pooled", "regions")
    }


@pytest.fixture
def images():
    noise = np.random.default_rng(0)
    return [Image.fromarray(noise.integers(0, 255, (24, 24, 3), np.uint8)) for _ in range(7)]


@pytest.fixture
def model(processor):
    config = VSEPlusPlus.Config(
        visual_input_dim=192, text_granularity="tokens", text_input_dim=len(processor["pooled"].vocabulary), embedding_dim=8, word_dim=5
    )
    return Retriever(VSEPlusPlus(config), processor["pooled"])


@pytest.fixture
def attention(processor):
    config = VSEPlusPlus.Config(
        visual_granularity="regions", visual_input_dim=192, text_granularity="tokens", text_input_dim=len(processor["regions"].vocabulary)
    )
    return Retriever(Attention(config), processor["regions"])


def test_retriever_scores_are_cosines_of_vectors(model, images):
    expected = model.encode_images(images) @ model.encode_texts(SENTENCES).T
    torch.testing.assert_close(model.score(images, SENTENCES), expected)


def test_retriever_without_vectors_scores_pairs(attention, images):
    scores = attention.score(images, SENTENCES)
    assert scores.shape == (7, 5)
    for row, column in ((0, 0), (6, 3)):
        torch.testing.assert_close(attention.score([images[row]], [SENTENCES[column]])[0, 0], scores[row, column])
    with pytest.raises(ShapeError, match=r"^Attention scores pairs: .* Use score\(images, texts\), .*--rerank"):
        attention.encode_images(images)


@pytest.mark.parametrize("path", ["a.png", Path("a.mp4")])
def test_retriever_rejects_single_path(model, path):
    for method in (model.encode_images, model.encode_videos):
        with pytest.raises(SpecError, match=rf"^(images|videos): expected a list of .+, got .*{path}.*\."):
            method(path)


def test_score_all_pairs_stays_within_memory(attention, images):
    visual, text = attention.encode_visual(images), attention.encode_text(SENTENCES)
    whole = score_all_pairs(attention.matcher, visual, text)
    assert attention.matcher.largest == (7, 5)
    attention.matcher.largest = (0, 0)
    torch.testing.assert_close(score_all_pairs(attention.matcher, visual, text, 60_000), whole, rtol=0, atol=1e-6)
    height, width = attention.matcher.largest
    pair = 36 * 5 * 4  # regions x words of the longest text, in float32
    assert height * width * pair < 60_000
    with pytest.raises(VisavisError, match=r"memory: expected at least .* to score one pair"):
        score_all_pairs(attention.matcher, visual, text, 100)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
def test_retriever_is_independent_of_batch_size(model, images, batch_size):
    progress = []
    smaller = Retriever(model.matcher, model.processor, batch_size=batch_size)
    torch.testing.assert_close(smaller.encode_images(images, lambda *done: progress.append(done)), model.encode_images(images))
    assert progress == [(min(7, done), 7) for done in range(batch_size, 7 + batch_size, batch_size)]
    torch.testing.assert_close(smaller.encode_texts(SENTENCES), model.encode_texts(SENTENCES))


def test_encode_items_restores_order(model):
    order = np.random.default_rng(0).permutation(40)
    texts = [SENTENCES[i % 5] for i in range(40)]
    shuffled = encode_items(
        model.matcher, "text", lambda index: model.processor.process_texts([texts[i] for i in index]), equal_batches(order, 6)
    )
    torch.testing.assert_close(shuffled.vectors, model.encode_texts(texts))


def test_encode_items_restores_training_mode(model):
    seen = []
    model.matcher.train()
    encode_items(
        model.matcher,
        "text",
        lambda index: (seen.append(model.matcher.training), model.processor.process_texts(SENTENCES))[1],
        [np.arange(5)],
    )
    assert seen == [False]
    assert model.matcher.training


def test_load_rejects_invalid_arguments(model, tmp_path):
    model.processor.save(model.matcher, tmp_path)
    assert visavis.load(tmp_path, device="cpu", batch_size=2, memory="1GiB").batch_size == 2
    with pytest.raises(ShapeError, match="batch_size: expected an integer >= 1, got 0"):
        visavis.load(tmp_path, batch_size=0)
    with pytest.raises(SpecError, match=r"memory: expected .*, got 'much'"):
        visavis.load(tmp_path, memory="much")
    with pytest.raises(RunError, match="device: expected auto, cpu or cuda, got 'tpu9'"):
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
        torch.testing.assert_close(each.score(images, SENTENCES), expected, rtol=0, atol=1e-3 * expected.abs().max().item())


def test_encode_images_accepts_every_kind_of_image(model, images, tmp_path):
    image = images[0]
    image.save(tmp_path / "image.png")
    pixels = np.asarray(image)
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1)
    kinds = [tmp_path / "image.png", str(tmp_path / "image.png"), (tmp_path / "image.png").read_bytes(), pixels, tensor, tensor / 255]
    expected = model.encode_images([image])
    for kind in kinds:
        assert torch.equal(model.encode_images([kind]), expected)
        assert torch.equal(model.score([kind], SENTENCES), model.score([image], SENTENCES))
    assert torch.equal(model.encode_images(np.stack([pixels, pixels])), model.encode_images([image, image]))


@pytest.mark.parametrize(
    ("odd", "given"),
    [
        (np.zeros((3, 24, 24), np.uint8), r"uint8 of shape \[3, 24, 24\]"),
        (np.zeros((24, 24, 3)), r"float64 of shape \[24, 24, 3\]"),
        (torch.zeros(24, 24, 3), r"float32 of shape \[24, 24, 3\]"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"int64 of shape \[3, 4, 4\]"),
        (torch.full((3, 4, 4), 255.0), "others"),
        (torch.full((3, 4, 4), torch.nan), "others"),
        (b"not an image", "is not an image"),
    ],
)
def test_encode_images_names_the_invalid_image(model, images, odd, given):
    with pytest.raises(DataError, match=rf"images\[1\].*{given}"):
        model.encode_images([images[0], odd])


def test_encode_chooses_by_type(model, images, tmp_path):
    images[0].save(tmp_path / "image.png")
    assert torch.equal(model.encode(SENTENCES), model.encode_texts(SENTENCES))
    assert torch.equal(model.encode([tmp_path / "image.png", images[1]]), model.encode_images(images[:2]))
    with pytest.raises(SpecError, match=r"^items: expected texts only or images only, got 1 texts among 2 items\."):
        model.encode(["a dog", images[0]])
    with pytest.raises(ShapeError, match=r"^items: expected at least one"):
        model.encode([])


def test_similarity_computes_cosines(model, images):
    rows, texts = model.encode(images), model.encode(SENTENCES)
    torch.testing.assert_close(model.similarity(rows * 3, texts), model.score(images, SENTENCES))
    for odd in (texts[0], texts.long(), texts.to_sparse()):
        with pytest.raises(ShapeError, match=r"^second: expected vectors of floats \[N, D\], got"):
            model.similarity(rows, odd)
    with pytest.raises(ShapeError, match=r"^first, second: .* got 8 and 5 dimensions"):
        model.similarity(rows, texts[:, :5])


def test_save_writes_folder_that_load_reads(model, images, tmp_path):
    folder = model.save(tmp_path / "saved")
    loaded = visavis.load(folder)
    assert torch.equal(loaded.encode(images), model.encode(images))
    assert torch.equal(loaded.encode(SENTENCES), model.encode(SENTENCES))
    with pytest.raises(RefusedOverwrite, match=r"saved already exists"):
        model.save(folder)
