"""Encoders that read two texts at once and say one number of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visavis.errors import DataError
from visavis.models.foreign import open_model, open_tokenizer, tried
from visavis.models.pretrained import model_folder

ONE_OUTPUT = "expected a cross-encoder with one output: visavis relevance fit --kind cross makes one"


class PairTower(nn.Module):
    """Pairs of texts to one number each: a sequence classifier of ``transformers`` with one output."""

    def __init__(self, model: Any, tokenizer: Any, longest: int):
        super().__init__()
        self.model, self.tokenizer, self.longest = model, tokenizer, longest

    def preprocess(self, first: Sequence[str], second: Sequence[str]) -> Any:
        """Tokens of pairs, padded to the longest."""
        return self.tokenizer(list(first), list(second), truncation=True, max_length=self.longest, padding=True, return_tensors="pt")

    def forward(self, tokens: Any) -> Tensor:
        """The model's number for each pair ``[N]``, float32."""
        return self.model(**tokens).logits[:, 0].float()

    @torch.no_grad()
    def encode(self, first: Sequence[str], second: Sequence[str]) -> Tensor:
        return self(self.preprocess(first, second).to(next(self.parameters()).device))


def open_pairs(name: str, *, new_output: bool = False) -> PairTower:
    """The pair encoder of a name, in evaluation mode. new_output: an untrained output on the encoder of that name, to be trained.

    Raises DataError if there is no such model, or if it does not say one number.
    """
    folder = model_folder(name)
    options = {"num_labels": 1} if new_output else {}
    model = open_model(folder, "AutoModelForSequenceClassification", new_output=new_output, expected=ONE_OUTPUT, **options)
    if model.config.num_labels != 1:
        raise DataError(f"{folder} has {model.config.num_labels} outputs; {ONE_OUTPUT}.")
    tower = PairTower(model, *open_tokenizer(folder)).eval()
    tried(lambda: tower(tower.preprocess(["a dog"], ["a cat"])), folder, "a pair of texts")
    return tower
