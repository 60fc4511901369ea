"""Where autocast is on by itself."""

import pytest
import torch

from visavis.models.device import autocast, multiplies_bfloat16

CPU = torch.device("cpu")


def product(device, wanted):
    torch.manual_seed(0)
    left, right = torch.randn(2, 16, 16, device=device)
    with autocast(device, wanted):
        return left @ right


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_auto_is_on_exactly_where_products_in_bfloat16_have_instructions(device):
    device = torch.device(device)
    on, off, auto = (product(device, wanted) for wanted in (True, False, "auto"))
    assert (on.dtype, off.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(auto, on if multiplies_bfloat16(device) else off)
    assert auto.dtype == (torch.bfloat16 if multiplies_bfloat16(device) else torch.float32)


@pytest.mark.parametrize(
    ("capabilities", "multiplies"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False, "amx_int8": True}, False),
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({"neon": True, "bf16": False}, False),
        ({}, False),
    ],
    ids=["AVX-512 alone", "AVX-512 bf16", "AMX", "ARM with bf16", "ARM without", "unknown"],
)
def test_processors_by_what_torch_says_of_them(capabilities, multiplies, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert multiplies_bfloat16(CPU) is multiplies
    assert torch.equal(product(CPU, "auto"), product(CPU, multiplies))


def test_a_torch_that_cannot_tell_of_processors_is_taken_to_say_no(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not multiplies_bfloat16(CPU)
