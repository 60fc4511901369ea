"""Splitting of texts into words. This file is copied into exported models, so it imports only the
standard library.

Example:
    >>> tokenize("Two dogs, on a beach!")
    ['two', 'dogs', 'on', 'a', 'beach']
"""

from __future__ import annotations

import re
import string
import unicodedata
from functools import cache

_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Scripts that are written without spaces. These ranges also have marks and punctuation: Thai and
# Lao, Burmese, Khmer, and Japanese syllables.
_MIXED_RANGES = (
    ("\u0e00", "\u0eff"),
    ("\u1000", "\u109f"),
    ("\u1780", "\u17ff"),
    ("\u3005", "\u3007"),
    ("\u3040", "\u30ff"),
    ("\u31f0", "\u31ff"),
)
# Chinese characters, and further letters of the scripts above.
_UNSPACED_RANGES = (
    *_MIXED_RANGES,
    ("\u3400", "\u4dbf"),
    ("\u4e00", "\u9fff"),
    ("\ua9e0", "\ua9ff"),
    ("\uaa60", "\uaa7f"),
    ("\uf900", "\ufaff"),
    ("\uff66", "\uff9f"),
    ("\U00020000", "\U000323af"),
)


def _letters(first: str, last: str, categories: str) -> str:
    """The characters of a range whose Unicode category begins with one of some letters."""
    return "".join(
        letter
        for letter in map(chr, range(ord(first), ord(last) + 1))
        if unicodedata.category(letter)[0] in categories
    )


@cache
def _unspaced_letter() -> re.Pattern[str]:
    """A letter of a script without spaces, with its marks."""
    # Not at the import, of which the categories of 3,000 characters take 5 ms.
    unspaced = "".join(f"{first}-{last}" for first, last in _UNSPACED_RANGES)
    marks = "".join(_letters(*bounds, "M") for bounds in _MIXED_RANGES)
    return re.compile(f"[{unspaced}][{marks}]*")


@cache
def _unspaced_punctuation() -> dict[int, str]:
    """A space in place of each punctuation mark of these scripts."""
    ranges = (*_MIXED_RANGES, ("\u3000", "\u303f"), ("\uff01", "\uff65"))
    marks = "".join(_letters(*bounds, "P") for bounds in ranges)
    return str.maketrans(dict.fromkeys(marks, " "))


def has_unspaced_script(caption: str) -> bool:
    """Return whether a caption has letters of a script without spaces, such as Chinese, Japanese,
    Thai, Lao, Khmer or Burmese.
    """
    return not caption.isascii() and _unspaced_letter().search(caption) is not None


def tokenize(caption: str) -> list[str]:
    """Split a caption into lower-case words without ASCII punctuation, as in Karpathy's caption
    files.
    """
    # Differs from the code of the VSE++ family: nltk's word_tokenize makes a token of each
    # punctuation mark ("." ends most captions) and two tokens of "man's".
    text = caption.lower().translate(_DELETE_PUNCTUATION)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        # Of scripts without spaces, each character with its marks is a word.
        letter = _unspaced_letter()
        if letter.search(text):
            text = letter.sub(r" \g<0> ", text.translate(_unspaced_punctuation()))
    return text.split()
