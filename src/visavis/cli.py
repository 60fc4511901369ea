"""The command line: parse, call the verb of the same name, print. The only module that prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visavis.errors import VisavisError

if TYPE_CHECKING:
    from visavis.terminal import Bars

app = typer.Typer(
    name="visavis",
    help="Train, compare, explain and serve vision-language retrieval.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Look at data.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")
relevance_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
app.add_typer(relevance_app, name="relevance")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Go on without what is broken, and say what was left out.")]


@app.command()
def demo(out: Annotated[Path | None, typer.Option(help="A new folder; default runs/demo-<n>.")] = None, json: Json = False) -> None:
    """Draw a captioned world, train three objectives on it, compare them and search: offline, about two minutes."""
    from visavis import storage, verbs

    with _bars() as watch:
        folder = verbs.demo(out=out, watch=watch)
    if json:
        _print_json({"folder": str(folder), "report": str(folder / "report.html"), **storage.read_json(folder / "table.json")})


@app.command()
def doctor(json: Json = False) -> None:
    """Is all well? Versions, threads, accelerators, data and caches, and how to mend what is wrong."""
    from visavis import verbs
    from visavis.terminal import print_findings

    findings = verbs.doctor()
    if json:
        _print_json({finding.name: {"value": finding.value, "ok": finding.ok, "remedy": finding.remedy} for finding in findings})
    else:
        print_findings(findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@data_app.command("check")
def data_check(
    path: Annotated[str, typer.Argument(help="A folder, a list in it, or a name under VISAVIS_DATA.")], json: Json = False
) -> None:
    """List exactly what is wrong with a data set; exit code 1 if training would lose something."""
    from visavis import verbs
    from visavis.terminal import print_check

    with _bars() as watch:
        report = verbs.check_data(path, watch=watch)
    if json:
        _print_json(report.to_json())
    else:
        print_check(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def features(
    path: Annotated[str, typer.Argument(help="A data set: a folder, a list in it, or a name under VISAVIS_DATA.")],
    vision: Annotated[str | None, typer.Option(help="An image encoder: scenes, a transformers folder, or a hub name.")] = None,
    text: Annotated[str | None, typer.Option(help="A text encoder: minilm, a transformers folder, or a hub name.")] = None,
    view: Annotated[str, typer.Option(help="Of images: pooled, or grid for regions.")] = "pooled",
    text_view: Annotated[str, typer.Option(help="Of captions: pooled, or words.")] = "pooled",
    crops: Annotated[int, typer.Option(help="Crops of an image: 1 or 10.")] = 1,
    out: Annotated[Path | None, typer.Option(help="A folder for the stores; default: the cache, where training finds them.")] = None,
    skip_bad: SkipBad = False,
    json: Json = False,
) -> None:
    """Cache what frozen encoders say of a data set; a killed call goes on where it ended."""
    from visavis import verbs

    with _bars() as watch:
        stores = verbs.features(
            path, vision=vision, text=text, view=view, text_view=text_view, crops=crops, out=out, skip_bad=skip_bad, watch=watch
        )
    facts = [{"folder": str(store.folder), "rows": len(store), "width": store.width, "view": store.description.view} for store in stores]
    if json:
        _print_json({"stores": facts})
    for fact in () if json else facts:
        typer.echo(f"{fact['folder']}: {fact['rows']:,} rows of {fact['view']} features, {fact['width']} wide")


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A TOML file or the name of a recipe that ships; with --resume: a run folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Such as objective='VLC()' training.batch_size=64.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="The data set, instead of the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new run folder; default runs/<recipe>-<n>.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the stopped run in this folder.")] = False,
    skip_bad: SkipBad = False,
    json: Json = False,
) -> None:
    """Train by a recipe into a run folder; Ctrl-C saves, --resume goes on exactly."""
    from visavis import verbs
    from visavis.environment import program
    from visavis.terminal import print_trained
    from visavis.training.trainer import Stopped

    try:
        with _bars() as watch:
            trained = verbs.train(recipe, data=data, out=out, overrides=overrides or [], resume=resume, skip_bad=skip_bad, watch=watch)
    except Stopped as stopped:
        typer.echo(f"Stopped; everything is saved. Go on with: {program()} train --resume {stopped}", err=True)
        raise typer.Exit(130) from None
    if json:
        _print_json(trained.to_json())
    else:
        print_trained(trained)


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    protocol: Annotated[str | None, typer.Option(help="A named protocol; see visavis catalog protocols.")] = None,
    split: Annotated[str | None, typer.Option(help="A split; default the recipe's test split.")] = None,
    data: Annotated[str | None, typer.Option(help="Another data set.")] = None,
    degrees: Annotated[str | None, typer.Option(help='Who tells degrees of relevance, such as "CBoW()"; default the recipe\'s.')] = None,
    semantics: Annotated[
        str, typer.Option(help="Of CS@K: reference (tau-b, first captions) or paper (tau-a, all captions).")
    ] = "reference",
    json: Json = False,
) -> None:
    """R@K both ways, RSUM, ranks and mAP of a run's best model; with degrees CS@K and nDCG@K."""
    from visavis import verbs
    from visavis.terminal import print_evaluation

    with _bars() as watch:
        result = verbs.evaluate(run, protocol=protocol, split=split, data=data, degrees=degrees, semantics=semantics, watch=watch)
    if json:
        _print_json(result.to_json())
    else:
        print_evaluation(result)


