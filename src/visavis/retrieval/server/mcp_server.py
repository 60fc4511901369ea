"""Server of the Model Context Protocol over stdio: search, similar items, details of an item, and
votes if they are allowed.

A client waits for the handshake, so torch, the indexes and their models are loaded by the first
call of a tool.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from visavis.core.environment import installed_version
from visavis.core.errors import DataError, VisavisError, format_value, requires_extra, suggest_name
from visavis.core.progress import Progress
from visavis.evaluation.feedback.records import FeedbackFile, Judgment, QueryKey, open_feedback
from visavis.retrieval.items import MANIFEST, IndexItem, ItemFilter, ItemKind, parse_time

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

    from visavis.data import Dataset
    from visavis.retrieval.search import SearchResult
    from visavis.retrieval.server.search_service import ServedIndex

MAX_QUERY_CHARS, MAX_KEY_CHARS, MAX_RESULTS = 500, 4096, 100


class ToolArguments(BaseModel):
    """Base of the arguments of a tool, which rejects unknown names."""

    model_config = ConfigDict(extra="forbid")


class FilterArguments(ToolArguments):
    """Conditions on the items, as in ``visavis search``, and the number of results.

    Attributes:
        path: Pattern of the whole path.
        kind: Kind of the items.
        after: Earliest time.
        before: Time before which an item must lie.
        metadata: Values that an item must have.
        limit: Maximum number of results.
    """

    path: str = Field(
        "",
        max_length=MAX_QUERY_CHARS,
        description="Pattern of the whole path, such as *beach* or 2024/*.jpg. Default: all.",
    )
    kind: ItemKind | None = Field(None, description="Kind of the items. Default: all.")
    after: str | None = Field(None, description="Earliest time of an item, such as 2024-05-31.")
    before: str | None = Field(
        None, description="Time before which an item must lie, such as 2024-06-30."
    )
    metadata: dict[str, str] = Field(
        {}, description='Metadata values that an item must have, such as {"split": "test"}.'
    )
    limit: int = Field(10, ge=1, le=MAX_RESULTS, description="Maximum number of results.")

    def to_item_filter(self) -> ItemFilter:
        """Convert to a filter of the index.

        Returns:
            The filter.

        Raises:
            DataError: If a time cannot be parsed.
        """
        return ItemFilter(
            self.path, self.kind, parse_time(self.after), parse_time(self.before), self.metadata
        )


class SearchArguments(FilterArguments):
    """A text query with conditions.

    Attributes:
        query: Text query. Empty: the newest items.
    """

    query: str = Field(
        max_length=MAX_QUERY_CHARS,
        description="Description of the wanted images in plain words. "
        '-word or -"several words" excludes. Empty: the newest items.',
    )


ITEM_DESCRIPTION = "Key of an item from search results, or path of its file."


class SimilarArguments(FilterArguments):
    """An item to find similar items of, with conditions.

    Attributes:
        item: Key of the item, or path of its file.
    """

    item: str = Field(max_length=MAX_KEY_CHARS, description=ITEM_DESCRIPTION)


class DetailsArguments(ToolArguments):
    """An item to describe.

    Attributes:
        item: Key of the item, or path of its file.
        thumbnail: Whether the answer has an image.
    """

    item: str = Field(max_length=MAX_KEY_CHARS, description=ITEM_DESCRIPTION)
    thumbnail: bool = Field(False, description="Also return a JPEG of at most 480 pixels per side.")


class VoteArguments(ToolArguments):
    """A vote on an item.

    Attributes:
        query: Text query.
        item: Key of the item, or path of its file.
        relevant: Whether the item is relevant. None withdraws the vote.
    """

    query: str = Field(
        min_length=1,
        max_length=MAX_QUERY_CHARS,
        description="The text query that the item was a result of.",
    )
    item: str = Field(max_length=MAX_KEY_CHARS, description=ITEM_DESCRIPTION)
    relevant: bool | None = Field(
        description="Whether the item is relevant to the query. Null withdraws an earlier vote."
    )


class ItemAnswer(BaseModel):
    """An item.

    Attributes:
        key: Key of the item.
        path: Absolute path of the file or archive. None if it is missing.
        kind: Kind of the item.
        start: Start of a moment in seconds.
        end: End of a moment in seconds.
        modified: Modification time of the file.
        taken: Capture time. None if the index does not have it.
        metadata: Other values of the item.
    """

    key: str = Field(description="Identifies the item in other tools and filters.")
    path: str | None = Field(description="Absolute path of the file. Null if it is missing.")
    kind: ItemKind
    start: float | None = Field(description="Start of a moment of a video in seconds.")
    end: float | None = Field(description="End of a moment of a video in seconds.")
    modified: datetime = Field(description="Modification time of the file.")
    taken: str | None = Field(description="Capture time. Null if unknown.")
    metadata: dict[str, str]


class FoundItem(ItemAnswer):
    """A result of a search.

    Attributes:
        score: Score, a cosine similarity for most models. None for the newest items.
        match_probability: Probability that the item is relevant. None without a calibration.
        duplicates: Keys of near-duplicates and of other moments of the video.
    """

    score: float | None = Field(description="Similarity to the query. Null for an empty query.")
    match_probability: float | None = Field(
        description="Probability that the item is relevant, 0 to 1. Null if unknown."
    )
    duplicates: list[str] = Field(
        description="Keys of near-duplicates and of other moments of the video."
    )


class FoundItems(BaseModel):
    """Results of a search.

    Attributes:
        hits: The results, best first.
        no_match: Whether even the best result is probably irrelevant. None without a calibration.
        message: Why nothing was found. Empty with results.
    """

    hits: list[FoundItem] = Field(description="Results, best first.")
    no_match: bool | None = Field(
        description="Whether even the best result is probably irrelevant. Null if unknown."
    )
    message: str = Field(description="Why nothing was found. Empty with results.")


class ItemDetails(ItemAnswer):
    """Details of an item.

    Attributes:
        size: Size of the file in bytes.
        captions: Captions of the item in its data set.
    """

    size: int = Field(description="Size of the file in bytes.")
    captions: list[str] = Field(description="Captions of the item in its data set.")


class SavedVote(BaseModel):
    """A saved vote.

    Attributes:
        query: The text query.
        item: Key of the item.
        relevant: Whether the item is relevant. None: the vote was withdrawn.
    """

    query: str
    item: str
    relevant: bool | None


class ToolAnswer(NamedTuple):
    """What a tool returns.

    Attributes:
        content: The structured content.
        text: The same in words.
        jpeg: An image, if it was requested.
    """

    content: BaseModel
    text: str
    jpeg: bytes | None = None


class IndexTools:
    """Tools over one or several indexes, each of which is opened by the first call that needs it.
    Only one call runs at a time.

    Args:
        folders: Folders of the indexes by name.
        stores: Confirmed locations of stores outside the folders.
        feedback: Feedback file. None: votes are not allowed.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        stores: Sequence[str | Path] = (),
        feedback: FeedbackFile | None = None,
    ):
        self.folders, self.stores, self.feedback = dict(folders), list(stores), feedback
        self._opened: dict[str, ServedIndex] = {}
        self._datasets: dict[str, _Captions] = {}

    def search(self, arguments: SearchArguments) -> ToolAnswer:
        """Search an index for a text.

        Args:
            arguments: Query and conditions.

        Returns:
            Results as ``FoundItems``.
        """
        key = QueryKey(" ".join(arguments.query.split()))
        return self._find(self._index(arguments), key, arguments)

    def similar(self, arguments: SimilarArguments) -> ToolAnswer:
        """Find the items that are most similar to an item.

        Args:
            arguments: The item and conditions.

        Returns:
            Results as ``FoundItems``. The first one is the item itself, if it passes the
            conditions.
        """
        index = self._index(arguments)
        item = _find_item(index, arguments.item)
        return self._find(index, QueryKey(similar_to=item.key), arguments)

    def details(self, arguments: DetailsArguments) -> ToolAnswer:
        """Describe an item.

        Args:
            arguments: The item, and whether to render it.

        Returns:
            ``ItemDetails``, and a JPEG if it is requested.

        Raises:
            DataError: If the item is unknown, or its file cannot be rendered.
        """
        index = self._index(arguments)
        item = _find_item(index, arguments.item)
        captions = self._captions(index, item)
        details = ItemDetails(**_item_values(index, item), size=item.size, captions=captions)
        lines = [
            f"{_printable(details.key)} ({details.kind})",
            f"file: {_printable(details.path or 'missing')}, {details.size:,} bytes",
            f"modified: {details.modified:%Y-%m-%d %H:%M} UTC",
            *(f"caption: {caption}" for caption in captions),
            *(f"{name}: {value}" for name, value in details.metadata.items() if name != "caption"),
        ]
        jpeg = None
        if arguments.thumbnail:
            from visavis.retrieval.server.image_cache import render_jpeg

            jpeg = render_jpeg(index.index.locate(item), item, "thumbnail")
        return ToolAnswer(details, "\n".join(lines), jpeg)

    def vote(self, arguments: VoteArguments) -> ToolAnswer:
        """Save whether an item is relevant to a query.

        Args:
            arguments: Query, item and judgment.

        Returns:
            ``SavedVote``.

        Raises:
            VisavisError: If votes are not allowed.
            StorageError: If the feedback file cannot be written.
        """
        if self.feedback is None:
            raise VisavisError(
                "vote: expected a server that saves votes, got none. Start it with --feedback FILE."
            )
        index, query = self._index(arguments), " ".join(arguments.query.split())
        if not query:
            raise VisavisError("query: expected text, got spaces. Pass the query of the search.")
        item = _find_item(index, arguments.item)
        self.feedback.append(
            Judgment(
                datetime.now(UTC).isoformat(timespec="milliseconds"),
                index.name,
                QueryKey(query),
                item.key,
                item.content,
                arguments.relevant,
                vote=secrets.token_hex(8),
            )
        )
        judgment = {True: "relevant to", False: "not relevant to", None: "without a vote for"}
        return ToolAnswer(
            SavedVote(query=query, item=item.key, relevant=arguments.relevant),
            f"Saved: {_printable(item.key)} is {judgment[arguments.relevant]} {query!r}.",
        )

    def close(self) -> None:
        """Close the opened indexes."""
        for index in self._opened.values():
            index.index.close()

    def _index(self, arguments: ToolArguments) -> ServedIndex:
        """The index that the arguments name, or the only one."""
        name = getattr(arguments, "index", next(iter(self.folders)))
        if name not in self._opened:
            from visavis.retrieval.index_folder import Index
            from visavis.retrieval.server.search_service import ServedIndex

            index = Index.open(self.folders[name], store=self.stores)
            self._opened[name] = ServedIndex(index, name)
        return self._opened[name]

    def _find(self, index: ServedIndex, key: QueryKey, arguments: FilterArguments) -> ToolAnswer:
        results = index.search(key, None, arguments.limit, arguments.to_item_filter())
        hits = [
            FoundItem(
                **_item_values(index, result.item),
                score=result.score if key else None,
                match_probability=result.match_probability,
                duplicates=list(result.duplicates),
            )
            for result in results
        ]
        message = results.message
        if not hits and not message:
            message = index.index.explain_no_results(arguments.to_item_filter())
        found = FoundItems(hits=hits, no_match=results.no_match, message=message)
        return ToolAnswer(found, _describe_hits(found, results))

    def _captions(self, index: ServedIndex, item: IndexItem) -> list[str]:
        """All captions of an item in its data set. Of a source without captions: none."""
        first = item.metadata.get("caption")
        if first is None:
            return []
        if index.name not in self._datasets:
            self._datasets[index.name] = _Captions.open(index.index.root)
        return self._datasets[index.name].of(item.path) or [first]


