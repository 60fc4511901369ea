"""The undamaged files: photographs with captions, encoders, cached features, recipes, and runs that
ended or were stopped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch
import transformers

import visavis
from visavis.core.progress import NoProgress, TrainingStep
from visavis.data.dataset_reader import open_dataset
from visavis.training.stop_signals import Stopped

RECIPE = """
name = "small"
seed = 3
data = {{ path = "{photos}" }}
visual = {visual}
text = {text}
model = {model}
training = {{ batch_size = 8, threads = 1, checkpoint_s = 0, metric_batches = 1 }}

[[phases]]
epochs = 4
objective = "VLC(gamma=20)"
optimizer = {{ name = "AdamW", lr = 1e-3 }}
"""


class StopAt(NoProgress):
    """Simulates Ctrl-C after ``last`` steps."""

    def __init__(self, last: int):
        self.left = last

    def training_step(self, training_step: TrainingStep) -> None:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)


def build(folder: Path) -> None:
    """Create the undamaged files."""
    os.environ["VISAVIS_CACHE"] = str(folder / "cache")
    # Background jobs of a shell ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder.mkdir(parents=True)
    os.chdir(folder)
    data = open_dataset("flickr8k").split("train")
    (folder / "photos").mkdir()
    images = []
    for i, split in enumerate(["train"] * 24 + ["val"] * 8 + ["test"] * 8):
        image = data.images[i]
        assert image.location is not None
        (folder / "photos" / image.name).write_bytes(image.location.read())
        images.append(
            {
                "filename": image.name,
                "split": split,
                "sentences": [{"raw": data.captions[c]} for c in data.captions_of[i][:3]],
            }
        )
    (folder / "photos" / "dataset.json").write_text(json.dumps({"images": images}, indent=1))
    tool = Path(__file__).resolve().parents[2] / "tools" / "mobilenet_folder.py"
    subprocess.run(
        [sys.executable, tool, "--out", folder / "encoders" / "visual"],
        check=True,
        capture_output=True,
    )
    words = sorted(
        {
            word
            for image in images
            for sentence in image["sentences"]
            for word in re.findall(r"\w+", sentence["raw"].lower())
        }
    )
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *words])
    )
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    bert = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=len(words) + 7))
    bert.save_pretrained(folder / "encoders" / "text")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(
        folder / "encoders" / "text"
    )
    frozen = '{{ encoder = "{}", granularity = "pooled" }}'
    recipes = {
        "frozen": (
            frozen.format("encoders/visual"),
            frozen.format("encoders/text"),
            '{ kind = "Heads", embedding_dim = 32, hidden_dim = 48, dropout = 0.1 }',
        ),
        "pixels": (
            '{ encoder = "small-cnn", granularity = "pixels" }',
            "{ min_count = 1 }",
            '{ kind = "VSE++", embedding_dim = 16, word_dim = 8 }',
        ),
    }
    for name, (visual, text, model) in recipes.items():
        (folder / f"{name}.toml").write_text(
            RECIPE.format(photos="photos", visual=visual, text=text, model=model)
        )
    visavis.train("frozen.toml", out="runs/finished", progress=NoProgress())
    for recipe, name in (("frozen.toml", "stopped"), ("pixels.toml", "pixels")):
        try:
            visavis.train(recipe, out=f"runs/{name}", progress=StopAt(14))
        except Stopped:
            continue
