"""SCAN over many images and captions: blocks without attended vectors, compared with a loop over
captions that forms each of them.

    python benchmarks/scan.py [--images 1000] [--captions 5000] [--longest 12] [--looped 200]
    [--memory 1GB] [--threads 2]

36 regions, 6 to 12 words, the last caption of ``--longest`` words, width 1,024, random numbers. The
loop scores some of the captions with all images in sequence, as the released code of SCAN does. Its
time is scaled to all captions. Each method runs in its own process, one after the other. Prints the
peak memory of each beyond its items, the largest difference of the scores that both computed, and
the speedup of the blocks.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, leaky_relu, normalize

from visavis.core.encoded import Encoded
from visavis.models.base import get_vectors
from visavis.models.image_text.cross_attention import SCAN
from visavis.models.inference import score_all_pairs

REGIONS = 36
WORDS = 12
WIDTH = 1024
METHODS = ("blocks", "loop")


def items(images: int, captions: int, longest: int) -> tuple[SCAN, Encoded, Encoded]:
    """A matcher, and encoded images and captions: unit regions, and 6 to 12 unit words per caption,
    except for the last.
    """
    torch.manual_seed(0)
    matcher = SCAN(
        SCAN.Config(
            visual_input_dim=8, text_granularity="words", text_input_dim=8, embedding_dim=WIDTH
        )
    ).eval()
    lengths = torch.randint(WORDS // 2, WORDS + 1, (captions, 1))
    lengths[-1] = longest
    mask = torch.arange(max(WORDS, longest)) < lengths
    words = normalize(torch.randn(*mask.shape, WIDTH), dim=-1) * mask[..., None]
    return (
        matcher,
        Encoded(normalize(torch.randn(images, REGIONS, WIDTH), dim=-1)),
        Encoded(words, mask),
    )


def looped(matcher: SCAN, visual: Encoded, text: Encoded) -> Tensor:
    """The scores ``[V, T]``, one caption at a time, with the attended vector of each word in every
    image.
    """
    regions = get_vectors(visual)
    sharpness = matcher.config.inverse_temperature
    assert isinstance(text.mask, Tensor)
    columns = []
    for caption, is_word in zip(get_vectors(text), text.mask, strict=True):
        words = caption[is_word].expand(len(regions), -1, -1)
        products = leaky_relu(regions @ words.transpose(1, 2), 0.1)
        weights = (sharpness * normalize(products, dim=2)).softmax(1)
        attended = weights.transpose(1, 2) @ regions
        columns.append(cosine_similarity(words, attended, dim=2).mean(1))
    return torch.stack(columns, 1)


def resident() -> int:
    """The resident memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
        "SC_PAGE_SIZE"
    )


def measure(options: argparse.Namespace) -> None:
    """Score with one method, save the scores of the first captions, and write one JSON line."""
    torch.set_num_threads(options.threads)
    matcher, visual, text = items(options.images, options.captions, options.longest)
    with torch.inference_mode():
        before = resident()
        started = time.perf_counter()
        worked = time.process_time()
        scores = (
            score_all_pairs(matcher, visual, text, options.memory)
            if options.method == "blocks"
            else looped(matcher, visual, text[: options.looped])
        )
        seconds = time.perf_counter() - started
        cpu = time.process_time() - worked
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    np.save(options.out, scores[:, : options.looped].numpy())
    sys.stdout.write(
        json.dumps(
            {"seconds": seconds, "cpu": cpu, "captions": scores.shape[1], "peak_bytes": peak_bytes}
        )
        + "\n"
    )


def compare(options: argparse.Namespace) -> None:
    """Run both methods and print the comparison."""
    costs = dict[str, dict[str, Any]]()
    scores = dict[str, np.ndarray]()
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS:
            out = Path(folder) / f"{method}.npy"
            settings = {
                name: value
                for name, value in vars(options).items()
                if name not in ("method", "out")
            }
            command = [
                sys.executable,
                __file__,
                "--method",
                method,
                "--out",
                str(out),
                *(f"--{name}={value}" for name, value in settings.items()),
            ]
            costs[method] = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            scores[method] = np.load(out)
            cost = costs[method]
            both = " and ".join(
                f"{1000 * cost[kind] / cost['captions']:.2f} ms" for kind in ("seconds", "cpu")
            )
            line = f"{method:6s} {cost['captions']:6,} captions in {cost['seconds']:6.1f} s, {both} of CPU each, {cost['peak_bytes'] / 1e9:.2f} GB peak"
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    seconds_per_caption = {
        method: costs[method]["seconds"] / costs[method]["captions"] for method in METHODS
    }
    loop_seconds = seconds_per_caption["loop"] * options.captions
    difference = np.abs(scores["blocks"] - scores["loop"]).max()
    sys.stdout.write(
        f"{options.images:,} x {options.captions:,}: {costs['blocks']['seconds']:.1f} s by blocks "
        f"within {options.memory}, "
        f"{loop_seconds:.0f} s by the loop (scaled): "
        f"{seconds_per_caption['loop'] / seconds_per_caption['blocks']:.1f} times as fast, largest "
        f"difference {difference:.1e}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (
        ("images", 1000),
        ("captions", 5000),
        ("longest", WORDS),
        ("looped", 200),
        ("threads", 2),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--method", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    (measure if options.method else compare)(options)


if __name__ == "__main__":
    main()
