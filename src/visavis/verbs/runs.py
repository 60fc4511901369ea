"""Verbs that make a run or use one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.errors import RecipeError, RunError
from visavis.progress import Progress, Silent

if TYPE_CHECKING:
    from visavis.diagnosis.explanation import Explanation
    from visavis.diagnosis.probes import Probes
    from visavis.diagnosis.walk import Diagnosis
    from visavis.evaluation import Evaluation
    from visavis.memory import Memory
    from visavis.models.retriever import Retriever
    from visavis.runs.begin import Trained


def train(
    recipe: str | Path | None = None,
    *,
    data: str | Path | None = None,
    judgements: str | Path | None = None,
    out: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    resume: str | Path | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Trained:
    """Train by a recipe into a run folder, and evaluate the best model on the test split.

    recipe: a TOML file, or the name of one that ships; None: a default chosen by the encoders that are
    available, and reported. judgements: the file in which ``visavis serve`` keeps what people said, of which sentences and training images
    are learned (``JudgedSupervision``); by a model that is trained already with ``overrides=["start_from=RUN"]``. out: a new folder;
    default ``runs/<recipe>-<n>``. overrides: ``{"training.batch_size": 64}`` or ``["training.batch_size=64"]``. resume: the folder of a
    stopped run to continue; no other argument is then allowed.
    Raises RecipeError, DataError, RefusedOverwrite; Stopped after Ctrl-C, once everything is saved.
    """
    from visavis.runs.together import begin_training, continue_training

    progress = progress or Silent()
    if resume is None:
        name, settings = chosen_recipe(recipe, overrides, progress, data=data, judgements=judgements, skip_bad=skip_bad)
        return begin_training(name, settings, out, progress)
    if overrides or skip_bad or any(given is not None for given in (data, judgements, out, recipe)):
        raise RunError("a resumed run keeps its recipe, its data and its folder: give --resume with the run folder alone.")
    return continue_training(Path(resume), progress)


def chosen_recipe(
    recipe: str | Path | None,
    overrides: dict[str, Any] | Sequence[str],
    progress: Progress,
    *,
    data: str | Path | None = None,
    judgements: str | Path | None = None,
    skip_bad: bool = False,
) -> tuple[str | Path, dict[str, Any]]:
    """The recipe and what is set in it; without a recipe the default for the data, which is said. Raises RecipeError."""
    from visavis.training.default_recipe import choose_recipe
    from visavis.training.overrides import parse_override

    settings = dict(parse_override(text) for text in overrides) if not isinstance(overrides, dict) else dict(overrides)
    votes = None if judgements is None else Path(judgements)
    for option, key, given in (("data", "data.path", data), ("judgements", "data.judgements", votes)):
        if given is not None and key in settings:
            raise RecipeError(f"the {option} are named twice, by --{option} {given} and by {key}={settings[key]}: keep one of them.")
        if given is not None:
            settings[key] = str(given)
    if skip_bad:
        settings["data.skip_bad"] = True
    if recipe is not None:
        return recipe, settings
    default = choose_recipe(settings)
    progress.say(default.why)
    return default.name, default.overrides | settings


def load(path: str | Path, *, device: str | None = None, batch_size: int = 64, memory: int | str | None = None) -> Retriever:
    """The trained model of a run folder, or a pretrained CLIP or SigLIP model.

    It has ``.encode_images(paths)``, ``.encode_texts(sentences)`` and ``.score(paths, sentences)``.
    device: default CUDA where there is one, else the CPU. batch_size: items encoded at once. memory: the most that blocks of
    scores may take, in bytes or as "2GiB"; default: a share of the free memory. Raises RunError if the folder holds no model.
    """
    from visavis.models.retriever import Retriever

    return Retriever.load(path, device=device, batch_size=batch_size, memory=memory)


def evaluate(
    run: str | Path | Sequence[str | Path],
    *,
    protocol: str | Sequence[str] | None = None,
    split: str | None = None,
    data: str | Path | None = None,
    degrees: str | None = None,
    semantics: str = "reference",
    average: bool | None = None,
    base: bool = False,
    published: str | None = None,
    memory: Memory = None,
    progress: Progress | None = None,
) -> Evaluation:
    """The metrics of a run's best model: R@K both ways, RSUM, ranks, mAP, under a named protocol; with degrees also CS@K and nDCG@K.

    run: a run folder, or, with ``data``, the folder or hub name of a CLIP or SigLIP model (so in every verb that takes a run); or
    several, whose scores are averaged, each model reading its own features of the same images and captions.
    protocol, split, data, degrees, average: default to the recipe's; on other data or another split the protocol is "plain". Of several
    protocols the first is the result, which holds the rest as ``others``.
    degrees: the estimator of degrees of relevance, such as "CBoW()". semantics: the definition of CS@K. "reference", that of the
    released code of the Ladder loss: tau-b over the first caption of each image. "paper", that of its text: tau-a over all
    captions, under keys of its own (``i2t_cs_at_100_paper``). average: the mean of the scores of both networks, for a run of
    NoisySupervision, which trains two, or of each of several. base: also the CLIP or SigLIP model that the training began with, as the
    ``base`` of the result. published: a row of a paper's table to set beside the result, such as "unified/2/clip-coco"; default the
    run's own. memory: the most that blocks of scores may take, in bytes or as "2GiB"; default the recipe's, else a quarter of the free
    memory.
    """
    from visavis.runs.evaluating import beside_base, evaluate_runs
    from visavis.runs.published import measured_row

    row = None if published is None else measured_row(published)
    runs, data, progress = paths_of(run), None if data is None else str(data), progress or Silent()
    result = evaluate_runs(runs, protocol, split, data, progress, degrees, semantics, memory, average=average)
    result = result if row is None else replace(result, published=row)
    return beside_base(result, runs, split, data, progress, memory) if base else result


def diagnose(
    run: str | Path,
    *,
    objective: Sequence[str] = (),
    at: str = "best",
    epsilon: Sequence[float] = (0.01,),
    batches: int | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    memory: Memory = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Which samples contribute to the gradient at a point of a run, for its own objective and others, over its training set.

    Counts and weights of contributing samples as in the COCOS paper: frozen weights, no dropout, mean and standard deviation over
    batches of 128. objective: specs of further objectives, such as ``["TripletHN(margin=0.2)"]``. at: "best", "last", "start" (the
    untrained model, made anew by the recipe's seed and compared with what the training began with), or the step of a checkpoint that is
    kept. epsilon: the weight from which a sample counts, or several: then each objective is counted at each. batches: at most so many.
    data: another data set than the run's own. A pretrained CLIP or SigLIP model needs both, data and objective. out: a new HTML page of the
    numbers, a picture of several epsilons, and the curves over training. memory: as in ``evaluate``.
    """
    from visavis import storage
    from visavis.diagnosis.walk import diagnose_run
    from visavis.report.figures import require_matplotlib

    if out is not None:
        require_matplotlib()
        storage.new_file(out)

    specs = [objective] if isinstance(objective, str) else objective
    epsilons = [epsilon] if isinstance(epsilon, int | float) else epsilon
    other = None if data is None else str(data)
    found = diagnose_run(Path(run), specs, batches, progress or Silent(), other, memory, at=str(at), epsilons=epsilons)
    if out is not None:
        from visavis.report.diagnosis import diagnosis_page

        storage.write_text(out, diagnosis_page(found))
    return found


