"""PairLoss equals the objective on dense float64 cosines: at every scale of the embeddings, in
every dtype, for extreme parameters.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch.nn.functional import normalize

from visavis import PairLoss, Targets
from visavis.core.encoded import Encoded, unit_rows
from visavis.core.errors import SpecError, VisavisError
from visavis.core.fields import PARAMETER_RANGE
from visavis.losses.pair_loss import cosine
from visavis.objectives import (
    CATALOG,
    VLC,
    InfoNCE,
    MultiSimilarity,
    NTXent,
    Objective,
    Sigmoid,
    Unified,
)

from ..matching import mentions
from ..sampling import pairwise
from .cases import force_plan, raises_error, required_annotations

PATHS = ("dense", "rows", "tiles")
RANGES = {
    torch.float16: (1e-2, 1e4),
    torch.bfloat16: (1e-30, 1e30),
    torch.float32: (1e-30, 1e30),
    torch.float64: (1e-250, 1e250),
}
SCALES = (1e-250, 1e-30, 1e-19, 1e-12, 1e-2, 1.0, 1e4, 5e18, 1e30, 1e250)
KINDS_OF_ROWS = [
    (dtype, scale)
    for dtype, (low, high) in RANGES.items()
    for scale in SCALES
    if low <= scale <= high
]
TOLERANCES = {
    torch.float64: (1e-11, 1e-9),
    torch.float32: (1e-4, 1e-3),
    torch.bfloat16: (1e-4, 2e-2),
    torch.float16: (1e-4, 4e-3),
}
"""Relative to 1 + the value, and to the largest gradient, which is rounded to the dtype."""
IMAGE_IDS, TEXT_IDS = [0, 1, 2, 2, 3, 4, 5], [0, 1, 1, 2, 3, 4, 5, 9]


@cache
def targets_in(dtype: torch.dtype) -> Targets:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        annotations = {
            name: value.detach().float().to(dtype)
            for name, value in required_annotations(7, 8).items()
        }
    return Targets(query_ids=IMAGE_IDS, candidate_ids=TEXT_IDS, **annotations)


def dense_reference(
    objective: Objective, images: torch.Tensor, texts: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Value and gradients in float64. Rows are divided by their largest element first."""
    sides = [side.detach().double().requires_grad_() for side in (images, texts)]
    units = []
    for side in sides:
        largest = side.detach().abs().amax(1, keepdim=True)
        rows = side / largest.where(largest > 0, 1.0)
        norms = rows.norm(dim=1, keepdim=True)
        units.append(rows / norms.where(norms > 0, torch.inf))
    value = objective(units[0] @ units[1].T, targets_in(torch.float64))
    return value.detach(), *torch.autograd.grad(
        value, sides, allow_unused=True, materialize_grads=True
    )


def assert_matches_reference(
    objective: Objective, images: torch.Tensor, texts: torch.Tensor
) -> None:
    dtype = images.dtype
    images, texts = images.detach().requires_grad_(), texts.detach().requires_grad_()
    value = PairLoss(objective)(
        images, texts, targets=targets_in(torch.promote_types(dtype, torch.float32))
    )
    gradients = torch.autograd.grad(
        value, (images, texts), allow_unused=True, materialize_grads=True
    )
    expected, *expected_gradients = dense_reference(objective, images, texts)
    value_error, gradient_error = TOLERANCES[dtype]
    assert (value.double() - expected).abs() <= value_error * (1 + expected.abs()), (
        value,
        expected,
    )
    limits = torch.finfo(dtype)
    for ours, right in zip(gradients, expected_gradients, strict=True):
        assert ours.isfinite().all()
        assert (
            (ours.double() - right).abs()
            <= gradient_error * right.abs().max() + limits.tiny * limits.eps
        ).all(), (ours, right)


def check_scale(kind, rows, zero_rows, path, monkeypatch) -> None:
    dtype, scale = rows
    objective = kind()
    if path == "tiles" and objective.summary(targets_in(dtype)) is None:
        path = "rows"
    force_plan(monkeypatch, path, rows=4, tile=4)
    images, texts = (
        (torch.randn(number, 6, dtype=torch.float64) * scale).to(dtype) for number in (7, 8)
    )
    if zero_rows:
        images[1] = texts[3] = 0
    assert_matches_reference(objective, images, texts)


