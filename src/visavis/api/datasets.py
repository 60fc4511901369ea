"""API functions for data and for the installation: check, audit, convert, cache features, demo,
doctor and catalog.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from visavis.api.arguments import parse_overrides, parse_workers, to_list
from visavis.core.errors import RefusedOverwrite, VisavisError, suggest_name
from visavis.core.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.core.environment import EnvironmentCheck
    from visavis.data.dataset_check import CheckReport
    from visavis.data.features.store import FeatureStore
    from visavis.models.encoders.checkpoint_files import CheckpointConversion
    from visavis.papers.convert_features import ConversionReport
    from visavis.research.audit.run_audit import Audit


STORE_PREFIXES = ("visual", "text", ".")
"""Beginnings of the names in a folder of feature stores."""


def data_check(
    path: str | Path, *, decode_videos: bool = False, progress: Progress | None = None
) -> CheckReport:
    """Check a data set for errors. The exit code is 1 if training would lose data.

    Args:
        path: Data set: a folder, a file of it, hf:OWNER/NAME, or a name under VISAVIS_DATA.
        decode_videos: Decode all frames of all videos. Default: of a sample of 16, and the
            containers of the others.
        progress: Receives the progress.

    Returns:
        Findings, and the number of images and captions of each split. ``ok`` is False if training
        would lose data.

    Raises:
        DataError: If the path is not a data set.

    Command line:
        ```sh
        visavis data check photos/
        visavis data check photos/ --all
        ```
    """
    from visavis.data.dataset_check import check_dataset

    progress = progress or NoProgress()
    return check_dataset(
        path,
        decode_videos=decode_videos,
        on_progress=lambda done, total: progress.update("images", done, total, 0.0),
    )


def data_audit(
    path: str | Path,
    *,
    recipe: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    parts: str | Sequence[str] = (),
    folds: int = 5,
    seeds: int = 3,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Audit:
    """Find near-duplicates and likely mislabeled pairs. It also finds uninformative captions and
    estimates the gain from more data.

    Results are cached, so an interrupted audit resumes.

    Args:
        path: Data set: a folder, a file of it, hf:OWNER/NAME, or a name under VISAVIS_DATA.
        recipe: Recipe of the encoders, model and objective. Default: chosen from the encoders
            available.
        overrides: Recipe overrides, such as visual.encoder=mobilenet-v2.
        parts: Part of the audit: duplicates, captions, mislabeled or learning_curve. Default: all.
        folds: Folds of the cross-validation that finds mislabeled pairs.
        seeds: Models per size of the learning curve.
        skip_bad: Leave out broken images and captions, and list them.
        progress: Receives the progress.

    Returns:
        Issues with examples and fixes.

    Raises:
        DataError: If the data cannot be read.
        VisavisError: If a part is unknown.

    Command line:
        ```sh
        visavis data audit photos/
        visavis data audit photos/ --parts duplicates --parts captions
        ```
    """
    from visavis.research.audit.run_audit import audit

    settings = parse_overrides(overrides) | ({"data.skip_bad": True} if skip_bad else {})
    return audit(path, recipe, settings, to_list(parts), folds, seeds, progress or NoProgress())


def data_convert(
    sources: Sequence[str | Path], out: str | Path, *, progress: Progress | None = None
) -> ConversionReport:
    """Convert published video features to feature stores. Training reads the stores. Nothing is
    unpickled.

    Args:
        sources: Pickle, .npy, .h5, .json or list file, or a folder. NAME=PATH names an expert.
        out: New folder for the stores and lists, written completely or not at all.
        progress: Receives the progress.

    Returns:
        The experts, caption features and split files that were written.

    Raises:
        DataError: If a source cannot be read or contradicts another one.

    Command line:
        ```sh
        visavis data convert features/ --out data/msrvtt
        visavis data convert face=faces.pkl --out data/faces
        ```
    """
    from visavis.papers.convert_features import convert_features

    return convert_features(sources, out, progress)


def data_scenes(
    out: str | Path,
    *,
    clips: bool = False,
    num_train: int = 2000,
    num_val: int = 200,
    num_test: int = 400,
    size: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Write a data set of synthetic scenes or clips with captions. The same arguments give the same
    bytes.

    Args:
        out: New folder.
        clips: Write clips with the features of three experts instead of images.
        num_train: Images or clips of the training split.
        num_val: Images or clips of the validation split.
        num_test: Images or clips of the test split.
        size: Side length in pixels. Default (0): 96 for images, no frames for clips.
        seed: Seed of the scenes and captions.
        progress: Receives the progress.

    Returns:
        The folder.

    Raises:
        RefusedOverwrite: If the folder is not empty.

    Command line:
        ```sh
        visavis data scenes --out data/scenes
        visavis data scenes --clips --num-train 500 --out data/clips
        ```
    """
    from visavis.data.synthetic import write_synthetic_clips, write_synthetic_scenes

    progress = progress or NoProgress()
    started = time.perf_counter()

    def on_progress(done: int, total: int) -> None:
        progress.update(
            "clips" if clips else "scenes", done, total, done / (time.perf_counter() - started)
        )

    # Pillow compares (size, size) with numbers, which is an array for a number of numpy.
    num_train, num_val, num_test, size, seed = map(
        operator.index, (num_train, num_val, num_test, size, seed)
    )
    write, size = (write_synthetic_clips, size) if clips else (write_synthetic_scenes, size or 96)
    return write(
        out,
        num_train=num_train,
        num_val=num_val,
        num_test=num_test,
        size=size,
        seed=seed,
        on_progress=on_progress,
    )


