"""How a frozen sentence model makes one vector of a text's words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor, nn

from visavis import storage
from visavis.errors import DataError


@dataclass(frozen=True)
class Module:
    """One step of a sentence model: its class, and its folder in that of the model."""

    type: str
    path: Annotated[str, Field(pattern=r"^(\w[\w.-]*)?$")]


@dataclass(frozen=True)
class _Settings:
    max_seq_length: Annotated[int, Field(gt=2)] | None = None


def read_modules(folder: Path) -> list[Module]:
    """What the ``modules.json`` of a sentence-transformers folder lists. Raises DataError."""
    return storage.read_json(folder / "modules.json", list[Module])


@dataclass(frozen=True)
class SentencePooling:
    """How a sentence model makes one vector of a text's words ``[N, L, D]``: their mean, or the first.

    longest: the number of word pieces after which a text is cut.
    """

    kind: str = "mean"
    normalize: bool = False
    longest: int = 512

    @classmethod
    def read(cls, folder: Path, longest: int) -> SentencePooling:
        """What the folder's sentence-transformers files say; without them the mean, at the model's own length."""
        if not (folder / "modules.json").exists():
            return cls(longest=longest)
        kinds = {module.type.rsplit(".", 1)[-1]: folder / module.path for module in read_modules(folder)}
        if "Pooling" not in kinds:
            raise DataError(
                f"{folder / 'modules.json'} names no Pooling among {', '.join(kinds) or 'no modules'}: expected a sentence model."
            )
        pooling = storage.read_json(kinds["Pooling"] / "config.json", dict[str, Any])
        chosen = [name.removeprefix("pooling_mode_") for name, on in pooling.items() if name.startswith("pooling_mode_") and on is True]
        chosen = chosen or [str(pooling.get("pooling_mode"))]
        names = {"mean_tokens": "mean", "mean": "mean", "cls_token": "first", "cls": "first"}
        if len(chosen) != 1 or chosen[0] not in names or set(kinds) - {"Transformer", "Pooling", "Normalize"}:
            raise DataError(
                f"{folder} pools words by {', '.join(chosen)} through {', '.join(kinds)}; known are the mean and the first token, normalized or not."
            )
        file = folder / "sentence_bert_config.json"
        limit = storage.read_json(file, _Settings).max_seq_length if file.exists() else None
        return cls(names[chosen[0]], "Normalize" in kinds, min(limit or longest, longest))

    def __call__(self, words: Tensor, mask: Tensor) -> Tensor:
        weight = mask[..., None].float()
        pooled = words[:, 0] if self.kind == "first" else (words * weight).sum(1) / weight.sum(1)
        return nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled
