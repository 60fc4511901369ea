"""Commands that index a collection and search it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visavis.cli.shared import Json, Memory, bars
from visavis.cli.terminal import print_json
from visavis.errors import VisavisError


def index(
    run: Annotated[str, typer.Argument(help="A run folder, or a CLIP or SigLIP model: its folder or hub name.")],
    source: Annotated[Path, typer.Argument(help="A folder of pictures and videos, or a data set.")],
    out: Annotated[Path, typer.Option(help="The folder of the index; one that is there is brought up to date.")],
    store: Annotated[
        str | None, typer.Option(help="A URI of LanceDB (a folder, s3://...) or Milvus (*.db, http://...); default: LanceDB inside --out.")
    ] = None,
    moments: Annotated[float | None, typer.Option(help="Seconds of a moment of a video; default 4.")] = None,
    width: Annotated[
        int | None, typer.Option(help="Keep the first so many numbers of the vectors, of a model trained with widths.")
    ] = None,
    curve: Annotated[bool, typer.Option("--curve", help="Measure recall, bytes and milliseconds of other forms of the vectors.")] = False,
    engine: Annotated[str, typer.Option(help="local, or ray: the processes of a Ray cluster.")] = "local",
    workers: Annotated[int, typer.Option(help="Processes of --engine ray.")] = 2,
    device: Annotated[str | None, typer.Option(help="Where the model computes: cpu or cuda; default: CUDA where there is one.")] = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Make an index of pictures and videos to search, or bring one up to date; killed, it goes on where it was."""
    from visavis import verbs
    from visavis.cli.output import print_built

    if engine not in ("local", "ray"):
        raise VisavisError(f"--engine is {engine!r}, expected local or ray.")
    with bars() as progress:
        built = verbs.index(
            run,
            source,
            out=out,
            store=store,
            moments=moments,
            width=width,
            curve=curve,
            engine=engine,  # type: ignore[arg-type]
            workers=workers,
            device=device,
            memory=memory,
            progress=progress,
        )
    if json:
        print_json(built.to_json())
    else:
        print_built(built)


def search(
    run: Annotated[
        list[Path],
        typer.Argument(default_factory=list, help="An index, or a run, or a CLIP or SigLIP model, or several.", metavar="RUN..."),
    ],
    query: Annotated[str, typer.Argument(help="A sentence; left out where --image or --like ask alone.")],
    image: Annotated[list[Path] | None, typer.Option(help="A picture to look for; may be given several times.")] = None,
    like: Annotated[list[str] | None, typer.Option(help="More like this item of the index, by its key.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="What not to show, as a sentence.")] = None,
    inside: Annotated[
        Path | None, typer.Option("--inside", "--in", help="For a run: a data set or any folder of images; default: the run's own data.")
    ] = None,
    path: Annotated[str, typer.Option(help="Only items whose path fits this pattern, such as '*beach*'.")] = "",
    kind: Annotated[str | None, typer.Option(help="Only items of this kind: image, video or moment.")] = None,
    after: Annotated[str | None, typer.Option(help="Only files changed at this time or later, such as 2024-05-31.")] = None,
    before: Annotated[str | None, typer.Option(help="Only files changed before this time.")] = None,
    metadata: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only items with this value.")] = None,
    fold: Annotated[bool, typer.Option(help="Near-duplicates, and moments of one clip, as one result.")] = True,
    rerank: Annotated[Path | None, typer.Option(help="A run of any model, such as SCAN, that ranks the first fifty anew.")] = None,
    model: Annotated[Path | None, typer.Option(help="Where the model of the index lies now, if it was moved.")] = None,
    top: Annotated[int, typer.Option(help="How many.")] = 5,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """What fits a query best: a sentence, pictures, items, with filters; from an index, or from a run's pictures."""
    from visavis import verbs
    from visavis.cli.output import print_results

    runs, text = (run, query) if run else ([Path(query)], "")
    with bars() as progress:
        found = verbs.search(
            runs,
            text,
            image=image or [],
            like=like or [],
            without=without or [],
            inside=inside,
            path=path,
            kind=kind,  # type: ignore[arg-type]
            after=after,
            before=before,
            metadata=_pairs(metadata or []),
            fold=fold,
            rerank=rerank,
            model=model,
            top=top,
            memory=memory,
            progress=progress,
        )
    if json:
        print_json({"query": text, **found.to_json()})
    else:
        print_results(found)


def label(
    run: Annotated[Path, typer.Argument(help="A run, a CLIP or SigLIP model, or an index, for its model.")],
    image: Annotated[Path, typer.Argument(help="A picture.")],
    labels: Annotated[Path, typer.Argument(help="A file with a caption or label a line.")],
    model: Annotated[Path | None, typer.Option(help="Where the model of the index lies now, if it was moved.")] = None,
    top: Annotated[int, typer.Option(help="How many.")] = 5,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Which captions or labels fit a picture best, with their scores."""
    from visavis import verbs
    from visavis.cli.output import print_texts

    fitting = verbs.label(run, image, labels, model=model, top=top, memory=memory)
    if json:
        print_json({"image": str(image), "texts": [{"text": text, "score": score} for text, score in fitting]})
    else:
        print_texts(fitting)


def judged(
    index: Annotated[Path, typer.Argument(help="An index that was judged.")],
    judgements: Annotated[Path, typer.Argument(help="The file of votes that visavis serve kept.")],
    model: Annotated[Path | None, typer.Option(help="Where the model of the index lies now, if it was moved.")] = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """How well an index answers what people judged on its page: R@K of their sentences, and pairs in order."""
    from visavis import verbs
    from visavis.cli.output import print_judgements

    result = verbs.judged(index, judgements, model=model, memory=memory)
    if json:
        print_json(result.to_json())
    else:
        print_judgements(result)


def _pairs(values: list[str]) -> dict[str, str]:
    for value in values:
        if "=" not in value:
            raise VisavisError(f"--metadata is {value!r}, expected NAME=VALUE, such as split=test.")
    return dict(value.split("=", 1) for value in values)
