"""open_clip's own ``train_one_epoch`` with its ClipLoss and with ours, on one process or several,
for open_clip 3 and 4.

python studies/peers/open_clip_training.py [--accum-freq 2], or under torchrun --nproc-per-node 2.
Needs open_clip_torch and torchvision.
"""

import argparse
import copy
import os
import types
from functools import cache

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from visavis.integrations.open_clip import ClipLoss
from visavis.objectives import InfoNCE, NTXent, Unified

RANK = int(os.environ.get("RANK", "0"))
NUMBER = int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 16
STEPS = 6
PROCESSES = {"rank": RANK, "world_size": NUMBER}
EXACT = {"local_loss": True, "gather_with_grad": True}
ENCODER = {"width": 32, "layers": 2}
LOSSES = {
    "open_clip, local_loss and gather_with_grad": lambda: imported().ClipLoss(**EXACT, **PROCESSES),
    "open_clip, its default": lambda: imported().ClipLoss(**PROCESSES),
    "NTXent": lambda: ClipLoss(NTXent(), **EXACT, **PROCESSES),
    "InfoNCE": lambda: ClipLoss(InfoNCE(), **PROCESSES),
    "Unified": lambda: ClipLoss(Unified(margin=0.2, gamma=10, reduction="half_mean"), **PROCESSES),
}
ARGS = {
    "device": "cpu",
    "precision": "fp32",
    "distill": False,
    "skip_scheduler": True,
    "accum_freq": 1,
    "grad_clip_norm": None,
    "horovod": False,
    "rank": RANK,
    "local_rank": RANK,
    "world_size": NUMBER,
    "distributed": NUMBER > 1,
    "log_every_n_steps": 1,
    "log_local": False,
    "wandb": False,
    "batch_size": BATCH // NUMBER,
}


@cache
def imported() -> types.ModuleType:
    """Import open_clip, also with a torch without CUDA: torchvision's wheels look up operators at
    import that are built for CUDA.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import open_clip

    return open_clip


class Batches:
    """This process' part of the same rows in every step."""

    num_batches = STEPS
    num_samples = STEPS * BATCH
    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        part = slice(RANK * BATCH // NUMBER, (RANK + 1) * BATCH // NUMBER)
        self.rows = (
            torch.randn(BATCH, 3, 32, 32, generator=generator)[part],
            torch.randint(1, 60, (BATCH, 8), generator=generator)[part],
        )

    def __iter__(self):
        return iter(
            [
                dict(zip(self.names, self.rows, strict=True)) if self.names else self.rows
                for _ in range(STEPS)
            ]
        )


def tiny_model() -> torch.nn.Module:
    torch.manual_seed(0)
    visual = {"image_size": 32, "patch_size": 16, "head_width": 16} | ENCODER
    return imported().CLIP(
        16, visual, {"context_length": 8, "vocab_size": 64, "heads": 2} | ENCODER, output_dict=True
    )


def train_one_epoch(model: torch.nn.Module, loss: torch.nn.Module, accum_freq: int) -> None:
    """One epoch of open_clip's training loop. Version 4 trains a CLIPTask that holds the model and
    the loss.
    """
    from open_clip_train import train

    data = Batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reader = {"train": types.SimpleNamespace(set_epoch=lambda _: None, dataloader=data)}
    args = types.SimpleNamespace(**ARGS | {"accum_freq": accum_freq})
    if not hasattr(imported(), "CLIPTask"):
        wrapped = DistributedDataParallel(model) if NUMBER > 1 else model
        train.train_one_epoch(wrapped, reader, loss, 0, optimizer, None, None, None, args)
        return
    data.names = ("image", "text")
    task = imported().CLIPTask(model, loss=loss, verbose=False)
    if NUMBER > 1:
        task.prepare_distributed()
    train.train_one_epoch(train.TrainState(task=task, optimizer=optimizer), reader, args)


def train_and_probe(name: str, accum_freq: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradient of the encoders at the first step, and the weights after all steps."""
    model = tiny_model()
    loss = LOSSES[name]()
    probe = copy.deepcopy(model)
    wrapped_probe = DistributedDataParallel(probe) if NUMBER > 1 else probe
    loss(**wrapped_probe(*Batches().rows)).backward()
    train_one_epoch(model, loss, accum_freq)
    encoder_gradients = [
        parameter.grad for name, parameter in probe.named_parameters() if name != "logit_scale"
    ]
    return encoder_gradients, [parameter.detach() for parameter in model.parameters()]


def largest_difference(first: list[torch.Tensor], second: list[torch.Tensor]) -> float:
    return max(
        (first_tensor - second_tensor).abs().max().item()
        for first_tensor, second_tensor in zip(first, second, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--accum-freq", type=int, default=1, help="batches per step, as open_clip's option"
    )
    accum_freq = parser.parse_args().accum_freq
    if NUMBER > 1:
        distributed.init_process_group("gloo")
    results = {name: train_and_probe(name, accum_freq) for name in LOSSES}
    exact = results["open_clip, local_loss and gather_with_grad"]
    norm = torch.cat([gradient.flatten() for gradient in exact[0]]).norm()
    for name, (gradients, weights) in results.items() if RANK == 0 else ():
        norm_ratio = torch.cat([gradient.flatten() for gradient in gradients]).norm() / norm
        outcome = (
            "trained"
            if name == "Unified"
            else f"weights after {STEPS // accum_freq} steps {largest_difference(weights, exact[1]):.1e} away"
        )
        print(
            f"{name}: gradient {norm_ratio:.4f} times the exact one of CLIP's loss, {outcome}",
            flush=True,
        )
    if NUMBER > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
