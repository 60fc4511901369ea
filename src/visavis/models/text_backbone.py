"""A pretrained text encoder that is trained as part of a matcher: BERT and its kin, word by word."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visavis.errors import DataError
from visavis.models.foreign import lay_out_model, open_config, open_model, open_tokenizer, tried
from visavis.models.pretrained import KeptPart, kept_folder, model_folder
from visavis.types import Encoded

FOLDER = "text_backbone"
"""Where a model folder keeps the config and the tokenizer; the weights are among the model's own."""


@dataclass(frozen=True)
class WordNoise:
    """What happens to words in training: each is masked, replaced by random word pieces, or left out, with these probabilities.

    All pieces of a word share its fate; what opens and closes a text stays. Source: the released code of VSE-infinity (Chen et al.,
    2021), where 20 % of the words are chosen: half of them are masked, a tenth is replaced, the rest is left out.
    """

    masked: float = 0.0
    replaced: float = 0.0
    left_out: float = 0.0

    @property
    def total(self) -> float:
        return self.masked + self.replaced + self.left_out


class TextBackbone(KeptPart):
    """Token ids ``[N, L]`` and their mask to word states ``[N, L', D]`` and theirs; those that open and close a text included.

    name: a folder of transformers, one in the cache, or a name of the hub. noise: of words in training, drawn from torch's
    generator, which the trainer seeds by the step; L' is smaller than L where words were left out.
    """

    kept_as = FOLDER
    folder: Path
    continues: Tensor
    kept: Tensor

    def __init__(self, name: str, noise: WordNoise | None = None):
        super().__init__()
        saved = kept_folder(FOLDER)
        self.folder = saved or model_folder(name)
        self.noise, self.model = noise or WordNoise(), _text_model(self.folder, saved is not None)
        tokenizer, _ = open_tokenizer(self.folder)
        if self.noise.masked and tokenizer.mask_token_id is None:
            raise DataError(f"{self.folder} has no token that stands for a masked word: set model.masked_words to 0.")
        self.mask_token = tokenizer.mask_token_id
        self.register_buffer("continues", _continues(tokenizer), persistent=False)
        self.register_buffer("kept", _own_tokens(tokenizer), persistent=False)
        if saved is None:
            tried(lambda: self.eval()(_sample(tokenizer)).vectors, self.folder, "a text")

    @property
    def width(self) -> int:
        """D, of a word's state."""
        return int(self.model.config.hidden_size)

    def forward(self, tokens: Encoded) -> Encoded:
        assert isinstance(tokens.vectors, Tensor) and isinstance(tokens.mask, Tensor)
        ids, mask = tokens.vectors, tokens.mask
        if self.training and self.noise.total:
            ids, mask = self._disturbed(ids, mask)
        return Encoded(self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state, mask)

    def _disturbed(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and their mask with words masked, replaced and left out by chance."""
        words = (~self.continues[ids]).cumsum(1) - 1
        chance = torch.rand(ids.shape, device=ids.device).gather(1, words.clamp(min=0))
        chance = chance.masked_fill(self.kept[ids] | ~mask, 1.0)
        masked, replaced = chance < self.noise.masked, chance < self.noise.masked + self.noise.replaced
        left_in = mask & ~((chance < self.noise.total) & ~replaced)
        ids = torch.where(replaced, torch.randint(len(self.continues), ids.shape, device=ids.device), ids)
        ids = torch.where(masked, self.mask_token, ids) if self.noise.masked else ids
        closer = left_in.long().argsort(dim=1, descending=True, stable=True)[:, : int(left_in.sum(1).max())]
        return ids.gather(1, closer), left_in.gather(1, closer)


def _text_model(folder: Path, laid_out: bool) -> Any:
    """The encoder of a folder, or one without its weights; its pooler, which reads the first state alone, is taken away."""
    config = open_config(folder)
    if not isinstance(getattr(config, "vocab_size", None), int) or not hasattr(config, "hidden_size"):
        raise DataError(f"{folder} is a model of kind {config.model_type}, expected an encoder of texts alone, such as BERT.")
    model = lay_out_model(folder) if laid_out else open_model(folder, dtype=torch.float32)
    model.pooler = None
    return model


def _continues(tokenizer: Any) -> Tensor:
    """Whether each token goes on with the word before it: ``[V]``, by the marks of WordPiece, byte pairs or SentencePiece."""
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    if any(token.startswith("##") for token in tokens):
        goes_on = [token.startswith("##") for token in tokens]
    elif any(token.startswith(("Ġ", "▁")) for token in tokens):
        special = set(tokenizer.all_special_tokens)
        goes_on = [not token.startswith(("Ġ", "▁")) and token not in special for token in tokens]
    else:
        goes_on = [False] * len(tokens)
    return torch.tensor(goes_on, device="cpu")


def _own_tokens(tokenizer: Any) -> Tensor:
    """Whether each token opens, closes or fills up a text: ``[V]``."""
    own = {*tokenizer("")["input_ids"], tokenizer.pad_token_id}
    return torch.tensor([number in own for number in range(len(tokenizer))], device="cpu")


def _sample(tokenizer: Any) -> Encoded:
    tokens = tokenizer(["a dog", "dogs"], padding=True, return_tensors="pt")
    return Encoded(tokens["input_ids"], tokens["attention_mask"].bool())
