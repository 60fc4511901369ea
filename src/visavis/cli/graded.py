"""Commands about the merely related."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visavis.cli.shared import Json, Memory, bars, print_json


def agreement(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or CLIP or SigLIP models; differences are to the first.")],
    data: Annotated[str | None, typer.Option(help="A data set with people's judgements beside it; default the runs'.")] = None,
    degrees: Annotated[str | None, typer.Option(help='Also how far degrees of relevance agree, such as "CBoW()".')] = None,
    json: Json = False,
) -> None:
    """How far runs agree with people's judgements of image-caption pairs, with intervals, and how far people agree."""
    from visavis import verbs
    from visavis.cli.output import print_agreement

    with bars() as progress:
        found = verbs.agreement(runs, data=data, degrees=degrees, progress=progress)
    if json:
        print_json({"agreement": [each.to_json() for each in found]})
    else:
        print_agreement(found)


def coherence(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or CLIP or SigLIP models, that rank the same data.")],
    degrees: Annotated[str, typer.Option(help="Who tells how relevant a caption is to an image.")] = "CBoW()",
    image: Annotated[str, typer.Option(help="From which of its captions an image's degree comes: best, mean, or own, its first.")] = "best",
    queries: Annotated[
        list[str] | None,
        typer.Option(help="How many queries to show, by lot, or a caption or an image's name; may be given several times."),
    ] = None,
    top: Annotated[int, typer.Option(help="How long a list is.")] = 30,
    irrelevant: Annotated[
        float, typer.Option(help="What is no more relevant than this share of all candidates is totally irrelevant.")
    ] = 0.5,
    split: Annotated[str | None, typer.Option(help="A split; default the first run's test split.")] = None,
    data: Annotated[str | None, typer.Option(help="Another data set than the runs' own.")] = None,
    seed: Annotated[int, typer.Option(help="Of the lots.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A new folder; default runs/coherence-<n>.")] = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """See how coherent the lists of runs are: side by side, with what is totally irrelevant, and CS@K against K."""
    from visavis import verbs
    from visavis.cli.output import print_coherence

    asked: int | list[str] = 4 if not queries else int(queries[0]) if len(queries) == 1 and queries[0].isdecimal() else queries
    with bars() as progress:
        result = verbs.coherence(
            runs,
            degrees=degrees,
            image=image,  # type: ignore[arg-type]
            queries=asked,
            top=top,
            irrelevant=irrelevant,
            split=split,
            data=data,
            seed=seed,
            out=out,
            memory=memory,
            progress=progress,
        )
    if json:
        print_json(result.to_json())
    else:
        print_coherence(result)


Degrees = Annotated[
    list[str] | None,
    typer.Option(help="Who tells degrees, as CBoW(common=1); may be given several times; default: all but fine-tuned ones."),
]


def relevance(context: typer.Context, degrees: Degrees = None, json: Json = False) -> None:
    """Degrees of relevance beside human ratings, with what they cost."""
    from visavis import verbs
    from visavis.cli.output import print_judged

    if context.invoked_subcommand is not None:
        return
    with bars() as progress:
        rows = verbs.relevance(degrees or (), progress=progress)
    if json:
        print_json({"degrees": [row.to_json() for row in rows]})
    else:
        print_judged(rows)


def relevance_thresholds(
    data: Annotated[str, typer.Argument(help="A data set: a folder, a list in it, or a name under VISAVIS_DATA.")],
    degrees: Degrees = None,
    image: Annotated[str, typer.Option(help="Whose degree an image has: own, best or mean of its captions.")] = "own",
    pairs: Annotated[int, typer.Option(help="How many random training pairs to look at.")] = 100_000,
    picture: Annotated[Path | None, typer.Option(help="A new PNG of the distributions.")] = None,
    json: Json = False,
) -> None:
    """How degrees lie over the training pairs of a data set, and thresholds for Ladder that follow."""
    from visavis import verbs
    from visavis.cli.output import print_distributions

    with bars() as progress:
        rows = verbs.relevance_thresholds(data, degrees=degrees or (), image=image, pairs=pairs, picture=picture, progress=progress)  # type: ignore[arg-type]
    if json:
        print_json({"degrees": [row.to_json() for row in rows]})
    else:
        print_distributions(rows)


def relevance_fit(
    out: Annotated[Path, typer.Option(help="A new folder for the model.")],
    kind: Annotated[str, typer.Option(help="bi: one vector a caption; cross: two captions read at once.")] = "bi",
    model: Annotated[str, typer.Option(help="What to begin with: minilm, a transformers folder, or a hub name.")] = "minilm",
    epochs: Annotated[int, typer.Option(help="How often all training pairs are seen.")] = 4,
    lr: Annotated[float | None, typer.Option(help="The learning rate; default 2e-5 for bi, 5e-5 for cross.")] = None,
    batch_size: Annotated[int, typer.Option(help="Pairs a step.")] = 16,
    seed: Annotated[int, typer.Option(help="Of order, dropout and the new output.")] = 0,
    json: Json = False,
) -> None:
    """Fine-tune a sentence model on the human ratings of STS-B, for SentenceModel or CrossEncoder."""
    from visavis import verbs
    from visavis.cli.output import print_fitted

    with bars() as progress:
        options = {"kind": kind, "model": model, "epochs": epochs, "lr": lr, "batch_size": batch_size, "seed": seed}
        fitted = verbs.relevance_fit(out, **options, progress=progress)  # type: ignore[arg-type]
    if json:
        print_json(fitted.to_json())
    else:
        print_fitted(fitted)
