"""Updating an index compared with building it: a folder of images, of which one in a hundred
changes and as many move.

    python benchmarks/index.py [--images 10000] [--seed 0]
    python benchmarks/index.py --loop [--images 200] [--size 1600 1200] [--repeats 3]

The images are synthetic scenes, and the model is a small one trained briefly on others. Prints the
time of the first index, of a second call that finds no change, and of one after the changes, as
shares of the first. Also prints whether that index equals a rebuilt one.

``--loop`` compares indexing of photos with a bare loop of transformers over the same files: open,
convert, preprocess and encode 32 photos at a time. The models are MobileNetV2 and CLIP ViT-B/32 of
random weights. Both run in turns in one process, and the text side of the model was exported before.
Prints photos per second and the ratio of seconds of the stages reading, encoding and writing. Then
it prints the ratios of the whole command, which also loads the model and writes its text side, in
seconds and in processor seconds. All values are medians, with the smallest and largest.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from data_path import write_photos
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn.functional import normalize

import visavis
from visavis.data.synthetic import write_synthetic_scenes
from visavis.retrieval.open_index import open_index

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
    items = index.store.table().items()
    vectors = index.store.vectors([item.key for item in items])
    assert isinstance(vectors, np.ndarray)
    return items, vectors


LOOP_BATCH = 32
"""Photos that the bare loop encodes at once."""
SPECIAL = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]"}


def write_mobilenet(folder: Path) -> tuple[Path, Path]:
    """A run with MobileNetV2 of random weights as its encoder. Returns it and the encoder."""
    encoder = folder / "mobilenet"
    transformers.MobileNetV2Model(transformers.MobileNetV2Config()).save_pretrained(encoder)
    transformers.MobileNetV2ImageProcessor().save_pretrained(encoder)
    scenes = write_synthetic_scenes(
        folder / "scenes", num_train=64, num_val=8, num_test=8, size=64, seed=0
    )
    recipe = folder / "mobilenet.toml"
    recipe.write_text(RECIPE.replace('encoder = "scenes"', f'encoder = "{encoder}"'))
    return visavis.train(recipe, data=scenes, out=folder / "mobilenet-run").run, encoder


def write_clip(folder: Path) -> tuple[Path, Path]:
    """CLIP ViT-B/32 of random weights, whose tokenizer knows a few words."""
    place = folder / "clip"
    words = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "a", "red", "star"]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[BOS] $A [EOS]", special_tokens=[("[BOS]", 2), ("[EOS]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", model_max_length=77, **SPECIAL
    ).save_pretrained(place)
    config = transformers.CLIPConfig(
        text_config={"eos_token_id": 3, "bos_token_id": 2, "pad_token_id": 0}
    )
    transformers.CLIPModel(config).save_pretrained(place)
    transformers.CLIPImageProcessor().save_pretrained(place)
    return place, place


def bare_loop(encoder: Path) -> Callable[[list[Path]], None]:
    """The loop that a user would write."""
    processor = transformers.AutoImageProcessor.from_pretrained(encoder)
    model = transformers.AutoModel.from_pretrained(encoder).eval()

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        if isinstance(model, transformers.CLIPModel):
            return model.visual_projection(model.vision_model(pixels).pooler_output)
        return model(pixels).pooler_output

    @torch.inference_mode()
    def run(photos: list[Path]) -> None:
        for start in range(0, len(photos), LOOP_BATCH):
            opened = [
                Image.open(path).convert("RGB") for path in photos[start : start + LOOP_BATCH]
            ]
            normalize(encode(processor(images=opened, return_tensors="pt")["pixel_values"]))

    return run


def compare_with_loop(folder: Path, options: argparse.Namespace) -> None:
    """Print the speed of indexing, as a ratio to the bare loop."""
    photos = folder / "photos"
    photos.mkdir()
    write_photos(photos, options.images, tuple(options.size), options.seed, None)
    (photos / "captions.jsonl").unlink()
    files = sorted(photos.iterdir())
    few = folder / "few-photos"
    few.mkdir()
    for file in files[:2]:
        shutil.copy(file, few)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name, write in (("MobileNetV2", write_mobilenet), ("CLIP ViT-B/32", write_clip)):
        model, encoder = write(folder)
        loop = bare_loop(encoder)
        # What is done once per model or process, such as the export of its text side.
        loop(files[:LOOP_BATCH])
        visavis.index(model, few, out=folder / f"few-{encoder.name}")
        ratios: dict[str, list[float]] = {"seconds": [], "stages": [], "processor": []}
        speeds = list[float]()
        for number in range(options.repeats):
            out = folder / f"index-{encoder.name}-{number}"
            before = sum(os.times()[:4])
            took, report = timed(partial(visavis.index, model, photos, out=out))
            between = sum(os.times()[:4])
            loop_took, _ = timed(partial(loop, files))
            speeds.append(report.files_per_second)
            ratios["seconds"].append(took / loop_took)
            ratios["stages"].append(len(files) / report.files_per_second / loop_took)
            ratios["processor"].append((between - before) / (sum(os.times()[:4]) - between))
        shown = {
            kind: f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            for kind, values in ratios.items()
        }
        print(
            f"{name}: {statistics.median(speeds):.0f} photos a second, {shown['stages']} x the "
            f"seconds of the bare loop. As a whole command {shown['seconds']} x, and "
            f"{shown['processor']} x its processor seconds",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loop", action="store_true", help="compare with a bare loop instead")
    parser.add_argument("--size", type=int, nargs=2, default=(1600, 1200), help="of the photos")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    options.images = options.images or (200 if options.loop else 10_000)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.loop:
            compare_with_loop(folder, options)
            return
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
