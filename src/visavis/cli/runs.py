"""Commands that make a run or use one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visavis.cli.shared import Json, Memory, SkipBad, bars, stoppable
from visavis.cli.terminal import print_json

Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...", help="A run folder, or a CLIP or SigLIP model: its folder or hub name; several: the mean of their scores."
    ),
]


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A TOML file or the name of a recipe that ships; default: chosen by the encoders available.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as objective='VLC()' training.batch_size=64.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="The data set, instead of the recipe's.")] = None,
    judgements: Annotated[
        Path | None,
        typer.Option(help="Learn what people said on the page of visavis serve: its file of votes. With start_from=RUN, go on from a run."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new run folder; default runs/<recipe>-<n>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the stopped run in this folder; takes no other option.")] = None,
    skip_bad: SkipBad = False,
    json: Json = False,
) -> None:
    """Train by a recipe into a run folder; Ctrl-C saves everything, --resume continues exactly."""
    from visavis import verbs
    from visavis.cli.output import print_trained

    settings = overrides or []
    if recipe is not None and "=" in recipe:
        settings = [recipe, *settings]
        recipe = None
    with stoppable("train"), bars() as progress:
        trained = verbs.train(
            recipe, data=data, judgements=judgements, out=out, overrides=settings, resume=resume, skip_bad=skip_bad, progress=progress
        )
    if json:
        print_json(trained.to_json())
    else:
        print_trained(trained)


def evaluate(
    run: Runs,
    protocol: Annotated[
        list[str] | None, typer.Option(help="A named protocol; see visavis catalog protocols; may be given several times.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="A split; default the recipe's test split.")] = None,
    data: Annotated[str | None, typer.Option(help="Another data set.")] = None,
    degrees: Annotated[
        str | None, typer.Option(help='The estimator of degrees of relevance, such as "CBoW()"; default the recipe\'s.')
    ] = None,
    semantics: Annotated[
        str,
        typer.Option(help="The definition of CS@K: reference (tau-b, first captions) or paper (tau-a, all captions; keys end in _paper)."),
    ] = "reference",
    average: Annotated[
        bool | None,
        typer.Option("--average/--single", help="The mean of the scores of both networks, where a run trained two; default the recipe's."),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Also the CLIP or SigLIP model that the training began with.")] = False,
    published: Annotated[
        str | None, typer.Option(help="A row of a paper's table to set beside it, such as unified/2/clip-coco; default the run's own.")
    ] = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """R@K both ways, RSUM, ranks and mAP of a run's best model, or of several together; with degrees CS@K and nDCG@K."""
    from visavis import verbs
    from visavis.cli.output import print_evaluation

    with bars() as progress:
        result = verbs.evaluate(
            run,
            protocol=protocol,
            split=split,
            data=data,
            degrees=degrees,
            semantics=semantics,
            average=average,
            base=base,
            published=published,
            memory=memory,
            progress=progress,
        )
    if json:
        print_json(result.to_json())
    else:
        print_evaluation(result)


def diagnose(
    run: Annotated[Path, typer.Argument(help="A run folder, or a CLIP or SigLIP model: its folder or hub name.")],
    objective: Annotated[
        list[str] | None, typer.Option(help="Another objective to diagnose at the same weights; may be given several times.")
    ] = None,
    at: Annotated[
        str,
        typer.Option(help="The point of the training: best, last, start (the untrained model), or the step of a checkpoint that is kept."),
    ] = "best",
    epsilon: Annotated[
        list[float] | None, typer.Option(help="The weight from which a sample counts, default 0.01; may be given several times.")
    ] = None,
    batches: Annotated[int | None, typer.Option(help="At most so many batches of 128; default: the whole training set.")] = None,
    data: Annotated[str | None, typer.Option(help="Another data set.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also a new HTML page: the numbers, counts against epsilon, curves over training.")
    ] = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """Which pairs still contribute to the gradient of a run's model: their counts and weights over the training set."""
    from visavis import verbs
    from visavis.cli.output import print_diagnosis

    with bars() as progress:
        result = verbs.diagnose(
            run,
            objective=objective or [],
            at=at,
            epsilon=epsilon or [0.01],
            batches=batches,
            data=data,
            out=out,
            memory=memory,
            progress=progress,
        )
    if json:
        print_json(result.to_json())
    else:
        print_diagnosis(result)


def probe(
    run: Annotated[Path, typer.Argument(help="A run folder, or a CLIP or SigLIP model: its folder or hub name.")],
    images: Annotated[int, typer.Option(help="The first so many images of the split; 0: all.")] = 500,
    data: Annotated[str | None, typer.Option(help="Another data set.")] = None,
    split: Annotated[str | None, typer.Option(help="A split; default the recipe's test split.")] = None,
    memory: Memory = None,
    json: Json = False,
) -> None:
    """What a run's best model does not understand: true captions against the same with one edit, and edits that should change nothing."""
    from visavis import verbs
    from visavis.cli.output import print_probes

    with bars() as progress:
        result = verbs.probe(run, images=images, data=data, split=split, memory=memory, progress=progress)
    if json:
        print_json(result.to_json())
    else:
        print_probes(result)


def explain(
    run: Annotated[Path, typer.Argument(help="A run folder of a model that attends, such as SCAN.")],
    image: Annotated[str, typer.Argument(help="A picture, or the name of an image in the run's data.")],
    text: Annotated[str, typer.Argument(help="A sentence that may describe it.")],
    out: Annotated[Path | None, typer.Option(help="A new .png, .pdf or .jpg; default runs/explanation-<n>.png.")] = None,
    json: Json = False,
) -> None:
    """Which region of an image answered which word of a text: a picture, word by word."""
    from visavis import verbs
    from visavis.cli.output import print_explanation

    with bars() as progress:
        result = verbs.explain(run, image, text, out=out, progress=progress)
    if json:
        print_json(result.to_json())
    else:
        print_explanation(result)
