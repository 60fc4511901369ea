"""Rows as whole numbers of 8 bits, a quarter of the bytes, and what that costs each score at most.

The rows are taken relative to their mean m and rounded with a step s for each group of rows, ``x = m + s c + e``; a query is
rounded with a step of its own, ``q = t d + f``. Then ``<x, q> = <m, q> + s t <c, d> + <e, q> + s <c, f>``: the product of the codes
is exact, and what is left out is at most ``|e| |q| + |s c| |f|`` by Cauchy-Schwarz, of which the largest of a group is kept.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visavis import storage
from visavis.memory import spans
from visavis.retrieval.exact import GROUP, ROUNDING, as_tensor

CODES, STEPS, MEAN = "codes.npy", "steps.npy", "mean.npy"
LARGEST = 127
FEWEST_ROWS, NARROWEST = 2**15, 64
"""Smaller collections, and narrower vectors, gain nothing."""
AT_ONCE = 2**10


class InInt8:
    """The first pass over codes of 8 bits: ``codes [N, D]``; ``steps [4, G]``: of each group the step, the largest |e|, |s c| and |x|."""

    def __init__(self, codes: np.ndarray, steps: np.ndarray, mean: np.ndarray):
        self.codes, self.mean = as_tensor(codes), as_tensor(mean)
        self.step, self.lost, self.kept, self.norm = as_tensor(steps)[:, None]

    @classmethod
    def of(cls, vectors: np.ndarray) -> InInt8:
        """Codes of vectors ``[N, D]`` in memory."""
        mean = _mean(vectors)
        parts = [encoded(torch.from_numpy(np.array(vectors[some])), torch.from_numpy(mean)) for some in spans(len(vectors), AT_ONCE)]
        if not parts:
            return cls(np.empty((0, vectors.shape[1]), np.int8), np.empty((4, 0), np.float32), mean)
        codes, steps = zip(*parts, strict=True)
        return cls(torch.cat(codes).numpy(), torch.cat(steps, 1).numpy(), mean)

    def prepare(self, queries: Tensor) -> None:
        step = queries.abs().amax(1, keepdim=True) / LARGEST
        step[step == 0] = 1.0
        self.query_codes = (queries / step).round().to(torch.int8)
        self.query_step, self.query_norm = step, queries.norm(dim=1, keepdim=True) * (1 + 1e-4)
        self.query_lost = (queries - self.query_codes * step).norm(dim=1, keepdim=True) * (1 + 1e-4)
        self.offset = (queries.double() @ self.mean.double()).float()[:, None]

    def products(self, rows: slice) -> Tensor:
        stop = -(-rows.stop // GROUP) * GROUP
        return torch._int_mm(self.query_codes, self.codes[rows.start : stop].T)[:, : rows.stop - rows.start]

    def scale(self, groups: slice) -> tuple[Tensor, Tensor]:
        return self.query_step * self.step[:, groups], self.offset

    def error(self, groups: slice) -> Tensor:
        norm = self.norm[:, groups]
        return self.query_norm * (self.lost[:, groups] + ROUNDING * norm) + self.query_lost * self.kept[:, groups]


@cache
def multiplies_int8() -> bool:
    """Whether the processor has instructions for products of 8-bit numbers (VNNI, AMX), by which torch is faster, and exact."""
    tell = getattr(torch.cpu, "get_capabilities", dict[str, bool])
    if not any(tell().get(name, False) for name in ("avx512_vnni", "avx_vnni", "amx_int8")) or not hasattr(torch, "_int_mm"):
        return False
    extreme = torch.full((GROUP, NARROWEST), LARGEST, dtype=torch.int8)
    return all(bool((torch._int_mm(sign * extreme, extreme.T) == sign * NARROWEST * LARGEST**2).all()) for sign in (1, -1))


def pays(rows: int, width: int) -> bool:
    """Whether codes make searching so many rows faster here."""
    return rows >= FEWEST_ROWS and width >= NARROWEST and multiplies_int8()


def write_reduced(folder: Path, vectors: np.ndarray) -> None:
    """Write the codes of vectors ``[N, D]`` into a folder that is being made. Raises StorageError."""
    rows, width = vectors.shape
    mean = _mean(vectors)
    storage.create_array(folder / CODES, shape=(-(-rows // GROUP) * GROUP, width), dtype="int8")
    codes, steps = np.lib.format.open_memmap(folder / CODES, mode="r+"), []
    for some in spans(rows, AT_ONCE):
        coded, numbers = encoded(torch.from_numpy(np.array(vectors[some])), torch.from_numpy(mean))
        codes[some.start : some.start + len(coded)] = coded.numpy()
        steps.append(numbers)
    codes.flush()
    storage.write_array(folder / STEPS, torch.cat(steps, 1).numpy())
    storage.write_array(folder / MEAN, mean)


def _mean(vectors: np.ndarray) -> np.ndarray:
    total = sum((np.sum(vectors[some], 0, np.float64) for some in spans(len(vectors), AT_ONCE)), np.zeros(vectors.shape[1]))
    return np.asarray(total / max(len(vectors), 1), np.float32)


def open_reduced(folder: Path) -> InInt8:
    """What ``write_reduced`` wrote, mapped. Raises DataError."""
    codes = storage.read_array(folder / CODES, dimensions=2, kinds="i", mapped=True)
    return InInt8(codes, storage.read_array(folder / STEPS, dimensions=2), storage.read_array(folder / MEAN, dimensions=1))


def encoded(rows: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Codes ``[N, D]`` of rows, filled up to whole groups, and of each group the four numbers of ``InInt8``."""
    moved = torch.nn.functional.pad(rows - mean, (0, 0, 0, -len(rows) % GROUP)).view(-1, GROUP, rows.shape[1])
    step = moved.abs().amax((1, 2), keepdim=True) / LARGEST
    step[step == 0] = 1.0
    codes = (moved / step).round()
    kept = codes * step
    lengths = torch.stack([(moved - kept).norm(dim=2), kept.norm(dim=2), moved.norm(dim=2) + 2 * mean.norm()]).amax(2)
    return codes.to(torch.int8).flatten(0, 1), torch.cat([step[None, :, 0, 0], lengths * (1 + 1e-4)])
