"""Fine-tuning CLIP on 200 pairs: what each method gains on a new style and loses on the old one.

    python studies/clip_small.py [--out runs/clip-small] [--seeds 3] [--rows full lora wise
    small-data] [--shares]

A tiny CLIP of ``transformers`` (1.1 million weights) is trained from random weights on 6,000
synthetic scenes. Then the style changes: each color is rendered differently, and each color and
shape has a word that the model has never seen. There are 100 images of this style with two captions
each, sampled again for every seed. Each variant of the recipe ``clip`` trains on them. Its learning
rate is the best of three by validation RSUM on images of seed 0, which are not tested.

Prints R@10, the mean of both directions, on 300 test images of each style, with mean and standard
deviation over seeds: the part that is kept of the old style, the gain on the new one, and the share
of the gain of full tuning. Finished runs in the folder are used again, and stopped ones resume.
Takes about 9 minutes of one core for the old style and a quarter of a minute for each of 30 runs.

``--shares`` prints what ``clip/small-data`` keeps and gains at every weight of interpolation, on as
many other styles and on the validation images of the old one. The largest weight of the recipe was
chosen by this: the largest whose mean kept, minus one standard error over styles, is at least 95 %.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import visavis
from visavis.core import storage
from visavis.core.errors import VisavisError
from visavis.data.synthetic import write_synthetic_scenes
from visavis.evaluation import Evaluation
from visavis.models.clip.model import export_to_transformers
from visavis.training.stop_signals import Stopped

SIZE = 64
WIDTH = 128
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
OLD = {"num_train": 6000, "num_val": 200, "num_test": 300, "size": SIZE, "seed": 1}
NEW = {
    "num_train": 100,
    "num_val": 100,
    "num_test": 300,
    "size": SIZE,
    "captions_per_image": 2,
    "style": "glass",
}
PRETRAINING: dict[str, Any] = {
    "model.scale": "fixed",
    "objective": "InfoNCE(tau=0.05)",
    "epochs": 12,
    "training.batch_size": 128,
    "training.captions_per_image": 1,
    "training.autocast": True,
    "training.metric_batches": 1,
    "phases.0.optimizer": {"name": "AdamW", "lr": 1e-3, "weight_decay": 0.05, "no_decay": []},
}
TUNING: dict[str, Any] = {
    "training.batch_size": 50,
    "training.metric_batches": 1,
    "epochs": 15,
    "phases.0.optimizer.no_decay": [],
}
RATES = {
    "linear": (1e-4, 5e-4, 2e-3),
    "full": (3e-4, 1e-3, 3e-3),
    "wise": (3e-4, 1e-3, 3e-3),
    "lora": (3e-3, 1e-2, 3e-2),
    "small-data": (3e-3, 1e-2, 3e-2),
}
"""Learning rates from which a variant chooses, on validation. The recipes' own rates are for models
a hundred times wider.
"""
ALPHAS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/clip-small"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", default=list(RATES))
    parser.add_argument("--pretrain-only", action="store_true")
    parser.add_argument(
        "--shares",
        action="store_true",
        help="Print what is kept and gained at every interpolation weight, on other styles.",
    )
    options = parser.parse_args()
    old = write_scenes_once(options.out / "old", **OLD)
    base = pretrained(options.out, old)
    if options.pretrain_only:
        return
    tuning_scenes, *scene_folders = (
        write_scenes_once(options.out / f"new-{seed}", seed=100 + seed, **NEW)
        for seed in range(options.seeds + 1)
    )
    if options.shares:
        other_scenes = {
            seed: write_scenes_once(options.out / f"new-{seed}", seed=100 + seed, **NEW)
            for seed in range(11, 11 + options.seeds)
        }
        sys.stdout.write(
            "\n".join(
                by_share(
                    options.out,
                    base,
                    old,
                    other_scenes,
                    best_rate("small-data", options.out, tuning_scenes, base),
                )
            )
            + "\n"
        )
        return
    scenes_by_seed = dict(enumerate(scene_folders, 1))
    rates = {row: best_rate(row, options.out, tuning_scenes, base) for row in options.rows}
    before = (
        r10_of(base, old),
        {seed: r10_of(base, new) for seed, new in scenes_by_seed.items()},
    )
    results_by_row: dict[str, list[tuple[float, float]]] = {row: [] for row in options.rows}
    for seed, new in scenes_by_seed.items():
        for row in options.rows:
            overrides = {
                **tuning(base, rates[row]),
                "seed": seed,
                "evaluation.forgetting": str(old),
            }
            result = train_once(f"clip/{row}", options.out / f"{row}-{seed}", new, overrides)
            results_by_row[row].append(
                (r10(result["forgetting"]["after"]), r10(result) - before[1][seed])
            )
            alpha = result.get("interpolation", {}).get("alpha", "")
            sys.stderr.write(
                f"{row} at {rates[row]:g}, seed {seed}: old {results_by_row[row][-1][0]:.1f}, gain "
                f"{results_by_row[row][-1][1]:+.1f} {alpha}\n"
            )
    sys.stdout.write("\n".join(table(before, results_by_row)) + "\n")


def by_share(
    out: Path, base: Path, old: Path, scenes_by_seed: dict[int, Path], rate: float
) -> Iterator[str]:
    """One row per interpolation weight: R@10 kept on the validation images of the old style, and
    gained on the test images of the new ones.
    """
    old_r10 = r10_of(base, old, "val")
    new_r10 = {seed: r10_of(base, new) for seed, new in scenes_by_seed.items()}
    yield "| interpolation weight | old style kept | gain on the new style |\n|---:|---:|---:|"
    for alpha in ALPHAS:
        kept_percents = []
        gains = []
        for seed, new in scenes_by_seed.items():
            run = out / f"small-data-{seed}-share-{alpha:g}"
            train_once(
                "clip/small-data",
                run,
                new,
                {**tuning(base, rate), "seed": seed, "interpolation.alphas": [alpha]},
            )
            kept_percents.append(100 * r10_of(run, old, "val") / old_r10)
            gains.append(r10_of(run, new) - new_r10[seed])
        yield f"| {alpha:g} | {spread(tuple(kept_percents))} % | {spread(tuple(gains))} |"


def tuning(base: Path, rate: float) -> dict[str, Any]:
    return {
        **TUNING,
        "visual.encoder": str(base),
        "text.encoder": str(base),
        "phases.0.optimizer.lr": rate,
    }


def best_rate(row: str, out: Path, scenes: Path, base: Path) -> float:
    """The learning rate with the best validation RSUM."""
    rsum_by_rate = {
        rate: train_once(f"clip/{row}", out / f"{row}-at-{rate:g}", scenes, tuning(base, rate))[
            "validation_rsum"
        ]
        for rate in RATES[row]
    }
    sys.stderr.write(
        f"{row}: validation RSUM "
        + ", ".join(f"{rsum:.1f} at {rate:g}" for rate, rsum in rsum_by_rate.items())
        + "\n"
    )
    return max(rsum_by_rate, key=lambda rate: float(rsum_by_rate[rate]))


def write_scenes_once(folder: Path, **settings: Any) -> Path:
    return (
        folder
        if (folder / "captions.jsonl").exists()
        else write_synthetic_scenes(folder, **settings)
    )


def pretrained(out: Path, old: Path) -> Path:
    """The folder of the model that was trained on the old style."""
    initial_folder = out / "begun"
    pretrained_folder = out / "base"
    if not pretrained_folder.exists():
        if not (initial_folder / "config.json").exists():
            write_initial_clip(
                initial_folder,
                sorted(
                    {
                        word
                        for line in captions(out, old)
                        for word in re.findall(r"\w+|[^\w\s]+", line.lower())
                    }
                ),
            )
        encoders = {"visual.encoder": str(initial_folder), "text.encoder": str(initial_folder)}
        train_once("clip/full", out / "pretraining", old, {**PRETRAINING, **encoders})
        export_to_transformers(visavis.load(out / "pretraining").matcher, pretrained_folder)
    return pretrained_folder


def captions(out: Path, old: Path) -> Iterator[str]:
    """The words of both styles, so that the tokenizer has ids for words that only the new style
    contains.
    """
    for folder in (
        old,
        write_scenes_once(
            out / "words", num_train=300, num_val=0, num_test=0, seed=99, size=SIZE, style="glass"
        ),
    ):
        for line in storage.read_json_lines(folder / "captions.jsonl", dict[str, Any]):
            yield from line["captions"]


def write_initial_clip(folder: Path, words: list[str]) -> None:
    """Create a small CLIP with random weights, its preprocessing and a tokenizer of these words."""
    shared = {"hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 2 * WIDTH}
    text = shared | {"num_hidden_layers": 3, "max_position_embeddings": 48}
    vision = shared | {"num_hidden_layers": 4, "image_size": SIZE, "patch_size": 8}
    write_clip_folder(folder, words, text, vision_config=vision, projection_dim=WIDTH)


def write_clip_folder(
    folder: Path, words: list[str], text_config: dict[str, Any], kind: str = "CLIP", **config: Any
) -> None:
    """Write a CLIP or SigLIP with random weights, its preprocessing and a tokenizer of some words.

    Args:
        folder: New folder in the format of transformers.
        words: Words of the tokenizer.
        text_config: Sizes of the text encoder. By default, the vocabulary has the size of the
            tokenizer's.
        kind: "CLIP" or "Siglip".
        **config: Other arguments of ``CLIPConfig`` or ``SiglipConfig``.
    """
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    token_ids = {word: token_id for token_id, word in enumerate([*SPECIAL.values(), *words])}
    text = {
        "vocab_size": len(token_ids),
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
    } | text_config
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}Model")(config_class(text_config=text, **config))
    size = model.vision_model.config.image_size
    tokenizer = Tokenizer(models.WordLevel(token_ids, unk_token=SPECIAL["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[BOS] $A [EOS]", special_tokens=[("[BOS]", 2), ("[EOS]", 3)]
    )
    pixels = {
        "do_resize": True,
        "size": {"height": size, "width": size},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(
        folder
    )
    storage.write_json(folder / "preprocessor_config.json", pixels)


def train_once(recipe: str, run: Path, data: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The result of a run. A finished run is read, a stopped run resumes, a new run starts."""
    if not (run / "result.json").exists():
        if (run / "run.toml").exists():
            visavis.train(resume=run)
        else:
            visavis.train(
                recipe, data=data, out=run, overrides={**overrides, "training.threads": 1}
            )
    return storage.read_json(run / "result.json", dict[str, Any])