def features(
    path: str | Path,
    *,
    visual: str | None = None,
    text: str | None = None,
    granularity: Literal["pooled", "regions", "frames"] = "pooled",
    text_granularity: Literal["pooled", "words"] = "pooled",
    crops: int = 1,
    frames_per_second: float = 0.0,
    full_decoding: bool = False,
    out: str | Path | None = None,
    skip_bad: bool = False,
    workers: int | str | None = None,
    progress: Progress | None = None,
) -> list[FeatureStore]:
    """Cache the features of frozen encoders for a data set. An interrupted call resumes. Processes
    of torchrun share the work.

    Args:
        path: Data set: a folder, a file of it, hf:OWNER/NAME, or a name under VISAVIS_DATA.
        visual: Image encoder: scenes, a transformers folder, or a hub name.
        text: Text encoder: minilm, a transformers folder, or a hub name.
        granularity: Vectors per image (pooled or regions) or per video (frames).
        text_granularity: Vectors per caption: one (pooled) or one per word.
        crops: Crops per image: 1 or 10.
        frames_per_second: Frames that are read per second of video, for granularity frames.
        full_decoding: Decode JPEG files in full, instead of at a reduced size. Slower for large
            files.
        out: Folder for the stores. Default: the cache, where training finds them.
        skip_bad: Leave out broken images and captions, and list them.
        workers: Number of processes that read images, or ray:NUMBER for a Ray cluster. Default: one
            per core for a GPU, none for a CPU, and 2 on Ray.
        progress: Receives the progress.

    Returns:
        The stores, images first.

    Raises:
        VisavisError: If no encoder is named.
        RefusedOverwrite: If ``out`` has other content than features, such as a run.
        DataError: If the data cannot be read.
        MissingExtra: If Ray is not installed.
        ReportedByOtherProcess: If another process fails.

    Command line:
        ```sh
        visavis features photos/ --visual openai/clip-vit-base-patch32 --text minilm
        visavis features photos/ --visual mobilenet-v2 --granularity regions --out features
        ```
    """
    from visavis.data.dataset_reader import open_dataset
    from visavis.data.image_validation import open_valid_dataset
    from visavis.models.encoders.encoder_spec import EncoderSpec
    from visavis.models.encoders.feature_extraction import cache_features
    from visavis.training.processes import join_processes

    progress = progress or NoProgress()
    engine, num_workers = parse_workers(workers)
    if not visual and not text:
        raise VisavisError(
            "features: expected an image encoder, a text encoder, or both, got none. Pass --visual "
            "or --text."
        )
    if out and os.path.isdir(out):
        for file in Path(out).iterdir():
            if not file.name.startswith(STORE_PREFIXES):
                raise RefusedOverwrite(
                    f"{out}: expected a new folder or one of features, got {file.name} in it. Name "
                    "another folder."
                )
    encoders = {}
    if visual:
        encoders["images"] = EncoderSpec(
            "visual",
            visual,
            granularity,
            # The description of a store is written as JSON, which has no numbers of numpy.
            operator.index(crops),
            float(frames_per_second),
            full_decoding=full_decoding,
        )
    encoders |= {"captions": EncoderSpec("text", text, text_granularity)} if text else {}
    with join_processes(
        "The stored part is intact. Start the command again, with any number of processes."
    ) as group:
        progress = progress if group.is_first else NoProgress()
        with group.first_rank_first():
            dataset = (
                open_valid_dataset(
                    path,
                    skip_bad=skip_bad,
                    frames_per_second=frames_per_second,
                    decode_all_frames=skip_bad,
                )
                if visual
                else open_dataset(path, skip_bad=skip_bad)
            )
        for skipped in dataset.skipped:
            progress.message(f"left out: {skipped}")
        compute = partial(cache_features, dataset, engine=engine, workers=num_workers, group=group)
        return [
            compute(
                encoder,
                Path(out) / encoder.side if out else None,
                on_progress=partial(progress.update, task),
            )
            for task, encoder in encoders.items()
        ]