@dataclass(frozen=True)
class _Captions:
    """Captions of a data set, and the row of each image by its name."""

    dataset: Dataset | None
    rows: Mapping[str, int]

    @classmethod
    def open(cls, source: Path) -> _Captions:
        from visavis.data import open_dataset

        try:
            dataset = open_dataset(source, skip_bad=True)
        except DataError as error:
            logging.getLogger(__name__).warning(
                "Only the first caption of each item is known, because the data set cannot be "
                "read: %s",
                error,
            )
            return cls(None, {})
        return cls(dataset, {image.name: row for row, image in enumerate(dataset.images)})

    def of(self, name: str) -> list[str]:
        """Captions of an image. Empty if the data set lacks it."""
        if self.dataset is None or name not in self.rows:
            return []
        captions = self.dataset.captions_of[self.rows[name]]
        return [self.dataset.captions[caption] for caption in captions]


def _find_item(index: ServedIndex, text: str) -> IndexItem:
    """The item with a key or the path of its file. Only the index is read, not the path."""
    keys = [text]
    with suppress(ValueError):  # a path on another drive of Windows
        keys.append(Path(os.path.relpath(text, index.index.root)).as_posix())
    items = index.index.store.get(keys)
    for key in keys:
        if key in items:
            return items[key]
    raise DataError(
        f"item: expected the key of an item of {index.name}, or the path of its file, got "
        f"{format_value(text)}. Copy a key from search results."
    )