def r10_of(model: Path, data: Path, split: str = "test") -> float:
    evaluation = visavis.evaluate(model, data=data, split=split)
    assert isinstance(evaluation, Evaluation)
    return r10(evaluation.metrics)


def r10(metrics: dict[str, Any]) -> float:
    return float(metrics["i2t_r10"] + metrics["t2i_r10"]) / 2


def table(
    before: tuple[float, dict[int, float]], results_by_row: dict[str, list[tuple[float, float]]]
) -> Iterator[str]:
    old = before[0]
    new = statistics.mean(before[1].values())
    yield f"| R@10 | old style | kept | gain on the new style | share of the gain of full tuning |\n|---{'|---:' * 4}|"
    yield f"| zero-shot | {old:.1f} | 100 % | 0 ({new:.1f}) | 0 % |"
    full = (
        statistics.mean(gain for _, gain in results_by_row["full"])
        if "full" in results_by_row
        else float("nan")
    )
    for row, measures in results_by_row.items():
        old_r10s, gains = zip(*measures, strict=True)
        kept_percent = 100 * statistics.mean(old_r10s) / old
        share = (
            f"{100 * statistics.mean(gains) / full:.0f} %"
            if full > 0
            else "full tuning gains nothing"
        )
        yield f"| clip/{row} | {spread(old_r10s)} | {kept_percent:.0f} % | {spread(gains)} | {share} |"


def spread(values: tuple[float, ...]) -> str:
    return f"{statistics.mean(values):.1f}" + (
        f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    )


if __name__ == "__main__":
    try:
        main()
    except VisavisError as error:
        sys.exit(str(error))
    except Stopped as stopped:
        sys.exit(f"Stopped in {stopped}. Everything is saved. Run the same command to resume.")
