"""sentence-transformers' trainer with two data sets, each with its loss, on several processes,
against one process.

python studies/peers/sentence_transformers_sets.py, or under torchrun --nproc-per-node 2. --way
selects the losses.
"""

import argparse
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from reporting import report
from tiny_models import sentences, tiny_sentence_transformer

from visavis import LearnedScale
from visavis.integrations.sentence_transformers import VisavisLoss
from visavis.objectives import NTXent, Unified

UNIFIED = Unified(margin=0.2, gamma=10, reduction="half_mean")
COLUMNS = sentences()
SETS = {
    "labelled": Dataset.from_dict(COLUMNS),
    "with negatives": Dataset.from_dict(
        {
            "anchor": COLUMNS["anchor"],
            "positive": COLUMNS["positive"],
            "n": COLUMNS["positive"][::-1],
        }
    ),
}
WAYS = {
    "one set": lambda model: VisavisLoss(model, UNIFIED),
    "mini batches": lambda model: VisavisLoss(model, UNIFIED, mini_batch_size=3),
    "a learned scale": lambda model: VisavisLoss(model, NTXent(), scale=LearnedScale(20.0)),
    "a loss for each set": lambda model: dict(
        zip(SETS, (VisavisLoss(model, UNIFIED), VisavisLoss(model, NTXent(), 20.0)), strict=True)
    ),
    "one loss for both sets": lambda model: VisavisLoss(model, UNIFIED),
    "no gathering": lambda model: {
        name: VisavisLoss(model, UNIFIED, gather=False) for name in SETS
    },
}
WITH_SEVERAL_SETS = ("a loss for each set", "one loss for both sets", "no gathering")


def trained(way: str, folder: str, *, steps: int, rows: int) -> tuple[torch.nn.Module, list[float]]:
    """The model after the steps, and the log."""
    torch.manual_seed(0)
    model = tiny_sentence_transformer()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # processes draw numbers of their own
    data = DatasetDict(SETS) if way in WITH_SEVERAL_SETS else SETS["labelled"]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    args = SentenceTransformerTrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=rows // processes,
        learning_rate=0.5,
        optim="sgd",  # Adam divides by gradients, so that rounding errors grow
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        multi_dataset_batch_sampler="round_robin",
    )
    trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=WAYS[way](model))
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--way", choices=WAYS, default="one set")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16, help="of a step, over all processes")
    parser.add_argument("--weights", type=Path, help="where the first process leaves the weights")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model, losses = trained(options.way, folder, steps=options.steps, rows=options.rows)
    for warning in caught:
        if "compare" in str(warning.message):
            print(f"reported: {warning.message}", flush=True)
    report(model, losses, options.weights)


if __name__ == "__main__":
    main()
