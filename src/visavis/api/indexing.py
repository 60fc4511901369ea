"""API functions for collections: index, search, classify, serve and mcp."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visavis.api.arguments import (
    optional_path,
    optional_text,
    parse_item_filter,
    parse_workers,
    read_lines,
    to_list,
    to_paths,
)
from visavis.core.errors import DataError, VisavisError
from visavis.core.memory_budget import MemoryLimit
from visavis.core.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.evaluation.classification import ZeroShotResult
    from visavis.retrieval.build.index_builder import IndexReport
    from visavis.retrieval.search import SearchQuery, SearchResults


def index(
    run: str | Path,
    source: str | Path | None = None,
    *,
    out: str | Path | None = None,
    model: str | Path | None = None,
    store: str | Path | None = None,
    moment_seconds: float | None = None,
    embedding_dim: int | None = None,
    full_decoding: bool = False,
    exclude: str | Sequence[str] = (),
    workers: int | str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> IndexReport:
    """Index a folder of images and videos, or update an index. Only new and changed files are
    encoded.

    A file is unchanged if its size, modification time and metadata are the same. A file whose
    content is in the index keeps its vectors. Items are removed if their file is gone, and kept
    with a warning if its folder cannot be read or is empty, or more than half are missing. Match
    probabilities are calibrated by the items, and by the validation data of the run. Without a run,
    a pretrained CLIP or SigLIP model is used: ``index("photos/")``.

    ``visavis indexes`` changes an existing index: its query models, compression and correction.

    Args:
        run: Run folder, folder or hub name of a CLIP, SigLIP or ColPali model, or file of vectors.
            With one argument: the folder to index.
        source: Folder of images and videos, or a data set. Default: the first argument, with a
            pretrained model.
        out: Folder of the index. An existing index is updated. Default: indexes/NAME in the current
            folder, NAME being the folder's name.
        model: Folder or hub name of a pretrained model, without a run. Default: the model of
            the index, else the user's default model.
        store: Milvus *.db file or http:// URL, or another folder. Required again for an update.
            Default: inside --out.
        moment_seconds: Length of a video moment in seconds. Default: 4, or the value of the index.
        embedding_dim: Number of leading dimensions to store, for a model trained with
            matryoshka_dims. Default: all, or the value of the index.
        full_decoding: Decode JPEG files in full, instead of at a reduced size. Slower for large
            files. An existing index keeps its setting.
        exclude: Pattern of names or paths that are not indexed, such as drafts or '2024/raw*'.
            Default: none, or those of the index.
        workers: Number of processes that read images, or ray:NUMBER for a Ray cluster. Default: one
            per core for a GPU, none for a CPU, and 2 on Ray.
        device: Device of the model: cpu, cuda or mps. Default: CUDA or an Apple GPU if available.
        progress: Receives the progress.

    Returns:
        Counts of encoded, unchanged, moved and removed files.

    Raises:
        DataError: If the source cannot be read.
        RunError: If the folder is not a run, or the index is of another model, source or setting.
        VisavisError: If a run and a model are given.

    Command line:
        ```sh
        visavis index photos/
        visavis index runs/mine photos/ --out index
        ```
    """
    from visavis.api.run_collections import open_run_data
    from visavis.retrieval.build.default_index import default_index_folder, index_source
    from visavis.retrieval.build.index_builder import build_index

    progress = progress or NoProgress()
    engine, num_workers = parse_workers(workers)
    options: dict[str, Any] = {
        "store": optional_text(store),
        "moment_seconds": moment_seconds,
        "embedding_dim": embedding_dim,
        "full_decoding": full_decoding,
        "exclude": to_list(exclude),
        "open_data": open_run_data,
        "engine": engine,
        "workers": num_workers,
        "device": device,
    }
    if source is None:
        return index_source(run, out, model, progress, **options)
    if model is not None:
        raise VisavisError(
            f"--model: expected one model, got {run} and {model}. Leave out one of them."
        )
    return build_index(
        run, source, out or default_index_folder(source, run), progress=progress, **options
    )


def search(
    run: str | Path | Sequence[str | Path],
    query: str = "",
    *,
    image: str | Path | Sequence[str | Path] = (),
    like: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
    collection: str | Path | None = None,
    filter: Mapping[str, str] | None = None,  # noqa: A002 - the option is --filter
    rerank: str | Path | None = None,
    store: str | Path | None = None,
    top: int = 5,
    max_irrelevant: float | None = None,
    progress: Progress | None = None,
) -> SearchResults:
    """Search an index or a run by text, images or similar items. Without an index, it searches the
    images of the run.

    Several runs are searched as an ensemble: their scores are averaged. Without a run, a folder is
    indexed with a pretrained model first: ``search("two dogs", collection="photos/")``.

    Args:
        run: Index, run folder, or folder or hub name of a pretrained model. Optional with a
            query and --collection.
        query: Text query. Optional with --image or --like.
        image: Query image.
        like: Key of an item of the index to find similar items of.
        without: Text that results should not match.
        collection: Data set or folder of images to search with a run. Default: the run's own data.
        filter: Condition on the items: path='*beach*', kind=image, video or moment,
            after=2024-05-31, before=2025, duplicates=show or a metadata value such as split=test.
            Upper and lower case of paths are equal. Times are capture times, or modification times
            if they are not known. A year or month counts from its start. Near-duplicates and
            moments of one video are one result unless they are shown. Default: any.
        rerank: Run that re-ranks the first 50 results, or --top if larger, such as SCAN. Default:
            none.
        store: Confirms the store of an index outside its folder. Default: only a store inside.
        top: Number of results.
        max_irrelevant: Expected share of irrelevant results at which the list ends, such as 0.3.
            --all prints the weaker results, too. Default: the list does not end.
        progress: Receives the progress.

    Returns:
        Results, best first.

    Raises:
        DataError: If a time cannot be parsed.
        RunError: If the folder is neither a run nor an index.
        VisavisError: If an option is only for an index, the kind is unknown, or the query is empty.

    Command line:
        ```sh
        visavis search "two dogs on a beach" --collection photos/
        visavis search index "two dogs on a beach" --top 10
        visavis search index "two dogs on a beach" --top 50 --max-irrelevant 0.3
        visavis search index --image photo.jpg --filter after=2024-05-31 --filter kind=image
        visavis search openai/clip-vit-base-patch32 "a red car" --collection photos/
        ```
    """
    from visavis.retrieval.index_folder import is_index
    from visavis.retrieval.open_index import open_index
    from visavis.retrieval.search import (
        Collection,
        attach_images,
        search_collection,
        validate_text_query,
        warn_unknown_words,
    )

    runs = to_paths(run)
    progress = progress or NoProgress()
    # A single text that names no model is the query.
    text = str(run if isinstance(run, str | Path) else run[0])
    if len(runs) == 1 and not query and not _is_model_or_index(text):
        if collection is not None:
            from visavis.api.run_collections import open_run_data
            from visavis.retrieval.build.default_index import update_default_index

            index_folder = update_default_index(collection, None, progress, open_data=open_run_data)
            runs = [index_folder]
            query = text
            collection = None
        elif not (image or like):
            raise VisavisError(
                f"search: expected an index, run or model and a query, got only {text!r}. Add "
                "--collection FOLDER."
            )
    elif len(runs) == 1 and collection is None and _is_folder_of_images(text):
        raise VisavisError(
            f"{text}: expected an index, run or model, got a folder without an index. Search it "
            f"with visavis search {shlex.quote(query or 'QUERY')} --collection {shlex.quote(text)}."
        )
    # The query, and the index or the images of runs in which it is searched.
    item_filter, group_duplicates = parse_item_filter(filter or {})
    parts = build_query(query, image, like, without)
    searched: Collection
    if any(is_index(folder) for folder in runs):
        if len(runs) > 1 or collection is not None:
            raise VisavisError(
                "search: expected one index without --collection, as an index has its own images. "
                "Pass one index only."
            )
        searched = open_index(runs[0], store=store)
    elif image or like or without or item_filter or rerank or store:
        raise VisavisError(
            f"{runs[0]}: expected an index for image queries, filters, --rerank and --store, got a "
            "run or model. "
            f"Create one with visavis index {runs[0]} FOLDER --out INDEX."
        )
    else:
        from visavis.api.run_collections import open_run_images
        from visavis.core.fields import validate_int

        # A wrong query is reported before features are computed.
        validate_text_query(query)
        validate_int(top, "top", 1)
        searched = open_run_images(runs, optional_path(collection), progress)
    with closing(searched):
        for encoder in searched.models:
            warn_unknown_words(encoder, parts, progress)
        reranker = None
        if rerank is not None:
            from visavis.models.retriever import Retriever

            reranker = Retriever.load(rerank)
        results = search_collection(
            searched,
            parts,
            top,
            item_filter,
            group_duplicates=group_duplicates,
            rerank=reranker,
            max_irrelevant=max_irrelevant,
        )
        results = attach_images(searched, results)
    if missing := [hit.name for hit in results if hit.image is None]:
        progress.message(
            f"{searched.root}: {', '.join(missing)} not found. Update the index with visavis index."
        )
    return results


def classify(
    run: str | Path,
    images: str | Path,
    labels: str | Path | Sequence[str] = (),
    *,
    templates: str | Path | None = None,
    top: int = 5,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> list[tuple[str, float]] | ZeroShotResult:
    """Classify an image with text labels (zero-shot). For a folder with a subfolder of images for
    each class, it measures the accuracy.

    Args:
        run: Run folder, folder or hub name of a pretrained model, or index for its model.
        images: Image file, or folder with a subfolder of images for each class.
        labels: File with one label or caption per line, or several labels. For a folder: file with
            a subfolder and the name of its class per line. Default: the names of the subfolders,
            with spaces for _ and -.
        templates: File with one prompt per line, with {} in place of the label. Default: the label
            as it is, and the prompt a photo of a {} for a folder.
        top: Number of labels of an image.
        memory: Maximum memory of score blocks, such as 2GiB. Default: the recipe's, else a share of
            the free memory.
        progress: Receives the progress.

    Returns:
        Labels with their scores, best first. For a folder, the accuracies of all images and of each
        class.

    Raises:
        DataError: If images, labels or templates cannot be read.
        RunError: If the folder is neither a run nor an index.
        ShapeError: If there is no label for an image.
        SpecError: If ``top`` is below 1.
        VisavisError: If several labels are given for a folder.

    Command line:
        ```sh
        visavis classify runs/mine photo.jpg labels.txt
        visavis classify runs/mine photos_by_species
        ```
    """
    from visavis.core.fields import validate_int
    from visavis.models.retriever import Retriever
    from visavis.retrieval.index_folder import is_index, read_manifest
    from visavis.retrieval.open_index import open_query_encoder
    from visavis.retrieval.zero_shot import (
        DEFAULT_TEMPLATE,
        evaluate_zero_shot,
        rank_texts,
        read_class_names,
        read_templates,
    )

    validate_int(top, "top", 1)
    is_folder = os.path.isdir(images)
    if is_folder and labels and not isinstance(labels, str | Path):
        raise VisavisError(
            f"labels: expected a file with a folder and the name of its class per line for the "
            f"folder {images}, got {len(labels)} labels. Pass one file."
        )
    # A file has one label per line, or for a folder, a subfolder and the name of its class.
    names: Any = labels
    if isinstance(labels, str | Path):
        names = read_class_names(labels) if is_folder else read_lines(labels)
    prompts = None if templates is None else read_templates(templates)
    image_model = None
    if is_index(run):
        queries = open_query_encoder(Path(run), read_manifest(Path(run)), memory=memory)
        model = queries.whole
        image_model = queries.image_model
    else:
        model = Retriever.load(run, memory=memory)
    if is_folder:
        prompts = prompts or [DEFAULT_TEMPLATE]
        return evaluate_zero_shot(
            model,
            Path(images),
            prompts,
            progress or NoProgress(),
            names or None,
            image_model=image_model,
        )
    return rank_texts(model, images, names, prompts, image_model=image_model)[:top]


def build_query(
    text: str,
    image: str | Path | Sequence[str | Path] = (),
    like: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
) -> SearchQuery:
    """Combine the parts of a query, each with weight 1, and excluded texts with weight -0.5."""
    from visavis.retrieval.search import EXCLUDED_WEIGHT, SearchQuery

    images = [(1.0, file) for file in ([image] if isinstance(image, str | Path) else image)]
    keys = [(1.0, key) for key in to_list(like)]
    # Without any part, there is one empty text, which a search refuses.
    texts = [(1.0, text)] if text.strip() or not (images or keys) else []
    texts += [(EXCLUDED_WEIGHT, excluded) for excluded in to_list(without)]
    return SearchQuery(tuple(texts), tuple(images), tuple(keys))


def _is_model_or_index(text: str) -> bool:
    """Whether a text names a file, a folder or a model. Other texts are queries."""
    from visavis.models.encoders.pretrained_files import HUB_NAME, local_model_folder

    return (
        os.path.exists(text)
        or bool(HUB_NAME.fullmatch(text))
        or local_model_folder(text) is not None
    )


def _is_folder_of_images(text: str) -> bool:
    """Whether a text names a folder of images that is neither an index, a run nor a model."""
    from visavis.retrieval.index_folder import is_index

    names = ("run.toml", "ensemble.toml", "config.json")
    if not os.path.isdir(text) or is_index(text):
        return False
    if any(os.path.exists(Path(text) / name) for name in names):
        return False
    # Only here: it imports the readers of data sets.
    from visavis.retrieval.source_files import list_source_files

    try:
        list_source_files(text)
    except DataError:
        return False
    return True


def serve(
    index: str | Path | Sequence[str | Path],
    *,
    model: str | Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    root_path: str = "",
    host_name: str | Sequence[str] = (),
    votes: bool = False,
    store: str | Path | Sequence[str | Path] = (),
    max_irrelevant: float | None = None,
    open_browser: bool = False,
    progress: Progress | None = None,
) -> None:
    """Serve a web UI to search one index, or to compare two. Two indexes are shown side by side in
    random order. Ctrl-C stops the server.

    A folder of images is indexed first, as ``visavis index FOLDER`` does.

    Args:
        index: Folder of an index, or of two indexes to compare, or folder of images to index and
            serve.
        model: Folder or hub name of a pretrained model for a folder of images. Default: the
            user's default model.
        host: Address to listen on. Any address but a loopback one needs a token.
        port: Port to listen on. 0: any free port.
        token: Access token required from clients, at least 12 characters. Default: none.
        root_path: Path below which a reverse proxy serves the web UI, such as /photos. Default:
            none.
        host_name: Name by which a reverse proxy requests the server, such as photos.example.
            Default: names of this machine.
        votes: Let people vote on results. The votes are saved in the index, or in both indexes.
        store: Confirms the store of an index outside its folder. Default: only stores inside.
        max_irrelevant: Expected share of irrelevant results at which the web UI draws a line. Results
            must have match probabilities. Default: 0.5, for results with match probabilities.
        open_browser: Open the web UI in a browser.
        progress: Receives the address.

    Raises:
        MissingExtra: If the packages of the extra ``serve`` are not installed.
        VisavisError: If the address is not a loopback one and no token is set, or a host name or
            path is invalid.

    Command line:
        ```sh
        visavis serve photos/
        visavis serve index --open-browser
        visavis serve index --votes --port 8080
        ```
    """
    from visavis.api.run_collections import open_run_data
    from visavis.retrieval.server.uvicorn_server import run_service

    run_service(
        to_paths(index),
        host=host,
        port=port,
        token=token,
        root_path=root_path,
        host_names=to_list(host_name),
        votes=votes,
        store=store,
        max_irrelevant=max_irrelevant,
        open_browser=open_browser,
        model=model,
        open_data=open_run_data,
        progress=progress or NoProgress(),
    )


def mcp(
    index: str | Path | Sequence[str | Path],
    *,
    votes: bool = False,
    store: str | Path | Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> None:
    """Serve indexes to an assistant over the Model Context Protocol. It uses stdin and stdout. The
    assistant starts the command.

    The tools search by text, find similar items, and return the details and the thumbnail of an
    item. They read the index and its files only, unless ``votes`` allows votes.

    Args:
        index: Folder of an index.
        votes: Let the assistant vote on results. A vote is saved in the index of its item. Default: no
            tool that writes.
        store: Confirms the store of an index outside its folder. Default: only stores inside.
        progress: Receives messages, which must not go to stdout.

    Raises:
        MissingExtra: If the packages of the extra ``mcp`` are not installed.
        RunError: If a folder is not an index.
        VisavisError: If an index is given twice.

    Command line:
        ```sh
        visavis mcp indexes/photos
        visavis mcp indexes/photos indexes/videos --votes
        ```
    """
    from visavis.retrieval.server.mcp_server import run_server

    stores = [store] if isinstance(store, str | Path) else list(store)
    run_server(to_paths(index), stores, progress or NoProgress(), votes=votes)
