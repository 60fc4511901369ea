"""A model with a costly score, within one memory setting: every word attends over the regions of
every image.

The score is written down directly: the attention weights and attended vectors of all pairs exist at
once, 36 x 20 and 20 x width values per pair, and the model does not declare this memory. Two jobs
run, each in a fresh process: ranking images and captions in both directions, and one training step.
Prints the peak of resident memory above that of inputs and model, with the setting and without a
limit. The ranking without a limit has fewer images, because the full one does not fit into memory.

    python benchmarks/attention.py [--memory 1GB] [--images 1000] [--few 60] [--batch 256] [--width
    64] [--threads 2]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, normalize

from visavis.core.encoded import Encoded
from visavis.evaluation import evaluate, rank_scores
from visavis.losses.pair_loss import PairLoss
from visavis.models.base import Matcher, MatcherConfig, get_vectors
from visavis.objectives import Unified

REGIONS = 36
WORDS = 20
CAPTIONS = 5
UNLIMITED = "1TB"


class WordAttention(Matcher):
    """Every word attends to the regions. The score is the mean over words of the cosine with the
    attended region.

    Formula: ``mean_w cos(w, sum_r softmax_r(sharpness unit_w(relu(cos(w, r)))) r)``. Source: Lee et
    al., SCAN (2018), text to image.
    """

    name = "WordAttention"

    @dataclass(frozen=True, kw_only=True)
    class Config(MatcherConfig):
        width: int = 64

    visual_granularities = ("regions",)
    text_granularities = ("words",)

    def __init__(self, config: Config):
        super().__init__(config)
        self.visual = nn.Linear(config.visual_input_dim, config.width)
        self.text = nn.Linear(config.text_input_dim, config.width)
        self.inverse_temperature = nn.Parameter(torch.tensor(9.0))

    def parts(self) -> dict[str, list[nn.Module | nn.Parameter]]:
        return {"visual": [self.visual], "text": [self.text, self.inverse_temperature]}

    def encode_visual(self, items: Encoded) -> Encoded:
        return Encoded(normalize(self.visual(get_vectors(items)), dim=-1), items.mask)

    def encode_text(self, items: Encoded) -> Encoded:
        return Encoded(normalize(self.text(get_vectors(items)), dim=-1), items.mask)

    def score(self, visual: Encoded, text: Encoded) -> Tensor:
        assert isinstance(text.mask, Tensor)
        regions = get_vectors(visual)
        words = get_vectors(text)
        affinity = torch.einsum("vrd,twd->vtwr", regions, words).relu()
        attention = (self.inverse_temperature * normalize(affinity, dim=2)).softmax(-1)
        attended = torch.einsum("vtwr,vrd->vtwd", attention, regions)
        return (cosine_similarity(attended, words[None], dim=-1) * text.mask).sum(
            -1
        ) / text.mask.sum(-1)

    def score_pairs(self, visual: Encoded, text: Encoded) -> Tensor:
        return torch.cat(
            [self.score(visual[i : i + 1], text[i : i + 1])[0] for i in range(len(visual))]
        )


def model_and_items(
    images: int, captions: int, width: int
) -> tuple[WordAttention, Encoded, Encoded]:
    """Regions of images, and the words of their captions, which are some of the regions with noise."""
    torch.manual_seed(0)
    regions = torch.randn(images, REGIONS, width)
    words = torch.randn(images * captions, WORDS, width)
    lengths = torch.randint(WORDS // 2, WORDS + 1, (images * captions, 1))
    for number, caption_words in enumerate(words):
        caption_words.mul_(4.0).add_(regions[number // captions, torch.randint(REGIONS, (WORDS,))])
    matcher = WordAttention(
        WordAttention.Config(
            visual_input_dim=width,
            text_granularity="words",
            visual_granularity="regions",
            text_input_dim=width,
            width=width,
        )
    )
    nn.init.eye_(matcher.visual.weight)
    nn.init.eye_(matcher.text.weight)
    return matcher.eval(), Encoded(regions), Encoded(words, torch.arange(WORDS) < lengths)


def ranking(
    matcher: WordAttention, visual: Encoded, text: Encoded, memory: str
) -> dict[str, np.ndarray]:
    """The ranks of all images and captions. Without a limit, the whole matrix is scored at once."""
    ids = torch.arange(len(visual))
    both = ids, ids.repeat_interleave(len(text) // len(visual))
    if memory == UNLIMITED:
        with torch.no_grad():
            result = rank_scores(matcher.score(visual, text), *both)
    else:
        result = evaluate(visual, text, matcher.score, *both, memory=memory)
    return {"image_ranks": result.image_ranks, "text_ranks": result.text_ranks}


def step(
    matcher: WordAttention, visual: Encoded, text: Encoded, memory: str
) -> dict[str, np.ndarray]:
    """The loss of a batch, and its gradients with respect to items and parameters."""
    items = [part.vectors.requires_grad_() for part in (visual, text)]  # type: ignore[union-attr]
    loss = PairLoss(Unified(), score=matcher.score, memory=memory)(visual, text)
    loss.backward()
    gradients = {
        name: part.grad
        for name, part in (
            ("visual", items[0]),
            ("text", items[1]),
            ("sharpness", matcher.inverse_temperature),
        )
    }
    return {"loss": loss.detach().numpy()} | {
        name: gradient.numpy() for name, gradient in gradients.items() if gradient is not None
    }


JOBS = {"ranking": ranking, "step": step}


def resident() -> int:
    """The resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def measure(arguments: argparse.Namespace) -> None:
    """Run one job once, save its results, and write one JSON line."""
    torch.set_num_threads(arguments.threads)
    captions = CAPTIONS if arguments.job == "ranking" else 1
    matcher, visual, text = model_and_items(arguments.images, captions, arguments.width)
    with torch.no_grad():
        visual = matcher.encode_visual(visual)
        text = matcher.encode_text(text)
    before = resident()
    start = time.perf_counter()
    results = JOBS[arguments.job](matcher, visual, text, arguments.memory)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    np.savez(arguments.out, allow_pickle=False, **results)
    sys.stdout.write(
        json.dumps({"seconds": seconds, "bytes": peak - before, "inputs": before}) + "\n"
    )


