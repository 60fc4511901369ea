"""Every verb of the command line as a function of the same name with the same arguments.

>>> import visavis
>>> run = visavis.train("heads-flickr8k")                                  # doctest: +SKIP
>>> visavis.evaluate(run.folder).metrics["rsum"]                           # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.errors import RunError, VisavisError, nearest
from visavis.watch import Silent, Watch

if TYPE_CHECKING:
    from visavis.data.check import CheckReport
    from visavis.data.features import FeatureStore
    from visavis.diagnosis.walk import Diagnosis
    from visavis.environment import Fact
    from visavis.evaluation import Evaluation
    from visavis.evaluation.agreement import Agreement
    from visavis.models.retriever import Retriever
    from visavis.report.coherence.comparison import Comparison
    from visavis.retrieval.query import Hit
    from visavis.supervision.graded.agreement import Agreement as Judged
    from visavis.supervision.graded.degrees import ImageBy
    from visavis.supervision.graded.fitting import Fitted, Kind
    from visavis.supervision.graded.thresholds import Distribution
    from visavis.training.running import Trained


def load(path: str | Path) -> Retriever:
    """The trained model of a run folder: ``load(run).encode_images(paths)``, ``.encode_texts(sentences)``, unit rows.

    Raises RunError if the folder holds no model.
    """
    from visavis.models.retriever import Retriever

    return Retriever.load(path)


def train(
    recipe: str | Path,
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    overrides: dict[str, Any] | Sequence[str] = (),
    resume: bool = False,
    skip_bad: bool = False,
    watch: Watch | None = None,
) -> Trained:
    """Train by a recipe into a run folder, and evaluate the best model on the test split.

    recipe: a TOML file, the name of one that ships, or with ``resume`` the folder of a run to go on with. out: a new
    folder; default ``runs/<recipe>-<n>``. overrides: ``{"training.batch_size": 64}`` or ``["training.batch_size=64"]``.
    Raises RecipeError, DataError, RefusedOverwrite; Stopped after Ctrl-C, when everything is saved.
    """
    from visavis.training.recipe import parse_override
    from visavis.training.running import begin_run, continue_run

    given = dict(parse_override(text) for text in overrides) if not isinstance(overrides, dict) else dict(overrides)
    given |= {key: value for key, value in (("data.path", data and str(data)), ("data.skip_bad", skip_bad)) if value}
    if not resume:
        return begin_run(recipe, given, out, watch or Silent())
    if given or out is not None:
        raise RunError("a resumed run keeps its recipe, its data and its folder: give --resume with the run folder alone.")
    return continue_run(Path(recipe), watch or Silent())


def evaluate(
    run: str | Path,
    *,
    protocol: str | None = None,
    split: str | None = None,
    data: str | Path | None = None,
    degrees: str | None = None,
    semantics: str = "reference",
    watch: Watch | None = None,
) -> Evaluation:
    """The metrics of a run's best model: R@K both ways, RSUM, ranks, mAP, under a named protocol; with degrees also CS@K and nDCG@K.

    protocol, split, data, degrees: default to the recipe's; on other data or another split the protocol is "plain".
    degrees: who tells degrees of relevance, such as "CBoW()". semantics: of CS@K: "reference" ranks the first caption of each image
    and is tau-b, as the released code of the Ladder loss; "paper" ranks all captions and is tau-a, as its text.
    """
    from visavis.training.running import evaluate_run

    return evaluate_run(Path(run), protocol, split, None if data is None else str(data), watch or Silent(), degrees, semantics)


def agreement(
    runs: str | Path | Sequence[str | Path],
    *,
    data: str | Path | None = None,
    degrees: str | None = None,
    watch: Watch | None = None,
) -> list[Agreement]:
    """How far runs agree with people: Kendall and Spearman between their scores of image-caption pairs and people's judgements.

    Of the expert and the crowd judgements of Flickr8k's test images, with all pairs and without an image's own captions; intervals by
    bootstrap over images; beside them how far single people agree with the others. data: where the judgements lie, default the runs'.
    degrees: also how far such degrees of relevance agree, told of an image by its first caption.
    """
    from visavis.training.agreeing import agree_runs

    folders = [runs] if isinstance(runs, str | Path) else runs
    return agree_runs([Path(run) for run in folders], None if data is None else str(data), degrees, watch or Silent())


def diagnose(run: str | Path, *, objective: Sequence[str] = (), batches: int | None = None, watch: Watch | None = None) -> Diagnosis:
    """What moves the queries of a run's training set at its best point, by its own objective and by others at the same point.

    Counts and weights of contributing samples as in the COCOS paper: frozen weights, no dropout, mean and deviation over
    batches of 128. objective: specs of further ones, such as ``["TripletHN(margin=0.2)"]``. batches: at most so many.
    """
    from visavis.diagnosis.walk import diagnose_run

    return diagnose_run(Path(run), [objective] if isinstance(objective, str) else objective, batches, watch or Silent())


def features(
    path: str | Path,
    *,
    vision: str | None = None,
    text: str | None = None,
    view: str = "pooled",
    text_view: str = "pooled",
    crops: int = 1,
    out: str | Path | None = None,
    skip_bad: bool = False,
    watch: Watch | None = None,
) -> list[FeatureStore]:
    """Cache what frozen encoders say of a data set: images by ``vision``, captions by ``text``; goes on where it was killed.

    view: "pooled" or "grid". text_view: "pooled" or "words". crops: 1 or 10. out: a folder for the stores ``vision`` and
    ``text``; default: the cache, where training finds them.
    """
    from visavis.data import open_dataset
    from visavis.models.caching import cache_features
    from visavis.models.towers import TowerSpec

    watch = watch or Silent()
    if vision is None and text is None:
        raise VisavisError("nothing to compute: name an encoder with --vision, with --text, or both.")
    dataset = open_dataset(path, skip_bad=skip_bad, pixels=vision is not None)
    towers = [TowerSpec("vision", vision, view, crops)] if vision else []  # type: ignore[arg-type]
    towers += [TowerSpec("text", text, text_view)] if text else []  # type: ignore[arg-type]

    def cache(tower: TowerSpec) -> FeatureStore:
        what = "images" if tower.side == "vision" else "captions"
        return cache_features(
            dataset,
            tower,
            Path(out) / tower.side if out else None,
            progress=lambda done, total, per_s: watch.work(what, done, total, per_s),
        )

    for sentence in dataset.skipped:
        watch.say(f"left out: {sentence}")
    return [cache(tower) for tower in towers]


def search(
    run: str | Path,
    query: str,
    *,
    inside: str | Path | None = None,
    top: int = 5,
    watch: Watch | None = None,
) -> list[Hit]:
    """The images that fit a sentence best, best first. inside: a data set or any folder of images; default: the run's data."""
    from visavis.retrieval.query import search_images

    return search_images(Path(run), query, None if inside is None else Path(inside), top, watch or Silent())


