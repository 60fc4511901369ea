"""Recipes for test_processes, and the work of one of several processes that train them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import visavis
from visavis.core.errors import ReportedByOtherProcess
from visavis.training.stop_signals import Stopped
from visavis.training.trainer import Trainer

TRAINING = "training = { batch_size = 24, checkpoint_s = 1e6, metric_batches = 1, threads = 1 }"
REGIONS = 'visual = { encoder = "scenes", granularity = "regions" }\ntext = { encoder = "vocabulary", min_count = 1 }'
PIXELS = 'visual = { encoder = "small-cnn", granularity = "pixels", augment = true }\ntext = { encoder = "vocabulary", min_count = 1 }'
VSE = 'model = { kind = "VSE++", embedding_dim = 16, word_dim = 8, region_pool = "mean" }'
SCAN = 'model = { kind = "SCAN", embedding_dim = 16, word_dim = 8 }'


def phase(objective: str, supervision: str = "PairSupervision()", lr: float = 0.01) -> str:
    return f'[[phases]]\nepochs = 2\nobjective = "{objective}"\nsupervision = "{supervision}"\noptimizer = {{ lr = {lr} }}'


RECIPES = {
    "pooled": (REGIONS, VSE, phase("Unified(gamma=20)")),
    # Batch norm makes training from pixels chaotic at a large learning rate: rounding errors of a
    # step grow.
    "auto": (REGIONS, VSE, phase("Unified(gamma='auto')")),
    "pixels": (PIXELS, VSE, phase("VLC(gamma=20)", lr=1e-5)),
    "SCAN": (REGIONS, SCAN, phase("Unified(gamma=20)", lr=0.001)),
    "NCR": (REGIONS, VSE, phase("NCR()", "NoisySupervision()", lr=0.001)),
    "graded": (
        REGIONS,
        VSE,
        phase("Ladder()", "GradedSupervision(relevance='SceneRelevance()')", lr=0.001),
    ),
    "offline": (REGIONS, VSE, phase("AOQ()", "OfflineNegativeSupervision(size=20)", lr=0.001)),
    "position": (REGIONS, VSE, phase("TripletHN()", "PairSupervision(by='position')", lr=0.001)),
}


def write_recipes(folder: Path) -> dict[str, Path]:
    """Write the recipes as files, by name."""
    files = {name: folder / f"{name}.toml" for name in RECIPES}
    for name, (inputs, model, phases) in RECIPES.items():
        files[name].write_text(
            "\n".join([f'name = "{name}"\nseed = 5', inputs, model, TRAINING, phases])
        )
    return files


def join(rank: int, world_size: int, rendezvous: Path) -> None:
    """Join the other processes."""
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    if world_size > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )


def train_all(
    rank: int,
    world_size: int,
    rendezvous: Path,
    jobs: dict[str, tuple[str, dict[str, Any]]],
    out: Path,
) -> None:
    """Train each recipe with its overrides into a folder of its name."""
    join(rank, world_size, rendezvous)
    for name, (recipe, overrides) in jobs.items():
        visavis.train(recipe, overrides=overrides, out=out / name)


def train_until(
    rank: int,
    world_size: int,
    rendezvous: Path,
    arguments: dict[str, Any],
    stop_step: int,
    stop_rank: int,
) -> None:
    """Train, and send SIGTERM to one process at a step. All processes must stop there. Step 0:
    train to the end.
    """
    join(rank, world_size, rendezvous)
    report = Trainer._report_step

    def report_and_stop(trainer: Trainer, steps: int) -> None:
        report(trainer, steps)
        if rank == stop_rank and trainer.state.step == stop_step:
            os.kill(os.getpid(), signal.SIGTERM)

    Trainer._report_step = report_and_stop
    try:
        visavis.train(**arguments)
    except Stopped:
        stopped = rank == 0
    except ReportedByOtherProcess as error:
        stopped = rank > 0 and error.exit_code == 128 + signal.SIGTERM
    else:
        stopped = False
    assert stopped == (stop_step > 0)
