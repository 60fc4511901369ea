"""Tokenization, vocabulary and padding of captions."""

import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from visavis.data.vocabulary import END, PAD, START, UNKNOWN, Vocabulary, pad_token_ids
from visavis.data.words import tokenize

texts = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("Two dogs, on a beach!", ["two", "dogs", "on", "a", "beach"]),
        ("A man's T-shirt", ["a", "mans", "tshirt"]),
        ("  tabs\tand\nlines  ", ["tabs", "and", "lines"]),
        ("<start> <pad>", ["start", "pad"]),
        ("Ärger über Öl", ["ärger", "über", "öl"]),
        ("caf\u00e9 cafe\u0301", ["caf\u00e9", "caf\u00e9"]),
        ("“a” dog—yes…", ["“a”", "dog—yes…"]),
        ("一隻狗，在草地上跑。", list("一隻狗在草地上跑")),
        ("犬が2匹、A dog!", ["犬", "が", "2", "匹", "a", "dog"]),
        ("두 마리 개", ["두", "마리", "개"]),
        ("วิ่งเล่น", ["วิ่", "ง", "เ", "ล่", "น"]),
        ("ລາວ", ["ລ", "າ", "ວ"]),
        ("ខ្មែរ", ["ខ្", "មែ", "រ"]),
        ("မြန်မာ။", ["မြ", "န်", "မာ"]),
        ("...", []),
        ("", []),
    ],
)
def test_tokenize_follows_karpathy(caption, words):
    assert tokenize(caption) == words


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_tokenize_is_equal_in_every_unicode_form(caption):
    forms = [tokenize(unicodedata.normalize(form, caption)) for form in ("NFC", "NFD")]
    assert forms[0] == forms[1]


@given(st.text(st.sampled_from(string.printable + "éü“”—…ßñ"), max_size=40))
def test_tokenize_of_spaced_scripts_splits_at_spaces(caption):
    assert (
        tokenize(caption)
        == caption.lower().translate(str.maketrans("", "", string.punctuation)).split()
    )


def test_vocabulary_of_unspaced_script_has_characters():
    captions = ["一隻狗在跑", "一隻貓在睡"]
    assert Vocabulary.from_captions(captions, min_count=2).words[4:] == tuple(sorted("一隻在"))


def test_vocabulary_in_decomposed_form_is_kept():
    old = Vocabulary((PAD, START, END, UNKNOWN, "cafe\u0301"))
    assert old.token_ids("a caf\u00e9") == [1, 3, 4, 2]


def test_vocabulary_has_frequent_words_in_order():
    captions = ["a dog", "a dog", "a cat", "A zebra."]
    assert Vocabulary.from_captions(captions, min_count=2).words == (
        PAD,
        START,
        END,
        UNKNOWN,
        "a",
        "dog",
    )
    assert Vocabulary.from_captions(reversed(captions), min_count=1).words[4:] == (
        "a",
        "cat",
        "dog",
        "zebra",
    )
    assert len(Vocabulary.from_captions([], min_count=1)) == 4


@given(st.lists(texts, min_size=1, max_size=6))
def test_vocabulary_knows_all_words_of_its_captions(captions):
    vocabulary = Vocabulary.from_captions(captions, min_count=1)
    for caption in captions:
        numbers = vocabulary.token_ids(caption)
        assert numbers[0] == 1
        assert numbers[-1] == 2
        assert all(number > 3 for number in numbers[1:-1])
        assert [vocabulary.words[number] for number in numbers[1:-1]] == tokenize(caption)


def test_vocabulary_encodes_unknown_words_and_empty_captions():
    vocabulary = Vocabulary.from_captions(["a dog"], min_count=1)
    encoded = vocabulary.encode(["a unicorn", ""])
    assert encoded.vectors.tolist() == [[1, 4, 3, 2], [1, 2, 0, 0]]
    assert encoded.mask.tolist() == [[True] * 4, [True, True, False, False]]


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=9))
def test_padding_adds_only_zeros(rows):
    encoded = pad_token_ids(rows)
    assert encoded.vectors.shape == encoded.mask.shape == (len(rows), max(map(len, rows)))
    assert [
        numbers[mask].tolist() for numbers, mask in zip(encoded.vectors, encoded.mask, strict=True)
    ] == rows
    assert (encoded.vectors[~encoded.mask] == 0).all()
