"""Bringing an index up to date against making it: a folder of pictures, of which one in a hundred changes and as many move.

    python benchmarks/index.py [--pictures 10000] [--seed 0]

The pictures are drawn scenes, the model a small one trained for a moment on others. Printed: the seconds of the first index, of a second
call that finds nothing to do, and of one after the changes, as shares of the first; and whether that index equals one made anew.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import visavis
from visavis.data.scenes import write_scenes
from visavis.retrieval.index import Index

RECIPE = """
name = "for-a-moment"
visual = { tower = "scenes", view = "pooled" }
text = { tower = "vocabulary", min_count = 1 }
model = { kind = "VSE++", width = 256, word_width = 32 }
training = { batch_size = 64 }
[[phases]]
epochs = 1
objective = "Unified(gamma=30)"
"""


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = act()
    return time.perf_counter() - started, value


def change(pictures: list[Path], random: np.random.Generator) -> None:
    """One picture in a hundred gets a colored corner, and as many another name."""
    share = max(1, len(pictures) // 100)
    chosen = random.choice(len(pictures), 2 * share, replace=False)
    for number in chosen[:share]:
        with Image.open(pictures[number]) as opened:
            picture = opened.convert("RGB")
        picture.paste(tuple(random.integers(0, 256, 3).tolist()), (0, 0, 16, 16))
        picture.save(pictures[number])
    for number in chosen[share:]:
        os.rename(pictures[number], pictures[number].with_stem(f"moved-{number}"))


def contents(folder: Path) -> tuple[list[Any], np.ndarray]:
    index = Index.open(folder)
    items = index.store.items()
    return items, index.store.vectors([item.key for item in items])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        scenes = write_scenes(folder / "few", num_train=200, num_val=20, num_test=20, captions_per_image=2, size=64, seed=options.seed)
        (folder / "recipe.toml").write_text(RECIPE)
        run = visavis.train(folder / "recipe.toml", data=scenes, out=folder / "run").folder
        many = write_scenes(
            folder / "many", num_train=0, num_val=0, num_test=options.pictures, captions_per_image=1, size=64, seed=options.seed + 1
        )
        photos = many / "images"
        first, built = timed(lambda: visavis.index(run, photos, out=folder / "index"))
        print(f"{built.encoded:,} pictures: {first:.1f} s, {built.encoded / first:.0f} a second")
        again, _ = timed(lambda: visavis.index(run, photos, out=folder / "index"))
        print(f"nothing changed: {again:.1f} s, {100 * again / first:.1f} %")
        change(sorted(photos.iterdir()), np.random.default_rng(options.seed))
        later, changed = timed(lambda: visavis.index(run, photos, out=folder / "index"))
        print(f"{changed.encoded:,} changed, {changed.moved:,} moved: {later:.1f} s, {100 * later / first:.1f} %")
        visavis.index(run, photos, out=folder / "anew")
        (items, vectors), (others, theirs) = contents(folder / "index"), contents(folder / "anew")
        print(f"equal items: {items == others}; largest difference of vectors: {np.abs(vectors - theirs).max():.1e}")


if __name__ == "__main__":
    main()
