"""Report and result files of a demo."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from visavis import storage
from visavis.demonstration.scene_search import RetrievedScene, SceneSearchResult, plot_retrievals
from visavis.environment import package_versions, shell_command
from visavis.experiments.results_table import ResultTable
from visavis.reports.html_report import ThemedImage, data_uri, encode_jpeg, render_report
from visavis.reports.plotting import TrainingCurve, plot_training_curves
from visavis.runs.run_folder import RunFolder
from visavis.training.training_run import TrainingResult

OBJECTIVE_NOTES = {
    "TripletHN": "pushes only the hardest negative of a batch",
    "VLC": "pushes all negatives, harder ones more: a softmax",
    "Unified": "a softmax over the negatives with the margin of a triplet loss",
}


@dataclass(frozen=True)
class DemoResults:
    """Results of a finished demo.

    Attributes:
        scenes: Folder of the synthetic scenes.
        runs: Runs by the name of their objective.
        best: Run with the highest validation RSUM.
        table: Comparison of the objectives.
        captions: Images that the best run retrieved for random test captions.
        searches: Images that the best run retrieved for text queries.
        seconds: Duration of each stage.
    """

    scenes: Path
    runs: Mapping[str, Sequence[TrainingResult]]
    best: TrainingResult
    table: ResultTable
    captions: Sequence[SceneSearchResult]
    searches: Sequence[SceneSearchResult]
    seconds: Mapping[str, float]


def write_demo_report(results: DemoResults, folder: Path) -> None:
    """Write the tables, plots and the report of a demo. ``report.html`` is written last.

    Args:
        results: Results of the demo.
        folder: Folder of the demo.
    """
    storage.write_text(folder / "table.md", results.table.markdown())
    storage.write_json(folder / "table.json", results.table.to_json())
    storage.write_json(folder / "demo.json", _summary(results))
    logs = [TrainingCurve(name, RunFolder(run.run).read_log()) for name, runs in results.runs.items() for run in runs]
    retrieval = ThemedImage.draw(partial(plot_retrievals, results.captions))
    curves = ThemedImage.draw(partial(plot_training_curves, logs))
    storage.write_bytes(folder / "retrieval.png", retrieval.light)
    storage.write_bytes(folder / "curves.png", curves.light)
    page = render_report(
        "demo",
        results=results,
        conditions=results.table.conditions,
        num_seeds=len(next(iter(results.runs.values()))),
        facts=_facts(results),
        objective_notes=OBJECTIVE_NOTES,
        order=", then ".join(f"{row.name} {row.mean('rsum'):.1f}" for row in sorted(results.table.rows, key=lambda row: -row.mean("rsum"))),
        spread=_spread(results.table),
        retrieval=retrieval,
        retrieval_alt=_retrieval_alt(results.captions),
        searches=results.searches,
        scene_uri=_scene_uri,
        curves=curves,
        commands=_commands(results),
        stages=", ".join(f"{name} {seconds:.0f} s" for name, seconds in results.seconds.items()),
        run_names=", ".join(run.run.name for runs in results.runs.values() for run in runs),
    )
    storage.write_text(folder / "report.html", page)


def _facts(results: DemoResults) -> list[tuple[str, str]]:
    row, best = results.table.best("t2i_r1"), results.table.best()
    recall, chance = row.mean("t2i_r1"), results.table.conditions.chance("t2i_r1")
    threads = torch.get_num_threads()
    return [
        (f"{recall:.0f} %", f"of captions with their image at rank 1 ({row.name})"),
        (f"{recall / chance:.0f} ×", f"the recall of a random order, {chance:.1f} %"),
        (f"{best.mean('rsum'):.0f}", f"of 600: best RSUM ({best.name})"),
        (f"{sum(results.seconds.values()):.0f} s", f"for all stages, with {threads} CPU thread{'s' if threads > 1 else ''}"),
    ]


def _spread(table: ResultTable) -> str:
    """How far the order of the rows can be trusted."""
    spread = sorted((std, row.name) for row in table.rows if (std := row.std("rsum")) is not None)
    if not spread:
        return "One seed does not show whether a difference is due to chance."
    (lowest, stable), (highest, unstable) = spread[0], spread[-1]
    return f"The standard deviation over seeds is {lowest:.1f} ({stable}) to {highest:.1f} ({unstable}). More seeds are needed for a test."


def _scene_uri(scene: RetrievedScene) -> str:
    return data_uri(encode_jpeg(scene.render, quality=88), "jpeg")


def _retrieval_alt(results: Sequence[SceneSearchResult]) -> str:
    rows = []
    for result in results:
        rank = next((rank for rank, scene in enumerate(result.scenes, 1) if scene.is_source), None)
        rows.append(f"“{result.query}”: its image {f'at rank {rank}' if rank else 'is not among them'}")
    return f"Captions with the top {len(results[0].scenes)} images. {'; '.join(rows)}."


def _commands(results: DemoResults) -> list[tuple[str, str]]:
    """Commands to copy, for the folder in which the demo was started."""
    run, scenes, visavis = shlex.quote(str(results.best.run)), shlex.quote(str(results.scenes)), shell_command()
    return [
        ("Search the images with your own text query:", f"{visavis} search {run} 'two stars in the snow'"),
        ("Print all metrics of a run:", f"{visavis} evaluate {run}"),
        ("Train another objective on the same scenes:", f"{visavis} train demo --data {scenes} objective='NTXent(tau=0.05)'"),
        ("List the objectives:", f"{visavis} catalog objectives"),
        ("Check your own images: a folder with captions.csv (filename,caption).", f"{visavis} data check your-folder"),
    ]


def _summary(results: DemoResults) -> dict[str, Any]:
    return {
        "best_run": results.best.run.name,
        "runs": {name: [run.run.name for run in runs] for name, runs in results.runs.items()},
        "searches": {search.query: search.num_relevant for search in results.searches},
        "seconds": dict(results.seconds),
        "threads": torch.get_num_threads(),
        "versions": package_versions(),
    }
