"""Server of the Model Context Protocol over stdio: search, similar items, details of an item, and
votes if they are allowed.

A client waits for the handshake, so the indexes and their models are loaded by the first call of a
tool.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, ValidationError, create_model

from visavis.core.environment import installed_version
from visavis.core.errors import DataError, VisavisError, format_value, requires_extra, suggest_name
from visavis.core.progress import Progress
from visavis.data.feedback.records import QueryKey
from visavis.data.file_names import escape_name
from visavis.retrieval.items import (
    DATABASE,
    OTHER_CAPTIONS,
    IndexItem,
    ItemFilter,
    ItemKind,
    index_names,
    parse_filter_time,
)
from visavis.retrieval.server.schemas import (
    EMPTY_IS_ABSENT,
    LIMITS,
    HitModel,
    ItemModel,
    Key,
    RequestModel,
    describe_invalid,
    is_unicode,
)

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server
    from mcp_types import JSONRPCError

    from visavis.retrieval.server.search_service import ServedIndex


class ItemAnswer(ItemModel):
    """An item.

    Attributes:
        path: Absolute path of the file or archive. None if it is missing.
        taken: Capture time. None if the index does not have it.
    """

    path: str | None = Field(description="Absolute path of the file. Null if it is missing.")
    taken: str | None = Field(description="Capture time. Null if unknown.")


class FoundItem(HitModel, ItemAnswer):
    """A result of a search."""


class NamedItem(ItemAnswer):
    """An item whose file name or caption has the words of a query.

    Attributes:
        found_by: What has the words.
        text: The name or caption that has them.
    """

    found_by: Literal["name", "caption"] = Field(description="What has the words of the query.")
    text: str = Field(description="The name or caption that has them.")


class FoundItems(BaseModel):
    """Results of a search.

    Attributes:
        named: Items found by name or caption.
        hits: The results, best first.
        no_match: Whether even the best result is probably irrelevant. None without a calibration.
        message: Why nothing was found, unknown words, or how the scores are corrected.
    """

    named: list[NamedItem] = Field(
        description="Items whose file name or caption has all words of the query."
    )
    hits: list[FoundItem] = Field(description="Results by content, best first.")
    no_match: bool | None = Field(
        description="Whether even the best result is probably irrelevant. Null if unknown."
    )
    message: str = Field(
        description="Why nothing was found, unknown words, or how the scores are corrected."
    )

    def __str__(self) -> str:
        lines = [self.message] if self.message else []
        lines += [
            f"Found by {named.found_by}: {_printable(named.key)}: {named.text}"
            for named in self.named
        ]
        if self.no_match:
            lines.append("Probably no match. These are the nearest results.")
        for rank, hit in enumerate(self.hits, 1):
            notes = [] if hit.score is None else [f"score {hit.score:.3f}"]
            if hit.match_probability is not None:
                notes.append(f"match probability {hit.match_probability:.0%}")
            if hit.duplicates:
                notes.append(f"near-duplicates: {', '.join(map(_printable, hit.duplicates))}")
            caption = f": {hit.metadata['caption']}" if "caption" in hit.metadata else ""
            end = f" ({', '.join(notes)})" if notes else ""
            lines.append(f"{rank}. {_printable(hit.key)}{caption}{end}")
        return "\n".join(lines)


class ItemDetails(ItemAnswer):
    """Details of an item.

    Attributes:
        size: Size of the file in bytes.
        captions: Captions of the item in its data set.
    """

    size: int = Field(description="Size of the file in bytes.")
    captions: list[str] = Field(description="Captions of the item in its data set.")

    def __str__(self) -> str:
        lines = [
            f"{_printable(self.key)} ({self.kind})",
            f"file: {_printable(self.path or 'missing')}, {self.size:,} bytes",
            f"modified: {self.modified:%Y-%m-%d %H:%M} UTC",
            *(f"caption: {caption}" for caption in self.captions),
            *(
                f"{name}: {value}"
                for name, value in self.metadata.items()
                if name not in ("caption", OTHER_CAPTIONS)
            ),
        ]
        return "\n".join(lines)


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

    def __str__(self) -> str:
        judgment = {True: "relevant to", False: "not relevant to", None: "without a vote for"}
        return f"Saved: {_printable(self.item)} is {judgment[self.relevant]} {self.query!r}."


def _printable(name: str) -> str:
    """A name on one line, without control characters."""
    return name if name.isprintable() else repr(name)


class OpenedIndexes:
    """Indexes that are opened by the first call that needs them.

    Args:
        folders: Folders of the indexes by name.
        stores: Confirmed locations of stores outside the folders.
        saves_votes: Whether the client may vote. A vote is saved in the index of its item.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        stores: Sequence[str | Path] = (),
        *,
        saves_votes: bool = False,
    ):
        self.folders = dict(folders)
        self.stores = list(stores)
        self.saves_votes = saves_votes
        self._opened: dict[str, ServedIndex] = {}

    def __getitem__(self, name: str) -> ServedIndex:
        if name not in self._opened:
            from visavis.retrieval.open_index import open_index
            from visavis.retrieval.server.search_service import ServedIndex

            index = open_index(self.folders[name], store=self.stores)
            self._opened[name] = ServedIndex(index, name, stores=self.stores)
        elif (newer := self._opened[name].newer()) is not None:
            self._opened[name].index.close()
            self._opened[name] = newer
        return self._opened[name]

    def close(self) -> None:
        """Close the opened indexes."""
        for index in self._opened.values():
            index.index.close()


