"""API functions for collections: index, search, classify, serve and mcp."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from visavis.api.arguments import (
    as_text,
    check_choice,
    optional_path,
    optional_text,
    read_bank,
    read_lines,
    to_list,
    to_paths,
)
from visavis.core.errors import DataError, VisavisError
from visavis.core.memory_budget import MemoryLimit, parse_memory
from visavis.core.progress import NoProgress, Progress

if TYPE_CHECKING:
    from visavis.retrieval.index_builder import IndexReport
    from visavis.retrieval.index_queries import QueryModels
    from visavis.retrieval.search import SearchQuery, SearchResults


def index(
    run: str | Path | None = None,
    source: str | Path | None = None,
    *,
    out: str | Path | None = None,
    model: str | Path | None = None,
    queries: str | Path | None = None,
    list_queries: bool = False,
    restore_queries: bool = False,
    store: str | Path | None = None,
    moment_seconds: float | None = None,
    embedding_dim: int | None = None,
    full_decoding: bool = False,
    exclude: str | Sequence[str] = (),
    remove_missing: bool = False,
    moved: bool = False,
    compression: bool = False,
    correction: str | None = None,
    bank: str | Path | None = None,
    item_bytes: MemoryLimit = None,
    set_default: bool = False,
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    device: str | None = None,
    memory: MemoryLimit = None,
    progress: Progress | None = None,
) -> IndexReport | QueryModels:
    """Index a folder of images and videos, or update an index. Only new and changed files are
    encoded.

    A file is unchanged if its size, modification time and metadata are the same. A file whose
    content is in the index keeps its vectors. Items are removed if their file is gone, and kept
    with a warning if its folder cannot be read or is empty, or more than half are missing. If the
    validation data of the run are available, the match probability is calibrated. Without a run, a
    pretrained CLIP or SigLIP model is used: ``index("photos/")``.

    With ``queries``, ``list_queries`` or ``restore_queries``, the models of text queries of an existing
    index are changed or listed, and no file is read.

    Args:
        run: Run folder, folder or hub name of a CLIP, SigLIP or ColPali model, or file of vectors.
            With one argument: the folder to index. Default: none, to change query models.
        source: Folder of images and videos, or a data set. Default: the first argument, with a
            pretrained model.
        out: Folder of the index. An existing index is updated. Default: indexes/NAME in the current
            folder, NAME being the folder's name.
        model: Folder or hub name of a pretrained model, without a run. Default: the model of
            the index, else the user's default model.
        queries: Run of visavis train --index that encodes the text queries of --out from now on.
            Also 'items' for the model that encoded the items, or a fingerprint of --list-queries.
            Default: no change.
        list_queries: List the query models of --out.
        restore_queries: Return to the query model that --out had before.
        store: LanceDB folder or s3:// URI, or Milvus *.db file or http:// URL. Required again for
            an update. Default: LanceDB inside --out.
        moment_seconds: Length of a video moment in seconds. Default: 4, or the value of the index.
        embedding_dim: Number of leading dimensions to store, for a model trained with
            matryoshka_dims. Default: all, or the value of the index.
        full_decoding: Decode JPEG files in full, instead of at a reduced size. Slower for large
            files. An existing index keeps its setting.
        exclude: Pattern of names or paths that are not indexed, such as drafts or '2024/raw*'.
            Default: none, or those of the index.
        remove_missing: Remove missing files also if more than half are missing, or their folder is
            empty.
        moved: The source of the index --out was moved to this folder. Its vectors are kept.
        compression: Also measure recall, bytes and latency of compressed vectors.
        correction: Correction of text queries for hubs, such as "QueryBankNorm()", see visavis
            catalog corrections. It is on only if held-out queries gain from it. none removes it.
            Default: the one of the index.
        bank: Texts that --correction learns from: a .txt file with one text per line, or a split of
            the run. Default: train.
        item_bytes: Compress the vectors of a late-interaction model to this size per item, such as
            2KB. Default: float32, or the value of the index.
        set_default: Use --model for all later commands that name no model.
        engine: Encode locally, or on a Ray cluster.
        workers: Number of processes of a Ray cluster, or that read images. Default: 2 on Ray, else
            one per core for a GPU and none for a CPU.
        device: Device of the model: cpu, cuda or mps. Default: CUDA or an Apple GPU if available.
        memory: Maximum memory of score blocks, such as 2GiB. Default: a share of the free memory.
        progress: Receives the progress.

    Returns:
        Counts of encoded, unchanged, moved and removed files, or the query models of the index.

    Raises:
        DataError: If the source cannot be read.
        RunError: If the folder is not a run, or the index is of another model, source or setting.
        VisavisError: If a run and a model are given, ``moved`` without ``out``, ``set_default``
            without ``model``, ``bank`` without ``correction``, or neither a folder nor a query
            model.

    Command line:
        ```sh
        visavis index photos/
        visavis index runs/mine photos/ --out index
        visavis index runs/mine moved/photos/ --out index --moved
        visavis index runs/mine photos/ --out index --correction "QueryBankNorm()"
        visavis index --queries runs/my-words --out index
        visavis index --restore-queries --out index
        ```
    """
    from visavis.api.run_collections import open_run_data

    changes = [queries is not None, list_queries, restore_queries]
    if any(changes):
        if sum(changes) > 1 or out is None or run is not None:
            raise VisavisError(
                "--queries, --list-queries, --restore-queries: expected one of them with --out "
                "alone, got more or no --out. Change the query model and update the index "
                "in two commands."
            )
        from visavis.retrieval import index_queries

        if list_queries:
            return index_queries.list_queries(Path(out))
        if queries is None:
            return index_queries.restore_queries(Path(out))
        return index_queries.use_queries(
            Path(out), queries, progress or NoProgress(), open_data=open_run_data
        )
    if run is None:
        raise VisavisError(
            "index: expected a folder of images, or --queries RUN with --out INDEX, got neither. "
            "Name the folder to index."
        )
    from visavis.retrieval.index_builder import build_index, default_index_folder, index_source

    progress = progress or NoProgress()
    correction = as_text(correction)
    if bank is not None and correction in (None, "none"):
        raise VisavisError("--bank: expected it with --correction, got no --correction. Pass both.")
    if correction not in (None, "none"):
        from visavis.evaluation.corrections import parse_correction

        # A wrong spec is reported before files are encoded.
        correction = repr(parse_correction(str(correction)))
    options: dict[str, Any] = {
        "store": optional_text(store),
        "moment_seconds": moment_seconds,
        "embedding_dim": embedding_dim,
        "full_decoding": full_decoding,
        "exclude": to_list(exclude),
        "remove_missing": remove_missing,
        "moved": moved,
        "compression": compression,
        "correction": "" if correction == "none" else correction,
        "bank": None if bank is None else read_bank(bank),
        "item_bytes": parse_memory(item_bytes, "item_bytes"),
        "open_data": open_run_data,
        "engine": engine,
        "workers": workers,
        "device": device,
        "memory": memory,
    }
    if moved and out is None:
        raise VisavisError(
            "--moved: expected --out with the index of the moved folder, got none. Pass the folder "
            "of the index with --out."
        )
    if set_default and (model is None or source is not None):
        raise VisavisError(
            "--set-default: expected a folder and --model with the new default model, got none. "
            "Pass --model NAME."
        )
    if source is None:
        return index_source(run, out, model, progress, set_default=set_default, **options)
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
    path: str = "",
    kind: Literal["image", "video", "moment"] | None = None,
    after: str | None = None,
    before: str | None = None,
    metadata: Mapping[str, str] | None = None,
    group_duplicates: bool = True,
    rerank: str | Path | None = None,
    model: str | Path | None = None,
    store: str | Path | None = None,
    top: int = 5,
    max_irrelevant: float | None = None,
    ignore_captions: bool = False,
    memory: MemoryLimit = None,
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
        path: Pattern of paths to search, such as '*beach*', in upper or lower case. Default: all.
        kind: Kind of items to search. Default: all.
        after: Earliest capture time, or modification time if it is not known, such as 2024-05-31
            or 2024. Default: any.
        before: Time before which the items must lie. A year or month counts from its start.
            Default: any.
        metadata: Metadata value of items to search, such as split=test. Default: any.
        group_duplicates: Group near-duplicates and moments of one video into one result.
        rerank: Run that re-ranks the first 50 results, or --top if larger, such as SCAN. Default:
            none.
        model: New location of the model of an index, or model for --collection without a run.
            Default: the recorded or default model.
        store: Confirms the store of an index outside its folder. Default: only a store inside.
        top: Number of results.
        max_irrelevant: Expected share of irrelevant results at which the list ends, such as 0.3.
            --all prints the weaker results, too. Without validation captions, the first search takes
            longer. Default: the list does not end.
        ignore_captions: Take match probabilities from the collection, also if validation captions
            calibrate the index. Recommended for texts that are shorter than the captions.
        memory: Maximum memory of score blocks, such as 2GiB. Default: the recipe's, else a share of
            the free memory.
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
        visavis search index --image photo.jpg --after 2024-05-31
        visavis search openai/clip-vit-base-patch32 "a red car" --collection photos/
        ```
    """
    from visavis.core.fields import validate_int
    from visavis.models.retriever import Retriever
    from visavis.retrieval.index_folder import is_index
    from visavis.retrieval.items import ItemFilter, ItemKind, parse_filter_time
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
            from visavis.retrieval.index_builder import update_default_index

            index_folder = update_default_index(
                collection, model, progress, open_data=open_run_data, memory=memory
            )
            runs = [index_folder]
            query = text
            collection = None
            model = None
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
    if kind is not None:
        check_choice("kind", kind, get_args(ItemKind))
    item_filter = ItemFilter(
        path, kind, parse_filter_time(after), parse_filter_time(before), dict(metadata or {})
    )
    parts = build_query(query, image, like, without)
    searched: Collection
    if any(is_index(folder) for folder in runs):
        if len(runs) > 1 or collection is not None:
            raise VisavisError(
                "search: expected one index without --collection, as an index has its own images. "
                "Pass one index only."
            )
        searched = open_index(
            runs[0], model=model, store=store, memory=memory, ignore_captions=ignore_captions
        )
        if ignore_captions and max_irrelevant is None:
            # Probabilities from the collection are shown on request only.
            max_irrelevant = 1.0
    elif image or like or without or item_filter or rerank or store or ignore_captions:
        raise VisavisError(
            f"{runs[0]}: expected an index for image queries, filters, --rerank, --store and "
            "--ignore-captions, got a run or model. "
            f"Create one with visavis index {runs[0]} FOLDER --out INDEX."
        )
    else:
        from visavis.api.run_collections import open_run_images

        # A wrong query is reported before features are computed.
        validate_text_query(query)
        validate_int(top, "top", 1)
        searched = open_run_images(runs, optional_path(collection), progress, memory)
    with closing(searched):
        for encoder in searched.models:
            warn_unknown_words(encoder, parts, progress)
        reranker = None if rerank is None else Retriever.load(rerank, memory=memory)
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
    image: str | Path,
    labels: str | Path | Sequence[str],
    *,
    templates: str | Path | None = None,
    model: str | Path | None = None,
    top: int = 5,
    memory: MemoryLimit = None,
) -> list[tuple[str, float]]:
    """Classify an image with text labels (zero-shot).

    Args:
        run: Run folder, folder or hub name of a pretrained model, or index for its model.
        image: Image file.
        labels: File with one label or caption per line, or several labels.
        templates: File with one prompt per line, with {} in place of the label. Default: the labels
            as they are.
        model: New location of the model of an index. Default: the recorded one.
        top: Number of labels.
        memory: Maximum memory of score blocks, such as 2GiB. Default: the recipe's, else a share of
            the free memory.

    Returns:
        Labels with their scores, best first.

    Raises:
        DataError: If the image, the labels or the templates cannot be read.
        RunError: If the folder is neither a run nor an index.
        SpecError: If ``top`` is below 1.

    Command line:
        ```sh
        visavis classify runs/mine photo.jpg labels.txt
        ```
    """
    from visavis.core.fields import validate_int
    from visavis.models.retriever import Retriever
    from visavis.retrieval.index_folder import is_index, read_manifest
    from visavis.retrieval.open_index import open_index_model
    from visavis.retrieval.zero_shot import rank_texts, read_templates

    validate_int(top, "top", 1)
    if isinstance(labels, str | Path):
        labels = read_lines(labels)
    prompts = None if templates is None else read_templates(templates)
    if is_index(run):
        retriever = open_index_model(Path(run), read_manifest(Path(run)), model, memory=memory)
    else:
        retriever = Retriever.load(model or run, memory=memory)
    return rank_texts(retriever, image, labels, prompts)[:top]