@app.command()
def agreement(
    runs: Annotated[list[Path], typer.Argument(help="Run folders; differences are to the first.")],
    data: Annotated[str | None, typer.Option(help="A data set with people's judgements beside it; default the runs'.")] = None,
    degrees: Annotated[str | None, typer.Option(help='Also how far degrees of relevance agree, such as "CBoW()".')] = None,
    json: Json = False,
) -> None:
    """How far runs agree with people's judgements of image-caption pairs, with intervals, and how far people agree."""
    from visavis import verbs
    from visavis.terminal import print_agreement

    with _bars() as watch:
        found = verbs.agreement(runs, data=data, degrees=degrees, watch=watch)
    if json:
        _print_json({"agreement": [each.to_json() for each in found]})
    else:
        print_agreement(found)


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    objective: Annotated[list[str] | None, typer.Option(help="Another objective at the same point; may be given several times.")] = None,
    batches: Annotated[int | None, typer.Option(help="At most so many batches of 128; default: the whole training set.")] = None,
    json: Json = False,
) -> None:
    """Which pairs still move a run's best model: counts and weights of contributing samples over the training set."""
    from visavis import verbs
    from visavis.terminal import print_diagnosis

    with _bars() as watch:
        result = verbs.diagnose(run, objective=objective or [], batches=batches, watch=watch)
    if json:
        _print_json(result.to_json())
    else:
        print_diagnosis(result)


@app.command()
def search(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    query: Annotated[str, typer.Argument(help="What to look for, in words.")],
    inside: Annotated[Path | None, typer.Option("--in", help="A data set or any folder of images; default: the run's own data.")] = None,
    top: Annotated[int, typer.Option(help="How many images.")] = 5,
    json: Json = False,
) -> None:
    """The images that fit a sentence best, with their scores."""
    from visavis import verbs
    from visavis.terminal import print_hits

    with _bars() as watch:
        hits = verbs.search(run, query, inside=inside, top=top, watch=watch)
    if json:
        _print_json({"query": query, "hits": [hit.to_json() for hit in hits]})
    else:
        print_hits(hits)