class IndexTool(RequestModel):
    """Base of the tools. The fields are the arguments of a call. Unknown names are rejected.

    Attributes:
        title: Name for people.
        answer: Type of the structured content.
        writes: Whether a call changes a file.
    """

    title: ClassVar[str]
    answer: ClassVar[type[BaseModel]]
    writes: ClassVar[bool] = False

    def run(self, indexes: OpenedIndexes) -> tuple[BaseModel, bytes | None]:
        """Run the tool: structured content, whose text is the same in words, and a JPEG if it was
        requested. Only one call runs at a time.
        """
        raise NotImplementedError

    def index_of(self, indexes: OpenedIndexes) -> ServedIndex:
        """Open the index that the argument ``index`` names, or the only one."""
        return indexes[getattr(self, "index", next(iter(indexes.folders)))]


QUERY_CHARS = LIMITS.max_query_chars
ITEM: Any = Field(description="Key of an item from search results, or path of its file.")


class FilterTool(IndexTool):
    """Base of tools that find items, with conditions as in ``visavis search``.

    Attributes:
        path: Pattern of the whole path.
        kind: Kind of the items.
        after: Earliest time.
        before: Time before which an item must lie.
        metadata: Values that an item must have.
        limit: Maximum number of results.
    """

    answer = FoundItems
    path: str = Field(
        "",
        max_length=QUERY_CHARS,
        description="Pattern of the whole path, such as *beach* or 2024/*.jpg. Default: all.",
    )
    kind: Annotated[ItemKind | None, EMPTY_IS_ABSENT] = Field(
        None, description="Kind of the items. Default: all."
    )
    after: Annotated[str | None, EMPTY_IS_ABSENT] = Field(
        None,
        description="Earliest time of an item by the clock at its place, such as 2024-05-31 or 2024.",
    )
    before: Annotated[str | None, EMPTY_IS_ABSENT] = Field(
        None, description="Time before which an item must lie, such as 2024-06-30."
    )
    metadata: dict[str, str] = Field(
        {}, description='Metadata values that an item must have, such as {"split": "test"}.'
    )
    limit: int = Field(10, ge=1, le=LIMITS.max_page_size, description="Maximum number of results.")

    def find(self, index: ServedIndex, key: QueryKey) -> tuple[FoundItems, None]:
        """Find the best items for a query, or the newest ones for an empty query."""
        from visavis.retrieval.server.search_service import item_values, result_values

        item_filter = ItemFilter(
            self.path,
            self.kind,
            parse_filter_time(self.after),
            parse_filter_time(self.before),
            self.metadata,
        )
        results = index.search(key, None, self.limit, item_filter)
        hits = [
            FoundItem(**result_values(key, result), **_file_values(index, result.item))
            for result in results
        ]
        message = results.message
        if results.correction:
            message = f"Scores are corrected: {results.correction}."
        # Without results by content, the message of named items has the unknown words.
        if results.unknown_words and (hits or not results.named):
            message = (
                f"The model does not know: {', '.join(results.unknown_words)}. {message}".strip()
            )
        if not hits and not message:
            message = index.index.explain_no_results(item_filter)
        named = [
            NamedItem(
                **item_values(found.item),
                **_file_values(index, found.item),
                found_by=found.found_by,
                text=found.text,
            )
            for found in results.named
        ]
        answer = FoundItems(named=named, hits=hits, no_match=results.no_match, message=message)
        return answer, None


