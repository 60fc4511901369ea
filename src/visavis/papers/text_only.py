"""Minimal pairs that a model without the image cannot solve, and two such models.

The n-gram model of the training captions measures how plausible a text is. Pairs are selected so
that the true text is as often the less plausible one. The second model learns from half of the
pairs which words occur in true and in edited texts, and is tested on the other half: it detects
what the selection left. Its selection is adversarial filtering (Le Bras et al., 2020), which
SugarCrepe (Hsieh et al., 2023) applies to caption edits with two language models.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from visavis.data.words import tokenize

ORDER = 3
"""Number of words of the longest n-grams."""
PRIOR = 2.0
"""Weight of the shorter n-grams, in occurrences of the context."""
TEXT_ONLY_LIMIT = 55.0
"""Accuracy of a model without the image, in percent, above which a probe also measures language."""


@dataclass(frozen=True, eq=False)
class NgramModel:
    """Language model of captions: word n-grams, smoothed by shorter ones.

    Formula:
        $p(w, c) = (n(c, w) + m p(w, d)) / (n(c) + m)$ with the context c, the context d without its
        first word, and the constant m, ``PRIOR``. The shortest is $(n(w) + 1) / (n + V + 1)$.

    Attributes:
        counts: Occurrences of each n-gram of up to ``ORDER`` words.
        contexts: Occurrences of each context.
        num_words: Number V of different words.
    """

    counts: Counter[tuple[str, ...]]
    contexts: Counter[tuple[str, ...]]
    num_words: int

    @classmethod
    def from_captions(cls, captions: Iterable[str]) -> NgramModel:
        """Count the n-grams of captions."""
        counts: Counter[tuple[str, ...]] = Counter()
        contexts: Counter[tuple[str, ...]] = Counter()
        for caption in captions:
            for ngram in _ngrams(caption):
                for start in range(ORDER):
                    counts[ngram[start:]] += 1
                    contexts[ngram[start:-1]] += 1
        return cls(counts, contexts, sum(len(ngram) == 1 for ngram in counts))

    def log_probability(self, text: str) -> float:
        """Compute the logarithm of the probability of a text."""
        return sum(math.log(self._probability(ngram)) for ngram in _ngrams(text))

    def _probability(self, ngram: tuple[str, ...]) -> float:
        seen = self.contexts[ngram[:-1]]
        if len(ngram) == 1:
            return (self.counts[ngram] + 1) / (seen + self.num_words + 1)
        shorter = self._probability(ngram[1:])
        return (self.counts[ngram] + PRIOR * shorter) / (seen + PRIOR)


def _ngrams(text: str) -> Iterable[tuple[str, ...]]:
    """The n-grams of the longest kind, one for each word and one for the end of the text."""
    words = [*[""] * (ORDER - 1), *tokenize(text), "."]
    return (tuple(words[i : i + ORDER]) for i in range(len(words) - ORDER + 1))


def balanced(margins: np.ndarray) -> np.ndarray:
    """Select pairs so that the margins of the selected ones are symmetric about 0: each pair whose
    true text is more plausible with a pair whose true text is less plausible by about as much.

    Args:
        margins: Plausibility of each true text minus the plausibility of its edit, shape ``[N]``.

    Returns:
        Indices of the selected pairs, ascending. Ties are selected.

    Example:
        >>> balanced(np.array([3.0, 1.0, -1.1, 5.0])).tolist()
        [1, 2]
    """
    above, below = np.flatnonzero(margins > 0), np.flatnonzero(margins < 0)
    fewer, more = sorted((above, below), key=len)
    sizes = np.abs(margins)
    free = dict.fromkeys(more[np.argsort(sizes[more], kind="stable")].tolist())
    selected = np.flatnonzero(margins == 0).tolist()
    # The hardest to match first: extreme margins of the rarer sign.
    for pair in fewer[np.argsort(-sizes[fewer], kind="stable")].tolist():
        partner = min(free, key=lambda other: abs(sizes[other] - sizes[pair]))
        del free[partner]
        selected += [pair, partner]
    return np.sort(np.array(selected, np.int64))


def select_balanced(
    true: Sequence[str],
    edited: Sequence[str],
    groups: Sequence[Hashable],
    kinds: Sequence[str],
    margins: np.ndarray,
) -> np.ndarray:
    """Select at most one pair of each kind for each image, so that neither the n-gram model, whose
    margins ``[N]`` are given, nor the learned model solves a kind. Returns ascending indices.
    """
    # Of the pairs of one image and kind, the one whose texts are the most equally plausible.
    best: dict[tuple[str, Hashable], int] = {}
    for number, key in enumerate(zip(kinds, groups, strict=True)):
        if key not in best or abs(margins[number]) < abs(margins[best[key]]):
            best[key] = number
    rows = {
        kind: np.array([number for (of_kind, _), number in best.items() if of_kind == kind])
        for kind in dict.fromkeys(kinds)
    }
    # Of each kind, a balanced part by the n-gram model.
    rows = {kind: each[balanced(margins[each])] for kind, each in rows.items()}
    while True:
        learned = np.zeros(len(margins))
        # In the order of the result, on which the halves of the images depend.
        selected = np.sort(np.concatenate([np.zeros(0, np.int64), *rows.values()]))
        learned[selected] = learned_margins(
            *([part[row] for row in selected] for part in (true, edited, groups))
        )
        solved = [
            kind
            for kind, each in rows.items()
            if len(each) and 100 * share_correct(learned[each]) > TEXT_ONLY_LIMIT
        ]
        # A balanced part by the learned model, which then finds other words. Each round removes at
        # least one pair of a solved kind.
        for kind in solved:
            rows[kind] = rows[kind][balanced(learned[rows[kind]])]
            rows[kind] = rows[kind][balanced(margins[rows[kind]])]
        if not solved:
            return selected


def share_correct(margins: np.ndarray) -> float:
    """Share of positive margins, a tie as a half."""
    return float((np.sign(margins) + 1).mean() / 2)


def learned_margins(
    true: Sequence[str], edited: Sequence[str], groups: Sequence[Hashable]
) -> np.ndarray:
    """Score the true text of each pair minus the edited one by the words alone, as learned from the pairs
    of the other half of the images ``groups``, shape ``[N]``.
    """
    number = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    fold = np.array([number[group] % 2 for group in groups])
    features = [tuple(map(_words_and_pairs, pair)) for pair in zip(true, edited, strict=True)]
    margins = np.empty(len(true))
    for test in (0, 1):
        counts: tuple[Counter[tuple[str, ...]], ...] = Counter(), Counter()
        for row in np.flatnonzero(fold != test):
            for count, words in zip(counts, features[row], strict=True):
                count.update(words)
        for row in np.flatnonzero(fold == test):
            # Naive Bayes: how much more often a word or pair of words occurs in true texts.
            scores = [
                # In a fixed order, because the last digits of a sum depend on it.
                sum(
                    math.log((counts[0][word] + 1) / (counts[1][word] + 1))
                    for word in sorted(words)
                )
                for words in features[row]
            ]
            margins[row] = round(scores[0] - scores[1], 9)
    return margins


def _words_and_pairs(text: str) -> set[tuple[str, ...]]:
    words = ["", *tokenize(text), ""]
    return {(word,) for word in words} | set(pairwise(words))
