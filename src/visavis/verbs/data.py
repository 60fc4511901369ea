"""Verbs to use before training: data, machine and catalog."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.errors import VisavisError, nearest
from visavis.progress import Progress, Silent

if TYPE_CHECKING:
    from visavis.auditing.running import Audit
    from visavis.data.check import CheckReport
    from visavis.data.conversion import Converted
    from visavis.data.features import FeatureStore
    from visavis.environment import Fact
    from visavis.models.checkpoints import ConvertedModel


def data_check(path: str | Path, *, progress: Progress | None = None) -> CheckReport:
    """List everything that is wrong or unusual in a data set (``visavis data check``)."""
    from visavis.data import check_dataset

    progress = progress or Silent()
    return check_dataset(path, on_progress=lambda done, total: progress.work("images", done, total, 0.0))


def data_audit(
    path: str | Path,
    *,
    recipe: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    part: Sequence[str] = (),
    folds: int = 5,
    seeds: int = 3,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Audit:
    """What pictures and captions are worth: copies, captions that tell little, likely wrong pairs, what more would bring (``visavis data audit``).

    recipe, overrides: as of ``train``; whose encoders, model and objective are asked. part: some of "duplicates", "captions", "pairs" and
    "curve"; default all. folds: of the cross-validation that finds wrong pairs. seeds: of the learning curve. What was computed is kept in
    the cache, so that an interrupted call goes on.
    """
    from visavis.auditing.running import audit
    from visavis.training.overrides import parse_override

    settings = dict(overrides) if isinstance(overrides, dict) else dict(parse_override(text) for text in overrides)
    settings |= {"data.skip_bad": True} if skip_bad else {}
    return audit(path, recipe, settings, part, folds, seeds, progress or Silent())


def data_convert(sources: Sequence[str | Path], out: str | Path, *, progress: Progress | None = None) -> Converted:
    """Published features of videos, as pickles or .h5 files, into stores and lists that training reads (``visavis data convert``).

    sources: each ``PATH``, or ``NAME=PATH`` to name an expert. out: a new folder, written as a whole or not at all. Nothing is unpickled.
    """
    from visavis.data.conversion import convert_features

    return convert_features(sources, out, progress)


def data_scenes(
    out: str | Path,
    *,
    moving: bool = False,
    num_train: int = 2000,
    num_val: int = 200,
    num_test: int = 400,
    size: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Draw a captioned world into a new folder ``out``, a data set like any other (``visavis data scenes``).

    moving: clips with experts of which some are missing, instead of pictures. num_train, num_val, num_test: images or clips of each split.
    size: pixels of a side; 0: 96 for pictures, and no frames of clips. The same arguments give the same bytes.
    """
    from visavis.data.scenes import write_moving_scenes, write_scenes

    progress, started = progress or Silent(), time.perf_counter()

    def on_progress(done: int, total: int) -> None:
        progress.work("clips" if moving else "scenes", done, total, done / (time.perf_counter() - started))

    if moving:
        return write_moving_scenes(
            out, num_train=num_train, num_val=num_val, num_test=num_test, size=size, seed=seed, on_progress=on_progress
        )
    return write_scenes(out, num_train=num_train, num_val=num_val, num_test=num_test, size=size or 96, seed=seed, on_progress=on_progress)


def features(
    path: str | Path,
    *,
    visual: str | None = None,
    text: str | None = None,
    view: str = "pooled",
    text_view: str = "pooled",
    crops: int = 1,
    frames_per_second: float = 0.0,
    out: str | Path | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> list[FeatureStore]:
    """Cache the features of frozen encoders for a data set: images by ``visual``, captions by ``text``; an interrupted call resumes.

    view: of images, "pooled" or "grid" (regions); of videos, "frames", so many a second (``frames_per_second``). text_view: of
    captions, "pooled" or "words". crops: of an image, 1 or 10.
    out: a folder for the stores ``visual`` and ``text``; default: the cache, where training finds them.
    """
    from visavis.data import open_dataset
    from visavis.models.caching import cache_features
    from visavis.models.towers import TowerSpec

    progress = progress or Silent()
    if not visual and not text:
        raise VisavisError("nothing to compute: name an encoder with --visual, with --text, or both.")
    dataset = open_dataset(path, skip_bad=skip_bad, pixels=bool(visual), rate=frames_per_second, whole=skip_bad)
    towers = [TowerSpec("visual", visual, view, crops, frames_per_second)] if visual else []  # type: ignore[arg-type]
    towers += [TowerSpec("text", text, text_view)] if text else []  # type: ignore[arg-type]

    def cache(tower: TowerSpec) -> FeatureStore:
        what = "images" if tower.side == "visual" else "captions"
        return cache_features(
            dataset,
            tower,
            Path(out) / tower.side if out else None,
            on_progress=lambda done, total, per_s: progress.work(what, done, total, per_s),
        )

    for sentence in dataset.skipped:
        progress.say(f"left out: {sentence}")
    return [cache(tower) for tower in towers]


def convert(checkpoint: str | Path, out: str | Path, *, text: str = "", config: str = "", image_size: int | None = None) -> ConvertedModel:
    """A checkpoint of X-VLM or of open_clip, as folders of transformers that training begins with; nothing is unpickled.

    out: a new folder, written as a whole or not at all. text: whose tokenizer reads texts, by folder or hub name: the BERT that an X-VLM was made
    from (default bert-base-uncased), a CLIP (default openai/clip-vit-base-patch32). config: of a CLIP, its configuration as open_clip writes it, a
    file, or a name such as ViT-B-32 where open_clip is installed; default open_clip_config.json beside the checkpoint. image_size: of an X-VLM,
    pixels of a side to train with, default the checkpoint's own. ``.to_json()`` of the result: what a recipe says to begin with it.
    """
    from visavis.models.checkpoints import read_checkpoint
    from visavis.models.clip_checkpoint import convert_clip, is_clip
    from visavis.models.xvlm_checkpoint import convert_xvlm

    file = Path(checkpoint)
    if is_clip(tensors := read_checkpoint(file)):
        if image_size is not None:
            raise VisavisError("image_size is for an X-VLM: a CLIP goes on with the size of its configuration.")
        return convert_clip(tensors, file, out, config=config, text=text)
    if config:
        raise VisavisError(f"config is for a CLIP of open_clip, and {file} holds none: leave it out.")
    return convert_xvlm(tensors, file, out, text=text, image_size=image_size)


def doctor() -> list[Fact]:
    """Versions, threads, accelerators, data, caches: what is wrong, and how to mend it."""
    from visavis.environment import inspect

    return inspect()


def demo(*, out: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Draw a captioned world, train three objectives on it, compare and search; returns the folder with the report.

    out: a new folder; default ``runs/demo-<n>``. Offline; about two minutes on two cores.
    """
    from visavis.demonstration.running import run_demo

    return run_demo(out, progress or Silent())


def catalog(kind: str | None = None, *, paper: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """What there is: name, what it is, formula, source and defaults of objectives, models, metrics, layouts of data, recipes, protocols.

    paper: of recipes, the rows of this paper's tables alone.
    """
    from visavis.verbs.listing import KINDS, table_rows

    if kind is not None and kind not in KINDS:
        raise VisavisError(f"there is no catalog of {kind}: {nearest(kind, KINDS)}")
    if paper is not None:
        if kind not in (None, "recipes"):
            raise VisavisError(f"there is no catalog of {kind} of a paper: ask for its recipes.")
        return {"recipes": table_rows(paper)}
    return {name: entries() for name, entries in KINDS.items() if kind in (None, name)}
