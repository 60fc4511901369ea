"""API functions that change, measure and evaluate an existing index, and the default model of new
ones.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from visavis.api.arguments import as_text, check_choice, optional_text, read_bank
from visavis.core.errors import VisavisError
from visavis.core.memory_budget import MemoryLimit, parse_memory
from visavis.core.progress import NoProgress, Progress
from visavis.retrieval.items import Basis

if TYPE_CHECKING:
    from visavis.evaluation.feedback_metrics import FeedbackEvaluation
    from visavis.retrieval.build.index_builder import IndexReport
    from visavis.retrieval.build.index_export import ExportedIndex, ExportedVotes
    from visavis.retrieval.build.index_queries import QueryModels
_BASES = {
    "captions": "from captions, where they hold",
    "collection": "from the collection, where it has some",
    "off": "off",
}


def indexes_evaluate(
    index: str | Path,
    feedback: str | Path | None = None,
    *,
    store: str | Path | None = None,
    memory: MemoryLimit = None,
) -> FeedbackEvaluation:
    """Evaluate an index with the votes of users.

    Args:
        index: Folder of an index.
        feedback: Index whose votes are used, or file of ``visavis indexes export-votes``. Default: the
            votes in the index itself.
        store: Confirms the store of an index outside its folder. Default: only a store inside.
        memory: Maximum memory of score blocks, such as 2GiB. Default: a share of the free memory.

    Returns:
        Recall of the judged queries.

    Raises:
        DataError: If the feedback has no relevant item of the index.
        RunError: If the folder is not an index.

    Command line:
        ```sh
        visavis indexes evaluate indexes/photos
        visavis indexes evaluate indexes/photos indexes/other
        ```
    """
    from visavis.retrieval.build.feedback_evaluation import evaluate_feedback
    from visavis.retrieval.open_index import open_index
    from visavis.retrieval.search import SearchQuery

    opened = open_index(Path(index), store=store, memory=memory)
    contents = opened.store.table().contents()
    result = evaluate_feedback(
        Path(index if feedback is None else feedback),
        contents,
        lambda text: opened.neighbors(
            opened.encode_query(SearchQuery.from_text(text)), len(contents)
        ),
        f"the index {opened.folder}",
    )
    correction = opened.correction
    return replace(result, correction=str(correction.settings)) if correction else result


def indexes_export_votes(index: str | Path, *, out: str | Path) -> ExportedVotes:
    """Write the votes on an index to a file of JSON lines. Training, comparisons and evaluations
    read the file, or the index itself.

    Args:
        index: Folder of an index.
        out: New file.

    Returns:
        The file, and the numbers of votes and preferences.

    Raises:
        DataError: If the folder is not an index.
        RefusedOverwrite: If the file exists.

    Command line:
        ```sh
        visavis indexes export-votes indexes/photos --out votes.jsonl
        ```
    """
    from visavis.retrieval.build.index_export import export_votes

    return export_votes(Path(index), Path(out))


def indexes_export(
    index: str | Path,
    *,
    out: str | Path,
    store: str | Path | None = None,
    progress: Progress | None = None,
) -> ExportedIndex:
    """Write items and vectors of an index to a Parquet file.

    Args:
        index: Folder of an index with one vector per item.
        out: New Parquet file with one row per item. ``visavis index FILE SOURCE`` makes an
            index of it, without a model, and other programs can read it.
        store: Confirms the store of an index outside its folder. Default: only a store inside.
        progress: Receives the progress.

    Returns:
        The file and its number of items.

    Raises:
        RunError: If the folder is not an index, or its items have several vectors.
        RefusedOverwrite: If the file exists.
        MissingExtra: If pyarrow is not installed.

    Command line:
        ```sh
        visavis indexes export indexes/photos --out photos.parquet
        ```
    """
    from visavis.retrieval.build.index_export import export_index

    return export_index(Path(index), Path(out), optional_text(store), progress or NoProgress())


def indexes_list_queries(index: str | Path) -> QueryModels:
    """List the models of text queries of an index.

    Args:
        index: Folder of an index.

    Returns:
        The query models.

    Raises:
        RunError: If the folder is not an index.

    Command line:
        ```sh
        visavis indexes list-queries indexes/photos
        ```
    """
    from visavis.retrieval.build.index_queries import list_queries

    return list_queries(Path(index))


def indexes_use_queries(
    index: str | Path, run: str | Path, *, int8: bool = False, progress: Progress | None = None
) -> QueryModels:
    """Let another model encode the text queries of an index. No item is encoded.

    Args:
        index: Folder of an index.
        run: Run of visavis train --index, 'items' for the model that encoded the items, or a
            fingerprint of visavis indexes list-queries.
        int8: Write a text tower with weights of 8 bits, if its vectors have cosines of at
            least 0.999 with the vectors of the model.
        progress: Receives the progress.

    Returns:
        The query models.

    Raises:
        RunError: If the folder is not an index, or the run was trained on other vectors.

    Command line:
        ```sh
        visavis indexes use-queries indexes/photos runs/my-words
        visavis indexes use-queries indexes/photos items
        ```
    """
    from visavis.api.run_collections import open_run_data
    from visavis.retrieval.build.index_queries import use_queries

    return use_queries(
        Path(index), run, progress or NoProgress(), int8=int8, open_data=open_run_data
    )


def indexes_restore_queries(index: str | Path) -> QueryModels:
    """Return to the query model that an index had before. A second call undoes the first.

    Args:
        index: Folder of an index.

    Returns:
        The query models.

    Raises:
        RunError: If the folder is not an index, or had no other query model.

    Command line:
        ```sh
        visavis indexes restore-queries indexes/photos
        ```
    """
    from visavis.retrieval.build.index_queries import restore_queries

    return restore_queries(Path(index), NoProgress())


def indexes_correct(
    index: str | Path,
    correction: str,
    *,
    bank: str | Path | None = None,
    store: str | Path | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> IndexReport:
    """Correct the text queries of an index for hubs. It is on only if held-out queries gain from
    it. New and changed files are indexed first, as ``visavis index`` does.

    Args:
        index: Folder of an index.
        correction: Correction, such as "QueryBankNorm()", see visavis catalog corrections. none
            removes it.
        bank: Texts to learn from: a .txt file with one text per line, or a split of the run.
            Default: train.
        store: Confirms the store of an index outside its folder. Default: only a store inside.
        memory: Maximum memory of score blocks, such as 2GiB. Default: a share of the free memory.
        progress: Receives the progress.

    Returns:
        Counts of the update. ``correction`` has the result of the check.

    Raises:
        DataError: If the bank cannot be read.
        RunError: If the folder is not an index.
        SpecError: If the correction is unknown.
        VisavisError: If ``bank`` is given with none.

    Command line:
        ```sh
        visavis indexes correct indexes/photos "QueryBankNorm()"
        visavis indexes correct indexes/photos none
        ```
    """
    from visavis.api.run_collections import open_run_data
    from visavis.losses.corrections import parse_correction
    from visavis.retrieval.build.make_correction import correct_index

    text = as_text(correction)
    is_removed = text == "none"
    if is_removed and bank is not None:
        raise VisavisError("--bank: expected it with a correction, got none. Leave it out.")
    # A wrong spec is reported before files are encoded.
    spec = "" if is_removed else repr(parse_correction(str(text)))
    texts = None if bank is None else read_bank(bank)
    report = _update(index, progress, store=optional_text(store), memory=memory)
    result = correct_index(
        Path(index),
        spec,
        texts,
        open_run_data,
        optional_text(store),
        memory,
        progress or NoProgress(),
    )
    return replace(report, correction=result)


def indexes_measure(
    index: str | Path,
    *,
    store: str | Path | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> IndexReport:
    """Measure recall, size and latency of compressed vectors. New and changed files
    are indexed first, as ``visavis index`` does.

    Args:
        index: Folder of an index.
        store: Confirms the store of an index outside its folder. Default: only a store inside.
        memory: Maximum memory of score blocks, such as 2GiB. Default: a share of the free memory.
        progress: Receives the progress.

    Returns:
        Counts of the update. ``compression`` has the measured encodings.

    Raises:
        RunError: If the folder is not an index.

    Command line:
        ```sh
        visavis indexes measure indexes/photos
        ```
    """
    return _update(index, progress, store=optional_text(store), compression=True, memory=memory)


def indexes_compress(
    index: str | Path,
    item_bytes: int | str,
    *,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> IndexReport:
    """Compress the vectors of a late-interaction index. New and changed files are indexed first, as
    ``visavis index`` does.

    Args:
        index: Folder of an index whose store is inside.
        item_bytes: Maximum size per item, such as 2KB.
        memory: Maximum memory of score blocks, such as 2GiB. Default: a share of the free memory.
        progress: Receives the progress.

    Returns:
        Counts of the update.

    Raises:
        RunError: If the folder is not an index, or was compressed to another size.
        VisavisError: If items have one vector, or no encoding is small enough.

    Command line:
        ```sh
        visavis indexes compress indexes/maxsim 2KB
        ```
    """
    return _update(
        index, progress, item_bytes=parse_memory(item_bytes, "item_bytes"), memory=memory
    )


def indexes_calibrate(
    index: str | Path,
    basis: Basis,
    *,
    store: str | Path | None = None,
    progress: Progress | None = None,
) -> Basis:
    """Choose the origin of match probabilities. They come from validation captions or the
    collection itself, or are off. Scores are calibrated again.

    The collection is the default. Captions hold for texts that are as long as the captions, in a
    collection of similar size, if the model is a run with validation data. Where the chosen one has
    no probabilities, the other one gives them.

    Args:
        index: Folder of an index.
        basis: captions, collection or off.
        store: Confirms the store of an index outside its folder. Default: only a store inside.
        progress: Receives the progress.

    Returns:
        The basis.

    Raises:
        RunError: If the folder is not an index.
        SpecError: If the basis is unknown.
        VisavisError: If none has probabilities, such as with a model that cannot distinguish
            similar images.

    Command line:
        ```sh
        visavis indexes calibrate indexes/photos collection
        ```
    """
    from visavis.retrieval.build.no_match import write_scale
    from visavis.retrieval.calibrate.calibration import NoProbabilitiesError
    from visavis.retrieval.index_folder import index_lock, read_manifest, write_manifest
    from visavis.retrieval.open_index import open_index

    check_choice("basis", basis, get_args(Basis))
    folder = Path(index)
    progress = progress or NoProgress()
    with index_lock(folder):
        manifest = replace(read_manifest(folder), probabilities=basis)
        if basis != "off":
            with closing(open_index(folder, store=store)) as opened:
                opened.manifest = manifest
                write_scale(opened, progress)
                try:
                    opened.match_scale(None)
                except NoProbabilitiesError as error:
                    raise VisavisError(
                        f"{folder}: no match probabilities, because {error.reason}"
                    ) from None
            manifest = replace(manifest, num_changed=0)
        write_manifest(folder, manifest)
    progress.message(f"{folder}: match probabilities are {_BASES[basis]}.")
    return basis


def indexes_move(
    index: str | Path,
    source: str | Path | None = None,
    *,
    model: str | Path | None = None,
    remove_missing: bool = False,
    store: str | Path | None = None,
    progress: Progress | None = None,
) -> IndexReport | None:
    """Record the new place of the source or model of an index. All vectors are kept.

    Args:
        index: Folder of an index.
        source: New location of the indexed folder or data set, which is updated. Default: unchanged.
        model: New location of the model of the items. Default: unchanged.
        remove_missing: Remove the items of files that are missing at the new place, also if more
            than half are.
        store: Confirms the store of an index outside its folder. Default: only a store inside.
        progress: Receives the progress.

    Returns:
        Counts of the update. None if only the model was moved.

    Raises:
        DataError: If the source cannot be read.
        RunError: If the folder is not an index, the model is another one, or files are missing.
        VisavisError: If neither is given.

    Command line:
        ```sh
        visavis indexes move indexes/photos moved/photos/
        visavis indexes move indexes/photos --model moved/runs/mine
        ```
    """
    from visavis.retrieval.build.index_builder import move_model

    if source is None and model is None:
        raise VisavisError(
            "source, model: expected the new place of the source or the model, got neither. Pass "
            "one of them."
        )
    folder = Path(index)
    progress = progress or NoProgress()
    if model is not None:
        move_model(folder, model, progress)
        progress.message(f"{folder}: its model is {model}.")
    if source is None:
        return None
    return _update(
        folder,
        progress,
        source=source,
        moved=True,
        remove_missing=remove_missing,
        store=optional_text(store),
    )


def indexes_prune(
    index: str | Path, *, store: str | Path | None = None, progress: Progress | None = None
) -> IndexReport:
    """Remove the items of all missing files from an index. ``visavis index`` keeps them if more
    than half are missing, or their folder is empty. New and changed files are indexed.

    Args:
        index: Folder of an index.
        store: Confirms the store of an index outside its folder. Default: only a store inside.
        progress: Receives the progress.

    Returns:
        Counts of the update.

    Raises:
        RunError: If the folder is not an index.

    Command line:
        ```sh
        visavis indexes prune indexes/photos
        ```
    """
    return _update(index, progress, remove_missing=True, store=optional_text(store))


def indexes_default_model(model: str | Path, *, progress: Progress | None = None) -> str:
    """Set the model of all later commands that name none. It is downloaded if necessary.

    Args:
        model: Folder or hub name of a CLIP or SigLIP model.
        progress: Receives the progress.

    Returns:
        The model, a folder as an absolute path.

    Raises:
        DataError: If the model cannot be downloaded.
        RunError: If it cannot be loaded.
        VisavisError: If it is not a CLIP or SigLIP model, or the settings cannot be written.

    Command line:
        ```sh
        visavis indexes default-model google/siglip-base-patch16-224
        ```
    """
    from visavis.models.default_model import default_model, saved_model
    from visavis.models.retriever import Retriever

    with default_model(model, progress or NoProgress(), set_default=True) as name:
        Retriever.load(name)
    if saved_model() != name:
        raise VisavisError(
            f"{name}: expected a CLIP or SigLIP model, and settings that can be written, got "
            "another model or a read-only file. The default model is unchanged."
        )
    return name


def _update(index: str | Path, progress: Progress | None, **options: Any) -> IndexReport:
    """Update an index with its model, its source unless it was moved, and its settings."""
    from visavis.api.run_collections import open_run_data
    from visavis.retrieval.build.default_index import update_index

    return update_index(Path(index), progress or NoProgress(), open_data=open_run_data, **options)
