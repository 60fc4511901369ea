"""API functions for graded relevance: ranking coherence, agreement with people, and relevance
estimators.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from visavis.api.arguments import check_choice, optional_text, to_list, to_paths
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.papers.relevance.estimator_quality import EstimatorQuality, RelevanceDistribution
    from visavis.papers.relevance.fine_tuning import FineTunedModel
    from visavis.papers.relevance.human_agreement import HumanAgreement
    from visavis.papers.relevance.ranked_lists import RankedListComparison


def papers_agreement(
    runs: str | Path | Sequence[str | Path],
    *,
    data: str | Path | None = None,
    relevance: str | None = None,
    progress: Progress | None = None,
) -> list[HumanAgreement]:
    """Correlate scores of runs with human judgments. People rated pairs of images and captions.

    The judgments are the expert and crowd judgments of Flickr8k, or the ratings of Crisscrossed
    Captions of MS-COCO. Correlations are Kendall's and Spearman's, with bootstrap intervals over
    images, with and without an image's own captions. The agreement of single annotators with the
    others is reported if they are known.

    Args:
        runs: Run folder, or folder or hub name of a pretrained model. Differences are to the
            first.
        data: Data set with human judgments. Default: the runs' own.
        relevance: Relevance estimator to correlate as well, such as "CBoW()". Default: none.
        progress: Receives the progress.

    Returns:
        Correlations for each kind of judgment.

    Raises:
        DataError: If the data set has no judgments.
        RunError: If the runs are of different data.

    Command line:
        ```sh
        visavis papers agreement runs/mine --data flickr8k
        ```
    """
    from visavis.papers.relevance.runs import measure_run_agreement

    return measure_run_agreement(
        to_paths(runs), optional_text(data), relevance, progress or NoProgress()
    )


def papers_coherence(
    runs: str | Path | Sequence[str | Path],
    *,
    relevance: str = "CBoW()",
    caption_aggregation: Literal["paired", "max", "mean"] = "max",
    queries: int | str | Sequence[str] = 4,
    top: int = 30,
    irrelevant_share: float = 0.5,
    split: str | None = None,
    data: str | Path | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> RankedListComparison:
    """Measure the ranking coherence of runs. It shows ranked lists side by side, irrelevant items,
    CS@K against K, and the order of long-tail queries, which have no match.

    Args:
        runs: Run folder, or folder or hub name of a pretrained model.
        relevance: Relevance estimator of captions and images.
        caption_aggregation: Relevance to an image from that to its captions: the maximum, the mean,
            or its first caption (paired).
        queries: Number of random queries to show, or a caption or image name. Default: 4.
        top: Length of each list.
        irrelevant_share: Share of all candidates below which a candidate is totally irrelevant.
        split: Split. Default: the test split of the first run.
        data: Data set. Default: the runs' own.
        seed: Seed of the sampled queries.
        out: New folder. Default: ``runs/coherence-<n>``.
        memory: Maximum memory of score blocks, such as 2GiB. Default: the recipe's, else a share of
            the free memory.
        progress: Receives the progress.

    Returns:
        Statistics of each run and of a random order, and the lists. The folder has ``report.html``.

    Raises:
        DataError: If the relevance is constant.
        RunError: If the runs rank different data.
        SpecError: If the estimator, the seed or ``top`` is invalid.
        VisavisError: If ``caption_aggregation``, ``irrelevant_share`` or a query is invalid.

    Command line:
        ```sh
        visavis papers coherence runs/mine runs/other --out coherence
        ```
    """
    from visavis.core import storage
    from visavis.core.fields import MAX_SEED, validate_int
    from visavis.papers.relevance.catalog import named_estimator
    from visavis.papers.relevance.coherence_report import write_coherence_report
    from visavis.papers.relevance.ranked_lists import (
        RankedListComparison,
        Ranker,
        RelevanceBands,
        choose_queries,
        measure_lists,
        query_lists,
    )
    from visavis.papers.relevance.runs import check_relevance_varies, open_rankers, trained_on

    # The report is written as JSON, which has no numbers of numpy.
    top = validate_int(top, "top", 1)
    irrelevant_share = float(irrelevant_share)
    validate_int(seed, "seed", 0, MAX_SEED)
    # validate_int returns at most 2**53, which would be another seed.
    seed = operator.index(seed)
    if isinstance(queries, numbers.Integral):
        queries = int(queries)
    elif isinstance(queries, str):
        queries = int(queries) if queries.isdecimal() else [queries]
    progress = progress or NoProgress()
    with storage.create_output_folder(out, "runs/coherence", will_be_replaced=True) as folder:
        bands = RelevanceBands(irrelevant_share)
        estimator = named_estimator(relevance)
        rankers, ranked_data, recipes = open_rankers(
            to_paths(runs), split, optional_text(data), memory, progress
        )
        shown_queries = choose_queries(queries, ranked_data, seed)
        image_relevance = estimator.for_dataset(ranked_data, caption_aggregation)
        check_relevance_varies(image_relevance, ranked_data)
        with_random = (*rankers, Ranker.random(ranked_data, seed))
        memory_limit = recipes[0].memory or None
        comparison = RankedListComparison(
            folder=folder,
            data=ranked_data,
            estimator=estimator,
            caption_aggregation=caption_aggregation,
            top=top,
            bands=bands,
            rankers=with_random,
            trained_on_estimator=tuple(
                run.name
                for run, recipe in zip(rankers, recipes, strict=True)
                if trained_on(recipe, estimator)
            ),
            statistics=measure_lists(
                with_random,
                estimator,
                image_relevance,
                ranked_data,
                bands,
                top,
                progress,
                memory_limit,
            ),
            queries=tuple(
                query_lists(*query, rankers, image_relevance, ranked_data, bands, top, memory_limit)
                for query in shown_queries
            ),
        )
        with storage.atomic_folder(folder) as part:
            write_coherence_report(comparison, part)
    return comparison


def papers_relevance(
    estimator: str | Sequence[str] = (), *, progress: Progress | None = None
) -> list[EstimatorQuality]:
    """Correlate relevance estimators with human ratings. The ratings are STS-B and Crisscrossed
    Captions. The speed of each estimator is measured, too.

    Args:
        estimator: Relevance estimator, such as CBoW(removed_components=1). Default: all that need
            no fine-tuned model.
        progress: Receives the progress.

    Returns:
        Correlations and speed of each estimator.

    Raises:
        SpecError: If an estimator is unknown.

    Command line:
        ```sh
        visavis papers relevance --estimator "CBoW()"
        ```
    """
    from visavis.papers.relevance.estimator_quality import DEFAULT_ESTIMATORS, evaluate_estimators

    return evaluate_estimators(to_list(estimator) or DEFAULT_ESTIMATORS, progress or NoProgress())


def papers_relevance_thresholds(
    data: str | Path,
    *,
    estimator: str | Sequence[str] = (),
    caption_aggregation: Literal["paired", "max", "mean"] = "paired",
    num_pairs: int = 100_000,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> list[RelevanceDistribution]:
    """Suggest thresholds for the Ladder objective. They follow from the distribution of relevance
    over random training pairs.

    Args:
        data: Data set: a folder, a file of it, hf:OWNER/NAME, or a name under VISAVIS_DATA.
        estimator: Relevance estimator, such as CBoW(removed_components=1). Default: all that need
            no fine-tuned model.
        caption_aggregation: Relevance to an image from that to its captions: the sampled caption
            (paired), the maximum, or the mean.
        num_pairs: Number of random training pairs.
        out: New PNG file with the distributions. Default: no plot.
        progress: Receives the progress.

    Returns:
        Quantiles, histogram and thresholds for each estimator.

    Raises:
        DataError: If the data cannot be read.
        SpecError: If an estimator is unknown.

    Command line:
        ```sh
        visavis papers relevance thresholds flickr8k --estimator "CBoW()" --out thresholds.png
        ```
    """
    from visavis.core import storage
    from visavis.data.dataset_reader import open_dataset
    from visavis.papers.relevance.distribution_plot import plot_relevance_distributions
    from visavis.papers.relevance.estimator_quality import (
        DEFAULT_ESTIMATORS,
        relevance_distributions,
    )

    if out is not None:
        storage.require_new_file(out)
    estimators = to_list(estimator) or DEFAULT_ESTIMATORS
    distributions = relevance_distributions(
        estimators, open_dataset(data), caption_aggregation, num_pairs, progress or NoProgress()
    )
    if out is not None:
        plot = plot_relevance_distributions(distributions)
        storage.save_new_file(out, lambda file: storage.write_bytes(file, plot))
    return distributions


def papers_relevance_fit(
    out: str | Path,
    *,
    kind: Literal["bi", "cross", "regression"] = "bi",
    model: str = "minilm",
    epochs: int = 4,
    lr: float | None = None,
    batch_size: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> FineTunedModel:
    """Fine-tune a sentence model on human ratings. The ratings are those of STS-B, and the estimators
    SentenceModel and CrossEncoder use the model.

    Args:
        out: New folder for the model.
        kind: One vector per caption (bi), or both captions read together, with a sigmoid (cross) or
            a linear output (regression).
        model: Pretrained model: minilm, a transformers folder, or a hub name.
        epochs: Number of epochs. The best on STS-B dev is saved.
        lr: Learning rate. Default: 5e-5 for cross, otherwise 2e-5.
        batch_size: Pairs per step.
        seed: Seed of the batch order, dropout and output layer.
        progress: Receives the progress.

    Returns:
        Correlation on STS-B dev after each epoch and on test, and the spec of the estimator.

    Raises:
        SpecError: If an argument is invalid.
        RefusedOverwrite: If the folder is not empty.

    Source:
        Ladder paper, fine-tuning of BERT.

    Command line:
        ```sh
        visavis papers relevance fit --kind cross --out models/cross
        ```
    """
    from visavis.papers.relevance.fine_tuning import EncoderKind, fine_tune

    check_choice("kind", kind, get_args(EncoderKind))
    return fine_tune(
        out,
        kind,
        model,
        # They are written as JSON, which has no numbers of numpy.
        epochs=operator.index(epochs),
        lr=None if lr is None else float(lr),
        batch_size=operator.index(batch_size),
        seed=operator.index(seed),
        progress=progress or NoProgress(),
    )
