"""How a frozen sentence model makes one vector of a text's words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from visavis import storage
from visavis.errors import DataError


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
        modules = storage.read_json(folder / "modules.json")
        kinds = {module["type"].rsplit(".", 1)[-1]: folder / module["path"] for module in modules}
        pooling = storage.read_json(kinds["Pooling"] / "config.json")
        chosen = [name.removeprefix("pooling_mode_") for name, on in pooling.items() if name.startswith("pooling_mode_") and on] or [
            pooling.get("pooling_mode")
        ]
        names = {"mean_tokens": "mean", "mean": "mean", "cls_token": "first", "cls": "first"}
        if len(chosen) != 1 or chosen[0] not in names or set(kinds) - {"Transformer", "Pooling", "Normalize"}:
            raise DataError(
                f"{folder} pools words by {', '.join(map(str, chosen))} through {', '.join(kinds)}; known are the mean and the first token, normalized or not."
            )
        file = folder / "sentence_bert_config.json"
        limit = storage.read_json(file).get("max_seq_length") if file.exists() else None
        return cls(names[chosen[0]], "Normalize" in kinds, min(limit or longest, longest))

    def __call__(self, words: Tensor, mask: Tensor) -> Tensor:
        weight = mask[..., None].float()
        pooled = words[:, 0] if self.kind == "first" else (words * weight).sum(1) / weight.sum(1)
        return nn.functional.normalize(pooled, dim=-1) if self.normalize else pooled
