"""One process of a group: every case on its part of the items, the answers saved for the test that started it.

python on_processes.py RANK NUMBER FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from visavis import PairLoss, Targets
from visavis.objectives import CATALOG, NTXent, Triplet, TripletHN, Unified
from visavis.targets import Factors
from visavis.types import Encoded

IMAGES = {1: [7], 2: [4, 3], 4: [3, 0, 2, 2]}  # how many each process has
TEXTS = {1: [9], 2: [2, 7], 4: [4, 1, 4, 0]}
IMAGE_IDS = torch.tensor([1, 2, 3, 4, 5, 6, 1])
TEXT_IDS = torch.tensor([6, 6, 1, 2, 5, 3, 1, 9, 4])
COUNTED = torch.tensor([0, 1, 2, 3, 0, 1, 2]), torch.tensor([0, 1, 0, 1, 2, 3, 4, 5, 6])  # 0, 1, 2 ... on both of two processes


class Words(nn.Module):
    """A score with a parameter, of items of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6, bias=False).double()

    def forward(self, images: Tensor, texts: Encoded) -> Tensor:
        affinity = torch.einsum("vd,twd->vtw", self.map(images), texts.vectors)
        return (affinity.tanh() * texts.mask).sum(-1) / texts.mask.sum(-1)


class Case(NamedTuple):
    loss: PairLoss
    images: Tensor
    texts: Tensor | Encoded
    arguments: dict[str, Any]
    inputs: dict[str, Tensor]  # by name; those that belong to items are compared part by part


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def part(items: Any, counts: list[int], rank: int) -> Any:
    """What one process has of the items."""
    start = sum(counts[:rank])
    return items[start : start + counts[rank]]


def cases(number: int, rank: int) -> Iterator[tuple[str, Callable[[], Case]]]:
    for kind in CATALOG:
        for reduction in ("sum", "mean", "half_mean"):
            yield f"{kind.__name__} {reduction}", lambda kind=kind, reduction=reduction: by_ids(kind(reduction=reduction), number, rank)
    for objective in (Triplet(), TripletHN(), Unified(), Unified(reduction="mean")):
        yield f"{objective!r} bare", lambda objective=objective: bare(objective, number, rank)
        yield f"{objective!r} counted", lambda objective=objective: bare(objective, number, rank, COUNTED)
        yield f"{objective!r} words", lambda objective=objective: words(objective, number, rank)
        yield f"{objective!r} extra", lambda objective=objective: with_extra(objective, number, rank)
    for rows in (None, 2):
        yield f"scale {rows}", lambda rows=rows: scaled(rows, number, rank)


def local(number: int, rank: int, images: Any, texts: Any) -> tuple[Any, Any]:
    return part(images, IMAGES[number], rank), part(texts, TEXTS[number], rank)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def by_ids(objective: Any, number: int, rank: int) -> Case:
    """Ids and every fact that can be known over processes."""
    vectors = [local(number, rank, *pair) for pair in ((draw(7, 6), draw(9, 6)), (draw(7, 3).abs() / 3, draw(9, 3).abs() / 3))]
    (images, texts), factors = vectors
    images, texts, factors = leaf(images), leaf(texts), Factors(*factors)
    facts = dict(zip(("query_margin", "candidate_margin"), local(number, rank, draw(7).abs(), draw(9).abs()), strict=True))
    offline = ("query_offline_scores", "candidate_offline_scores")
    facts |= {name: leaf(scores) for name, scores in zip(offline, local(number, rank, draw(7, 2), draw(9, 2)), strict=True)}
    ids = local(number, rank, IMAGE_IDS, TEXT_IDS)
    targets = Targets(query_ids=ids[0], candidate_ids=ids[1], relevance=factors, pair_margin=factors, **facts)
    inputs = {"images": images, "texts": texts} | {name: facts[name] for name in offline}
    return Case(PairLoss(objective, block_rows=2), images, texts, {"targets": targets}, inputs)


def bare(objective: Any, number: int, rank: int, ids_of_all: tuple[Tensor, Tensor] = (IMAGE_IDS, TEXT_IDS)) -> Case:
    """Nothing but ids: where one tile serves both directions."""
    images, texts = (leaf(each) for each in local(number, rank, draw(7, 6), draw(9, 6)))
    ids = dict(zip(("image_ids", "text_ids"), local(number, rank, *ids_of_all), strict=True))
    return Case(PairLoss(objective), images, texts, ids, {"images": images, "texts": texts})