@pairwise(kind=CATALOG, rows=KINDS_OF_ROWS, zero_rows=[False, True], path=PATHS)
def test_pair_loss_matches_float64_at_every_scale(kind, rows, zero_rows, path, monkeypatch):
    check_scale(kind, rows, zero_rows, path, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_pair_loss_matches_float64_in_full_product(kind, monkeypatch):
    for rows, zero_rows, path in itertools.product(KINDS_OF_ROWS, (False, True), PATHS):
        check_scale(kind, rows, zero_rows, path, monkeypatch)


def extreme_objectives(kind: type[Objective], fields_at_once: int) -> Iterator[Objective]:
    """The objective with some parameters at the ends of their range, for every choice of its other
    fields.
    """
    low, high = PARAMETER_RANGE
    hints = typing.get_type_hints(kind)
    choices = {
        name: typing.get_args(hint)
        for name, hint in hints.items()
        if typing.get_origin(hint) is typing.Literal and name != "reduction"
    }
    for chosen in itertools.product(*choices.values()):
        for names in itertools.combinations(number_fields(kind), fields_at_once):
            for ends in itertools.product((low, high, -high), repeat=fields_at_once):
                numbers = {
                    name: with_numbers(kind, name, end)
                    for name, end in zip(names, ends, strict=True)
                }
                try:
                    yield kind(**dict(zip(choices, chosen, strict=True)), **numbers)
                except SpecError:
                    continue


def number_fields(kind: type[Objective]) -> list[str]:
    return [name for name, value in vars(kind()).items() if isinstance(value, float | tuple)] + [
        "gamma"
    ] * (kind.__name__ == "RSP")


def with_numbers(kind: type[Objective], name: str, number: float) -> float | tuple[float, ...]:
    """The number, or as many descending ones as the default has."""
    default = getattr(kind(), name)
    return (
        tuple(number * (1 - 0.1 * index * (number > 0)) for index in range(len(default)))
        if isinstance(default, tuple)
        else number
    )


@pytest.mark.parametrize("fields_at_once", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", CATALOG, ids=lambda kind: kind.__name__)
def test_pair_loss_matches_float64_for_extreme_parameters(kind, fields_at_once, monkeypatch):
    images, texts = torch.randn(7, 6), torch.randn(8, 6)
    objectives = list(extreme_objectives(kind, fields_at_once))
    # Every objective has a parameter with two valid ends.
    assert len(objectives) >= 2 or fields_at_once == 2
    # In a normal run, the pair weights of Goal take turns.
    for number, objective in enumerate(
        objectives[:: 1 + len(objectives) // 60] if fields_at_once == 1 else objectives
    ):
        has_summary = objective.summary(targets_in(torch.float32)) is not None
        force_plan(monkeypatch, PATHS[number % (3 if has_summary else 2)], rows=4, tile=4)
        try:
            assert_matches_reference(objective, images, texts)
        except AssertionError as error:
            error.add_note(f"with {objective}")
            raise


@pairwise(kind=CATALOG, number=[1e13, -1e13, 1e38, 1e300, 1e-13, 1e-300])
def test_objectives_reject_parameters_out_of_range(kind, number):
    for name in number_fields(kind):
        with pytest.raises(SpecError, match=mentions(f"{kind.__name__}.{name}: expected")):
            kind(**{name: with_numbers(kind, name, number)})


@pytest.mark.parametrize(
    "argument", [{"scale": 1e13}, {"scale": 1e-13}, {"scale": 10.0, "bias": -1e13}], ids=str
)
def test_pair_loss_rejects_extreme_scale_or_bias(argument):
    with raises_error(list(argument)[-1], list(argument.values())[-1], kind=SpecError):
        PairLoss(Sigmoid(), **argument)


@pytest.mark.parametrize(
    ("objective", "scale"),
    [(VLC(gamma=1e6), None), (NTXent(tau=1e-12), None), (InfoNCE(), 1e6)],
    ids=str,
)
@pytest.mark.parametrize("path", ["dense", "rows"])
def test_pair_loss_rejects_scale_beyond_float16(objective, scale, path, monkeypatch):
    force_plan(monkeypatch, path)
    images, texts = torch.randn(2, 5, 4).unbind()
    with (
        torch.autocast("cpu", torch.float16),
        raises_error("expected a scale <= 32752", "float16", kind=SpecError),
    ):
        PairLoss(objective, scale=scale)(images, texts)
    with raises_error("expected a scale <= 32752", "float16", kind=SpecError):
        PairLoss(objective, scale=scale, score=lambda images, texts: images @ texts.T)(
            images.half(), texts.half()
        )
    assert PairLoss(objective, scale=scale)(images, texts).isfinite()
    assert PairLoss(objective, scale=scale)(images.half(), texts.half()).isfinite()


def test_tiles_support_large_gamma_under_float16_autocast(monkeypatch):
    force_plan(monkeypatch, "tiles", rows=4, tile=4)
    images, texts = torch.randn(2, 9, 6).requires_grad_().unbind()
    objective = Unified(gamma=PARAMETER_RANGE[1])
    with torch.autocast("cpu", torch.float16):
        value = PairLoss(objective)(images, texts)
    torch.testing.assert_close(value, objective(cosine(images, texts), Targets.paired(9)))
    assert all(
        gradient.isfinite().all() for gradient in torch.autograd.grad(value, (images, texts))
    )


def test_multi_similarity_rejects_threshold_that_absorbs_scores():
    with pytest.raises(SpecError, match=mentions("MultiSimilarity.lam", "<= 1000", 1001.0)):
        MultiSimilarity(lam=1001.0)


@pytest.mark.parametrize("every_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_unit_rows_keep_the_bits_of_normalize(dtype, every_device, monkeypatch):
    """Also by the operations that other devices always take."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: every_device)
    for shape, scale in itertools.product(
        [(64, 512), (300, 33), (4, 6, 17), (1, 1), (0, 3)], [1e-3, 1.0, 30.0, 1e3]
    ):
        rows, upstream = (
            torch.randn(shape, dtype=torch.float64).mul(scale).to(dtype) for scale in (scale, 1.0)
        )
        ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
        values = unit_rows(ours), normalize(theirs, dim=-1)
        assert torch.equal(*values)
        for value in values:
            value.backward(upstream)
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("wrap", [torch.Tensor.detach, Encoded])
@pytest.mark.parametrize("name", ["images", "texts", "extra_images"])
def test_pair_loss_rejects_items_on_meta_device(name, wrap):
    items = {"images": torch.eye(3), "texts": torch.eye(3), name: wrap(torch.eye(3, device="meta"))}
    with pytest.raises(VisavisError, match=f"^{name}: expected tensors with values"):
        PairLoss(VLC())(**items)
