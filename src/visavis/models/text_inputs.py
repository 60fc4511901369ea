"""Checks of the texts and items that a model or its text tower encodes. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from visavis.core.errors import DataError, ShapeError, SpecError, UnknownWords, format_value, warn
from visavis.data.vocabulary import Vocabulary


def check_texts(texts: Sequence[str]) -> int:
    """Check the texts to encode, and return their number."""
    count = count_items(texts, "texts")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise SpecError(
                f"texts[{number}]: expected a text, got {format_value(text)}. Pass a str."
            )
        if not text.strip():
            raise DataError(
                f"texts[{number}]: expected a text, got {format_value(text)}. Remove it, or write "
                "some words."
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"texts[{number}]: expected Unicode, got half of a surrogate pair in "
                f"{format_value(text)}. Decode the text from its file as UTF-8 or UTF-16."
            ) from None
    return count


def count_items(items: Sequence[Any], name: str) -> int:
    """Check that there are items to encode, and return their number."""
    # A text is a sequence of letters, each of which would be encoded.
    if isinstance(items, str):
        raise SpecError(
            f"{name}: expected a list, got {format_value(items)}. Pass [{items!r:.80}]."
        )
    if not len(items):
        raise ShapeError(f"{name}: expected at least one to encode, got an empty list. Pass some.")
    return len(items)


def warn_of_unknown_texts(texts: Sequence[str], vocabulary: Vocabulary | None) -> None:
    """Warn of texts without a known word. None: a tokenizer knows all words."""
    unknown = [text for text in texts if vocabulary is not None and not vocabulary.knows(text)]
    if unknown:
        warn(
            f"texts: the model knows no word of {len(unknown):,} of {len(texts):,} texts "
            f"({', '.join(map(format_value, unknown[:3]))}). Use words of its captions."
        )


def unknown_words(text: str, vocabulary: Vocabulary | None) -> list[str]:
    """Find the words of a text that are not in the vocabulary. None: a tokenizer knows all words."""
    if vocabulary is None:
        return []
    if not vocabulary.knows(text):
        raise UnknownWords(
            f"{text!r}: expected at least one of the {len(vocabulary):,} words of the "
            "vocabulary, got unknown words only. Use other words."
        )
    return vocabulary.unknown_words(text)