def relevance(
    degrees: Sequence[str] = (),
    *,
    data: str | Path | None = None,
    image: ImageBy = "own",
    pairs: int = 100_000,
    picture: str | Path | None = None,
    watch: Watch | None = None,
) -> list[Judged] | list[Distribution]:
    """How far degrees of relevance agree with people (STS-B dev and test, Crisscrossed Captions), and what they cost.

    degrees: specs such as ``["CBoW(common=1)"]``; default: those that need no model of the user's. With data instead: how degrees
    lie over that many random training pairs of a data set, and thresholds for Ladder from their quantiles; image as in
    GradedSupervision; picture: a new PNG of the distributions.
    """
    from visavis import storage
    from visavis.supervision.graded.agreement import ESTIMATORS, judge
    from visavis.supervision.graded.thresholds import distributions

    specs, watch = [degrees] if isinstance(degrees, str) else degrees or ESTIMATORS, watch or Silent()
    if data is None:
        if picture is not None:
            raise VisavisError("a picture is of the degrees of a data set: name it with --data.")
        return judge(specs, watch)
    from visavis.data import open_dataset
    from visavis.report.figures import degrees_picture, require_matplotlib

    if picture is not None:
        require_matplotlib()
        storage.new_file(picture)
    rows = distributions(specs, open_dataset(data), image, pairs, watch)
    if picture is not None:
        storage.write_bytes(picture, degrees_picture(rows))
    return rows


