"""Commands to use before training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from visavis.cli.shared import Json, SkipBad, bars
from visavis.cli.terminal import print_json, print_line


def demo(out: Annotated[Path | None, typer.Option(help="A new folder; default runs/demo-<n>.")] = None, json: Json = False) -> None:
    """Draw a captioned world, train three objectives on it, compare them and search: offline, about two minutes."""
    from visavis import storage, verbs

    with bars() as progress:
        folder = verbs.demo(out=out, progress=progress)
    if json:
        print_json(
            {"folder": str(folder), "report": str(folder / "report.html"), **storage.read_json(folder / "table.json", dict[str, Any])}
        )


def doctor(json: Json = False) -> None:
    """Is all well? Versions, threads, accelerators, data and caches, and how to mend what is wrong."""
    from visavis import verbs
    from visavis.cli.output import print_findings

    findings = verbs.doctor()
    if json:
        print_json({finding.name: {"value": finding.value, "ok": finding.ok, "remedy": finding.remedy} for finding in findings})
    else:
        print_findings(findings)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def data_check(
    path: Annotated[str, typer.Argument(help="A folder, a list in it, or a name under VISAVIS_DATA.")],
    every: Annotated[bool, typer.Option("--all", help="Print every finding, not only the first of each kind.")] = False,
    json: Json = False,
) -> None:
    """Say exactly what is wrong with a data set; exit code 1 if training would lose something."""
    from visavis import verbs
    from visavis.cli.output import print_check

    with bars() as progress:
        report = verbs.data_check(path, progress=progress)
    if json:
        print_json(report.to_json())
    else:
        print_check(report, every=every)
    if not report.ok:
        raise typer.Exit(1)


def data_audit(
    path: Annotated[str, typer.Argument(help="A folder, a list in it, or a name under VISAVIS_DATA.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the recipe, such as visual.tower=mobilenet-v2.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Whose encoders, model and objective are asked; default: chosen by the encoders available.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="duplicates, captions, pairs or curve; may be given several times; default all.")
    ] = None,
    folds: Annotated[int, typer.Option(help="Of the cross-validation that finds wrong pairs.")] = 5,
    seeds: Annotated[int, typer.Option(help="Models of each size of the learning curve.")] = 3,
    skip_bad: SkipBad = False,
    every: Annotated[bool, typer.Option("--all", help="Print every finding, not only the first of each kind.")] = False,
    json: Json = False,
) -> None:
    """Say what pictures and captions are worth: copies, captions that tell little, likely wrong pairs, what more of them would bring."""
    from visavis import verbs
    from visavis.cli.output import print_audit

    with bars() as progress:
        audit = verbs.data_audit(
            path, recipe=recipe, overrides=overrides or [], part=part or [], folds=folds, seeds=seeds, skip_bad=skip_bad, progress=progress
        )
    if json:
        print_json(audit.to_json())
    else:
        print_audit(audit, every=every)


def data_convert(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Pickles, .npy of objects, .h5 files or a folder of them, MSR-VTT's .json, lists such as train_list.txt; NAME=PATH names an expert."
        ),
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the stores and lists.")],
    json: Json = False,
) -> None:
    """Turn published features of videos into stores that training reads; nothing in the sources is run."""
    from visavis import verbs
    from visavis.cli.output import print_converted

    with bars() as progress:
        converted = verbs.data_convert(sources, out, progress=progress)
    if json:
        print_json(converted.to_json())
    else:
        print_converted(converted)


def data_scenes(
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    moving: Annotated[bool, typer.Option("--moving", help="Clips in which order decides, as features of three experts.")] = False,
    num_train: Annotated[int, typer.Option(help="Images or clips to train on.")] = 2000,
    num_val: Annotated[int, typer.Option(help="Images or clips of the validation split.")] = 200,
    num_test: Annotated[int, typer.Option(help="Images or clips of the test split.")] = 400,
    size: Annotated[int, typer.Option(help="Pixels of a side; 0: 96 for pictures, and no frames of clips.")] = 0,
    seed: Annotated[int, typer.Option(help="Another seed is another world.")] = 0,
    json: Json = False,
) -> None:
    """Draw a captioned world, still or moving: a data set to try things on, without a download."""
    from visavis import verbs

    with bars() as progress:
        folder = verbs.data_scenes(
            out, moving=moving, num_train=num_train, num_val=num_val, num_test=num_test, size=size, seed=seed, progress=progress
        )
    if json:
        print_json({"folder": str(folder)})
    else:
        print_line(f"{folder}: {num_train:,} / {num_val:,} / {num_test:,} {'clips' if moving else 'images'} with captions")


def features(
    path: Annotated[str, typer.Argument(help="A data set: a folder, a list in it, or a name under VISAVIS_DATA.")],
    visual: Annotated[
        str | None, typer.Option("--visual", "--vision", help="An image encoder: scenes, a transformers folder, or a hub name.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="A text encoder: minilm, a transformers folder, or a hub name.")] = None,
    view: Annotated[str, typer.Option(help="Features of images: pooled, or grid for regions; of videos: frames.")] = "pooled",
    text_view: Annotated[str, typer.Option(help="Features of captions: pooled, or words.")] = "pooled",
    crops: Annotated[int, typer.Option(help="Crops per image: 1 or 10.")] = 1,
    frames_per_second: Annotated[float, typer.Option(help="Frames of a video that are read, for the view frames.")] = 0.0,
    out: Annotated[Path | None, typer.Option(help="A folder for the stores; default: the cache, where training finds them.")] = None,
    skip_bad: SkipBad = False,
    json: Json = False,
) -> None:
    """Cache the features of frozen encoders for a data set; an interrupted call resumes."""
    from visavis import verbs

    with bars() as progress:
        stores = verbs.features(
            path,
            visual=visual,
            text=text,
            view=view,
            text_view=text_view,
            crops=crops,
            frames_per_second=frames_per_second,
            out=out,
            skip_bad=skip_bad,
            progress=progress,
        )
    facts = [{"folder": str(store.folder), "rows": len(store), "width": store.width, "view": store.description.view} for store in stores]
    if json:
        print_json({"stores": facts})
    for fact in () if json else facts:
        print_line(f"{fact['folder']}: {fact['rows']:,} rows of {fact['view']} features, {fact['width']} wide")


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A published X-VLM of Swin and BERT, or a CLIP of open_clip, such as epoch_32.pt.")],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    text: Annotated[
        str, typer.Option(help="The BERT that it was made from, or a CLIP with its tokenizer: a transformers folder or a hub name.")
    ] = "",
    config: Annotated[str, typer.Option(help="Of a CLIP: its configuration by open_clip, a file or a name such as ViT-B-32.")] = "",
    image_size: Annotated[
        int | None, typer.Option(help="Of an X-VLM: pixels of a side to train with; default the checkpoint's own.")
    ] = None,
    json: Json = False,
) -> None:
    """Turn a published checkpoint into a model that training begins with; nothing in it is run."""
    from visavis import verbs
    from visavis.cli.output import print_converted_model

    converted = verbs.convert(checkpoint, out, text=text, config=config, image_size=image_size)
    if json:
        print_json(converted.to_json())
    else:
        print_converted_model(converted)


def catalog(
    kind: Annotated[str | None, typer.Argument(help="objectives, models, metrics, layouts, recipes, protocols and others.")] = None,
    paper: Annotated[str | None, typer.Option(help="Of recipes: the rows of this paper's tables, such as goal.")] = None,
    json: Json = False,
) -> None:
    """See what there is: names, formulas, sources, defaults."""
    from visavis import verbs
    from visavis.cli.output import print_catalog

    entries = verbs.catalog(kind, paper=paper)
    if json:
        print_json(entries)
    else:
        print_catalog(entries)
