"""Text CNN: values by hand, padding, and word order."""

import pytest
import torch
from torch.nn.functional import relu

from visavis.core.encoded import Encoded
from visavis.models.image_text.global_matchers import Heads
from visavis.models.word_encoders import TextCNN

WORDS = torch.tensor([[4, 7, 5, 0, 0], [6, 4, 0, 0, 0], [5, 7, 4, 6, 8]])
MASK = WORDS > 0


@pytest.fixture
def encoder():
    torch.manual_seed(3)
    return TextCNN(9, 4, 2, dropout=0.4).eval()


def test_text_cnn_keeps_maximum_of_each_filter(encoder):
    ids = WORDS[0, :3]
    one, two, three = encoder.convolutions
    words = torch.cat(
        [torch.zeros(1, 4), encoder.embedding(ids), torch.zeros(1, 4)]
    )  # padding of a text is zero
    expected = []
    for layer, windows in (
        (one, [words[i : i + 1] for i in (1, 2, 3)]),
        (two, [words[i : i + 2] for i in (1, 2, 3)]),
        (three, [words[i : i + 3] for i in (0, 1, 2)]),
    ):
        seen = torch.stack(
            [(layer.weight * window.T).sum((1, 2)) + layer.bias for window in windows]
        )
        expected.append(relu(seen.max(0).values))
    torch.testing.assert_close(encoder(Encoded(WORDS, MASK))[0], torch.cat(expected))


@pytest.mark.parametrize("more", [1, 4])
def test_text_cnn_ignores_padding(encoder, more):
    padded = torch.nn.functional.pad(WORDS, (0, more))
    torch.testing.assert_close(encoder(Encoded(padded, padded > 0)), encoder(Encoded(WORDS, MASK)))
    torch.testing.assert_close(encoder(Encoded(WORDS[2:])), encoder(Encoded(WORDS, MASK))[2:])


def test_text_cnn_depends_on_word_order(encoder):
    assert not torch.equal(encoder(Encoded(WORDS[2:])), encoder(Encoded(WORDS[2:].flip(1))))


@pytest.mark.slow
def test_heads_with_text_cnn_overfit_ten_captions():
    torch.manual_seed(0)
    heads = Heads(
        Heads.Config(
            visual_input_dim=8,
            text_granularity="tokens",
            text_input_dim=9,
            embedding_dim=16,
            hidden_dim=32,
            num_filters=16,
            word_dim=8,
        )
    )
    images, texts = Encoded(torch.randn(10, 8)), Encoded(torch.randint(1, 9, (10, 5)))
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.01)
    for _ in range(400):
        scores = 10 * heads.score(heads.encode_visual(images), heads.encode_text(texts))
        loss = torch.nn.functional.cross_entropy(scores, torch.arange(10))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    heads.eval()
    assert (
        heads.score(heads.encode_visual(images), heads.encode_text(texts)).argmax(1)
        == torch.arange(10)
    ).all()
