"""Full-text index of file names and captions: a table of SQLite's FTS5 without texts of its own."""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from visavis.data.file_names import VISUAL_SUFFIXES

# Without the texts, which the items have.
SCHEMA = (
    """CREATE VIRTUAL TABLE names USING fts5(
    name, captions, content = '', tokenize = 'unicode61 remove_diacritics 2'
)""",
)
"""Statements that make the table: a row for each file, with the number of its item."""
COLUMNS: tuple[Literal["name", "captions"], ...] = ("name", "captions")
MIN_PREFIX_CHARS = 3
"""Length from which the last word of a query matches beginnings of words. Shorter ones have too
many.
"""
MAX_FILTERED = 10_000
"""Files with the words of a query of which those that pass a filter are found."""
MAX_QUERY_WORDS = 32
"""Words beyond which a text describes an image, and names none."""
# FTS5 splits at punctuation. These are the other places: between letters and digits, and around
# characters of languages that write no spaces.
_IDEOGRAPH = "[\u3040-\u30ff\u3400-\u9fff]"
_SPLIT = re.compile(
    r"(?<=\d)(?=[^\W\d_])|(?<=[^\W\d_])(?=\d)" + f"|(?<={_IDEOGRAPH})|(?={_IDEOGRAPH})"
)
_WORD = re.compile(r"[^\W_]+")
# Group 1 holds quoted words, group 2 one word.
_TERM = re.compile(r'"([^"]*)"|([^\s"]+)')
# A word between two captions, so that no phrase continues from one to the next. It is a character
# for private use, which FTS5 takes for a letter.
_BETWEEN = " \ue000 "


class NameTable:
    """Full-text index of the file names and captions of items.

    Args:
        connection: Connection to a database with this table.
    """

    def __init__(self, connection: sqlite3.Connection):
        self.connection = connection

    def insert(self, files: Iterable[tuple[int, str, Sequence[str]]]) -> None:
        """Insert files: row, path and captions."""
        self.connection.executemany(
            "INSERT INTO names (rowid, name, captions) VALUES (?, ?, ?)", map(_values, files)
        )

    def delete(self, files: Iterable[tuple[int, str, Sequence[str]]]) -> None:
        """Delete files, with the path and captions with which they were inserted."""
        # FTS5 finds the words of a row by its texts. Other texts would damage the table.
        self.connection.executemany(
            "INSERT INTO names (names, rowid, name, captions) VALUES ('delete', ?, ?, ?)",
            map(_values, files),
        )

    def clear(self) -> None:
        """Delete all files."""
        self.connection.execute("INSERT INTO names (names) VALUES ('delete-all')")


def _values(file: tuple[int, str, Sequence[str]]) -> tuple[int, str, str]:
    row, path, captions = file
    return row, _split(file_stem(path)), _split(_BETWEEN.join(captions))


def file_stem(path: str) -> str:
    """Return the name of a file without its folder and without a suffix of images and videos."""
    name = path.rpartition("/")[2]
    has_suffix = name.lower().endswith(VISUAL_SUFFIXES)
    return name.rpartition(".")[0] if has_suffix else name


def _split(text: str) -> str:
    return _SPLIT.sub(" ", text)


def match_expressions(text: str) -> list[str]:
    """Write a text as queries of FTS5, the strictest first: all words in any order, and quoted words
    next to each other. The last word may be the beginning of a word. Empty: the text names no file.

    Example:
        >>> match_expressions('IMG_2041.jpg "red kite" bea')
        ['"IMG_2041" "red kite" "bea"', '"IMG_2041" "red kite" "bea" *']
    """
    phrases = list[str]()
    num_words = 0
    is_prefix = False
    for quoted, word in _TERM.findall(text):
        phrase = _split(quoted or file_stem(word))
        if words := _WORD.findall(phrase):
            phrases.append(f'"{phrase}"')
            num_words += len(words)
            is_prefix = not quoted and len(words[-1]) >= MIN_PREFIX_CHARS
    if not 0 < num_words <= MAX_QUERY_WORDS:
        return []
    exact = " ".join(phrases)
    return [exact, f"{exact} *"] if is_prefix else [exact]


def searched_columns(text: str) -> Sequence[Literal["name", "captions"]]:
    """Return the columns that a text is searched in: names, and captions for quoted words."""
    # Of Flickr8k, two words of a new caption are in captions of 13 images, of which one is the
    # right image for 22 % of texts. Ranked by content, these images come in a better order.
    return COLUMNS if any(quoted for quoted, _ in _TERM.findall(text)) else COLUMNS[:1]


def best_caption(captions: Sequence[str], text: str) -> str:
    """Return the first caption that has the most words of a text."""
    words = set(_folded_words(text))
    return max(captions, key=lambda caption: len(words.intersection(_folded_words(caption))))


def _folded_words(text: str) -> Iterator[str]:
    """Words without accents and upper case, as the table compares them."""
    plain = unicodedata.normalize("NFKD", _split(text)).casefold()
    yield from _WORD.findall("".join(c for c in plain if not unicodedata.combining(c)))