def _item_values(index: ServedIndex, item: IndexItem) -> dict[str, Any]:
    """Values of ``ItemAnswer``."""
    from visavis.retrieval.server.search_service import modified_at

    image = index.index.image(item)
    location = None if image is None else image.location
    return {
        "key": item.key,
        "path": None if location is None else str(location.path),
        "kind": item.kind,
        "start": item.start,
        "end": item.end,
        "modified": modified_at(item),
        "taken": item.metadata.get("taken"),
        "metadata": dict(item.metadata),
    }


def _describe_hits(found: FoundItems, results: Sequence[SearchResult]) -> str:
    """The results in words, one per line."""
    lines = [found.message] if found.message else []
    if found.no_match:
        lines.append("Probably no match. These are the nearest results.")
    for rank, (hit, result) in enumerate(zip(found.hits, results, strict=True), 1):
        notes = [] if hit.score is None else [f"score {hit.score:.3f}"]
        if hit.match_probability is not None:
            notes.append(f"match probability {hit.match_probability:.0%}")
        if hit.duplicates:
            notes.append(f"near-duplicates: {', '.join(map(_printable, hit.duplicates))}")
        caption = f": {result.item.text}" if "caption" in hit.metadata else ""
        lines.append(
            f"{rank}. {_printable(hit.key)}{caption}" + (f" ({', '.join(notes)})" if notes else "")
        )
    return "\n".join(lines)


