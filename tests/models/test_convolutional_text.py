"""Words from scratch through convolutions: by hand, whatever the padding, and told apart by their order."""

import pytest
import torch
from torch.nn.functional import relu

from visavis.models import Heads
from visavis.models.convolutional_text import ConvolutionalText
from visavis.types import Encoded

WORDS = torch.tensor([[4, 7, 5, 0, 0], [6, 4, 0, 0, 0], [5, 7, 4, 6, 8]])
MASK = WORDS > 0


@pytest.fixture
def tower():
    torch.manual_seed(3)
    return ConvolutionalText(9, 4, 2, dropout=0.4).eval()


def test_each_filter_keeps_the_largest_of_what_it_sees(tower):
    ids = WORDS[0, :3]
    one, two, three = tower.convolutions
    words = torch.cat([torch.zeros(1, 4), tower.embedding(ids), torch.zeros(1, 4)])  # what stands beside a text is zero
    expected = []
    for layer, windows in (
        (one, [words[i : i + 1] for i in (1, 2, 3)]),
        (two, [words[i : i + 2] for i in (1, 2, 3)]),
        (three, [words[i : i + 3] for i in (0, 1, 2)]),
    ):
        seen = torch.stack([(layer.weight * window.T).sum((1, 2)) + layer.bias for window in windows])
        expected.append(relu(seen.max(0).values))
    torch.testing.assert_close(tower(Encoded(WORDS, MASK))[0], torch.cat(expected))


@pytest.mark.parametrize("more", [1, 4])
def test_padding_changes_nothing(tower, more):
    padded = torch.nn.functional.pad(WORDS, (0, more))
    torch.testing.assert_close(tower(Encoded(padded, padded > 0)), tower(Encoded(WORDS, MASK)))
    torch.testing.assert_close(tower(Encoded(WORDS[2:])), tower(Encoded(WORDS, MASK))[2:])


def test_the_order_of_words_is_seen(tower):
    assert not torch.equal(tower(Encoded(WORDS[2:])), tower(Encoded(WORDS[2:].flip(1))))


def test_heads_from_scratch_learn_ten_sentences_by_heart():
    torch.manual_seed(0)
    heads = Heads(Heads.Config(visual_width=8, text_view="tokens", text_width=9, width=16, hidden=32, filters=16, word_width=8))
    images, texts = Encoded(torch.randn(10, 8)), Encoded(torch.randint(1, 9, (10, 5)))
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.01)
    for _ in range(60):
        scores = 10 * heads.score(heads.encode_visual(images), heads.encode_text(texts))
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(10))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    heads.eval()
    assert (heads.score(heads.encode_visual(images), heads.encode_text(texts)).argmax(1) == torch.arange(10)).all()