def relevance_fit(
    out: str | Path,
    *,
    kind: Kind = "bi",
    model: str = "minilm",
    epochs: int = 4,
    rate: float | None = None,
    batch_size: int = 16,
    seed: int = 0,
    watch: Watch | None = None,
) -> Fitted:
    """Fine-tune a sentence model on the ratings of STS-B train, as the ladder paper fine-tunes BERT; the best epoch on dev is kept.

    out: a new folder, for SentenceModel (kind "bi": the cosine of two vectors) or CrossEncoder (kind "cross": two captions read at
    once). rate: default 2e-5 for "bi", 5e-5 for "cross", whose output begins untrained.
    """
    from visavis.supervision.graded.fitting import fit

    return fit(out, kind, model, epochs=epochs, rate=rate, batch_size=batch_size, seed=seed, watch=watch or Silent())


def check_data(path: str | Path, *, watch: Watch | None = None) -> CheckReport:
    """Everything that is wrong or odd in a data set, listed exactly (``visavis data check``)."""
    from visavis.data import check_dataset

    watch = watch or Silent()
    return check_dataset(path, progress=lambda done, total: watch.work("images", done, total, 0.0))


def doctor() -> list[Fact]:
    """Versions, threads, accelerators, data, caches: what is wrong, and how to mend it."""
    from visavis.environment import inspect

    return inspect()


def demo(*, out: str | Path | None = None, watch: Watch | None = None) -> Path:
    """Draw a captioned world, train three objectives on it, compare and search; returns the folder with the report.

    out: a new folder; default ``runs/demo-<n>``. Offline; about two minutes on two cores.
    """
    from visavis.report.demonstration import run_demo

    return run_demo(out, watch or Silent())


def coherence(
    runs: str | Path | Sequence[str | Path],
    *,
    degrees: str = "CBoW()",
    image: ImageBy = "best",
    queries: int | str | Sequence[str] = 4,
    top: int = 30,
    irrelevant: float = 0.5,
    split: str | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    watch: Watch | None = None,
) -> Comparison:
    """How coherent the lists of runs are: their first items side by side, how many are totally irrelevant, CS@K against K.

    degrees: who tells how relevant a caption is to an image, and image: from which captions of the image, as in GradedSupervision.
    queries: how many images, and captions of them, are shown, drawn with ``seed``; or captions and names of images. irrelevant:
    what is no more relevant to a query than this share of all candidates is totally irrelevant. split: default the first run's test split.
    out: a new folder; default ``runs/coherence-<n>``. Raises RunError for runs of different data, DataError for constant degrees.
    """
    from visavis.report.coherence.comparison import compare_runs

    return compare_runs(
        [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)],
        degrees,
        image=image,
        queries=[queries] if isinstance(queries, str) else queries,
        top=top,
        irrelevant=irrelevant,
        split=split,
        seed=seed,
        out=out,
        watch=watch or Silent(),
    )


def catalog(kind: str | None = None) -> dict[str, list[dict[str, str]]]:
    """What there is: name, what it is, formula, source and defaults of objectives, models, metrics, recipes, protocols."""
    from visavis.report.listing import KINDS

    if kind is not None and kind not in KINDS:
        raise VisavisError(f"there is no catalog of {kind}: {nearest(kind, KINDS)}")
    return {name: entries() for name, entries in KINDS.items() if kind in (None, name)}


__all__ = [
    "agreement",
    "catalog",
    "check_data",
    "coherence",
    "demo",
    "diagnose",
    "doctor",
    "evaluate",
    "features",
    "load",
    "relevance",
    "relevance_fit",
    "search",
    "train",
]
