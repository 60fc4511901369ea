"""GRU word encoder and pooling of words: both ignore padding."""

from __future__ import annotations

import pytest
import torch

from visavis.core.encoded import Encoded, concatenate
from visavis.models.word_encoders import GRUWordEncoder, pool_words


def tokens(*lengths: int, longest: int | None = None) -> Encoded:
    longest = longest or max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return Encoded(torch.randint(1, 20, mask.shape) * mask, mask)


@pytest.fixture(params=[False, True], ids=["one direction", "two directions"])
def encoder(request) -> GRUWordEncoder:
    return GRUWordEncoder(20, 6, 8, bidirectional=request.param, dropout=0.0)


@pytest.mark.parametrize("how", ["last", "max", "mean"])
def test_gru_word_encoder_ignores_padding(encoder, how):
    texts = tokens(5, 1, 3, longest=9)
    alone = [
        pool_words(
            encoder(short := Encoded(row[None, : m.sum()], m[None, : m.sum()])), short.mask, how
        )
        for row, m in zip(texts.vectors, texts.mask, strict=True)
    ]
    rubbish = Encoded(texts.vectors.masked_fill(~texts.mask, 19), texts.mask)
    for padded in (texts, rubbish):
        torch.testing.assert_close(pool_words(encoder(padded), padded.mask, how), torch.cat(alone))


@pytest.mark.parametrize("how", ["last", "max", "mean"])
def test_gru_word_encoder_without_mask_reads_all_words(encoder, how):
    texts = tokens(5, 5)
    bare = Encoded(texts.vectors)
    torch.testing.assert_close(
        pool_words(encoder(bare), None, how), pool_words(encoder(texts), texts.mask, how)
    )


def test_gru_word_encoder_states_survive_padding(encoder):
    a, b = tokens(2, 4), tokens(7)
    joined = concatenate([a, b])
    states = encoder(joined)
    assert states.shape == (3, 7, 8)
    torch.testing.assert_close(states[:2, :4][a.mask], encoder(a)[a.mask])


def test_gru_word_encoder_averages_two_directions():
    one, two = (GRUWordEncoder(20, 6, 8, bidirectional=both, dropout=0.0) for both in (False, True))
    texts = tokens(4)
    changed = Encoded(texts.vectors.clone(), texts.mask)
    changed.vectors[0, 3] = 19 if texts.vectors[0, 3] != 19 else 18
    assert torch.equal(one(texts)[:, :3], one(changed)[:, :3])
    assert not torch.equal(two(texts)[:, 0], two(changed)[:, 0])
    words = two.embedding(texts.vectors)
    torch.testing.assert_close(
        two(texts), (two.forward_gru(words)[0] + two.backward_gru(words.flip(1))[0].flip(1)) / 2
    )


def test_gru_word_encoder_matches_packed_sequences(monkeypatch):
    monkeypatch.setattr("visavis.models.word_encoders.GRU_BATCH_SIZE", 2)
    ours, texts = (
        GRUWordEncoder(20, 6, 8, bidirectional=True, dropout=0.0).double(),
        tokens(5, 1, 9, 3, 1),
    )
    packed = torch.nn.GRU(6, 8, batch_first=True, bidirectional=True).double()
    packed.load_state_dict(
        ours.forward_gru.state_dict()
        | {f"{name}_reverse": part for name, part in ours.backward_gru.state_dict().items()}
    )
    rows = torch.nn.utils.rnn.pack_padded_sequence(
        ours.embedding(texts.vectors), texts.mask.sum(1), True, enforce_sorted=False
    )
    theirs = torch.nn.utils.rnn.pad_packed_sequence(packed(rows)[0], batch_first=True)[0]
    states, expected = (
        ours(texts)[texts.mask],
        ((theirs[..., :8] + theirs[..., 8:]) / 2)[texts.mask],
    )
    torch.testing.assert_close(states, expected)
    weight = torch.randn_like(states)
    (mine,), (right,) = (
        torch.autograd.grad((found * weight).sum(), ours.embedding.weight)
        for found in (states, expected)
    )
    torch.testing.assert_close(mine, right)


def test_pool_words_by_hand():
    words = torch.tensor(
        [[[1.0, 9.0], [3.0, 2.0], [7.0, 7.0]], [[4.0, 5.0], [8.0, 8.0], [8.0, 8.0]]]
    )
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert pool_words(words, mask, "last").tolist() == [[3.0, 2.0], [4.0, 5.0]]
    assert pool_words(words, mask, "max").tolist() == [[3.0, 9.0], [4.0, 5.0]]
    assert pool_words(words, mask, "mean").tolist() == [[2.0, 5.5], [4.0, 5.0]]


def test_gru_word_encoder_initialization_and_dropout():
    encoder = GRUWordEncoder(500, 6, 8, bidirectional=False, dropout=0.5)
    assert encoder.embedding.weight.abs().max() <= 0.1
    texts = tokens(5)
    assert not torch.equal(encoder(texts), encoder(texts))
    encoder.eval()
    assert torch.equal(encoder(texts), encoder(texts))
