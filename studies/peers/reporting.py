"""The output of a training on one or several processes, for the comparison of the two."""

import hashlib
from pathlib import Path

import torch
from torch import distributed


def report(model: torch.nn.Module, losses: list[float], path: Path | None) -> None:
    """Print a hash of the weights in every process. The first one also prints its losses and saves
    the weights.
    """
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    print(
        f"weights {hashlib.sha256(b''.join(value.numpy().tobytes() for value in weights.values())).hexdigest()[:8]}",
        flush=True,
    )
    if not distributed.is_initialized() or distributed.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}", flush=True)
        if path:
            torch.save(weights, path)
    if distributed.is_initialized():
        distributed.destroy_process_group()
