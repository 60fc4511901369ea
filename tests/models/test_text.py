"""Words: a recurrent tower and its pooling, neither of which may see padding."""

from __future__ import annotations

import pytest
import torch

from visavis.models.text import RecurrentWords, pool_words
from visavis.types import Encoded, concatenate


def tokens(*lengths: int, longest: int | None = None) -> Encoded:
    longest = longest or max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return Encoded(torch.randint(1, 20, mask.shape) * mask, mask)


@pytest.fixture(params=[False, True], ids=["one direction", "two directions"])
def tower(request) -> RecurrentWords:
    return RecurrentWords(20, 6, 8, bidirectional=request.param, dropout=0.0)


@pytest.mark.parametrize("how", ["last", "max", "mean"])
def test_padding_changes_nothing(tower, how):
    texts = tokens(5, 1, 3, longest=9)
    alone = [
        pool_words(tower(short := Encoded(row[None, : m.sum()], m[None, : m.sum()])), short.mask, how)
        for row, m in zip(texts.vectors, texts.mask, strict=True)
    ]
    rubbish = Encoded(texts.vectors.masked_fill(~texts.mask, 19), texts.mask)
    for padded in (texts, rubbish):
        torch.testing.assert_close(pool_words(tower(padded), padded.mask, how), torch.cat(alone))


@pytest.mark.parametrize("how", ["last", "max", "mean"])
def test_without_a_mask_every_position_holds_a_word(tower, how):
    texts = tokens(5, 5)
    bare = Encoded(texts.vectors)
    torch.testing.assert_close(pool_words(tower(bare), None, how), pool_words(tower(texts), texts.mask, how))


def test_texts_joined_to_a_longer_block_keep_their_states(tower):
    a, b = tokens(2, 4), tokens(7)
    joined = concatenate([a, b])
    states = tower(joined)
    assert states.shape == (3, 7, 8)
    torch.testing.assert_close(states[:2, :4][a.mask], tower(a)[a.mask])


def test_one_direction_reads_forward_only_and_two_are_averaged():
    one, two = (RecurrentWords(20, 6, 8, bidirectional=both, dropout=0.0) for both in (False, True))
    texts = tokens(4)
    changed = Encoded(texts.vectors.clone(), texts.mask)
    changed.vectors[0, 3] = 19 if texts.vectors[0, 3] != 19 else 18
    assert torch.equal(one(texts)[:, :3], one(changed)[:, :3])
    assert not torch.equal(two(texts)[:, 0], two(changed)[:, 0])
    words = two.embedding(texts.vectors)
    torch.testing.assert_close(two(texts), (two.forth(words)[0] + two.back(words.flip(1))[0].flip(1)) / 2)


def test_states_and_gradients_are_those_of_packed_sequences(monkeypatch):
    monkeypatch.setattr("visavis.models.text.TEXTS_AT_ONCE", 2)
    ours, texts = RecurrentWords(20, 6, 8, bidirectional=True, dropout=0.0).double(), tokens(5, 1, 9, 3, 1)
    packed = torch.nn.GRU(6, 8, batch_first=True, bidirectional=True).double()
    packed.load_state_dict(ours.forth.state_dict() | {f"{name}_reverse": part for name, part in ours.back.state_dict().items()})
    rows = torch.nn.utils.rnn.pack_padded_sequence(ours.embedding(texts.vectors), texts.mask.sum(1), True, enforce_sorted=False)
    theirs = torch.nn.utils.rnn.pad_packed_sequence(packed(rows)[0], batch_first=True)[0]
    states, expected = ours(texts)[texts.mask], ((theirs[..., :8] + theirs[..., 8:]) / 2)[texts.mask]
    torch.testing.assert_close(states, expected)
    weight = torch.randn_like(states)
    (mine,), (right,) = (torch.autograd.grad((found * weight).sum(), ours.embedding.weight) for found in (states, expected))
    torch.testing.assert_close(mine, right)


def test_pooling_of_words_by_hand():
    words = torch.tensor([[[1.0, 9.0], [3.0, 2.0], [7.0, 7.0]], [[4.0, 5.0], [8.0, 8.0], [8.0, 8.0]]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert pool_words(words, mask, "last").tolist() == [[3.0, 2.0], [4.0, 5.0]]
    assert pool_words(words, mask, "max").tolist() == [[3.0, 9.0], [4.0, 5.0]]
    assert pool_words(words, mask, "mean").tolist() == [[2.0, 5.5], [4.0, 5.0]]


def test_word_vectors_begin_small_and_dropout_is_for_training():
    tower = RecurrentWords(500, 6, 8, bidirectional=False, dropout=0.5)
    assert tower.embedding.weight.abs().max() <= 0.1
    texts = tokens(5)
    assert not torch.equal(tower(texts), tower(texts))
    tower.eval()
    assert torch.equal(tower(texts), tower(texts))
