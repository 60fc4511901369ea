"""Commands that set many runs beside one another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from visavis.cli.shared import Json, bars, stoppable
from visavis.cli.terminal import print_json

Engine = Annotated[str, typer.Option(help="local, or ray: a cluster whose machines all see the folder.")]
Workers = Annotated[int | None, typer.Option(help="Runs at once; default one for each core.")]


def compare(
    recipe: Annotated[
        str | None, typer.Argument(help="A TOML file or the name of a recipe that ships; default: chosen by the encoders available.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For all runs, such as epochs=4.")] = None,
    objective: Annotated[list[str] | None, typer.Option(help='Such as "Unified()"; several times; "Goal.all()" is fifteen.')] = None,
    model: Annotated[list[str] | None, typer.Option(help='Such as "VSE++(width=512)"; several times.')] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help='Such as "phases.0.optimizer.lr=[3e-4, 1e-3]"; the best on validation of each objective is taken.'),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds 1 to so many, for each; default 5.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="A time such as 30m: the better half by validation goes on after 1, 2, 4, ... seeds.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="The data set, instead of the recipe's.")] = None,
    judgements: Annotated[
        Path | None, typer.Option(help="Another test beside the captions: the file of votes on the page of visavis serve.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; default runs/compare-<n>.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the comparison in this folder, also with more --seeds or new --judgements.")
    ] = None,
    trec: Annotated[bool, typer.Option("--trec", help="Also ranked lists and right answers as TREC files.")] = False,
    engine: Engine = "local",
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Which objective, model and settings are best on some data, and how sure that is."""
    from visavis import verbs
    from visavis.cli.output import print_comparison

    settings = overrides or []
    if recipe is not None and "=" in recipe:
        settings, recipe = [recipe, *settings], None
    with stoppable("compare"), bars() as progress:
        comparison = verbs.compare(
            recipe,
            objective=objective or [],
            model=model or [],
            grid=grid or [],
            seeds=seeds,
            budget=budget,
            data=data,
            judgements=judgements,
            out=out,
            overrides=settings,
            resume=resume,
            trec=trec,
            engine=engine,  # type: ignore[arg-type]  # the verb checks it
            workers=workers,
            progress=progress,
        )
    if json:
        print_json(comparison.to_json())
    else:
        print_comparison(comparison)


def reproduce(
    table: Annotated[str | None, typer.Argument(help="A paper's table, such as goal/3; see visavis catalog recipes.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For all rows, such as epochs=4.")] = None,
    rows: Annotated[
        list[str] | None, typer.Option(help="A row's name, or a pattern such as 'r152-con-*'; several times; default all.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="A recipe for other data than the paper's, such as heads-flickr8k, with each row's objective.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Seeds 1 to so many; default as many runs as the paper averages.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; default runs/<paper>-<table>-<n>.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the table in this folder, also with more --seeds.")] = None,
    engine: Engine = "local",
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Train the rows of a paper's table: published beside reached."""
    from visavis import verbs
    from visavis.cli.output import print_reproduction

    with stoppable("reproduce"), bars() as progress:
        reproduction = verbs.reproduce(
            table,
            rows=rows or [],
            base=base,
            seeds=seeds,
            out=out,
            overrides=overrides or [],
            resume=resume,
            engine=engine,  # type: ignore[arg-type]  # the verb checks it
            workers=workers,
            progress=progress,
        )
    if json:
        print_json(reproduction.to_json())
    else:
        print_reproduction(reproduction)
