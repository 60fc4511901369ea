"""Several matchers as one, whose score is the mean of theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from visavis.batches import EncodedBatches
from visavis.models.base import Matcher
from visavis.types import Encoded, Parts


class Average(Matcher):
    """Matchers whose scores of a pair are averaged. For evaluation.

    Items carry what every member made of them: its tensors by ``<member>/<field>/<part>``. Members that read the same items encode
    them here; what others made, each of its own features, is put together by ``joined``.
    Source: how BFAN, SGRAF, VSE∞ and NCR report two networks together, the starred rows of tables.
    """

    name = "Average"

    def __init__(self, members: Sequence[Matcher]):
        nn.Module.__init__(self)
        self.config, self.members = members[0].config, nn.ModuleList(members)

    def encode_visual(self, items: Encoded) -> Encoded:
        return joined([member.encode_visual(items) for member in self.members])  # type: ignore[operator]

    def encode_text(self, items: Encoded) -> Encoded:
        return joined([member.encode_text(items) for member in self.members])  # type: ignore[operator]

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        scores = [member.score(_of(visual, number), _of(text, number)) for number, member in enumerate(self.members)]  # type: ignore[operator]
        return torch.stack(scores).mean(0)

    @property
    def rerank(self) -> int:
        """The most that any member ranks anew; what has one stage alone then gives the same score again."""
        return max(member.rerank for member in self.members)  # type: ignore[type-var, return-value]

    def first_stage(self, items: Encoded) -> Encoded:
        return joined([member.first_stage(_of(items, number)) for number, member in enumerate(self.members)])  # type: ignore[operator]

    def second_stage(self, visual: Encoded, text: Encoded) -> Tensor:
        pairs = [(member.second_stage if member.rerank else member.score_pairs, number) for number, member in enumerate(self.members)]
        return torch.stack([score(_of(visual, number), _of(text, number)) for score, number in pairs]).mean(0)  # type: ignore[operator]

    def parts(self) -> dict[str, list[nn.Module]]:
        return {str(number): [member] for number, member in enumerate(self.members)}


def joined(encoded: Sequence[Encoded]) -> Encoded:
    """The same items, as each of several matchers encoded them, as their ``Average`` reads them."""
    batches = [items for items in encoded if isinstance(items, EncodedBatches)]
    if len(batches) == len(encoded) and all(items.lies_as(batches[0]) for items in batches):
        return EncodedBatches(
            [joined(blocks) for blocks in zip(*(items.blocks for items in batches), strict=True)], batches[0].block, batches[0].row
        )
    return Encoded({f"{number}/{name}": tensor for number, items in enumerate(encoded) for name, tensor in _tensors(items).items()})


def _tensors(items: Encoded) -> dict[str, Tensor]:
    """All tensors of encoded items, by ``<field>/<part>``; the part is empty where there are no named ones."""
    named: dict[str, Tensor] = {}
    for field in ("vectors", "mask", "weights"):
        parts: Parts | None = getattr(items, field)
        if parts is not None:
            named |= {f"{field}/{part}": tensor for part, tensor in ({"": parts} if isinstance(parts, Tensor) else parts).items()}
    return named


def _of(items: Encoded, number: int) -> Encoded:
    """What one member made of the items: ``_tensors`` backwards."""
    fields: dict[str, dict[str, Tensor]] = {}
    assert isinstance(items.vectors, dict)
    for key, tensor in items.vectors.items():
        member, field, part = key.split("/", 2)
        if member == str(number):
            fields.setdefault(field, {})[part] = tensor
    return Encoded(**{field: parts[""] if list(parts) == [""] else parts for field, parts in fields.items()})  # type: ignore[arg-type]
