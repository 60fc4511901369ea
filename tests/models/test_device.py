"""Autocast in bfloat16, by the capabilities of the processor."""

import pytest
import torch

from visavis.models.device import autocast_context, has_native_bfloat16

CPU = torch.device("cpu")


def product(device, enabled):
    torch.manual_seed(0)
    left, right = torch.randn(2, 16, 16, device=device)
    with autocast_context(device, enabled):
        return left @ right


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_context_auto_follows_native_support(device):
    device = torch.device(device)
    on, off, auto = (product(device, enabled) for enabled in (True, False, "auto"))
    assert (on.dtype, off.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(auto, on if has_native_bfloat16(device) else off)
    assert auto.dtype == (torch.bfloat16 if has_native_bfloat16(device) else torch.float32)


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
def test_has_native_bfloat16_reads_cpu_capabilities(capabilities, multiplies, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert has_native_bfloat16(CPU) is multiplies
    assert torch.equal(product(CPU, "auto"), product(CPU, multiplies))


def test_has_native_bfloat16_is_false_on_older_torch(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not has_native_bfloat16(CPU)