def probe(
    run: str | Path,
    *,
    images: int = 500,
    data: str | Path | None = None,
    split: str | None = None,
    memory: Memory = None,
    progress: Progress | None = None,
) -> Probes:
    """What a run's best model does not understand: minimal pairs of captions, and edits that should change nothing.

    How often it scores a true caption above the same with one edit that makes it false (``slices``: colors, relations and roles swapped or
    replaced, numbers, negation), on drawn scenes and clips by their truth, on other data by lists of words; and what typos, blur, a crop,
    JPEG and gray pictures cost its recalls (``costs``). images: the first so many of the split, each with at most one case of a kind; 0: all.
    data, split: others than the run's own test split. memory: as in ``evaluate``. Raises RunError for a model that reads no new sentences.
    """
    from visavis.diagnosis.probes import probe_run

    return probe_run(Path(run), images, progress or Silent(), None if data is None else str(data), split, memory)


def paths_of(run: str | Path | Sequence[str | Path]) -> list[Path]:
    """The folders of one run or several."""
    return [Path(run)] if isinstance(run, str | Path) else [Path(folder) for folder in run]


def explain(
    run: str | Path,
    image: str | Path,
    text: str,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Explanation:
    """Which region of an image answered which word of a text, by a model that attends; drawn word by word.

    image: the path of a picture, or the name of an image in the run's data. out: a new file, drawn as its ending
    says: .png, .pdf or .jpg; default ``runs/explanation-<n>.png``.
    What it returns has ``words``, ``weights`` ``[words, regions]`` (the share of each region in what answered a word), ``scores`` (of each
    word with what answered it) and ``score``. Raises RunError for a model whose score does not tell.
    """
    from dataclasses import replace

    from visavis import storage
    from visavis.diagnosis.explanation import explained
    from visavis.report.explanation import explanation_picture, form_of

    form = form_of(Path("explanation.png" if out is None else out))
    if out is not None:
        storage.new_file(out)
    explanation = explained(Path(run), str(image), text, progress or Silent())
    content = explanation_picture(explanation, form)
    file = storage.numbered_file("runs/explanation.png") if out is None else Path(out)
    storage.write_bytes(file, content)
    return replace(explanation, file=file)