@relevance_app.callback()
def relevance(
    context: typer.Context,
    degrees: Annotated[
        list[str] | None,
        typer.Option(help="Who tells degrees, as CBoW(common=1); may be given several times; default: all but fine-tuned ones."),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Suggest thresholds for this data set, from its random training pairs.")] = None,
    image: Annotated[str, typer.Option(help="With --data: whose degree an image has: own, best or mean of its captions.")] = "own",
    pairs: Annotated[int, typer.Option(help="With --data: how many pairs to look at.")] = 100_000,
    picture: Annotated[Path | None, typer.Option(help="With --data: a new PNG of the distributions.")] = None,
    json: Json = False,
) -> None:
    """Degrees of relevance beside human ratings, with what they cost; with --data, thresholds for Ladder."""
    from visavis import verbs
    from visavis.terminal import print_relevance

    if context.invoked_subcommand is not None:
        return
    with _bars() as watch:
        rows = verbs.relevance(degrees or (), data=data, image=image, pairs=pairs, picture=picture, watch=watch)  # type: ignore[arg-type]
    if json:
        _print_json({"degrees": [row.to_json() for row in rows]})
    else:
        print_relevance(rows)


@relevance_app.command("fit")
def relevance_fit(
    out: Annotated[Path, typer.Option(help="A new folder for the model.")],
    kind: Annotated[str, typer.Option(help="bi: one vector a caption; cross: two captions read at once.")] = "bi",
    model: Annotated[str, typer.Option(help="What to begin with: minilm, a transformers folder, or a hub name.")] = "minilm",
    epochs: Annotated[int, typer.Option(help="How often all training pairs are seen.")] = 4,
    rate: Annotated[float | None, typer.Option(help="The learning rate; default 2e-5 for bi, 5e-5 for cross.")] = None,
    batch_size: Annotated[int, typer.Option(help="Pairs a step.")] = 16,
    seed: Annotated[int, typer.Option(help="Of order, dropout and the new output.")] = 0,
    json: Json = False,
) -> None:
    """Fine-tune a sentence model on the human ratings of STS-B, for SentenceModel or CrossEncoder."""
    from visavis import verbs
    from visavis.terminal import print_fitted

    with _bars() as watch:
        options = {"kind": kind, "model": model, "epochs": epochs, "rate": rate, "batch_size": batch_size, "seed": seed}
        fitted = verbs.relevance_fit(out, **options, watch=watch)  # type: ignore[arg-type]
    if json:
        _print_json(fitted.to_json())
    else:
        print_fitted(fitted)


@app.command()
def catalog(
    kind: Annotated[str | None, typer.Argument(help="objectives, models, metrics, recipes or protocols.")] = None, json: Json = False
) -> None:
    """See what there is: names, formulas, sources, defaults."""
    from visavis import verbs
    from visavis.terminal import print_catalog

    entries = verbs.catalog(kind)
    if json:
        _print_json(entries)
    else:
        print_catalog(entries)


@app.command()
def coherence(
    runs: Annotated[list[Path], typer.Argument(help="Run folders that rank the same data.")],
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
    seed: Annotated[int, typer.Option(help="Of the lots.")] = 0,
    out: Annotated[Path | None, typer.Option(help="A new folder; default runs/coherence-<n>.")] = None,
    json: Json = False,
) -> None:
    """See how coherent the lists of runs are: side by side, with what is totally irrelevant, and CS@K against K."""
    from visavis import verbs
    from visavis.terminal import print_coherence

    asked: int | list[str] = 4 if not queries else int(queries[0]) if len(queries) == 1 and queries[0].isdecimal() else queries
    with _bars() as watch:
        result = verbs.coherence(
            runs,
            degrees=degrees,
            image=image,  # type: ignore[arg-type]
            queries=asked,
            top=top,
            irrelevant=irrelevant,
            split=split,
            seed=seed,
            out=out,
            watch=watch,
        )
    if json:
        _print_json(result.to_json())
    else:
        print_coherence(result)


def _bars() -> Bars:
    from visavis.terminal import Bars

    return Bars()


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, ensure_ascii=False))


def main() -> None:
    """Run the command line; an error of the user's is one sentence on stderr and exit code 1."""
    try:
        app()
    except VisavisError as error:
        typer.echo(f"visavis: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        typer.echo(f"visavis: {error.filename or 'a file'} cannot be read or written: {error.strerror}.", err=True)
        sys.exit(1)