class Search(FilterTool):
    """Find images, videos and moments of videos by a description of what they show.

    Attributes:
        query: Text query. Empty: the newest items.
    """

    title = "Search images and videos"
    query: str = Field(
        max_length=QUERY_CHARS,
        description="Description of the wanted images in plain words. "
        '-word or -"several words" excludes. Empty: the newest items.',
    )

    def run(self, indexes: OpenedIndexes) -> tuple[BaseModel, bytes | None]:
        return self.find(self.index_of(indexes), QueryKey(" ".join(self.query.split())))


class Similar(FilterTool):
    """Find the items that look most similar to an item, which is itself the first result.

    Attributes:
        item: Key of the item, or path of its file.
    """

    title = "Find similar items"
    item: Key = ITEM

    def run(self, indexes: OpenedIndexes) -> tuple[BaseModel, bytes | None]:
        index = self.index_of(indexes)
        return self.find(index, QueryKey(similar_to=_find_item(index, self.item).key))


class Details(IndexTool):
    """Return the file, time, captions and metadata of an item, and its thumbnail if wanted.

    Attributes:
        item: Key of the item, or path of its file.
        thumbnail: Whether the answer has an image.
    """

    title = "Details of an item"
    answer = ItemDetails
    item: Key = ITEM
    thumbnail: bool = Field(False, description="Also return a JPEG of at most 480 pixels per side.")

    def run(self, indexes: OpenedIndexes) -> tuple[BaseModel, bytes | None]:
        from visavis.retrieval.server.image_cache import render_jpeg
        from visavis.retrieval.server.search_service import item_values

        index = self.index_of(indexes)
        item = _find_item(index, self.item)
        details = ItemDetails(
            **item_values(item),
            **_file_values(index, item),
            size=item.size,
            captions=list(item.captions),
        )
        if not self.thumbnail:
            return details, None
        return details, render_jpeg(index.index.locate(item), item, "thumbnail")


class Vote(IndexTool):
    """Save whether an item is relevant to a query, in the index.

    Attributes:
        query: Text query.
        item: Key of the item, or path of its file.
        relevant: Whether the item is relevant. None withdraws the vote.
    """

    title = "Vote on a result"
    answer = SavedVote
    writes = True
    query: str = Field(
        min_length=1,
        max_length=QUERY_CHARS,
        description="The text query that the item was a result of.",
    )
    item: Key = ITEM
    relevant: bool | None = Field(
        description="Whether the item is relevant to the query. Null withdraws an earlier vote."
    )

    def run(self, indexes: OpenedIndexes) -> tuple[BaseModel, bytes | None]:
        from visavis.retrieval.server.vote_store import new_vote, open_votes

        index = self.index_of(indexes)
        query = " ".join(self.query.split())
        if not query:
            raise VisavisError("query: expected text, got spaces. Pass the query of the search.")
        item = _find_item(index, self.item)
        with open_votes(index.index.folder) as votes:
            votes.add(new_vote(index.name, QueryKey(query), item, self.relevant))
        return SavedVote(query=query, item=item.key, relevant=self.relevant), None


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