def papers_convert(
    checkpoint: str | Path,
    out: str | Path,
    *,
    text_encoder: str = "",
    config: str = "",
    key: str = "",
    image_size: int | None = None,
    max_length: int | None = None,
) -> CheckpointConversion:
    """Convert a published checkpoint to a model folder for training. It converts X-VLM and
    open_clip, or extends a CLIP to longer texts. Nothing is unpickled.

    Args:
        checkpoint: X-VLM with Swin and BERT, or open_clip checkpoint, such as epoch_32.pt. With
            ``max_length``: a CLIP or SigLIP model.
        out: New folder, written completely or not at all.
        text_encoder: Folder or hub name of the BERT or CLIP that has the tokenizer. Default:
            bert-base-uncased or openai/clip-vit-base-patch32.
        config: Configuration of an open_clip model: a file, or a name such as ViT-B-32. Default:
            open_clip_config.json next to the checkpoint.
        key: Weights of a checkpoint that holds several models, such as state_dict_ema. Default: the
            only ones.
        image_size: Training image size of an X-VLM in pixels. Default: the checkpoint's.
        max_length: Tokens of a text that the new CLIP reads, such as 248. Positions are
            interpolated. Default: unchanged.

    Returns:
        The folder. ``to_recipe_sections()`` gives the recipe keys that start training from it.

    Raises:
        DataError: If the checkpoint cannot be read or has unknown weights.
        VisavisError: If an option is not for this kind of checkpoint.

    Command line:
        ```sh
        visavis papers convert epoch_32.pt --config ViT-B-32 --out models/clip
        visavis papers convert openai/clip-vit-base-patch32 --max-length 248 --out models/long-clip
        ```
    """
    from visavis.core import storage
    from visavis.core.fields import validate_int
    from visavis.models.clip.conversion import (
        MAX_TEXT_LENGTH,
        convert_open_clip,
        extend_positions,
        is_open_clip,
    )
    from visavis.models.encoders.checkpoint_files import matching_shapes, read_checkpoint
    from visavis.papers.models.xvlm_conversion import convert_xvlm

    if os.path.exists(out):
        storage.prepare_empty_folder(out, will_be_replaced=True)
    if max_length is not None:
        other_options = {
            "text_encoder": text_encoder or None,
            "config": config or None,
            "key": key or None,
            "image_size": image_size,
        }
        if conflicts := [
            f"{name}={value}" for name, value in other_options.items() if value is not None
        ]:
            raise VisavisError(
                f"max_length: expected no other option, got {', '.join(conflicts)}. "
                "Convert the checkpoint first, then its folder with --max-length."
            )
        return extend_positions(
            str(checkpoint), validate_int(max_length, "max_length", 1, MAX_TEXT_LENGTH), out
        )
    file = Path(checkpoint)
    tensors = read_checkpoint(file, key)
    with matching_shapes(file):
        if is_open_clip(tensors):
            if image_size is not None:
                raise VisavisError(
                    "image_size: expected an X-VLM checkpoint, got an open_clip checkpoint, "
                    f"{file}. Remove --image-size."
                )
            return convert_open_clip(tensors, file, out, config=config, text=text_encoder)
        if config:
            raise VisavisError(
                f"config: expected an open_clip checkpoint, got another kind, {file}. Remove "
                "--config."
            )
        return convert_xvlm(tensors, file, out, text=text_encoder, image_size=image_size)