def run(
    job: str, images: int, memory: str, arguments: argparse.Namespace, folder: Path
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Run a job in its own process, and return its costs and its results."""
    out = folder / f"{job}-{images}-{memory}.npz"
    options = {
        "job": job,
        "images": images,
        "memory": memory,
        "width": arguments.width,
        "threads": arguments.threads,
        "out": out,
    }
    command = [
        sys.executable,
        __file__,
        *(part for name, value in options.items() for part in (f"--{name}", str(value))),
    ]
    costs = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    with np.load(out) as arrays:
        return costs, dict(arrays)


def difference(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest difference of any result, relative to its largest value."""
    return max(
        float(np.abs(actual[name] - expected[name]).max() / np.abs(expected[name]).max())
        for name in expected
    )


def compare(arguments: argparse.Namespace) -> None:
    """Both jobs within the memory and without a limit."""
    jobs = (("ranking", arguments.images), ("ranking", arguments.few), ("step", arguments.batch))
    with tempfile.TemporaryDirectory() as folder:
        for job, images in jobs:
            results = {}
            for memory in (arguments.memory, UNLIMITED):
                if job == "ranking" and images == arguments.images and memory == UNLIMITED:
                    continue
                costs, results[memory] = run(job, images, memory, arguments, Path(folder))
                size = f"{images:,} x {images * CAPTIONS if job == 'ranking' else images:,}"
                limit = "no limit" if memory == UNLIMITED else memory
                line = f"{job:8s} {size:14s} {limit:9s} {costs['bytes'] / 1e9:6.3f} GB above the inputs, {costs['seconds']:6.1f} s"
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
            if len(results) == 2:
                sys.stdout.write(
                    f"{'':33s} largest relative difference {difference(*results.values()):.1e}\n"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("images", 1000),
        ("few", 60),
        ("batch", 256),
        ("width", 64),
        ("threads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        measure(arguments)
    else:
        compare(arguments)


if __name__ == "__main__":
    main()