def _file_values(index: ServedIndex, item: IndexItem) -> dict[str, Any]:
    """Values that only ``ItemAnswer`` has."""
    image = index.index.image(item)
    location = None if image is None else image.location
    path = None if location is None else escape_name(str(location.path))
    return {"path": path, "taken": item.metadata.get("taken")}


def list_tools(indexes: OpenedIndexes) -> dict[str, type[IndexTool]]:
    """List the tools that a client may call, by name."""
    # Without votes, no tool writes.
    tools: list[Any] = [Search, Similar, Details, *([Vote] if indexes.saves_votes else [])]
    listed = {tool.__name__.lower(): tool for tool in tools}
    if len(indexes.folders) > 1:
        index: Any = (Literal[tuple(indexes.folders)], Field(description="Name of the index."))
        listed = {
            name: create_model(name, __base__=tool, __doc__=tool.__doc__, index=index)
            for name, tool in listed.items()
        }
    return listed


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """JSON schema of a model without docstrings, which describe the class to developers."""
    schema = model.model_json_schema()
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("description", None)
    return schema


def create_server(indexes: OpenedIndexes) -> Server[Any]:
    """Create the server of the package ``mcp``, without a transport."""
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

    tools = list_tools(indexes)
    one_at_a_time = CapacityLimiter(1)
    descriptions = [
        Tool(
            name=name,
            title=tool.title,
            description=(inspect.getdoc(tool) or "").partition("\n\n")[0],
            input_schema=_schema(tool),
            output_schema=_schema(tool.answer),
            annotations=ToolAnnotations(
                title=tool.title,
                read_only_hint=not tool.writes,
                destructive_hint=False,
                idempotent_hint=not tool.writes,
                open_world_hint=False,
            ),
        )
        for name, tool in tools.items()
    ]

    async def answer_list(_: Any, __: Any) -> ListToolsResult:
        return ListToolsResult(tools=descriptions)

    async def answer_call(_: Any, request: Any) -> CallToolResult:
        if request.name not in tools:
            raise MCPError(
                INVALID_PARAMS,
                f"tool: expected the name of a tool, got {format_value(request.name)}: "
                f"{suggest_name(request.name, tools)}",
            )
        try:
            call = parse_call(tools[request.name], request.arguments or {})
            answer, jpeg = await to_thread.run_sync(call.run, indexes, limiter=one_at_a_time)
        except Exception as error:  # noqa: BLE001 - an unexpected error must not stop the server
            message = str(error)
            if not isinstance(error, VisavisError):
                message = "An internal error occurred. See the log of the server."
                logging.getLogger(__name__).warning(
                    "%s: %s: %s", request.name, type(error).__name__, error
                )
            return CallToolResult(content=[TextContent(type="text", text=message)], is_error=True)
        content: list[ContentBlock] = [TextContent(type="text", text=str(answer))]
        if jpeg is not None:
            data = base64.b64encode(jpeg).decode()
            content.append(ImageContent(type="image", data=data, mime_type="image/jpeg"))
        return CallToolResult(content=content, structured_content=answer.model_dump(mode="json"))

    return Server(
        "visavis",
        title="visavis",
        version=installed_version("visavis") or "0",
        instructions="Search the images and videos of the user in these indexes: "
        f"{', '.join(indexes.folders)}.",
        on_list_tools=answer_list,
        on_call_tool=answer_call,
    )


def parse_call(tool: type[IndexTool], arguments: Mapping[str, Any]) -> IndexTool:
    """Check the arguments of a call."""
    try:
        return tool.model_validate(arguments)
    except ValidationError as error:
        first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    raise VisavisError(describe_invalid(first, name, tool.model_fields))


