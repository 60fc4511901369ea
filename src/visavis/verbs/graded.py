"""Verbs about graded relevance: how far runs and degrees of relevance agree, with each other and with human judgements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from visavis.progress import Progress, Silent

if TYPE_CHECKING:
    from visavis.comparison.coherence import RankedLists
    from visavis.degrees.base import ImageBy
    from visavis.degrees.fitting import Fitted, Kind
    from visavis.degrees.judging import Judged
    from visavis.degrees.thresholds import Distribution
    from visavis.evaluation.agreement import Agreement
    from visavis.memory import Memory


def agreement(
    runs: str | Path | Sequence[str | Path],
    *,
    data: str | Path | None = None,
    degrees: str | None = None,
    progress: Progress | None = None,
) -> list[Agreement]:
    """How far runs agree with people: Kendall and Spearman correlation of their scores of image-caption pairs with human judgements.

    Computed for the expert and the crowd judgements of Flickr8k's test images, or for the ratings of Crisscrossed Captions of MS-COCO's,
    over all pairs and without an image's own captions, with bootstrap intervals over images; for comparison, how far single people
    agree with the others, where these are known. data: the data set with the judgements; default the runs'. degrees: an estimator of
    degrees of relevance to judge too, from the first caption of each image.
    """
    from visavis.runs.agreement import agree_runs

    folders = [runs] if isinstance(runs, str | Path) else runs
    return agree_runs([Path(run) for run in folders], None if data is None else str(data), degrees, progress or Silent())


def coherence(
    runs: str | Path | Sequence[str | Path],
    *,
    degrees: str = "CBoW()",
    image: ImageBy = "best",
    queries: int | str | Sequence[str] = 4,
    top: int = 30,
    irrelevant: float = 0.5,
    split: str | None = None,
    data: str | Path | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    memory: Memory = None,
    progress: Progress | None = None,
) -> RankedLists:
    """How coherent the ranked lists of runs are: their top items side by side, how many are totally irrelevant, CS@K against K.

    degrees: the estimator of the relevance of a caption to an image. image: from which captions of the image, as in
    GradedSupervision. queries: the number of images, and of captions, to show, drawn at random with ``seed``; or captions and names
    of images. top: the length of the lists. irrelevant: a candidate is totally irrelevant if it is no more relevant to the query
    than this share of all candidates. split: default the first run's test split. data: another data set than the runs' own; needed
    for a pretrained CLIP or SigLIP model. out: a new folder; default ``runs/coherence-<n>``. memory: of blocks of scores; default the
    recipe's. Raises RunError for runs of different data, DataError for constant degrees.
    """
    from visavis.comparison.coherence import compare_runs
    from visavis.report.coherence import write_report
    from visavis.report.figures import require_matplotlib

    require_matplotlib()
    comparison = compare_runs(
        [Path(run) for run in ([runs] if isinstance(runs, str | Path) else runs)],
        degrees,
        image=image,
        queries=[queries] if isinstance(queries, str) else queries,
        top=top,
        irrelevant=irrelevant,
        split=split,
        data=None if data is None else str(data),
        seed=seed,
        out=out,
        memory=memory,
        progress=progress or Silent(),
    )
    write_report(comparison)
    return comparison


def relevance(degrees: str | Sequence[str] = (), *, progress: Progress | None = None) -> list[Judged]:
    """How far estimators of degrees of relevance agree with human ratings (STS-B dev and test, Crisscrossed Captions), and their cost.

    degrees: specs such as ``["CBoW(common=1)"]``; default: those that need no model of the user's own.
    """
    from visavis.degrees.judging import ESTIMATORS, judge

    return judge([degrees] if isinstance(degrees, str) else degrees or ESTIMATORS, progress or Silent())


def relevance_thresholds(
    data: str | Path,
    *,
    degrees: str | Sequence[str] = (),
    image: ImageBy = "own",
    pairs: int = 100_000,
    picture: str | Path | None = None,
    progress: Progress | None = None,
) -> list[Distribution]:
    """The distribution of degrees of relevance over random training pairs of a data set, and thresholds for Ladder from its quantiles.

    degrees: specs; default: those that need no model of the user's own. image: as in GradedSupervision. pairs: how many to sample.
    picture: a new PNG of the distributions.
    """
    from visavis import storage
    from visavis.data import open_dataset
    from visavis.degrees.judging import ESTIMATORS
    from visavis.degrees.thresholds import distributions
    from visavis.report.figures import degrees_picture, require_matplotlib

    if picture is not None:
        require_matplotlib()
        storage.new_file(picture)
    specs = [degrees] if isinstance(degrees, str) else degrees or ESTIMATORS
    rows = distributions(specs, open_dataset(data), image, pairs, progress or Silent())
    if picture is not None:
        storage.write_bytes(picture, degrees_picture(rows))
    return rows


def relevance_fit(
    out: str | Path,
    *,
    kind: Kind = "bi",
    model: str = "minilm",
    epochs: int = 4,
    lr: float | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fitted:
    """Fine-tune a sentence model on the ratings of STS-B train, as the ladder paper fine-tunes BERT; the best epoch on dev is kept.

    out: a new folder, for SentenceModel (kind "bi": the cosine of two vectors) or CrossEncoder (kind "cross": two captions read
    together). lr: default 2e-5 for "bi", 5e-5 for "cross", whose output layer starts untrained.
    """
    from visavis.degrees.fitting import fit

    return fit(out, kind, model, epochs=epochs, lr=lr, batch_size=batch_size, seed=seed, progress=progress or Silent())
