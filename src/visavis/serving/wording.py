"""From what a person types to the parts of a query: words that must be there, and words that must not."""

from __future__ import annotations

import re

WITHOUT = -0.5
"""The weight of what must not be there. Vectors of sentences have much in common: a full -1 would take that out too."""

_MINUS = re.compile(r"""(?:^|(?<=\s))-(?:"([^"]*)"|([^\s"-]\S*))""")


def parts_of(text: str) -> tuple[tuple[float, str], ...]:
    """A weight and a sentence each: first what is wanted, then each ``-word`` or ``-"several words"`` that is not.

    A dash within a word, before a space or before another dash is no minus.

    >>> parts_of('a beach -people -"red umbrella"')
    ((1.0, 'a beach'), (-0.5, 'people'), (-0.5, 'red umbrella'))
    >>> parts_of("black-and-white dog - running")
    ((1.0, 'black-and-white dog - running'),)
    """
    without = [(quoted or word).strip() for quoted, word in _MINUS.findall(text)]
    wanted = " ".join(_MINUS.sub(" ", text).split())
    return tuple(([(1.0, wanted)] if wanted else []) + [(WITHOUT, words) for words in without if words])
