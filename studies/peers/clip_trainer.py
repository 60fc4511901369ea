"""A CLIP under transformers' Trainer with gradient checkpointing, on several processes, against one
process.

python studies/peers/clip_trainer.py, or under torchrun --nproc-per-node 2. --way selects the loss.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from reporting import report
from tiny_models import captioned_images, rows, tiny_clip

from visavis.integrations.transformers import TrainerLoss
from visavis.objectives import NTXent, Unified

WAYS = {
    "fixed margin": lambda _: TrainerLoss(Unified(margin=0.2, gamma=10, reduction="half_mean")),
    "temperature": lambda _: TrainerLoss(NTXent()),
    "learned scale": lambda model: TrainerLoss(NTXent(), logit_scale=model.logit_scale),
    "accumulation": lambda model: TrainerLoss(NTXent(), logit_scale=model.logit_scale),
}


def collate(examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor | bool]:
    """Keys of the collate function of transformers' run_clip.py, which asks the model for its own
    loss, and the ids of the pairs.
    """
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]} | {
        "return_loss": True
    }


class InOrder(torch.utils.data.Dataset):
    """All rows in every step, whatever the number of processes."""

    def __init__(self, columns: dict[str, torch.Tensor], steps: int) -> None:
        self.rows = rows(columns) * steps

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="fixed margin")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--weights", type=Path, help="where the first process leaves the weights")
    options = parser.parse_args()
    accumulate = 2 if options.way == "accumulation" else 1
    torch.manual_seed(0)
    model = tiny_clip()
    columns = captioned_images()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=options.steps,
            per_device_train_batch_size=16 // accumulate // int(os.environ.get("WORLD_SIZE", "1")),
            gradient_accumulation_steps=accumulate,
            gradient_checkpointing=not options.no_checkpointing,
            train_sampling_strategy="sequential",
            learning_rate=0.5,
            optim="sgd",
            logging_steps=1,
            label_names=["labels"],
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
        )
        data = InOrder(columns, options.steps)
        loss = WAYS[options.way](model)
        trainer = Trainer(
            model,
            args,
            collate if accumulate > 1 else None,
            train_dataset=data,
            compute_loss_func=loss,
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report(model, losses, options.weights)


if __name__ == "__main__":
    main()
