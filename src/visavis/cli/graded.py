"""Commands about graded relevance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visavis.cli.shared import Json, Memory, bars
from visavis.cli.terminal import print_json


def agreement(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or CLIP or SigLIP models; differences are to the first.")],
    data: Annotated[str | None, typer.Option(help="The data set with human judgements; default the runs'.")] = None,
    degrees: Annotated[str | None, typer.Option(help='An estimator of degrees of relevance to judge too, such as "CBoW()".')] = None,
    json: Json = False,
) -> None:
    """How far runs agree with human judgements of image-caption pairs, with intervals, and how far people agree with each other."""
    from visavis import verbs
    from visavis.cli.output import print_agreement

    with bars() as progress:
        agreements = verbs.agreement(runs, data=data, degrees=degrees, progress=progress)
    if json:
        print_json({"agreement": [agreement.to_json() for agreement in agreements]})
    else:
        print_agreement(agreements)


def coherence(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or CLIP or SigLIP models, that rank the same data.")],
    degrees: Annotated[str, typer.Option(help="The estimator of the relevance of a caption to an image.")] = "CBoW()",
    image: Annotated[str, typer.Option(help="Which captions of an image its degree comes from: best, mean, or own (the first).")] = "best",
    queries: Annotated[
        list[str] | None,
        typer.Option(help="A number of random queries to show, or a caption or an image's name; may be given several times."),
    ] = None,
    top: Annotated[int, typer.Option(help="The length of each list.")] = 30,
    irrelevant: Annotated[
        float, typer.Option(help="A candidate no more relevant than this share of all candidates is totally irrelevant.")
    ] = 0.5,
    split: Annotated[str | None, typer.Option(help="A split; default the first run's test split.")] = None,
    data: Annotated[str | None, typer.Option(help="Another data set than the runs' own.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of what is drawn at random.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A new folder; default runs/coherence-<n>.")] = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """How coherent the ranked lists of runs are: side by side, with totally irrelevant items marked, and CS@K against K."""
    from visavis import verbs
    from visavis.cli.output import print_coherence

    shown: int | list[str] = 4 if not queries else int(queries[0]) if len(queries) == 1 and queries[0].isdecimal() else queries
    with bars() as progress:
        result = verbs.coherence(
            runs,
            degrees=degrees,
            image=image,  # type: ignore[arg-type]
            queries=shown,
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
    typer.Option(help="An estimator of degrees, such as CBoW(common=1); may be given several times; default: all but fine-tuned ones."),
]


def relevance(context: typer.Context, degrees: Degrees = None, json: Json = False) -> None:
    """How far estimators of degrees of relevance agree with human ratings, and their cost."""
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
    image: Annotated[
        str, typer.Option(help="Which captions of an image its degree comes from: own (the one drawn), best or mean.")
    ] = "own",
    pairs: Annotated[int, typer.Option(help="How many random training pairs to sample.")] = 100_000,
    picture: Annotated[Path | None, typer.Option(help="A new PNG of the distributions.")] = None,
    json: Json = False,
) -> None:
    """The distribution of degrees over the training pairs of a data set, and thresholds for Ladder from it."""
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
    kind: Annotated[str, typer.Option(help="bi: one vector per caption; cross: two captions read together.")] = "bi",
    model: Annotated[str, typer.Option(help="The pretrained model: minilm, a transformers folder, or a hub name.")] = "minilm",
    epochs: Annotated[int, typer.Option(help="Passes over all training pairs.")] = 4,
    lr: Annotated[float | None, typer.Option(help="The learning rate; default 2e-5 for bi, 5e-5 for cross.")] = None,
    batch_size: Annotated[int, typer.Option(help="Pairs per step.")] = 16,
    seed: Annotated[int, typer.Option(help="The seed of order, dropout and the new output layer.")] = 0,
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
