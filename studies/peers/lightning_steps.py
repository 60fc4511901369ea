"""PairLossSteps under Lightning's Trainer on a CLIP, on several processes, against one process.

python studies/peers/lightning_steps.py, or under torchrun --nproc-per-node 2. --way selects the
loss.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from reporting import report
from tiny_models import captioned_images, rows, tiny_clip

from visavis import LearnedScale, PairLoss
from visavis.integrations.lightning import PairLossSteps
from visavis.objectives import NTXent, Unified

RANK = int(os.environ.get("RANK", "0"))
NUMBER = int(os.environ.get("WORLD_SIZE", "1"))
WAYS = {
    "fixed margin": lambda: PairLoss(Unified(margin=0.2, gamma=10, reduction="half_mean")),
    "learned scale": lambda: PairLoss(NTXent(), scale=LearnedScale(20.0)),
}


class Retriever(PairLossSteps, LightningModule):
    """A tiny CLIP with a PairLoss."""

    def __init__(self, loss: PairLoss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = tiny_clip()
        self.loss = loss
        self.losses = list[float]()
        self.model.logit_scale.requires_grad_(False)

    def embed(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outputs = self.model(pixel_values=batch["pixel_values"], input_ids=batch["input_ids"])
        return outputs.image_embeds, outputs.text_embeds, batch["labels"]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], lr=0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="fixed margin")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--weights", type=Path, help="where the first process leaves the weights")
    options = parser.parse_args()
    module = Retriever(WAYS[options.way]())
    own_rows = rows(captioned_images())[RANK * 16 // NUMBER : (RANK + 1) * 16 // NUMBER]
    trainer = Trainer(
        accelerator="cpu",
        devices=NUMBER,
        strategy="ddp" if NUMBER > 1 else "auto",
        max_epochs=options.steps,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(own_rows, batch_size=len(own_rows)))
    report(module, module.losses, options.weights)


if __name__ == "__main__":
    main()
