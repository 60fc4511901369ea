"""API functions that explain objectives and models: gradient profiles, contributing samples,
capability tests, attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from visavis.api.arguments import optional_text, to_list, to_paths
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.papers.diagnostics.contribution_analysis import ContributionAnalysis
    from visavis.papers.diagnostics.objective_profile import ObjectiveProfiles
    from visavis.papers.probes import ProbeReport
    from visavis.research.attention_maps import AttentionMap


def papers_anatomy(
    objective: str | Sequence[str], *, out: str | Path | None = None
) -> ObjectiveProfiles:
    """Plot the gradient of objectives on a triplet, without data. It shows the weights of pairs and
    the rotation of vectors.

    Args:
        objective: Objective, such as 'Unified(gamma=50)'.
        out: New folder. Default: ``runs/anatomy-<n>``.

    Returns:
        The profile of each objective. The folder has ``report.html``, a plot of each objective and
        ``profiles.json``.

    Raises:
        SpecError: If an objective is unknown.

    Command line:
        ```sh
        visavis papers anatomy 'Unified(gamma=50)' 'VLC()' --out anatomy
        ```
    """
    from visavis.core import storage
    from visavis.papers.diagnostics.objective_profile import (
        ObjectiveProfiles,
        profile_objectives,
        write_profile_report,
    )

    with storage.create_output_folder(out, "runs/anatomy", will_be_replaced=True) as folder:
        result = ObjectiveProfiles(profile_objectives(to_list(objective)), folder)
        with storage.atomic_folder(folder) as part:
            write_profile_report(result, part)
    return result


def papers_diagnose(
    run: str | Path | Sequence[str | Path],
    *,
    objective: str | Sequence[str] = (),
    checkpoint: str | int = "best",
    epsilon: float | Sequence[float] = (0.01,),
    with_slope: bool = False,
    max_batches: int | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> ContributionAnalysis:
    """Count the samples that contribute to the gradient of a run. It uses the weights of the run's
    model and its training set.

    Counts and weights are those of the COCOS paper: frozen weights, no dropout, batches of 128. The
    report also plots the norms of gradients that trainings have recorded.

    Args:
        run: Run folder, or folder or hub name of a pretrained model. Of several runs, the first is
            counted, and the recorded gradients of all are compared.
        objective: Further objective to diagnose at the same weights, such as
            'TripletHN(margin=0.2)'.
        checkpoint: best, last, start (the untrained model), or the step of a saved checkpoint.
        epsilon: Weight from which a sample counts as contributing. Default: 0.01.
        with_slope: Count triplets of SmoothAP by eqs. 12 and 13 of COCOS as printed, with the
            factor 1 / tau. Default: without it, as in the paper's table 4.
        max_batches: Maximum number of batches. Default: the whole training set.
        data: Data set to diagnose on. Default: the run's.
        out: New HTML report with tables, a plot over epsilon, and training curves. Default: no
            report.
        memory: Maximum memory of score blocks, such as 2GiB. Default: the recipe's, else a share of
            the free memory.
        progress: Receives the progress.

    Returns:
        Mean and standard deviation over batches for each objective and epsilon.

    Raises:
        RunError: If the folder is not a run, the checkpoint is missing, or one of several runs has
            no recorded gradients.
        SpecError: If an objective is unknown.
        VisavisError: If a pretrained model is given without data and objective.

    Command line:
        ```sh
        visavis papers diagnose runs/mine
        visavis papers diagnose runs/vlc runs/unified --out diagnosis.html
        visavis papers diagnose runs/mine --objective 'TripletHN(margin=0.2)' --out diagnosis.html
        ```
    """
    from visavis.core import storage
    from visavis.papers.diagnostics.contribution_analysis import diagnose_run
    from visavis.research.reports.gradient_flow import read_gradient_flows

    if out is not None:
        storage.require_new_file(out)
    runs = to_paths(run)
    gradients = read_gradient_flows(runs)
    result = diagnose_run(
        runs[0],
        to_list(objective),
        max_batches,
        progress or NoProgress(),
        optional_text(data),
        memory,
        checkpoint=str(checkpoint),
        epsilons=[float(value) for value in to_list(epsilon)],
        with_slope=with_slope,
    )
    result = replace(result, gradients=gradients)
    if out is not None:
        from visavis.papers.diagnostics.contribution_analysis import render_diagnosis

        page = render_diagnosis(result)
        storage.save_new_file(out, lambda file: storage.write_text(file, page))
    return result


def papers_probe(
    run: str | Path,
    *,
    num_images: int = 500,
    data: str | Path | None = None,
    split: str | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> ProbeReport:
    """Test a run's best model with edited captions and images.

    One edit makes a caption false: colors, relations and roles are swapped or replaced, numbers and
    negation changed. The result is how often the true caption scores higher. Typos, blur, a crop,
    JPEG and gray images should change nothing. The result is their cost in recall.

    Args:
        run: Run folder, or folder or hub name of a pretrained model.
        num_images: Number of images, the first of the split. 0: all.
        data: Data set. Default: the run's.
        split: Split. Default: the test split of the recipe.
        memory: Maximum memory of score blocks, such as 2GiB. Default: the recipe's, else a share of
            the free memory.
        progress: Receives the progress.

    Returns:
        Accuracy for each kind of edit, and changes of recall.

    Raises:
        RunError: If the model cannot encode new captions.

    Command line:
        ```sh
        visavis papers probe runs/mine --num-images 200
        ```
    """
    from visavis.papers.probes import probe_run

    return probe_run(
        Path(run), num_images, progress or NoProgress(), optional_text(data), split, memory
    )


def explain(
    run: str | Path,
    image: str | Path,
    text: str,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> AttentionMap:
    """Draw which image region each word of a text attends to. The model needs cross-attention, such
    as SCAN.

    Args:
        run: Run folder of a cross-attention model.
        image: Image file, or name of an image in the run's data.
        text: Text that may describe the image.
        out: New .png, .pdf or .jpg file. Default: ``runs/explanation-<n>.png``.
        progress: Receives the progress.

    Returns:
        ``words``, ``weights`` of shape ``[words, regions]``, ``scores`` of the words, ``score`` and
        the ``file``.

    Raises:
        RunError: If the model has no attention between words and regions.
        VisavisError: If the file name has another ending.

    Command line:
        ```sh
        visavis explain runs/scan photo.jpg "two dogs on a beach" --out attention.png
        ```
    """
    from visavis.core import storage
    from visavis.research.attention_maps import (
        attention_map,
        draw_attention,
        image_format,
    )

    file_format = image_format(Path("explanation.png" if out is None else out))
    if out is not None:
        storage.require_new_file(out)
    explanation = attention_map(Path(run), str(image), text, progress or NoProgress())
    content = draw_attention(explanation, file_format)
    file = storage.save_new_file(
        out, lambda file: storage.write_bytes(file, content), stem="runs/explanation.png"
    )
    return replace(explanation, file=file)