def words(objective: Any, number: int, rank: int) -> Case:
    score, vectors = Words(), draw(9, 4, 6)
    mask = torch.arange(4) < torch.randint(1, 5, (9, 1))
    images, texts = local(number, rank, draw(7, 6), vectors)
    _, own_mask = local(number, rank, mask, mask)
    longest = int(own_mask.sum(-1).max()) if len(own_mask) else 1  # each process pads to its own longest text
    images, texts = leaf(images), leaf(texts[:, :longest])
    ids = dict(zip(("image_ids", "text_ids"), local(number, rank, IMAGE_IDS, TEXT_IDS), strict=True))
    inputs = {"images": images, "texts": texts, "parameter": score.map.weight}
    return Case(PairLoss(objective, score=score, block_rows=3), images, Encoded(texts, own_mask[:, :longest]), ids, inputs)


def with_extra(objective: Any, number: int, rank: int) -> Case:
    """The same bank on every process."""
    case, more = bare(objective, number, rank), leaf(draw(3, 6))
    extra = {"extra_texts": more, "extra_text_ids": [2, 9, 4]}
    return case._replace(arguments=case.arguments | extra, inputs=case.inputs | {"bank": more})


def scaled(rows: int | None, number: int, rank: int) -> Case:
    """Pairs in order, without ids, as many as there are images; a scale that learns."""
    images, texts = (leaf(part(draw(7, 6), IMAGES[number], rank)) for _ in range(2))
    scale = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))
    inputs = {"images": images, "texts": texts, "parameter": scale}
    return Case(PairLoss(NTXent(), block_rows=rows, scale=scale), images, texts, {}, inputs)


def answer(make: Callable[[], Case], seed: int) -> dict[str, Tensor]:
    """The value and the gradients of a case; twice the value, so that what comes from above is seen to multiply."""
    torch.manual_seed(seed)
    case = make()
    value = case.loss(case.images, case.texts, **case.arguments)
    gradients = torch.autograd.grad(2 * value, list(case.inputs.values()), allow_unused=True, materialize_grads=True)
    return {"value": value.detach()} | {name: each / 2 for name, each in zip(case.inputs, gradients, strict=True)}


def answers(number: int, rank: int) -> dict[str, dict[str, Tensor]]:
    return {name: answer(make, seed) for seed, (name, make) in enumerate(cases(number, rank))}


def trained(number: int, rank: int, objective: Any) -> list[Tensor]:
    """The gradient of two encoders and a scale after a backward pass through DistributedDataParallel."""
    torch.manual_seed(5)
    towers = [nn.Linear(6, 4, bias=False).double() for _ in range(2)]
    images, texts = local(number, rank, draw(7, 6), draw(9, 6))
    ids = local(number, rank, IMAGE_IDS, TEXT_IDS)
    wrapped = [DistributedDataParallel(tower) for tower in towers] if number > 1 else towers
    PairLoss(objective)(wrapped[0](images), wrapped[1](texts), *ids).backward()
    return [tower.weight.grad for tower in towers]


def alone_in_eval(rank: int) -> Tensor | None:
    """Only the first process evaluates; were there a collective, it would wait forever."""
    torch.manual_seed(0)
    images, texts = draw(3, 6), draw(3, 6)
    if rank > 0:
        return None
    values = [PairLoss(Unified()).eval()(images, texts), PairLoss(Unified(), gather=True).eval()(images, texts)]
    return torch.stack([*values, PairLoss(Unified(), gather=False)(images, texts)])


def refusals(rank: int) -> list[str]:
    """What cannot be known over processes is said."""
    said = []
    for targets in (Targets.paired(2, weight=torch.ones(2, 2)), Targets.from_pairs([0], [0], 2, 2)):
        try:
            PairLoss(Unified())(draw(2, 3), draw(2, 3), targets=targets)
        except ValueError as error:
            said.append(str(error))
    return said


def main(rank: int, number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=number)
    found = {"answers": answers(number, rank), "eval": alone_in_eval(rank), "refusals": refusals(rank)}
    found["trained"] = {name: trained(number, rank, objective) for name, objective in TRAINED.items()}
    torch.save(found, folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


TRAINED = {"Triplet": Triplet(), "Unified": Unified(), "NTXent": NTXent()}

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
