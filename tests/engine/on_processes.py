"""One process of a group: every case on its part of the items, the answers saved for the test that started it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from visavis import PairLoss, Targets
from visavis.objectives import CATALOG, Ladder, NTXent, Sigmoid, Triplet, TripletHN, Unified
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
        for size in (0, 3):
            yield f"{objective!r} bank {size}", lambda objective=objective, size=size: with_bank(objective, number, rank, size)
        yield f"{objective!r} extras", lambda objective=objective: with_own_extras(objective, number, rank)
    for objective in (Triplet(), Unified()):
        for common in (False, True):
            yield (
                f"{objective!r} extra words {common}",
                lambda objective=objective, common=common: extra_words(objective, number, rank, common=common),
            )
        yield f"{objective!r} nobody's", lambda objective=objective: nobodys(objective, number, rank)
    for numbered in (False, True):
        yield f"Ladder function {numbered}", lambda numbered=numbered: by_function(number, rank, numbered=numbered)
    for rows in (None, 2):
        yield f"scale {rows}", lambda rows=rows: scaled(rows, number, rank)
        yield f"bias {rows}", lambda rows=rows: biased(rows, number, rank)
        yield f"widths {rows}", lambda rows=rows: scaled(rows, number, rank, widths=(2, 4))
    yield "widths extras", lambda: at_widths(with_own_extras(Unified(), number, rank))


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


def with_bank(objective: Any, number: int, rank: int, size: int) -> Case:
    """The same bank on every process."""
    case, more = bare(objective, number, rank), leaf(draw(size, 6))
    extra = {"extra_texts": more, "extra_text_ids": [2, 9, 4][:size]}
    return case._replace(arguments=case.arguments | extra, inputs=case.inputs | {"bank": more})


EXTRA = {1: [5], 2: [5, 0], 4: [1, 0, 2, 2]}


def with_own_extras(objective: Any, number: int, rank: int) -> Case:
    """Extra items of each process on both sides; who has none says nothing of them."""
    case, sides = bare(objective, number, rank), {"image": draw(5, 6), "text": draw(5, 6)}
    extra: dict[str, Any] = {}
    own = {f"extra_{side}s": leaf(part(items, EXTRA[number], rank)) for side, items in sides.items()}
    if EXTRA[number][rank]:
        extra = own | {f"extra_{side}_ids": part([2, 9, 4, 4, 7], EXTRA[number], rank) for side in sides}
    return case._replace(arguments=case.arguments | extra, inputs=case.inputs | own)


def extra_words(objective: Any, number: int, rank: int, *, common: bool) -> Case:
    """Extra texts of other lengths than those of the batch, the same ones on every process or to each its own."""
    case, more = words(objective, number, rank), draw(5, 6, 6)
    mask = torch.arange(6) < torch.randint(1, 7, (5, 1))
    own, own_mask, ids = (each if common else part(each, EXTRA[number], rank) for each in (more, mask, [2, 9, 4, 4, 7]))
    own = leaf(own)
    extra = {"extra_texts": Encoded(own, own_mask), "extra_text_ids": ids}
    return case._replace(arguments=case.arguments | extra, inputs=case.inputs | {"bank" if common else "extra_texts": own})


def nobodys(objective: Any, number: int, rank: int) -> Case:
    """Pairs in order without ids, beside extra items that belong to nobody."""
    images, texts = (leaf(part(draw(7, 6), IMAGES[number], rank)) for _ in range(2))
    more = leaf(part(draw(5, 6), EXTRA[number], rank))
    extra = {"extra_texts": more, "extra_text_ids": [-1] * len(more)}
    return Case(PairLoss(objective), images, texts, extra, {"images": images, "texts": texts, "extra_texts": more})


def by_function(number: int, rank: int, *, numbered: bool) -> Case:
    """Degrees of a table that all processes know, by places in the whole batch, or by numbers of a larger data set."""
    images, texts = (leaf(each) for each in local(number, rank, draw(7, 6), draw(9, 6)))
    ids, table = local(number, rank, IMAGE_IDS, TEXT_IDS), torch.rand(30, 40, dtype=torch.float64)
    rows, columns = (torch.randperm(size) for size in table.shape)
    numbers = dict(zip(("rows", "columns"), local(number, rank, rows[:7], columns[:9]), strict=True)) if numbered else {}
    known = Targets(query_ids=ids[0], candidate_ids=ids[1], relevance=lambda rows, columns: table[rows][:, columns], **numbers)
    return Case(PairLoss(Ladder(), block_rows=2), images, texts, {"targets": known}, {"images": images, "texts": texts})


def scaled(rows: int | None, number: int, rank: int, widths: tuple[int, ...] = ()) -> Case:
    """Pairs in order, without ids, as many as there are images; a scale that learns; perhaps from several widths."""
    images, texts = (leaf(part(draw(7, 6), IMAGES[number], rank)) for _ in range(2))
    scale = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))
    inputs = {"images": images, "texts": texts, "parameter": scale}
    return Case(PairLoss(NTXent(), block_rows=rows, scale=scale, widths=widths), images, texts, {}, inputs)


def biased(rows: int | None, number: int, rank: int) -> Case:
    """A bias that learns, of captions by ids."""
    case, bias = bare(Sigmoid(), number, rank), nn.Parameter(torch.tensor([-3.0], dtype=torch.float64))
    return case._replace(loss=PairLoss(Sigmoid(), block_rows=rows, scale=5.0, bias=bias), inputs=case.inputs | {"parameter": bias})


def at_widths(case: Case) -> Case:
    return case._replace(loss=PairLoss(case.loss.objective, widths=(2, 4)))


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
    table = torch.ones(2, 2)
    refused = (
        (Unified(), Targets.paired(2, weight=table)),
        (Ladder(), Targets.paired(2, relevance=lambda rows, columns: table[rows][:, columns])),  # of the batch alone
        (Unified(), Targets.from_pairs([0], [0], 2, 2)),
    )
    for objective, targets in refused:
        said += said_by(PairLoss(objective), draw(2, 3), draw(2, 3), targets=targets)
    bank = {"extra_texts": draw(3, 3), "extra_text_ids": [-1, rank - 1, -1]}  # a place for the second process alone
    return said + said_by(PairLoss(Unified()), draw(2, 3), draw(2, 3), **bank)


def said_by(loss: PairLoss, *items: Tensor, **facts: Any) -> list[str]:
    try:
        loss(*items, **facts)
    except ValueError as error:
        return [str(error)]
    return []


def main(rank: int, number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=number)
    found = {"answers": answers(number, rank), "eval": alone_in_eval(rank), "refusals": refusals(rank)}
    found["trained"] = {name: trained(number, rank, objective) for name, objective in TRAINED.items()}
    torch.save(found, folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


TRAINED = {"Triplet": Triplet(), "Unified": Unified(), "NTXent": NTXent()}
