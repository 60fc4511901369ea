"""Tables about trained and evaluated runs, and comparisons with published results."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from visavis.cli.console import print_markup, print_table
from visavis.cli.search_tables import print_feedback_evaluation, print_ranked_texts
from visavis.cli.terminal import print_line
from visavis.core.encoded import DIRECTIONS
from visavis.evaluation.published_row import (
    comparison_cells,
    format_metric,
    metric_label,
    metric_title,
)

if TYPE_CHECKING:
    from visavis.evaluation import Evaluation
    from visavis.evaluation.classification import ZeroShotResult
    from visavis.evaluation.feedback_metrics import FeedbackEvaluation
    from visavis.integrations.mteb import MtebReport
    from visavis.training.export.export_model import ExportedModel
    from visavis.training.runs.mine_negatives import MiningReport
    from visavis.training.training_plan import TrainingPlan
    from visavis.training.training_run import TrainingResult


def print_exported(exported: ExportedModel) -> None:
    """Print the files of an exported folder.

    Args:
        exported: The exported folder.
    """
    print_line(
        f"{exported.model}, {exported.embedding_dim} dimensions, format {exported.format}: "
        f"{', '.join(exported.files)}"
    )
    print_line(f"Folder: {exported.folder}. README.md shows how to load it.")
    if exported.url:
        print_line(f"Uploaded: {exported.url}")


def print_trained(trained: TrainingResult | TrainingPlan) -> None:
    """Print the test metrics, validation RSUM and folder of a training, or its plan.

    Args:
        trained: Finished run, or a plan.
    """
    from visavis.training.training_plan import TrainingPlan

    if isinstance(trained, TrainingPlan):
        for name, text in trained.lines():
            print_line(f"{name + ':':<13} {text}")
        return
    if trained.test is not None:
        print_evaluation(trained.test)
    print_line(
        f"{trained.objective}, positives by {trained.positives_by}, {trained.supervision}: "
        f"best validation RSUM {trained.validation_rsum:.1f} ({trained.validation_images:,} images "
        "against all their captions), "
        f"step {trained.best_step:,}. Training: {trained.seconds:.0f} s. Data and features: "
        f"{trained.cache_seconds:.0f} s."
    )
    for member in trained.members:
        test = "" if member.test is None else f"; test RSUM {member.test.metrics['rsum']:.1f}"
        print_line(
            f"{member.run.name}: best validation RSUM {member.validation_rsum:.1f}, step "
            f"{member.best_step:,}{test}"
        )
    print_line(f"Run folder: {trained.run}")


def print_evaluation(result: Evaluation | FeedbackEvaluation | ZeroShotResult) -> None:
    """Print the metrics of an evaluation for each protocol, next to published results.

    Args:
        result: Evaluation of a run, of an index with feedback, or on a folder of classes.
    """
    from visavis.evaluation.classification import ZeroShotResult
    from visavis.evaluation.feedback_metrics import FeedbackEvaluation

    if isinstance(result, FeedbackEvaluation):
        print_feedback_evaluation(result)
        return
    if isinstance(result, ZeroShotResult):
        _print_zero_shot(result)
        return
    for evaluation in (result, *result.other_protocols):
        _print_protocol(replace(evaluation, extra_metrics=result.extra_metrics))
    if result.published is not None:
        print_differences(result)
    if result.pretrained is not None:
        print_line("Pretrained model:")
        print_evaluation(result.pretrained)


def print_classification(result: list[tuple[str, float]] | ZeroShotResult) -> None:
    """Print the labels of an image with their scores, or the accuracies of a folder of classes.

    Args:
        result: Labels and scores, best first, or accuracies.
    """
    if isinstance(result, list):
        print_ranked_texts(result)
    else:
        print_evaluation(result)


def _print_zero_shot(result: ZeroShotResult) -> None:
    from visavis.evaluation.classification import TOP_K

    estimates = (
        ("top-1 accuracy", result.top1),
        # Of five classes, all are among the five highest.
        *((("top-5 accuracy", result.top5),) if len(result.classes) > TOP_K else ()),
        ("mean per class, top-1", result.mean_per_class),
    )
    print_table(
        ("", "%", "95 % interval over images"),
        [
            [
                name,
                f"{estimate.value:.1f}",
                "" if estimate.interval is None else f"{estimate.interval}",
            ]
            for name, estimate in estimates
        ],
    )
    if confusions := result.confusions:
        print_table(
            ("class", "images", "top-1", "most often taken for", "images"),
            [
                [
                    each.name,
                    f"{each.images:,}",
                    f"{each.top1:.1f}",
                    each.confused_with or "",
                    f"{each.confused_images:,}",
                ]
                for each in confusions
            ],
        )
    print_line(f"Protocol: {result.protocol}")


def print_mteb_report(report: MtebReport) -> None:
    """Print the main score of each task in percent, and the folder of mteb's results.

    Args:
        report: Results of a model on tasks of mteb.
    """
    print_table(
        ("task", "metric", "score"),
        [
            [task, report.metrics[task], f"{100 * score:.1f}"]
            for task, score in report.scores.items()
        ],
    )
    print_line(f"Results of {report.model}: {report.folder}")


def print_mining(report: MiningReport) -> None:
    """Print the numbers of mined negatives, examples, and how to train with them.

    Args:
        report: Mined negatives.
    """
    rows = [
        [
            DIRECTIONS[each.direction],
            f"{each.queries:,}",
            f"{each.negatives:.1f}",
            f"{100 * each.dropped:.1f} %",
            f"{100 * each.incomplete:.1f} %",
        ]
        for each in report.directions
    ]
    print_table(("", "queries", "negatives of a query", "dropped", "queries with fewer"), rows)
    print_line(
        "dropped: likely false negatives among the hardest candidates. The captions with the "
        "highest scores of a negative image:"
    )
    for example in report.examples:
        print_line(f"  {example.score:.3f}  {example.image}: {example.caption}")
        print_line(f"         {example.negative}: {example.negative_caption}")
    print_line(f"Negatives of split {report.split}: {report.file}")
    print_line(
        "Train with them in a phase: supervision = "
        f"\"MinedNegativeSupervision(file='{report.file}')\""
    )


def _print_protocol(result: Evaluation) -> None:
    from visavis.evaluation.metrics.ranking import TIES_IN_WORDS

    metrics = result.metrics
    rows = []
    for direction, title in DIRECTIONS.items():
        recalls = (f"{metrics[f'{direction}_r{k}']:.1f}" for k in (1, 5, 10))
        rows.append(
            [
                title,
                *recalls,
                f"{metrics[f'{direction}_medr']:.0f}",
                f"{metrics[f'{direction}_meanr']:.1f}",
            ]
        )
    print_table(("", "R@1", "R@5", "R@10", "median rank", "mean rank"), rows)
    print_line(
        f"RSUM {metrics['rsum']:.1f}, average recall {metrics['average_recall']:.1f}  (protocol "
        f"{result.protocol}: {result.num_images:,} images, "
        f"{result.num_texts:,} texts, {result.captions_per_image:g} captions per image, "
        f"{TIES_IN_WORDS[result.ties]})"
    )
    if result.extra_metrics:
        print_line(
            ", ".join(
                f"{metric_title(key)} {format_metric(key, metrics[key])}"
                for key in result.extra_metrics
            )
        )
    queries = len(result.image_ranks), len(result.text_ranks)
    if queries[0] < result.num_images or queries[1] < result.num_texts:
        print_line(
            f"R-Precision {metrics['i2t_r_precision']:.3f} and {metrics['t2i_r_precision']:.3f}, "
            f"mAP@R {metrics['i2t_map_at_r']:.3f} and "
            f"{metrics['t2i_map_at_r']:.3f}, over the {queries[0]:,} images and {queries[1]:,} "
            "texts that are queries"
        )
    for section in result.sections:
        table = section.table()
        print_table(table.columns, table.rows, text_columns=table.text_columns)
        for note in table.notes:
            print_line(note)


def print_differences(result: Evaluation) -> None:
    """Print published and reached results with their differences.

    Args:
        result: Evaluation with published results.
    """
    row = result.published
    reached = result.under_published_protocol
    assert row is not None
    differences = row.differences(reached.all_metrics)
    rows = [
        comparison_cells(metric.key, metric.published, metric.std, metric.reached)
        for metric in differences
    ]
    print_line("")
    print_table(("", "published", "reached", "difference"), rows)
    print_line(f"Published: {row.id}{', cited there' if row.cited else ''}: {row.source}.")
    if row.protocol != reached.protocol:
        print_line(
            f"Protocols differ: published {row.protocol}, reached {reached.protocol}, with other "
            "candidates."
        )
    remarks = {
        "Not published": row.unreported,
        "Trained with": row.substitutes,
        "Misprint in the paper": row.misprint,
        "Published as counted by the released code": row.code_difference,
    }
    for title, remark in remarks.items():
        if remark:
            print_line(f"{title}: {remark}.")


def print_published_rows(rows: list[dict[str, Any]]) -> None:
    """Print one line per table row: its published results and requirements.

    Args:
        rows: Entries of the catalog of recipes.
    """
    labels = {
        "cited": "cited",
        "not_trainable": "not trainable",
        "unreported": "settings not published",
        "substitutes": "with substitutes",
        "misprint": "misprint",
    }
    for row in rows:
        marks = [label for key, label in labels.items() if row[key]]
        packages = ", ".join([row["needs"].partition(",")[0], *row["encoders"]])
        needs = f"needs {packages}" if row["needs"] else f"no recipe: {row['not_trainable']}"
        results = _format_results(row["published"]) or "curve of a figure"
        line = escape(f"{results}  ({', '.join([*marks, needs])})")
        print_markup(f"  [cyan]{escape(row['name'])}[/cyan]  {line}")
    for text in dict.fromkeys(row["substitutes"] for row in rows if row["substitutes"]):
        print_line(f"  With substitutes: {text}.")


def _format_results(published: dict[str, float]) -> str:
    """All results of a row, grouped by direction."""
    parts: dict[str, list[str]] = {}
    for key, mean in published.items():
        if not key.endswith("_std"):
            direction = DIRECTIONS.get(key.partition("_")[0], "")
            parts.setdefault(direction, []).append(
                f"{metric_label(key)} {format_metric(key, mean, published.get(f'{key}_std'))}"
            )
    return "; ".join(
        " ".join(filter(None, [direction, ", ".join(values)]))
        for direction, values in parts.items()
    )
