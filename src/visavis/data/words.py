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


_UNSPACED = "".join(f"{first}-{last}" for first, last in _UNSPACED_RANGES)
_MARKS = "".join(_letters(*bounds, "M") for bounds in _MIXED_RANGES)
_UNSPACED_LETTER = re.compile(f"[{_UNSPACED}][{_MARKS}]*")
_UNSPACED_PUNCTUATION = str.maketrans(
    dict.fromkeys(
        "".join(
            _letters(*bounds, "P")
            for bounds in (*_MIXED_RANGES, ("\u3000", "\u303f"), ("\uff01", "\uff65"))
        ),
        " ",
    )
)


def has_unspaced_script(caption: str) -> bool:
    """Return whether a caption has letters of a script without spaces, such as Chinese, Japanese,
    Thai, Lao, Khmer or Burmese.

    Args:
        caption: The caption.

    Returns:
        Whether it does.
    """
    return not caption.isascii() and _UNSPACED_LETTER.search(caption) is not None


def tokenize(caption: str) -> list[str]:
    """Split a caption into lower-case words without ASCII punctuation, as in Karpathy's caption
    files.

    Words are in NFC. Of scripts without spaces, such as Chinese, Japanese, Thai, Khmer, Lao and
    Burmese, each character with its marks is a word.

    Differs from the code of the VSE++ family: nltk's word_tokenize makes a token of each
    punctuation mark ("." ends most captions) and two tokens of "man's".

    Args:
        caption: The caption.

    Returns:
        Its words.
    """
    text = caption.lower().translate(_DELETE_PUNCTUATION)
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        if _UNSPACED_LETTER.search(text):
            text = _UNSPACED_LETTER.sub(r" \g<0> ", text.translate(_UNSPACED_PUNCTUATION))
    return text.split()
