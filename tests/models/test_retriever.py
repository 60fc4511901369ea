"""A model that takes pictures and sentences: the same numbers at any batch size and memory, and a sentence for what cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import visavis
from visavis.data.captions import Vocabulary
from visavis.errors import RunError, ShapeError, SpecError, VisavisError
from visavis.models import Matcher, VSEPlusPlus
from visavis.models.base import vectors
from visavis.models.device import choose_device
from visavis.models.encoding import batches_of_about, encode
from visavis.models.processor import Processor
from visavis.models.retriever import Retriever
from visavis.models.scoring import score_all
from visavis.models.towers import TowerSpec
from visavis.types import Encoded

SENTENCES = ["a dog runs", "two red cats", "a boat", "the dog and the boat", "cats"]


class Attention(Matcher):
    """Each word looks for its region: what it costs to score grows with both."""

    name = "Attention"
    Config = VSEPlusPlus.Config
    visual_views = ("grid",)
    text_views = ("tokens",)

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.text_width, config.visual_width)
        self.largest = (0, 0)

    def parts(self):
        return {"text": [self.words]}

    def encode_visual(self, items):
        return items

    def encode_text(self, items):
        return Encoded(self.words(items.vectors), items.mask)

    def score(self, visual, text):
        self.largest = max(self.largest, (len(visual), len(text)), key=np.prod)
        fits = torch.einsum("vrd,twd->vtrw", vectors(visual), vectors(text)).amax(2)
        return (fits * text.mask).sum(-1) / text.mask.sum(-1)


@pytest.fixture
def processor():
    return {
        view: Processor(TowerSpec("visual", "scenes", view), None, Vocabulary.of(SENTENCES, min_count=1)) for view in ("pooled", "grid")
    }


@pytest.fixture
def pictures():
    noise = np.random.default_rng(0)
    return [Image.fromarray(noise.integers(0, 255, (24, 24, 3), np.uint8)) for _ in range(7)]


@pytest.fixture
def model(processor):
    config = VSEPlusPlus.Config(visual_width=192, text_view="tokens", text_width=len(processor["pooled"].vocabulary), width=8, word_width=5)
    return Retriever(VSEPlusPlus(config), processor["pooled"])


@pytest.fixture
def attention(processor):
    config = VSEPlusPlus.Config(visual_view="grid", visual_width=192, text_view="tokens", text_width=len(processor["grid"].vocabulary))
    return Retriever(Attention(config), processor["grid"])


def test_scores_of_vectors_are_their_cosines(model, pictures):
    expected = model.encode_images(pictures) @ model.encode_texts(SENTENCES).T
    torch.testing.assert_close(model.score(pictures, SENTENCES), expected)


def test_a_model_without_vectors_scores_and_says_so(attention, pictures):
    scores = attention.score(pictures, SENTENCES)
    assert scores.shape == (7, 5)
    for row, column in ((0, 0), (6, 3)):
        torch.testing.assert_close(attention.score([pictures[row]], [SENTENCES[column]])[0, 0], scores[row, column])
    with pytest.raises(ShapeError, match=r"^Attention scores pairs .*: take score\(images, texts\), or index another model .* --rerank\.$"):
        attention.encode_images(pictures)


@pytest.mark.parametrize("path", ["a.png", Path("a.mp4")])
def test_a_path_in_the_place_of_a_list_is_told(model, path):
    for method in (model.encode_images, model.encode_videos):
        with pytest.raises(ShapeError, match=rf"^expected a list of pictures or videos, found one path: write \['{path}'\]\.$"):
            method(path)


def test_scores_stay_within_the_memory_and_are_the_same(attention, pictures):
    visual, text = attention.encode_visual(pictures), attention.encode_text(SENTENCES)
    whole = score_all(attention.matcher, visual, text)
    assert attention.matcher.largest == (7, 5)
    attention.matcher.largest = (0, 0)
    torch.testing.assert_close(score_all(attention.matcher, visual, text, 60_000), whole, rtol=0, atol=1e-6)
    height, width = attention.matcher.largest
    pair = 36 * 5 * 4  # regions x words of the longest text, in float32
    assert height * width * pair < 60_000
    with pytest.raises(VisavisError, match=r"scoring one pair takes .*: give a larger memory"):
        score_all(attention.matcher, visual, text, 100)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
def test_the_size_of_batches_changes_nothing(model, pictures, batch_size):
    told = []
    smaller = Retriever(model.matcher, model.processor, batch_size=batch_size)
    torch.testing.assert_close(smaller.encode_images(pictures, lambda *done: told.append(done)), model.encode_images(pictures))
    assert told == [(min(7, done), 7) for done in range(batch_size, 7 + batch_size, batch_size)]
    torch.testing.assert_close(smaller.encode_texts(SENTENCES), model.encode_texts(SENTENCES))


def test_items_come_back_in_order_whatever_the_order_of_computing(model):
    order = np.random.default_rng(0).permutation(40)
    texts = [SENTENCES[i % 5] for i in range(40)]
    shuffled = encode(model.matcher, "text", lambda index: model.processor.texts([texts[i] for i in index]), batches_of_about(order, 6))
    torch.testing.assert_close(shuffled.vectors, model.encode_texts(texts))


def test_encoding_rests_while_it_runs_and_leaves_training_as_it_was(model):
    seen = []
    model.matcher.train()
    encode(model.matcher, "text", lambda index: (seen.append(model.matcher.training), model.processor.texts(SENTENCES))[1], [np.arange(5)])
    assert seen == [False]
    assert model.matcher.training


def test_what_cannot_be_loaded_with_is_a_sentence(model, tmp_path):
    model.processor.save(model.matcher, tmp_path)
    assert visavis.load(tmp_path, device="cpu", batch_size=2, memory="1GiB").batch_size == 2
    with pytest.raises(ShapeError, match="batch_size is 0, expected at least 1"):
        visavis.load(tmp_path, batch_size=0)
    with pytest.raises(SpecError, match="memory is 'much'"):
        visavis.load(tmp_path, memory="much")
    with pytest.raises(RunError, match="device is 'tpu9', which is no device of torch: expected auto, cpu or cuda"):
        visavis.load(tmp_path, device="tpu9")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_the_choice_is_the_cpu_and_cuda_is_a_sentence():
    assert choose_device(None) == choose_device("auto") == torch.device("cpu")
    with pytest.raises(RunError, match=r"^training\.device is cuda, but torch finds no CUDA device here: set it to auto or cpu\.$"):
        choose_device("cuda", "training.device")


@pytest.mark.gpu
def test_on_cuda_the_numbers_are_those_of_the_cpu(model, attention, pictures, tmp_path):
    for each in (model, attention):
        expected = each.score(pictures, SENTENCES)
        each.matcher.cuda()
        torch.testing.assert_close(each.score(pictures, SENTENCES), expected, rtol=0, atol=1e-3)