def _printable(name: str) -> str:
    """A name on one line, without control characters."""
    return name if name.isprintable() else repr(name)


@dataclass(frozen=True)
class IndexTool:
    """A tool as a client sees it.

    Attributes:
        name: Name of the tool.
        title: Name for people.
        description: When to use the tool.
        arguments: Type of the arguments.
        content: Type of the structured content.
        call: Computes the answer.
        is_read_only: Whether the tool writes nothing.
    """

    name: str
    title: str
    description: str
    arguments: type[ToolArguments]
    content: type[BaseModel]
    call: Callable[[Any], ToolAnswer]
    is_read_only: bool = True


def list_tools(tools: IndexTools) -> dict[str, IndexTool]:
    """List the tools that a client may call.

    Args:
        tools: The tools.

    Returns:
        Tools by name. With several indexes, each has an argument ``index``. Without a feedback
        file, no tool writes.
    """
    listed = [
        IndexTool(
            "search",
            "Search images and videos",
            "Find images, videos and moments of videos by a description of what they show.",
            SearchArguments,
            FoundItems,
            tools.search,
        ),
        IndexTool(
            "similar",
            "Find similar items",
            "Find the items that look most similar to an item, which is itself the first result.",
            SimilarArguments,
            FoundItems,
            tools.similar,
        ),
        IndexTool(
            "details",
            "Details of an item",
            "Return the file, time, captions and metadata of an item, and its thumbnail if wanted.",
            DetailsArguments,
            ItemDetails,
            tools.details,
        ),
    ]
    if tools.feedback is not None:
        listed.append(
            IndexTool(
                "vote",
                "Vote on a result",
                "Save whether an item is relevant to a query, in the feedback file of the server.",
                VoteArguments,
                SavedVote,
                tools.vote,
                is_read_only=False,
            )
        )
    if len(tools.folders) > 1:
        index: Any = (Literal[tuple(tools.folders)], Field(description="Name of the index."))
        listed = [_with_argument(tool, index) for tool in listed]
    return {tool.name: tool for tool in listed}