def doctor(
    index: str | Path | Sequence[str | Path] = (), *, store: str | Path | Sequence[str | Path] = ()
) -> list[EnvironmentCheck]:
    """Check the installation, devices and caches, and suggest fixes. It prints versions, threads,
    devices and data. With an index, it also verifies all of its items.

    Args:
        index: Folder of an index whose items and vectors are compared with their checksums.
        store: Confirms the store of an index outside its folder. Default: only stores inside.

    Returns:
        One entry per check. ``fix`` is set where something is wrong or could be enabled.

    Command line:
        ```sh
        visavis doctor
        visavis doctor indexes/photos
        ```
    """
    from visavis.models.default_model import check_default_model
    from visavis.research.doctor import check_environment

    checks = [*check_environment(), check_default_model()]
    if indexes := [index] if isinstance(index, str | Path) else index:
        from visavis.retrieval.open_index import check_index

        checks += [
            check_index(Path(folder), [store] if isinstance(store, str | Path) else store)
            for folder in indexes
        ]
    return checks


def demo(*, out: str | Path | None = None, progress: Progress | None = None) -> Path:
    """Train and compare three objectives on synthetic scenes. It works offline, takes two to four
    minutes on two cores, and ends with a search.

    Args:
        out: New folder. Default: ``runs/demo-<n>``.
        progress: Receives the progress.

    Returns:
        The folder with ``report.html``.

    Raises:
        RefusedOverwrite: If the folder is not empty.

    Command line:
        ```sh
        visavis demo
        visavis demo --out first
        ```
    """
    from visavis.research.demo_run import run_demo

    return run_demo(out, progress or NoProgress())


def catalog(kind: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """List objectives, models, metrics, recipes and other parts. Each entry has its formula, source
    and defaults. Data formats, protocols and vector stores are listed, too.

    Args:
        kind: One catalog: objectives, models, metrics, formats, recipes, protocols, ... Default:
            all.

    Returns:
        Entries by kind.

    Raises:
        VisavisError: If the kind is unknown.

    Command line:
        ```sh
        visavis catalog objectives
        visavis catalog recipes
        ```
    """
    from visavis.api.catalog_entries import CATALOGS, catalog_entries

    if kind is not None and kind not in CATALOGS:
        raise VisavisError(
            f"catalog: expected a kind of entries, got {kind!r}: {suggest_name(kind, CATALOGS)}"
        )
    return {name: catalog_entries(name) for name in CATALOGS if kind in (None, name)}


def papers_list(paper: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """List the rows of papers' tables with their published results. It also lists what each row
    needs, its recipe, and the curves of figures.

    Args:
        paper: Paper whose rows are listed, such as goal. Default: all papers.

    Returns:
        The rows, under the key ``recipes``.

    Raises:
        VisavisError: If the paper is unknown.

    Command line:
        ```sh
        visavis papers list goal
        ```
    """
    from visavis.api.catalog_entries import table_rows

    return {"recipes": table_rows(paper)}