def run_server(
    indexes: Sequence[Path],
    stores: Sequence[str | Path],
    progress: Progress,
    *,
    votes: bool = False,
) -> None:
    """Serve indexes over stdin and stdout until the client closes stdin."""
    with requires_extra("mcp", "visavis mcp"):
        import anyio
        import prometheus_client  # noqa: F401 - only checks that it is installed
        from mcp.server.stdio import stdio_server
    for folder in indexes:
        if not os.path.isfile(folder / DATABASE):
            # It raises the error. Of an index, it is read by the first call of a tool.
            from visavis.retrieval.index_folder import read_manifest

            read_manifest(folder)
    if stores:
        from visavis.retrieval.index_folder import check_confirmed_stores

        check_confirmed_stores(indexes, stores)
    if votes:
        from visavis.retrieval.server.vote_store import check_votes_writable

        for folder in indexes:
            check_votes_writable(folder)
    with closing(OpenedIndexes(index_names(indexes), stores, saves_votes=votes)) as opened:
        server = create_server(opened)

        async def serve() -> None:
            # While serving, prints of other libraries go to stderr, so that stdout has messages only.
            lines: Any = _StdinLines()
            async with stdio_server(stdin=lines) as (messages, answers):
                lines.answers.set_result(answers)
                await server.run(messages, answers, server.create_initialization_options())

        progress.message(
            f"Serving {', '.join(opened.folders)} to the client on stdin and stdout (press Ctrl-C to stop)"
        )
        try:
            anyio.run(serve)
        except* (BrokenPipeError, KeyboardInterrupt):
            progress.message("Stopped.")


class _StdinLines:
    """Lines of stdin for the running event loop. Invalid ones are answered here, because ``mcp``
    ignores them, and their client would wait.

    A daemon thread reads them: the thread of ``mcp`` would keep the process alive after a signal,
    until the client closes stdin.

    Attributes:
        answers: Stream of the answers.
    """

    def __init__(self) -> None:
        self.answers = asyncio.Future[Any]()
        self._lines = asyncio.Queue[bytes | None]()
        Thread(target=self._read, args=(asyncio.get_running_loop(),), daemon=True).start()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        # A file of its own, because Python waits for the lock of sys.stdin when it ends.
        with suppress(RuntimeError), open(os.dup(0), "rb") as stdin:  # the loop was closed
            for line in stdin:
                loop.call_soon_threadsafe(self._lines.put_nowait, line)
            loop.call_soon_threadsafe(self._lines.put_nowait, None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        from mcp.shared.message import SessionMessage

        while (line := await self._lines.get()) is not None:
            if not line.strip():
                continue
            if (error := _line_error(line)) is None:
                return line.decode()
            await (await self.answers).send(SessionMessage(error))
        raise StopAsyncIteration


def _line_error(line: bytes) -> JSONRPCError | None:
    """The answer to a line that is not a message of JSON-RPC."""
    from mcp_types import (
        INVALID_REQUEST,
        PARSE_ERROR,
        ErrorData,
        JSONRPCError,
        jsonrpc_message_adapter,
    )

    try:
        jsonrpc_message_adapter.validate_json(line, by_name=False)
        line.decode()
    except ValueError:
        pass
    else:
        return None
    code = INVALID_REQUEST
    sent = None
    try:
        sent = json.loads(line)
    except (ValueError, RecursionError):
        code = PARSE_ERROR
        shown = line[:60].decode(errors="backslashreplace")
        problem = f"expected JSON in UTF-8, got {shown!r}. Send one JSON object per line"
    else:
        if isinstance(sent, list):
            problem = "expected one message, got a batch. Send each message on a line of its own"
        elif not is_unicode(json.dumps(sent, ensure_ascii=False)):
            code = PARSE_ERROR
            problem = "expected Unicode, got half of a surrogate pair. Send text"
        else:
            problem = (
                "expected an object with jsonrpc, method and id of JSON-RPC 2.0, got "
                f"{format_value(sent)}. Send these fields"
            )
    number = sent.get("id") if isinstance(sent, dict) else None
    known = number if isinstance(number, str | int) and is_unicode(str(number)) else None
    return JSONRPCError(
        jsonrpc="2.0", id=known, error=ErrorData(code=code, message=f"message: {problem}.")
    )
