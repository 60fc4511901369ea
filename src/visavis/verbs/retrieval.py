"""Verbs that use a model: index a collection, and search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from visavis.errors import DataError, VisavisError
from visavis.progress import Progress, Silent
from visavis.verbs.runs import paths_of

if TYPE_CHECKING:
    from visavis.memory import Memory
    from visavis.retrieval.building import Built
    from visavis.retrieval.engines import Engine
    from visavis.retrieval.item import Kind, Where
    from visavis.retrieval.judged import JudgedEvaluation
    from visavis.retrieval.searching import Query, Results

WITHOUT = 0.5
"""The weight of what a query is to be without."""


def index(
    run: str | Path,
    source: str | Path,
    *,
    out: str | Path,
    store: str | Path | None = None,
    moments: float | None = None,
    width: int | None = None,
    curve: bool = False,
    engine: Engine = "local",
    workers: int = 2,
    device: str | None = None,
    memory: Memory = None,
    progress: Progress | None = None,
) -> Built:
    """Make an index of pictures and videos to search, or bring one up to date: what is new or changed is encoded, the rest stays.

    run: a run folder, or a CLIP or SigLIP model by folder or hub name. source: a folder or a data set. out: the folder of the index.
    store: a URI of LanceDB (a folder, ``s3://...``) or Milvus (``*.db``, ``http://...``); default: LanceDB inside ``out``. moments: the
    seconds of a moment of a clip; default 4. width: how many first numbers of the vectors are kept, of a model trained for it (``widths``);
    default: all. curve: measure recall@10, bytes a vector and milliseconds a query of other forms of the vectors, too.
    engine, workers: ``"ray"`` encodes with so many processes of a cluster (``RAY_ADDRESS``).
    Where the run's validation data are here, the index also learns how likely a score is a match.
    """
    from dataclasses import replace

    from visavis.retrieval.building import build_index
    from visavis.retrieval.curve import measure
    from visavis.retrieval.index import Index
    from visavis.retrieval.learning import learn_calibration

    told = progress or Silent()
    built = build_index(
        run,
        source,
        out,
        store=None if store is None else str(store),
        moments_s=moments,
        width=width,
        engine=engine,
        workers=workers,
        device=device,
        memory=memory,
        progress=told,
    )
    learn_calibration(run, Path(out), told)
    if not curve:
        return built
    opened = Index.open(out, model=run, device=device, memory=memory)
    try:
        return replace(built, curve=measure(opened, memory))
    finally:
        opened.store.close()


def search(
    run: str | Path | Sequence[str | Path],
    query: str = "",
    *,
    image: str | Path | Sequence[str | Path] = (),
    like: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
    inside: str | Path | None = None,
    path: str = "",
    kind: Kind | None = None,
    after: str | None = None,
    before: str | None = None,
    metadata: Mapping[str, str] | None = None,
    fold: bool = True,
    rerank: str | Path | None = None,
    model: str | Path | None = None,
    top: int = 5,
    memory: Memory = None,
    progress: Progress | None = None,
) -> Results:
    """What fits a query best, best first: a sentence, pictures, items of the index, together and without something.

    run: an index; or a run folder, a CLIP or SigLIP model, or several, whose scores are averaged. Of an index: image: pictures to look for; like: keys of
    items to find more of; without: sentences that tell what not to show, at half the weight; path, kind, after, before, metadata: which items
    may be found (``path`` a pattern such as ``*beach*``, times such as ``2024-05-31``); fold: near-duplicates, and moments of one clip,
    as one result; rerank: a run of any model that ranks the first fifty anew; model: where the index's model lies now. Of runs: inside: a data
    set or any folder of images; default: the run's data. memory: as in ``evaluate``.
    """
    from visavis.retrieval.index import Index, is_index
    from visavis.retrieval.query import say_unknown_words, search_images
    from visavis.retrieval.searching import found_images, with_images

    runs, told = paths_of(run), progress or Silent()
    if not any(is_index(folder) for folder in runs):
        if image or like or without or path or kind or after or before or metadata or rerank:
            raise VisavisError(
                f"{runs[0]} is no index, and only an index is searched by pictures, with filters or --rerank: make one with "
                f"visavis index {runs[0]} FOLDER --out INDEX"
            )
        return found_images(search_images(runs, query, None if inside is None else Path(inside), top, told, memory))
    if len(runs) > 1 or inside is not None:
        raise VisavisError("an index is searched alone, and brings its own pictures: name one index, without --in.")
    from visavis.models.retriever import Retriever
    from visavis.retrieval.searching import search as search_index

    opened = Index.open(runs[0], model=model, memory=memory)
    asked = query_of(query, image, like, without)
    try:
        for _, text in asked.texts:
            if text.strip():
                say_unknown_words(opened.model, text, told)
        found = search_index(
            opened,
            asked,
            top,
            where_of(path, kind, after, before, metadata or {}),
            fold=fold,
            rerank=None if rerank is None else Retriever.load(rerank, memory=memory),
        )
        shown = with_images(opened, found)
        if gone := [hit.item.path for hit in shown if hit.image is None]:
            told.say(f"no longer in {opened.root}, so bring the index up to date with visavis index: {', '.join(gone)}")
        return shown
    finally:
        opened.store.close()


def label(
    run: str | Path,
    image: str | Path,
    labels: str | Path | Sequence[str],
    *,
    model: str | Path | None = None,
    top: int = 5,
    memory: Memory = None,
) -> list[tuple[str, float]]:
    """Which captions or labels fit a picture best, with their scores, by a run, a CLIP or SigLIP model, or the model of an index.

    labels: texts, or a file with one a line. model: where the index's model lies now. memory: as in ``evaluate``.
    """
    from visavis import storage
    from visavis.models.retriever import Retriever
    from visavis.retrieval.index import is_index, read_manifest
    from visavis.retrieval.searching import fitting_texts

    if isinstance(labels, str | Path):
        labels = [line for line in storage.read_text(labels).splitlines() if line.strip()]
    name = model or (read_manifest(Path(run)).model if is_index(run) else run)
    return fitting_texts(Retriever.load(name, memory=memory), image, labels)[:top]


def judged(index: str | Path, judgements: str | Path, *, model: str | Path | None = None, memory: Memory = None) -> JudgedEvaluation:
    """How well an index answers what people judged on its page: how often something that fits is among the first results.

    judgements: the file of ``visavis serve``. model: where the index's model lies now. memory: as in ``evaluate``. Raises DataError for a
    file without a sentence that something fits.
    """
    from visavis.retrieval.index import Index
    from visavis.retrieval.judged import evaluate_judged

    return evaluate_judged(Index.open(index, model=model, memory=memory), Path(judgements))


def query_of(
    text: str, image: str | Path | Sequence[str | Path] = (), like: str | Sequence[str] = (), without: str | Sequence[str] = ()
) -> Query:
    """A query from its parts, each of weight 1, and those that it is to be without. Raises VisavisError if there are none."""
    from visavis.retrieval.searching import Query

    images = [image] if isinstance(image, str | Path) else image
    keys, unwanted = ([part] if isinstance(part, str) else part for part in (like, without))
    texts = [(1.0, text)] if text.strip() or not (images or keys) else []
    return Query(
        texts=(*texts, *((-WITHOUT, sentence) for sentence in unwanted)),
        images=tuple((1.0, picture) for picture in images),
        like=tuple((1.0, key) for key in keys),
    )


def where_of(path: str, kind: Kind | None, after: str | None, before: str | None, metadata: Mapping[str, str]) -> Where:
    """Which items may be found. Raises VisavisError for a kind or a time that is none."""
    from visavis.retrieval.item import Where

    if kind not in (None, "image", "video", "moment"):
        raise VisavisError(f"kind is {kind!r}, expected image, video or moment.")
    return Where(path=path, kind=kind, after=_time(after), before=_time(before), metadata=dict(metadata))


def _time(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(datetime.fromisoformat(text).astimezone().timestamp() * 1e9)
    except (ValueError, OverflowError, OSError):
        raise DataError(f"{text!r} is no time: expected a date such as 2024-05-31, or 2024-05-31T18:30.") from None
