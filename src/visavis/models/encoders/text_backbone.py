"""Text backbone: a pretrained text encoder such as BERT that is trained as part of a matcher, with
its tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visavis.core.encoded import Encoded
from visavis.core.errors import DataError
from visavis.data.sequences import read_items
from visavis.models.encoders.pretrained_files import (
    TEXT_BACKBONE_FOLDER,
    PretrainedPart,
    model_folder,
    saved_part_folder,
)
from visavis.models.encoders.pretrained_loading import (
    build_empty_model,
    check_text_encoding,
    load_pretrained_config,
    load_pretrained_model,
    load_pretrained_tokenizer,
    reads_padding,
)


@dataclass(frozen=True)
class PretrainedTokenizer:
    """Tokenizer of a pretrained model.

    Attributes:
        tokenizer: Tokenizer of transformers.
        max_length: Tokens after which a text is cut.
        fixed_length: Whether every text is padded to ``max_length`` and has no mask, as SigLIP was
            trained. Otherwise texts are padded to the longest of their batch.
    """

    tokenizer: Any
    max_length: int
    fixed_length: bool

    @classmethod
    def open(cls, folder: Path) -> PretrainedTokenizer:
        """Open the tokenizer of a model."""
        return cls(
            *load_pretrained_tokenizer(folder),
            reads_padding(load_pretrained_config(folder)),
        )

    def __len__(self) -> int:
        return len(self.tokenizer)

    def count_tokens(self, texts: Sequence[str]) -> np.ndarray:
        """Count the tokens of texts that are not cut, ``[N]``."""
        return np.array(
            [len(ids) for ids in self.tokenizer(list(texts), verbose=False)["input_ids"]],
            dtype=np.int64,
        )

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Tokenize texts to ids ``[N, L]``. With ``fixed_length``, they have no mask."""
        padding = "max_length" if self.fixed_length else "longest"
        tokens = self.tokenizer(
            list(texts),
            padding=padding,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        return Encoded(
            tokens["input_ids"], None if self.fixed_length else tokens["attention_mask"].bool()
        )


class EncoderTokens:
    """Captions as tokens of a pretrained model, tokenized when they are read.

    Args:
        captions: The captions.
        tokenizer: The tokenizer.
    """

    def __init__(self, captions: Sequence[str], tokenizer: PretrainedTokenizer):
        self.captions = captions
        self.tokenizer = tokenizer

    def read(self, index: np.ndarray, seeds: np.ndarray | None = None) -> Encoded:
        """Tokenize some captions to ids ``[N, L]``. ``seeds`` is not used."""
        return self.tokenizer.encode(read_items(self.captions, index))


@dataclass(frozen=True)
class WordNoise:
    """Probabilities of changing a word in training. All pieces of a word change together. Special
    tokens never change.

    Attributes:
        masked: Probability of masking a word.
        replaced: Probability of replacing a word with random word pieces.
        dropped: Probability of dropping a word.

    Source:
        The released code of VSE-infinity (Chen et al., 2021) selects 20 % of the words: half of
        them are masked, a tenth is replaced, the others are dropped.
    """

    masked: float = 0.0
    replaced: float = 0.0
    dropped: float = 0.0

    @property
    def total(self) -> float:
        """Probability of any change."""
        return self.masked + self.replaced + self.dropped


class TextBackbone(PretrainedPart):
    """Pretrained text encoder with the states of all tokens, including the first and last token of
    a text.

    Args:
        name: A folder of transformers, one in the cache, or a name of the hub.
        noise: Noise of words in training, sampled from torch's generator, which the trainer seeds
            in each step.

    Raises:
        DataError: If the model is not a text encoder, or lacks a mask token that the noise needs.
    """

    part_name = TEXT_BACKBONE_FOLDER
    folder: Path
    is_continuation: Tensor
    is_special: Tensor

    def __init__(self, name: str, noise: WordNoise | None = None):
        super().__init__()
        saved = saved_part_folder(TEXT_BACKBONE_FOLDER)
        self.folder = saved or model_folder(name)
        self.noise = noise or WordNoise()
        config = load_pretrained_config(self.folder)
        if not isinstance(getattr(config, "vocab_size", None), int) or not hasattr(
            config, "hidden_size"
        ):
            raise DataError(
                f"{self.folder}: expected a text encoder such as BERT, got a model of kind "
                f"{config.model_type}. Use another model."
            )
        if saved is None:
            self.model = load_pretrained_model(self.folder, dtype=torch.float32)
        else:
            self.model = build_empty_model(self.folder)
        # A pooler reads only the first state.
        self.model.pooler = None
        tokenizer, max_length = load_pretrained_tokenizer(self.folder)
        if self.noise.masked and tokenizer.mask_token_id is None:
            raise DataError(
                f"{self.folder}: expected a mask token for model.word_mask_rate, got a tokenizer "
                "without one. Set model.word_mask_rate to 0."
            )
        self.mask_token = tokenizer.mask_token_id
        # Whether each token continues the word before it, [V], by the marks of WordPiece, byte
        # pairs or SentencePiece.
        tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        if any(token.startswith("##") for token in tokens):
            flags = [token.startswith("##") for token in tokens]
        elif any(token.startswith(("Ġ", "▁")) for token in tokens):
            names = set(tokenizer.all_special_tokens)
            flags = [not token.startswith(("Ġ", "▁")) and token not in names for token in tokens]
        else:
            flags = [False] * len(tokens)
        is_continuation = torch.tensor(flags, device="cpu")
        self.register_buffer("is_continuation", is_continuation, persistent=False)
        # Tokens that start, end or pad a text.
        special = {*tokenizer("")["input_ids"], tokenizer.pad_token_id}
        is_special = torch.tensor(
            [index in special for index in range(len(tokenizer))], device="cpu"
        )
        self.register_buffer("is_special", is_special, persistent=False)
        if saved is None:
            sample = PretrainedTokenizer(tokenizer, max_length, fixed_length=False)
            check_text_encoding(
                lambda texts: self.eval()(sample.encode(texts)).vectors, self.folder, tokenizer
            )

    @property
    def hidden_dim(self) -> int:
        """Dimensions of a word state."""
        return int(self.model.config.hidden_size)

    def forward(self, tokens: Encoded) -> Encoded:
        """Encode token ids ``[N, L]`` to states ``[N, L', D]``. In training, words are dropped."""
        assert isinstance(tokens.vectors, Tensor) and isinstance(tokens.mask, Tensor)
        ids = tokens.vectors
        mask = tokens.mask
        if self.training and self.noise.total:
            ids, mask = self._add_noise(ids, mask)
        return Encoded(
            self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state, mask
        )

    def _add_noise(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids and their mask with words masked, replaced and dropped at random."""
        # All pieces of a word share a random number, so that they change together.
        word_index = (~self.is_continuation[ids]).cumsum(1) - 1
        noise = torch.rand(ids.shape, device=ids.device).gather(1, word_index.clamp(min=0))
        # 1.0 is above every rate: special tokens and padding never change.
        noise = noise.masked_fill(self.is_special[ids] | ~mask, 1.0)
        masked = noise < self.noise.masked
        replaced = noise < self.noise.masked + self.noise.replaced
        dropped = (noise < self.noise.total) & ~replaced
        kept = mask & ~dropped
        ids = torch.where(
            replaced, torch.randint(len(self.is_continuation), ids.shape, device=ids.device), ids
        )
        ids = torch.where(masked, self.mask_token, ids) if self.noise.masked else ids
        # A stable sort moves dropped words to the end and keeps the order of the others. The
        # longest text that remains gives the new length.
        order = kept.long().argsort(dim=1, descending=True, stable=True)[
            :, : int(kept.sum(1).max())
        ]
        return ids.gather(1, order), kept.gather(1, order)