def _with_argument(tool: IndexTool, index: Any) -> IndexTool:
    """The tool with an argument for the index."""
    create: Any = create_model
    arguments = create(tool.arguments.__name__, __base__=tool.arguments, index=index)
    return replace(tool, arguments=arguments)


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of a model without docstrings, which describe the class to developers."""
    schema = model.model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("description", None)
    return schema


def create_server(tools: IndexTools) -> Server[Any]:
    """Create the server.

    Args:
        tools: The tools.

    Returns:
        The server of the package ``mcp``, without a transport.

    Raises:
        MCPError: From a request, for an unknown tool.
    """
    from anyio import CapacityLimiter, to_thread
    from mcp.server.lowlevel import Server
    from mcp.shared.exceptions import MCPError
    from mcp_types import (
        INVALID_PARAMS,
        CallToolResult,
        ContentBlock,
        ImageContent,
        ListToolsResult,
        TextContent,
        Tool,
        ToolAnnotations,
    )

    listed, one_at_a_time = list_tools(tools), CapacityLimiter(1)
    descriptions = [
        Tool(
            name=tool.name,
            title=tool.title,
            description=tool.description,
            input_schema=_schema(tool.arguments),
            output_schema=_schema(tool.content),
            annotations=ToolAnnotations(
                title=tool.title,
                read_only_hint=tool.is_read_only,
                destructive_hint=False,
                idempotent_hint=tool.is_read_only,
                open_world_hint=False,
            ),
        )
        for tool in listed.values()
    ]

    async def answer_list(_: Any, __: Any) -> ListToolsResult:
        return ListToolsResult(tools=descriptions)

    def failed(message: str) -> CallToolResult:
        return CallToolResult(content=[TextContent(type="text", text=message)], is_error=True)

    async def answer_call(_: Any, request: Any) -> CallToolResult:
        if request.name not in listed:
            raise MCPError(
                INVALID_PARAMS,
                f"tool: expected the name of a tool, got {format_value(request.name)}: "
                f"{suggest_name(request.name, listed)}",
            )
        tool = listed[request.name]
        try:
            arguments = parse_arguments(tool, request.arguments or {})
            answer = await to_thread.run_sync(tool.call, arguments, limiter=one_at_a_time)
        except VisavisError as error:
            return failed(str(error))
        except Exception as error:  # noqa: BLE001 - an unexpected error must not stop the server
            logging.getLogger(__name__).warning(
                "%s: %s: %s", request.name, type(error).__name__, error
            )
            return failed("An internal error occurred. See the log of the server.")
        content: list[ContentBlock] = [TextContent(type="text", text=answer.text)]
        if answer.jpeg is not None:
            data = base64.b64encode(answer.jpeg).decode()
            content.append(ImageContent(type="image", data=data, mime_type="image/jpeg"))
        return CallToolResult(
            content=content, structured_content=answer.content.model_dump(mode="json")
        )

    return Server(
        "visavis",
        title="visavis",
        version=installed_version("visavis") or "0",
        instructions="Search the images and videos of the user in these indexes: "
        f"{', '.join(tools.folders)}.",
        on_list_tools=answer_list,
        on_call_tool=answer_call,
    )


def parse_arguments(tool: IndexTool, values: Mapping[str, Any]) -> ToolArguments:
    """Check the arguments of a call.

    Args:
        tool: The tool.
        values: Arguments by name, as the client sent them.

    Returns:
        The arguments, of the type that the tool has.

    Raises:
        VisavisError: If an argument is unknown, missing or invalid.
    """
    try:
        return tool.arguments.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))[:80]
    if first["type"] == "extra_forbidden":
        known = suggest_name(name, tool.arguments.model_fields)
        raise VisavisError(
            f"{name}: expected an argument of {tool.name}, got another name: {known}"
        )
    if first["type"] == "missing":
        raise VisavisError(f"{name}: expected a value, got none. Pass this argument.")
    problem = re.sub("^[A-Z][a-z]+ should (be|have) ", "expected ", first["msg"])
    problem = problem[:1].lower() + problem[1:]
    raise VisavisError(f"{name}: {problem}, got {format_value(first['input'])}. Correct it.")


def run_server(
    indexes: Sequence[Path],
    feedback: str | Path | None,
    stores: Sequence[str | Path],
    progress: Progress,
) -> None:
    """Serve indexes over stdin and stdout until the client closes stdin.

    Args:
        indexes: Folders of the indexes.
        feedback: Feedback file. None: votes are not allowed.
        stores: Confirmed locations of stores outside the folders of the indexes.
        progress: Receives messages.

    Raises:
        RunError: If a folder is not an index.
        VisavisError: If an index is given twice.
        DataError: If the feedback file is invalid.
        MissingExtra: If a package of the extra ``mcp`` is not installed.
    """
    with requires_extra("mcp", "visavis mcp"):
        import anyio
        import prometheus_client  # noqa: F401 - only checks that it is installed
        from mcp.server.stdio import stdio_server
    for folder in indexes:
        if not os.path.isfile(folder / MANIFEST):
            # It raises the error. Its module imports torch, so it is not used for an index.
            from visavis.retrieval.index_folder import read_manifest

            read_manifest(folder)
    if stores:
        from visavis.retrieval.index_folder import check_confirmed_stores

        check_confirmed_stores(indexes, stores)
    with ExitStack() as stack:
        file = None if feedback is None else stack.enter_context(open_feedback(feedback))
        tools = IndexTools(index_names(indexes), stores, file)
        stack.callback(tools.close)
        server = create_server(tools)

        async def serve() -> None:
            # While serving, prints of other libraries go to stderr, so that stdout has messages only.
            lines: Any = _StdinLines()
            async with stdio_server(stdin=lines) as (messages, answers):
                await server.run(messages, answers, server.create_initialization_options())

        progress.message(
            f"Serving {', '.join(tools.folders)} to the client on stdin and stdout (press Ctrl-C to stop)"
        )
        try:
            anyio.run(serve)
        except* (BrokenPipeError, KeyboardInterrupt):
            progress.message("Stopped.")


class _StdinLines:
    """Lines of stdin for the running event loop.

    A daemon thread reads them: the thread of ``mcp`` would keep the process alive after a signal,
    until the client closes stdin.
    """

    def __init__(self) -> None:
        self._lines = asyncio.Queue[str | None]()
        Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        # A file of its own, because Python waits for the lock of sys.stdin when it ends.
        with suppress(RuntimeError), open(os.dup(0), "rb") as stdin:  # the loop was closed
            for line in stdin:
                loop.call_soon_threadsafe(self._lines.put_nowait, line.decode(errors="replace"))
            loop.call_soon_threadsafe(self._lines.put_nowait, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        line = await self._lines.get()
        if line is None:
            raise StopAsyncIteration
        return line


def index_names(folders: Sequence[Path]) -> dict[str, Path]:
    """Name indexes by the last parts of their paths, as many as distinguish them.

    Args:
        folders: Folders of the indexes.

    Returns:
        Folders by name.

    Raises:
        VisavisError: If a folder is given twice.
    """
    paths = [Path(os.path.realpath(folder)) for folder in folders]
    for path in paths:
        if paths.count(path) > 1:
            raise VisavisError(
                f"index: expected different folders, got {path} twice. Pass each index once."
            )
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, folders, strict=True))
