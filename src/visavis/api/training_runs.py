"""API functions that train a model, load it and evaluate it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from visavis.api.arguments import optional_text, resolve_recipe, to_paths
from visavis.errors import RunError
from visavis.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.evaluation import Evaluation
    from visavis.feedback.evaluate_feedback import FeedbackEvaluation
    from visavis.memory_budget import MemoryLimit
    from visavis.models.retriever import Retriever
    from visavis.training.training_run import TrainingResult


def train(
    recipe: str | Path | None = None,
    *,
    data: str | Path | None = None,
    feedback: str | Path | None = None,
    out: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> TrainingResult:
    """Train a model into a run folder and evaluate it. Ctrl-C saves a checkpoint, and --resume continues.

    Args:
        recipe: TOML file or name of a shipped recipe. Default: chosen by the installed encoders.
        data: Data set. Default: that of the recipe.
        feedback: Feedback file of visavis serve to train on. Default: none.
        out: New run folder. Default: ``runs/<recipe>-<n>``.
        overrides: Recipe overrides, such as objective='VLC()' training.batch_size=64.
        resume: Folder of a stopped run to continue. Takes no other option. Default: a new run.
        skip_bad: Leave out broken images and captions, and list them.
        progress: Receives the progress.

    Returns:
        The run folder, validation RSUM and test metrics.

    Raises:
        DataError: If the data cannot be read.
        RecipeError: If the recipe has an unknown key or an invalid value.
        RefusedOverwrite: If ``out`` is a file or a folder with other content.
        RunError: If ``out`` is a run already, or if other options are given with ``resume``.
        Stopped: After Ctrl-C, once everything is saved.

    Example:
        >>> run = visavis.train("heads-flickr8k", overrides={"training.batch_size": 64})  # doctest: +SKIP
    """
    from visavis.recipes.files import read_recipe
    from visavis.runs.open_run import with_absolute_paths
    from visavis.training.start_training import resume_training, start_training

    progress = progress or NoProgress()
    if resume is None:
        name, settings = resolve_recipe(recipe, overrides, progress, data=data, feedback=feedback, skip_bad=skip_bad)
        return start_training(with_absolute_paths(read_recipe(name, settings)), out, progress)
    if overrides or skip_bad or any(value is not None for value in (data, feedback, out, recipe)):
        raise RunError("--resume: expected the run folder alone, as a run keeps its recipe and data. Remove the other options.")
    return resume_training(Path(resume), progress)


def load(path: str | Path, *, device: str | None = None, batch_size: int = 64, memory: MemoryLimit = None) -> Retriever:
    """Load the model of a run, or a pretrained CLIP or SigLIP model.

    Args:
        path: Run folder, or folder or hub name of a CLIP or SigLIP model.
        device: Device of the model. Default: CUDA if available, else the CPU.
        batch_size: Items that are encoded at once.
        memory: Maximum memory of score blocks, in bytes or such as 2GiB. Default: a share of the free memory.

    Returns:
        A model with ``encode_images(paths)``, ``encode_texts(texts)`` and ``score(paths, texts)``.

    Raises:
        RunError: If the folder has no model.
    """
    from visavis.models.retriever import Retriever

    return Retriever.load(path, device=device, batch_size=batch_size, memory=memory)


def evaluate(
    run: str | Path | Sequence[str | Path],
    *,
    protocol: str | Sequence[str] | None = None,
    split: str | None = None,
    data: str | Path | None = None,
    relevance: str | None = None,
    semantics: Literal["reference", "paper"] = "reference",
    average: bool | None = None,
    pretrained: bool = False,
    published: str | None = None,
    feedback: str | Path | None = None,
    model: str | Path | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> Evaluation | FeedbackEvaluation:
    """Evaluate a run, a pretrained model, or an index with feedback: recall, RSUM, ranks and mAP.

    Several runs are evaluated as an ensemble: their scores are averaged.

    Args:
        run: Run folder, folder or hub name of a CLIP or SigLIP model, or index with --feedback.
        protocol: Evaluation protocol, see visavis catalog protocols. Default: the recipe's, or plain on other data.
        split: Split. Default: the test split of the recipe.
        data: Data set. Default: that of the run.
        relevance: Relevance estimator for CS@K and nDCG@K, such as "CBoW()". Default: the recipe's.
        semantics: Definition of CS@K: tau-b over first captions (reference), or tau-a over all captions (paper, keys end in _paper).
        average: Average the scores of both networks if a run trained two. Default: the recipe's.
        pretrained: Also evaluate the CLIP or SigLIP model that the training started from.
        published: Row of a paper's table to compare with, such as unified/2/clip-coco. Default: the run's own.
        feedback: Feedback file of visavis serve. Evaluates an index. Default: none.
        model: New location of the model of an index. Default: the recorded one.
        memory: Maximum memory of score blocks, such as 2GiB. Default: the recipe's, else a share of the free memory.
        progress: Receives the progress.

    Returns:
        Metrics in percent. ``other_protocols`` has the results of further protocols. With ``feedback``, recall of the judged queries.

    Raises:
        DataError: If the data do not suit the protocol, or the feedback has no relevant item.
        RunError: If the folder is not a run, or runs are of different data.
        VisavisError: If an option is not for this kind of evaluation.
    """
    if feedback is not None:
        options = {"protocol": protocol, "split": split, "data": data, "relevance": relevance, "published": published}
        if unused := [name for name, value in options.items() if value is not None]:
            raise RunError(f"--feedback: expected an index without {unused[0]}. Remove --{unused[0]}.")
        return _evaluate_index(to_paths(run), Path(feedback), model, memory)
    from visavis.recipes.published_tables import measured_result
    from visavis.runs.evaluate_runs import evaluate_runs, with_base_model

    if model is not None:
        raise RunError("--model: expected an index with --feedback. Pass --feedback, or remove --model.")
    row = None if published is None else measured_result(published)
    runs, data, progress = to_paths(run), optional_text(data), progress or NoProgress()
    result = evaluate_runs(runs, protocol, split, data, progress, relevance, semantics, memory, average_networks=average)
    result = result if row is None else replace(result, published=row)
    return with_base_model(result, runs, split, data, progress, memory) if pretrained else result


def _evaluate_index(indexes: Sequence[Path], feedback: Path, model: str | Path | None, memory: MemoryLimit) -> FeedbackEvaluation:
    """Evaluate an index with the judgments of a feedback file."""
    from visavis.feedback.evaluate_feedback import evaluate_feedback
    from visavis.retrieval.index_folder import Index
    from visavis.retrieval.index_search import SearchQuery, query_vector

    if len(indexes) != 1:
        raise RunError(f"--feedback: expected one index, got {len(indexes)}. Evaluate each index alone.")
    opened = Index.open(indexes[0], model=model, memory=memory)
    return evaluate_feedback(
        feedback,
        {key: item.content for key, item in opened.items.items()},
        lambda text: opened.store.search(query_vector(opened, SearchQuery.from_text(text))[None], len(opened.items))[0],
        f"the index {opened.folder}",
    )
