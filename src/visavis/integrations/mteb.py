"""MtebEncoder: a model in the benchmarks of mteb 2, such as MIEB.

``mteb.evaluate(MtebEncoder(visavis.load("runs/mine"), "mine"),
mteb.get_tasks(["Flickr30kT2IRetrieval"]))``
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visavis.core.encoded import unit_rows
from visavis.core.errors import DataError, RefusedOverwrite, VisavisError, requires_extra
from visavis.core.result import Result
from visavis.core.table import Column, Table

RESULTS_FOLDER = "results"
"""Folder in which mteb keeps results."""
MODALITIES = ("text", "image", "video")
"""Columns of a batch that are encoded. Others, such as ids, are ignored."""
NUM_FRAMES = 8
"""Frames of a video that a model of images encodes, as in ``Video2ImagesWrapper`` of mteb."""


@dataclass(frozen=True)
class MtebReport(Result):
    """Results of a model on tasks of mteb.

    Attributes:
        model: Name of the model in mteb.
        folder: Folder of mteb's JSON files, one per task.
        metrics: Name of the main metric of each task.
        scores: Main metric of each task, from 0 to 1, the mean over its splits and subsets.
        result: Result of mteb, with all metrics.
    """

    model: str
    folder: Path
    metrics: dict[str, str]
    scores: dict[str, float]
    result: Any

    def tables(self) -> list[Table]:
        """Return the main score of each task in percent."""
        rows = [(task, self.metrics[task], 100 * score) for task, score in self.scores.items()]
        columns = (Column("task", is_text=True), Column("metric"), Column("score", ".1f"))
        return [Table(columns, tuple(rows), (f"Results of {self.model}: {self.folder}",))]

    def to_json(self) -> dict[str, Any]:
        """Return the content for JSON, with all metrics of all tasks."""
        tasks = {task.task_name: task.scores for task in self.result.task_results}
        return {
            "model": self.model,
            "folder": str(self.folder),
            "metrics": self.metrics,
            "scores": self.scores,
            "tasks": tasks,
        }


class MtebEncoder:
    """Encoder with the interface ``EncoderProtocol`` of mteb 2.

    An item of a text and an image is the sum of both vectors, as in mteb's CLIP models. A model of
    frames reads videos at its own rate.

    Args:
        model: A Retriever with one vector per item.
        name: Name of the model in mteb. ``visavis/`` is added if it has no organization.
        num_frames: Number of frames of a video that a model of images encodes. The video is the
            mean of their vectors. The result is an experiment with the settings of mteb's
            ``Video2ImagesWrapper``, which needs torchvision. 0: no videos.

    Raises:
        MissingExtra: If mteb is not installed.
    """

    def __init__(self, model: Any, name: str, *, num_frames: int = 0) -> None:
        with requires_extra("mteb", "visavis mteb"):
            from mteb.models import ModelMeta
            from mteb.models.model_meta import ScoringFunction
        self.model = model
        self.frames_per_second: float = model.processor.visual_spec.frames_per_second
        self.num_frames = 0 if self.frames_per_second else num_frames
        self.mteb_model_meta: Any = ModelMeta.create_empty(
            {
                "name": name if "/" in name else f"visavis/{name}",
                "revision": model.fingerprint,
                "n_parameters": sum(parameter.numel() for parameter in model.matcher.parameters()),
                "embed_dim": model.embedding_dim,
                "framework": ["PyTorch"],
                "similarity_fn_name": ScoringFunction.COSINE,
                "modalities": ["image", "text", *(["video"] if self.frames_per_second else [])],
            }
        )
        if self.num_frames:
            from mteb.models.video_wrappers.video2images_wrapper import video2images_model_meta

            self.mteb_model_meta = video2images_model_meta(
                self.mteb_model_meta, num_frames=self.num_frames
            )

    def encode(
        self, inputs: Any, *, prompt_type: Any = None, batch_size: int | None = None, **_: Any
    ) -> Tensor:
        """Encode the items of a data loader.

        Args:
            inputs: Data loader of mteb. Its batches hold lists of texts, images or videos.
            prompt_type: Ignored: queries and documents are encoded in the same way.
            batch_size: Number of items per batch.
            **_: Task and split, which are ignored.

        Returns:
            Vectors, shape ``[N, D]``, on the CPU.

        Raises:
            DataError: If a batch holds neither texts nor images nor videos that the model reads.
        """
        if (self.frames_per_second or self.num_frames) and "video" in getattr(
            inputs.dataset, "features", ()
        ):
            from mteb.models.modality_collators import FramesCollator

            # Frames at the rate of the model, or a number of frames of each video.
            inputs.collate_fn = FramesCollator(
                fps=self.frames_per_second or None, num_frames=self.num_frames or None
            )
        encoded = []
        for items in _group_items(inputs, batch_size or self.model.batch_size):
            vectors = []
            if "text" in items:
                # Benchmarks have empty documents. Their zero vectors match nothing.
                is_empty = torch.tensor([not text.strip() for text in items["text"]])
                known = self.model.processor.known_text
                texts = [text if text.strip() else known for text in items["text"]]
                vectors.append(self.model.encode_texts(texts).masked_fill(is_empty[:, None], 0.0))
            if "image" in items:
                vectors.append(self.model.encode_images(items["image"]))
            if "video" in items and self.frames_per_second:
                clips = [[_to_image(frame) for frame in clip] for clip in items["video"]]
                vectors.append(self.model.to_unit_rows(self.model.encode_visual(clips)))
            elif "video" in items and self.num_frames:
                # A model of images encodes all frames at once. A clip is the mean of its frames.
                clips = items["video"]
                frames = self.model.encode_images([frame for clip in clips for frame in clip])
                parts = frames.split([len(clip) for clip in clips])
                vectors.append(torch.stack([part.mean(0) for part in parts]))
            if not vectors:
                raise DataError(
                    f"{self.mteb_model_meta.name}: expected texts or images, got "
                    f"{', '.join(items) or 'other columns'}. Choose another task."
                )
            # [N, D]: the sum of the vectors of an item of several modalities.
            encoded.append(torch.stack(vectors).sum(0))
        return torch.cat(encoded)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Compute the cosines of all pairs.

        Args:
            embeddings1: Vectors, shape ``[N, D]`` or ``[D]``.
            embeddings2: Vectors, shape ``[M, D]`` or ``[D]``.

        Returns:
            Cosines, shape ``[N, M]``.
        """
        first, second = (
            unit_rows(torch.atleast_2d(torch.as_tensor(vectors)))
            for vectors in (embeddings1, embeddings2)
        )
        return first @ second.T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Compute the cosines of corresponding pairs.

        Args:
            embeddings1: Vectors, shape ``[N, D]``.
            embeddings2: Vectors, shape ``[N, D]``.

        Returns:
            Cosines, shape ``[N]``.
        """
        return torch.cosine_similarity(
            torch.as_tensor(embeddings1), torch.as_tensor(embeddings2), dim=-1
        )


def _group_items(batches: Iterable[dict[str, Any]], size: int) -> Iterator[dict[str, list[Any]]]:
    """Yield batches of at least ``size`` items. mteb loads the images of some tasks one by one."""
    pending: dict[str, list[Any]] = {}
    for batch in batches:
        for name in MODALITIES:
            if name in batch:
                pending.setdefault(name, []).extend(batch[name])
        # A batch of other columns is reported by the encoder.
        if not pending:
            yield {}
        elif len(next(iter(pending.values()))) >= size:
            yield pending
            pending = {}
    if pending:
        yield pending


def _to_image(frame: Tensor) -> Any:
    """Convert a frame ``[3, H, W]`` of 8-bit integers to an image."""
    from PIL import Image

    return Image.fromarray(torch.as_tensor(frame).permute(1, 2, 0).contiguous().numpy())


def check_output(folder: Path) -> None:
    """Check that a folder is new, or has results of mteb only."""
    if os.path.isdir(folder) and (
        other := [file.name for file in folder.iterdir() if file.name != RESULTS_FOLDER]
    ):
        raise RefusedOverwrite(
            f"{folder}: expected a new folder or one of mteb results, got {other[0]} in it. Name "
            "another folder."
        )


def run_tasks(model: Any, name: str, tasks: Sequence[Any], folder: Path) -> MtebReport:
    """Evaluate a model on tasks, or names of tasks or benchmarks such as ``MIEB(lite)``, of mteb.
    Finished tasks of the same model are read from the folder.
    """
    with requires_extra("mteb", "visavis mteb"):
        import mteb
    selected: list[Any] = []
    for task in tasks:
        if isinstance(task, mteb.AbsTask):
            selected.append(task)
            continue
        try:
            selected.append(mteb.get_task(task))
        except KeyError:
            try:
                selected += mteb.get_benchmark(task).tasks
            except KeyError:
                raise VisavisError(
                    f"tasks: expected the name of a task or benchmark of mteb, got {task!r}. "
                    "List them with mteb available-tasks and mteb available-benchmarks."
                ) from None
    encoder = MtebEncoder(model, name)
    cache = mteb.ResultCache(folder)
    task_results = []
    for task in selected:
        task_encoder = (
            MtebEncoder(model, name, num_frames=NUM_FRAMES)
            if "video" in task.metadata.modalities
            else encoder
        )
        with _task_errors(task.metadata, task_encoder):
            result = mteb.evaluate(
                task_encoder,
                task,
                cache=cache,
                encode_kwargs={"batch_size": model.batch_size},
                show_progress_bar=False,
            )
            task_results += result.task_results
    # mteb keeps the results of a model under its name and revision.
    meta = encoder.mteb_model_meta
    return MtebReport(
        meta.name,
        folder / RESULTS_FOLDER / meta.model_name_as_path() / meta.revision,
        {task.metadata.name: task.metadata.main_score for task in selected},
        {task_result.task_name: task_result.get_score() for task_result in task_results},
        mteb.results.ModelResult(
            model_name=meta.name, model_revision=meta.revision, task_results=task_results
        ),
    )


@contextmanager
def _task_errors(task: Any, encoder: MtebEncoder) -> Iterator[None]:
    """Convert the errors of mteb during a task, described by its metadata."""
    from datasets.exceptions import DatasetNotFoundError

    try:
        yield
    except (ConnectionError, DatasetNotFoundError) as error:
        raise DataError(
            f"{task.name}: expected its data on the Hugging Face hub or in its cache, got "
            f"{type(error).__name__}. "
            "Connect to the network once, or copy the cache."
        ) from error
    except ValueError as error:
        # mteb compares the modalities of the model and the task.
        if not str(error).startswith("Model "):
            raise
        raise VisavisError(
            f"{task.name}: expected a task of {', '.join(encoder.mteb_model_meta.modalities)}, "
            "each alone in an item or as text "
            f"with image, got one of {', '.join(task.modalities)} ({task.category}). Choose "
            "another task."
        ) from error
    except ImportError as error:
        raise VisavisError(
            f"{task.name}: expected the packages that mteb needs for this task, got no "
            f"{error.name or error}. Install this package."
        ) from error
