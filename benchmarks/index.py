"""Updating an index compared with building it: a folder of images, of which one in a hundred
changes and as many move.

    python benchmarks/index.py [--images 10000] [--seed 0]

The images are synthetic scenes, and the model is a small one trained briefly on others. Prints the
time of the first index, of a second call that finds no change, and of one after the changes, as
shares of the first. Also prints whether that index equals a rebuilt one.
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
from visavis.data.synthetic import write_synthetic_scenes
from visavis.retrieval.open_index import open_index
from visavis.retrieval.stores.arrow_tables import items_from_table

RECIPE = """
name = "small"
visual = { encoder = "scenes", granularity = "pooled" }
text = { encoder = "vocabulary", min_count = 1 }
model = { kind = "VSE++", embedding_dim = 256, word_dim = 32 }
training = { batch_size = 64 }
[[phases]]
epochs = 1
objective = "Unified(gamma=30)"
"""


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    value = act()
    return time.perf_counter() - started, value


def change(images: list[Path], random: np.random.Generator) -> None:
    """Draw a colored corner into one image in a hundred, and rename as many others."""
    share = max(1, len(images) // 100)
    changed = random.choice(len(images), 2 * share, replace=False)
    for number in changed[:share]:
        with Image.open(images[number]) as opened:
            image = opened.convert("RGB")
        image.paste(tuple(random.integers(0, 256, 3).tolist()), (0, 0, 16, 16))
        image.save(images[number])
    for number in changed[share:]:
        os.rename(images[number], images[number].with_stem(f"moved-{number}"))


def contents(folder: Path) -> tuple[list[Any], np.ndarray]:
    index = open_index(folder)
    items = items_from_table(index.store.table())
    vectors = index.store.vectors([item.key for item in items])
    assert isinstance(vectors, np.ndarray)
    return items, vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        scenes = write_synthetic_scenes(
            folder / "few",
            num_train=200,
            num_val=20,
            num_test=20,
            captions_per_image=2,
            size=64,
            seed=options.seed,
        )
        (folder / "recipe.toml").write_text(RECIPE)
        run = visavis.train(folder / "recipe.toml", data=scenes, out=folder / "run").run
        many = write_synthetic_scenes(
            folder / "many",
            num_train=0,
            num_val=0,
            num_test=options.images,
            captions_per_image=1,
            size=64,
            seed=options.seed + 1,
        )
        photos = many / "images"
        first, built = timed(lambda: visavis.index(run, photos, out=folder / "index"))
        print(
            f"{built.num_encoded:,} images: {first:.1f} s, {built.num_encoded / first:.0f} a second"
        )
        again, _ = timed(lambda: visavis.index(run, photos, out=folder / "index"))
        print(f"nothing changed: {again:.1f} s, {100 * again / first:.1f} %")
        change(sorted(photos.iterdir()), np.random.default_rng(options.seed))
        later, changed = timed(lambda: visavis.index(run, photos, out=folder / "index"))
        print(
            f"{changed.num_encoded:,} changed, {changed.num_moved:,} moved: {later:.1f} s, "
            f"{100 * later / first:.1f} %"
        )
        visavis.index(run, photos, out=folder / "rebuilt")
        items, vectors = contents(folder / "index")
        rebuilt_items, rebuilt_vectors = contents(folder / "rebuilt")
        print(
            f"equal items: {items == rebuilt_items}, largest difference of vectors: "
            f"{np.abs(vectors - rebuilt_vectors).max():.1e}"
        )


if __name__ == "__main__":
    main()
