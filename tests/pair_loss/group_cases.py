"""Worker of test_process_group: computes every case on the items of one rank and saves the results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from visavis import PairLoss, Targets
from visavis.core.encoded import Encoded
from visavis.losses.targets import Factors
from visavis.objectives import CATALOG, Ladder, NTXent, Sigmoid, Triplet, TripletHN, Unified

IMAGES = {1: [7], 2: [4, 3], 4: [3, 0, 2, 2]}  # number of images of each rank, by world size
TEXTS = {1: [9], 2: [2, 7], 4: [4, 1, 4, 0]}
IMAGE_IDS = torch.tensor([1, 2, 3, 4, 5, 6, 1])
TEXT_IDS = torch.tensor([6, 6, 1, 2, 5, 3, 1, 9, 4])
REDUCTIONS = ("sum", "mean", "half_mean")
COUNTED = (
    torch.tensor([0, 1, 2, 3, 0, 1, 2]),
    torch.tensor([0, 1, 0, 1, 2, 3, 4, 5, 6]),
)  # 0, 1, 2 ... on both of two ranks


class WordScore(nn.Module):
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
    inputs: dict[str, Tensor]  # by name


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def part(items: Any, counts: list[int], rank: int) -> Any:
    """The items of one rank."""
    start = sum(counts[:rank])
    return items[start : start + counts[rank]]


def cases(world_size: int, rank: int) -> Iterator[tuple[str, Callable[[], Case]]]:
    for kind in CATALOG:
        for reduction in REDUCTIONS:
            yield (
                f"{kind.__name__} {reduction}",
                lambda kind=kind, reduction=reduction: by_ids(
                    kind(reduction=reduction), world_size, rank
                ),
            )
    for objective in (Triplet(), TripletHN(), Unified(), Unified(reduction="mean")):
        yield (
            f"{objective!r} bare",
            lambda objective=objective: ids_only(objective, world_size, rank),
        )
        yield (
            f"{objective!r} counted",
            lambda objective=objective: ids_only(objective, world_size, rank, COUNTED),
        )
        yield (
            f"{objective!r} score function",
            lambda objective=objective: with_word_score(objective, world_size, rank),
        )
        for size in (0, 3):
            yield (
                f"{objective!r} bank {size}",
                lambda objective=objective, size=size: with_bank(objective, world_size, rank, size),
            )
        yield (
            f"{objective!r} extras",
            lambda objective=objective: with_local_extras(objective, world_size, rank),
        )
    for objective in (Triplet(), Unified()):
        for common in (False, True):
            yield (
                f"{objective!r} extra words {common}",
                lambda objective=objective, common=common: with_extra_words(
                    objective, world_size, rank, common=common
                ),
            )
        yield (
            f"{objective!r} unmatched",
            lambda objective=objective: unmatched_extras(objective, world_size, rank),
        )
    for has_positions in (False, True):
        yield (
            f"Ladder function {has_positions}",
            lambda has_positions=has_positions: with_function(
                world_size, rank, has_positions=has_positions
            ),
        )
    for rows in (None, 2):
        yield f"scale {rows}", lambda rows=rows: scaled(rows, world_size, rank)
        yield f"bias {rows}", lambda rows=rows: biased(rows, world_size, rank)
        yield (
            f"matryoshka {rows}",
            lambda rows=rows: scaled(rows, world_size, rank, matryoshka_dims=(2, 4)),
        )
    yield (
        "matryoshka extras",
        lambda: with_matryoshka_dims(with_local_extras(Unified(), world_size, rank)),
    )


def daily_names() -> list[str]:
    """Names of all cases, but of only one reduction of each objective."""
    skipped = {
        f"{kind.__name__} {REDUCTIONS[(number + shift) % 3]}"
        for number, kind in enumerate(CATALOG)
        for shift in (1, 2)
    }
    return [name for name, _ in cases(1, 0) if name not in skipped]


def local(world_size: int, rank: int, images: Any, texts: Any) -> tuple[Any, Any]:
    return part(images, IMAGES[world_size], rank), part(texts, TEXTS[world_size], rank)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def by_ids(objective: Any, world_size: int, rank: int) -> Case:
    """Ids and every annotation that can be gathered over ranks."""
    vectors = [
        local(world_size, rank, *pair)
        for pair in ((randn(7, 6), randn(9, 6)), (randn(7, 3).abs() / 3, randn(9, 3).abs() / 3))
    ]
    (images, texts), factors = vectors
    images, texts, factors = leaf(images), leaf(texts), Factors(*factors)
    annotations = dict(
        zip(
            ("query_margin", "candidate_margin"),
            local(world_size, rank, randn(7).abs(), randn(9).abs()),
            strict=True,
        )
    )
    offline = ("query_offline_scores", "candidate_offline_scores")
    annotations |= {
        name: leaf(scores)
        for name, scores in zip(
            offline, local(world_size, rank, randn(7, 2), randn(9, 2)), strict=True
        )
    }
    ids = local(world_size, rank, IMAGE_IDS, TEXT_IDS)
    targets = Targets(
        query_ids=ids[0],
        candidate_ids=ids[1],
        relevance=factors,
        pair_margin=factors,
        **annotations,
    )
    inputs = {"images": images, "texts": texts} | {name: annotations[name] for name in offline}
    return Case(PairLoss(objective, block_rows=2), images, texts, {"targets": targets}, inputs)


def ids_only(
    objective: Any,
    world_size: int,
    rank: int,
    ids_of_all: tuple[Tensor, Tensor] = (IMAGE_IDS, TEXT_IDS),
) -> Case:
    """Ids only, so that one tile serves both directions."""
    images, texts = (leaf(each) for each in local(world_size, rank, randn(7, 6), randn(9, 6)))
    ids = dict(zip(("image_ids", "text_ids"), local(world_size, rank, *ids_of_all), strict=True))
    return Case(PairLoss(objective), images, texts, ids, {"images": images, "texts": texts})


def with_word_score(objective: Any, world_size: int, rank: int) -> Case:
    score, vectors = WordScore(), randn(9, 4, 6)
    mask = torch.arange(4) < torch.randint(1, 5, (9, 1))
    images, texts = local(world_size, rank, randn(7, 6), vectors)
    _, local_mask = local(world_size, rank, mask, mask)
    longest = (
        int(local_mask.sum(-1).max()) if len(local_mask) else 1
    )  # each rank pads to its longest text
    images, texts = leaf(images), leaf(texts[:, :longest])
    ids = dict(
        zip(("image_ids", "text_ids"), local(world_size, rank, IMAGE_IDS, TEXT_IDS), strict=True)
    )
    inputs = {"images": images, "texts": texts, "parameter": score.map.weight}
    return Case(
        PairLoss(objective, score=score, block_rows=3),
        images,
        Encoded(texts, local_mask[:, :longest]),
        ids,
        inputs,
    )


def with_bank(objective: Any, world_size: int, rank: int, size: int) -> Case:
    """The same bank on every rank."""
    case, extra_items = ids_only(objective, world_size, rank), leaf(randn(size, 6))
    extra = {"extra_texts": extra_items, "extra_text_ids": [2, 9, 4][:size]}
    return case._replace(
        arguments=case.arguments | extra, inputs=case.inputs | {"bank": extra_items}
    )


EXTRA = {1: [5], 2: [5, 0], 4: [1, 0, 2, 2]}


def with_local_extras(objective: Any, world_size: int, rank: int) -> Case:
    """Extra items of each rank on both sides. A rank without any passes none."""
    case, sides = ids_only(objective, world_size, rank), {"image": randn(5, 6), "text": randn(5, 6)}
    extra: dict[str, Any] = {}
    local_extras = {
        f"extra_{side}s": leaf(part(items, EXTRA[world_size], rank))
        for side, items in sides.items()
    }
    if EXTRA[world_size][rank]:
        extra = local_extras | {
            f"extra_{side}_ids": part([2, 9, 4, 4, 7], EXTRA[world_size], rank) for side in sides
        }
    return case._replace(arguments=case.arguments | extra, inputs=case.inputs | local_extras)


def with_extra_words(objective: Any, world_size: int, rank: int, *, common: bool) -> Case:
    """Extra texts of other lengths than those of the batch, common to all ranks or different on
    each rank.
    """
    case, extra_items = with_word_score(objective, world_size, rank), randn(5, 6, 6)
    mask = torch.arange(6) < torch.randint(1, 7, (5, 1))
    local_extras, local_mask, ids = (
        each if common else part(each, EXTRA[world_size], rank)
        for each in (extra_items, mask, [2, 9, 4, 4, 7])
    )
    local_extras = leaf(local_extras)
    extra = {"extra_texts": Encoded(local_extras, local_mask), "extra_text_ids": ids}
    return case._replace(
        arguments=case.arguments | extra,
        inputs=case.inputs | {"bank" if common else "extra_texts": local_extras},
    )


def unmatched_extras(objective: Any, world_size: int, rank: int) -> Case:
    """Pairs in order without ids, and extra items without a match."""
    images, texts = (leaf(part(randn(7, 6), IMAGES[world_size], rank)) for _ in range(2))
    extra_items = leaf(part(randn(5, 6), EXTRA[world_size], rank))
    extra = {"extra_texts": extra_items, "extra_text_ids": [-1] * len(extra_items)}
    return Case(
        PairLoss(objective),
        images,
        texts,
        extra,
        {"images": images, "texts": texts, "extra_texts": extra_items},
    )


def with_function(world_size: int, rank: int, *, has_positions: bool) -> Case:
    """Relevance from a table on all ranks, by positions in the global batch or in a larger data
    set.
    """
    images, texts = (leaf(each) for each in local(world_size, rank, randn(7, 6), randn(9, 6)))
    ids, table = (
        local(world_size, rank, IMAGE_IDS, TEXT_IDS),
        torch.rand(30, 40, dtype=torch.float64),
    )
    rows, columns = (torch.randperm(size) for size in table.shape)
    positions = (
        dict(zip(("rows", "columns"), local(world_size, rank, rows[:7], columns[:9]), strict=True))
        if has_positions
        else {}
    )
    targets = Targets(
        query_ids=ids[0],
        candidate_ids=ids[1],
        relevance=lambda rows, columns: table[rows][:, columns],
        **positions,
    )
    return Case(
        PairLoss(Ladder(), block_rows=2),
        images,
        texts,
        {"targets": targets},
        {"images": images, "texts": texts},
    )


def scaled(
    rows: int | None, world_size: int, rank: int, matryoshka_dims: tuple[int, ...] = ()
) -> Case:
    """Pairs in order without ids, and a learnable scale, optionally at several Matryoshka
    dimensions.
    """
    images, texts = (leaf(part(randn(7, 6), IMAGES[world_size], rank)) for _ in range(2))
    scale = nn.Parameter(torch.tensor(5.0, dtype=torch.float64))
    inputs = {"images": images, "texts": texts, "parameter": scale}
    return Case(
        PairLoss(NTXent(), block_rows=rows, scale=scale, matryoshka_dims=matryoshka_dims),
        images,
        texts,
        {},
        inputs,
    )


def biased(rows: int | None, world_size: int, rank: int) -> Case:
    """Captions by ids and a learnable bias."""
    case, bias = (
        ids_only(Sigmoid(), world_size, rank),
        nn.Parameter(torch.tensor([-3.0], dtype=torch.float64)),
    )
    return case._replace(
        loss=PairLoss(Sigmoid(), block_rows=rows, scale=5.0, bias=bias),
        inputs=case.inputs | {"parameter": bias},
    )


def with_matryoshka_dims(case: Case) -> Case:
    return case._replace(loss=PairLoss(case.loss.objective, matryoshka_dims=(2, 4)))


def value_and_gradients(make: Callable[[], Case], seed: int) -> dict[str, Tensor]:
    """Value and gradients of a case. The value is doubled to test that the incoming gradient is
    multiplied.
    """
    torch.manual_seed(seed)
    case = make()
    value = case.loss(case.images, case.texts, **case.arguments)
    gradients = torch.autograd.grad(
        2 * value, list(case.inputs.values()), allow_unused=True, materialize_grads=True
    )
    return {"value": value.detach()} | {
        name: each / 2 for name, each in zip(case.inputs, gradients, strict=True)
    }


def all_values_and_gradients(
    world_size: int, rank: int, names: list[str]
) -> dict[str, dict[str, Tensor]]:
    return {
        name: value_and_gradients(make, seed)
        for seed, (name, make) in enumerate(cases(world_size, rank))
        if name in names
    }


def trained_gradients(world_size: int, rank: int, objective: Any) -> list[Tensor]:
    """The gradient of two encoders and a scale after a backward pass through
    DistributedDataParallel.
    """
    torch.manual_seed(5)
    encoders = [nn.Linear(6, 4, bias=False).double() for _ in range(2)]
    images, texts = local(world_size, rank, randn(7, 6), randn(9, 6))
    ids = local(world_size, rank, IMAGE_IDS, TEXT_IDS)
    wrapped = (
        [DistributedDataParallel(encoder) for encoder in encoders] if world_size > 1 else encoders
    )
    PairLoss(objective)(wrapped[0](images), wrapped[1](texts), *ids).backward()
    return [encoder.weight.grad for encoder in encoders]


def values_in_eval(rank: int) -> Tensor | None:
    """Only the first rank evaluates. A collective operation would wait forever."""
    torch.manual_seed(0)
    images, texts = randn(3, 6), randn(3, 6)
    if rank > 0:
        return None
    values = [
        PairLoss(Unified()).eval()(images, texts),
        PairLoss(Unified(), gather=True).eval()(images, texts),
    ]
    return torch.stack([*values, PairLoss(Unified(), gather=False)(images, texts)])


def errors_of_local_annotations(rank: int) -> list[str]:
    """Messages for annotations that cannot be gathered over ranks."""
    messages = []
    table = torch.ones(2, 2)
    cases_to_reject = (
        (Unified(), Targets.paired(2, weight=table)),
        (
            Ladder(),
            Targets.paired(2, relevance=lambda rows, columns: table[rows][:, columns]),
        ),  # positions in the local batch only
        (Unified(), Targets.from_pairs([0], [0], 2, 2)),
    )
    for objective, targets in cases_to_reject:
        messages += error_messages(PairLoss(objective), randn(2, 3), randn(2, 3), targets=targets)
    bank = {
        "extra_texts": randn(3, 3),
        "extra_text_ids": [-1, rank - 1, -1],
    }  # a position on the second rank only
    return messages + error_messages(PairLoss(Unified()), randn(2, 3), randn(2, 3), **bank)


def error_messages(loss: PairLoss, *items: Tensor, **annotations: Any) -> list[str]:
    try:
        loss(*items, **annotations)
    except ValueError as error:
        return [str(error)]
    return []


def main(rank: int, world_size: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size
    )
    actual = {
        "all_values_and_gradients": all_values_and_gradients(world_size, rank, names),
        "eval": values_in_eval(rank),
        "errors": errors_of_local_annotations(rank),
    }
    actual["trained_gradients"] = {
        name: trained_gradients(world_size, rank, objective) for name, objective in TRAINED.items()
    }
    torch.save(actual, folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


TRAINED = {"Triplet": Triplet(), "Unified": Unified(), "NTXent": NTXent()}
