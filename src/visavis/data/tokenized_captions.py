"""Captions of a data set as token ids of a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from visavis.core.encoded import Encoded
from visavis.data.sequences import LazySequence, read_items
from visavis.data.vocabulary import Vocabulary, pad_token_ids


class TokenizedCaptions:
    """Captions as token ids of a vocabulary, tokenized once, or when they are read if they are
    lazy.

    Args:
        captions: The captions.
        vocabulary: The vocabulary.
    """

    def __init__(self, captions: Sequence[str], vocabulary: Vocabulary):
        self.captions = captions
        self.vocabulary = vocabulary
        self.token_ids = (
            None
            if isinstance(captions, LazySequence)
            else [vocabulary.token_ids(caption) for caption in captions]
        )

    def read(self, index: np.ndarray, seeds: np.ndarray | None = None) -> Encoded:
        """Read items, as ``ItemSource.read``. Seeds are not used."""
        if self.token_ids is None:
            return self.vocabulary.encode(read_items(self.captions, index))
        return pad_token_ids([self.token_ids[i] for i in index])