def build_query(
    text: str,
    image: str | Path | Sequence[str | Path] = (),
    like: str | Sequence[str] = (),
    without: str | Sequence[str] = (),
) -> SearchQuery:
    """Combine the parts of a query, each with weight 1, and excluded texts with weight -0.5.

    Args:
        text: Text query, or empty with an image or item.
        image: Query images.
        like: Keys of items.
        without: Excluded texts.

    Returns:
        The query. Without any part, it has one empty text, which a search refuses.
    """
    from visavis.retrieval.search import EXCLUDED_WEIGHT, SearchQuery

    images = [(1.0, file) for file in ([image] if isinstance(image, str | Path) else image)]
    keys = [(1.0, key) for key in to_list(like)]
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
    feedback: str | Path | None = None,
    store: str | Path | Sequence[str | Path] = (),
    max_irrelevant: float | None = None,
    ignore_captions: bool = False,
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
        feedback: File for relevance judgments, new or to be continued. Default: no feedback.
        store: Confirms the store of an index outside its folder. Default: only stores inside.
        max_irrelevant: Expected share of irrelevant results at which the web UI draws a line, also
            without captions. Default: 0.5, only with captions.
        ignore_captions: Take match probabilities from the collection, also if validation captions
            calibrate the index.
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
        visavis serve index --feedback votes.jsonl --port 8080
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
        feedback=feedback,
        store=store,
        max_irrelevant=max_irrelevant,
        ignore_captions=ignore_captions,
        open_browser=open_browser,
        model=model,
        open_data=open_run_data,
        progress=progress or NoProgress(),
    )


def mcp(
    index: str | Path | Sequence[str | Path],
    *,
    feedback: str | Path | None = None,
    store: str | Path | Sequence[str | Path] = (),
    progress: Progress | None = None,
) -> None:
    """Serve indexes to an assistant over the Model Context Protocol. It uses stdin and stdout. The
    assistant starts the command.

    The tools search by text, find similar items, and return the details and the thumbnail of an
    item. They read the index and its files only, unless ``feedback`` allows votes.

    Args:
        index: Folder of an index.
        feedback: File for relevance judgments of the assistant, new or to be continued. Default: no
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
        visavis mcp indexes/photos indexes/videos --feedback votes.jsonl
        ```
    """
    from visavis.retrieval.server.mcp_server import run_server

    stores = [store] if isinstance(store, str | Path) else list(store)
    run_server(to_paths(index), feedback, stores, progress or NoProgress())
