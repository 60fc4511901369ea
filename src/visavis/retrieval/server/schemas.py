"""Requests and responses of the HTTP API, as shown in its OpenAPI description."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from typing import Annotated, Any, Literal

from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from visavis.core.errors import format_value, suggest_name
from visavis.core.fields import expected_value
from visavis.data.feedback.records import QueryKey
from visavis.retrieval.items import ItemFilter, ItemKind
from visavis.retrieval.server.limits import LRUCache, ServerLimits

LIMITS = ServerLimits()
Key = Annotated[str, StringConstraints(max_length=4096)]
Digest = Annotated[str, StringConstraints(pattern="^([0-9a-f]{64})?$")]
# Forms and assistants send an empty text for what they leave out.
EMPTY_IS_ABSENT = BeforeValidator(lambda value: None if value == "" else value)
SideName = Literal["only", "left", "right"]


class ErrorResponse(BaseModel):
    """An error.

    Attributes:
        error: The problem and its fix.
    """

    error: str


class OpenAIError(BaseModel):
    """Content of an error in OpenAI's form.

    Attributes:
        message: The problem and its fix.
        type: Kind of the error.
        param: Wrong field of the request.
        code: Name of the error.
    """

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorResponse(BaseModel):
    """An error in OpenAI's form, of the routes below ``/v1``.

    Attributes:
        error: The error.
    """

    error: OpenAIError


class ApiError(HTTPException):
    """A request that cannot be answered.

    Args:
        status: HTTP status.
        message: The problem and its fix.
        headers: Headers of the response.
        param: Wrong field of the request.
        code: Name of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
    ):
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


class RequestModel(BaseModel):
    """Base of requests, which rejects unknown names. Null means absent."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _remove_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {
            # Also the values of a filter by metadata.
            name: {key: part for key, part in value.items() if part is not None}
            if isinstance(value, dict)
            else value
            for name, value in values.items()
            if value is not None or name in required
        }


class OpenAIRequestModel(RequestModel):
    """Base of requests in forms of other servers, which ignores unknown names with a note in the
    log, as those servers do.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _note_unknown(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in map(str, values.keys() - cls.model_fields.keys()):
                if values[name] is not None and _NOTED.get(name) is None:
                    _NOTED.put(name, True)
                    logging.getLogger(__name__).warning(
                        "A request has the unknown field %s. It is ignored.",
                        format_value(name[:80]),
                    )
        return values


# Each name is noted once.
_NOTED = LRUCache[bool](256)


class QueryModel(RequestModel):
    """A query. An empty query returns the newest items.

    Attributes:
        text: Text query.
        like: Key of an item to find similar items.
        image: SHA-256 of an uploaded image.
    """

    text: str = Field(
        "",
        max_length=LIMITS.max_query_chars,
        description='A text query. -word or -"several words" excludes.',
    )
    like: Key = Field("", description="Key of an item to find similar items.")
    image: Digest = Field("", description="SHA-256 of an image that was uploaded before.")

    @field_validator("text")
    @classmethod
    def _check_text(cls, value: str) -> str:
        if any(ord(letter) < 32 or 0xD800 <= ord(letter) < 0xE000 for letter in value):
            raise ValueError("expected text, got control characters or half a character")
        return " ".join(value.split())

    @field_validator("like")
    @classmethod
    def _check_key(cls, value: str) -> str:
        # The name of a file may have spaces and control characters.
        if not is_unicode(value):
            raise ValueError("expected text, got half a character")
        return value

    def to_key(self) -> QueryKey:
        """Convert to the query of feedback records."""
        return QueryKey(self.text, self.like, self.image)

    @classmethod
    def from_key(cls, key: QueryKey) -> QueryModel:
        """Convert from the query of feedback records."""
        return cls(text=key.text, like=key.similar_to, image=key.image_hash)


class FilterModel(BaseModel):
    """Conditions on the items.

    Attributes:
        path: Part of the path, or a pattern of the whole path.
        kind: Kind of the items.
        since: First day of the capture or modification time.
        until: Last day of the capture or modification time.
        tag: Metadata values.
    """

    path: str = Field(
        "",
        max_length=500,
        description="Part of the path, or a pattern of the whole path with * and ?.",
    )
    kind: Annotated[ItemKind | None, EMPTY_IS_ABSENT] = None
    since: Annotated[date | None, EMPTY_IS_ABSENT] = Field(
        None, description="First day of the capture or modification time."
    )
    until: Annotated[date | None, EMPTY_IS_ABSENT] = Field(
        None, description="Last day of the capture or modification time."
    )
    tag: list[
        Annotated[str, StringConstraints(pattern="^[^=\\x00]+=[^\\x00]*$", max_length=500)]
    ] = Field([], max_length=8, description="NAME=VALUE of the metadata.")

    def to_item_filter(self) -> ItemFilter:
        """Convert to a filter of the index."""
        pattern = (
            self.path if not self.path or "*" in self.path or "?" in self.path else f"*{self.path}*"
        )
        tags = dict(tag.split("=", 1) for tag in self.tag)
        return ItemFilter(
            pattern, self.kind, _day_start(self.since, 0), _day_start(self.until, 1), tags
        )


class SearchRequest(QueryModel, FilterModel):
    """A query, conditions, and a page of results.

    Attributes:
        offset: Number of results to skip.
        limit: Maximum number of results.
    """

    offset: int = Field(0, ge=0, le=LIMITS.max_results)
    limit: int = Field(40, ge=1, le=LIMITS.max_page_size)


class ItemModel(BaseModel):
    """An item.

    Attributes:
        key: Key of the item.
        kind: Kind of the item.
        modified: Modification time of the file.
        start: Start of a moment in seconds.
        end: End of a moment in seconds.
        metadata: Other values of the item.
    """

    key: str = Field(description="Identifies the item in later requests.")
    kind: ItemKind
    modified: datetime = Field(description="Modification time of the file.")
    start: float | None = Field(description="Start of a moment of a video in seconds.")
    end: float | None = Field(description="End of a moment of a video in seconds.")
    metadata: dict[str, str]


class HitModel(ItemModel):
    """A result.

    Attributes:
        score: Score. Null for an empty query.
        match_probability: Probability that the item is relevant, 0 to 1. Null if scores are not
            calibrated.
        irrelevant_share: Expected share of irrelevant results up to this one, 0 to 1. Null if
            scores are not calibrated.
        duplicates: Keys of near-duplicates and of other moments of the clip.
    """

    score: float | None = Field(description="Similarity to the query. Null for an empty query.")
    match_probability: float | None = Field(
        description="Probability that the item is relevant, 0 to 1. Null if unknown."
    )
    irrelevant_share: float | None = Field(
        description="Expected share of irrelevant results up to this one, 0 to 1. Null if unknown."
    )
    duplicates: list[str] = Field(
        description="Keys of near-duplicates and of other moments of the video."
    )


class HitResponse(HitModel):
    """A result for the web UI.

    Attributes:
        name: Name of the file.
        path: Path of the file.
        vote: Vote on the item for this query. Null: no vote.
        content_version: Version of the content, for the URL of its image.
    """

    name: str
    path: str
    vote: bool | None
    content_version: str


class NamedResponse(HitResponse):
    """An item whose file name or caption has the words of a query.

    Attributes:
        found_by: What has the words.
        text: The name or caption that has them.
    """

    found_by: Literal["name", "caption"]
    text: str


class SideResponse(BaseModel):
    """Results of one index.

    Attributes:
        side: Position in a comparison.
        index: Number of the index, for images and votes.
        hits: Results, best first.
        missing: Number of results of this page without a file, because the index was not updated.
        has_more: Whether there are more results, which later pages return.
        is_cut: Whether there are more results than the server returns for one query.
        no_match: Whether even the best result is probably irrelevant. Null if scores are not
            calibrated.
        correction: Correction of the scores with its bank. Empty: none.
        unknown_words: Words of the query that are not in the vocabulary of the model.
        named: Items found by name or caption, on the first page only. They may be among the
            results, too.
    """

    side: SideName
    index: int
    hits: list[HitResponse]
    missing: int
    has_more: bool
    is_cut: bool
    no_match: bool | None
    correction: str
    unknown_words: list[str]
    named: list[NamedResponse]


class SearchResponse(BaseModel):
    """Results of a search.

    Attributes:
        query: The query, with the SHA-256 of an uploaded image.
        sides: Results of each index.
        milliseconds: Time of the search in ms.
    """

    query: QueryModel
    sides: list[SideResponse]
    milliseconds: float


class IndexInfo(BaseModel):
    """A served index.

    Attributes:
        name: Name of the index.
        model: Location of its model.
        count: Number of items.
        unfinished: Whether items are missing, because an update was interrupted or was running when
            the server started.
        version: Text that changes when the server opens a new version of the index.
    """

    name: str
    model: str
    count: int
    unfinished: bool
    version: str


class ServerInfo(BaseModel):
    """The server.

    Attributes:
        indexes: The indexes.
        blind: Whether two indexes are compared without their names.
        votes: Whether votes are saved.
        videos: Whether videos can be played.
        version: Version of visavis.
        max_irrelevant: Expected share of irrelevant results at which the web UI draws a line.
    """

    indexes: list[IndexInfo]
    blind: bool
    votes: bool
    videos: bool
    version: str
    max_irrelevant: float


class FacetsResponse(BaseModel):
    """Values to filter by, with the number of items of each.

    Attributes:
        kinds: Kinds of items.
        folders: Folders with the most items.
        years: Years of the capture or modification time.
        metadata: Metadata names with a few values.
    """

    kinds: dict[str, int]
    folders: dict[str, int]
    years: dict[str, int]
    metadata: dict[str, dict[str, int]]


class VoteRequest(RequestModel):
    """A vote.

    Attributes:
        query: The query.
        index: Number of the index.
        key: Key of the item.
        relevant: Whether the item is relevant. Null withdraws the vote.
    """

    query: QueryModel
    index: int = Field(0, ge=0, le=1)
    key: Key
    relevant: bool | None


class VoteResponse(BaseModel):
    """A saved vote.

    Attributes:
        relevant: Whether the item is relevant. Null: no vote.
        vote: Name of the vote, to undo it.
    """

    relevant: bool | None
    vote: str


class UndoRequest(RequestModel):
    """A vote to undo.

    Attributes:
        vote: Name of the vote.
    """

    vote: str = Field(min_length=1, max_length=64)


class UndoResponse(BaseModel):
    """The judgment of the item after an undo.

    Attributes:
        relevant: Whether the item is relevant by an earlier or later vote. Null: no vote.
    """

    relevant: bool | None


class PreferenceRequest(RequestModel):
    """Which index gave the better results.

    Attributes:
        query: The query.
        preferred: The better side.
    """

    query: QueryModel
    preferred: Literal["left", "right", "neither"]


class PreferenceResponse(BaseModel):
    """Names of the compared indexes.

    Attributes:
        left: Name of the left index.
        right: Name of the right index.
        saved: Whether the preference was saved.
    """

    left: str
    right: str
    saved: bool


class UncertainPairModel(BaseModel):
    """A query and an item whose vote would be informative.

    Attributes:
        query: The query.
        index: Number of the index.
        hit: The item.
    """

    query: QueryModel
    index: int
    hit: HitResponse


class UncertainPairsResponse(BaseModel):
    """Pairs to vote on.

    Attributes:
        pairs: Pairs, the most uncertain first.
    """

    pairs: list[UncertainPairModel]


class HealthResponse(BaseModel):
    """Health of the server.

    Attributes:
        status: Always ``"ok"``.
        items: Number of items.
    """

    status: Literal["ok"]
    items: int


# Numbers too large for a float become infinite. Python also reads halves of surrogate pairs in
# UTF-8, and UTF-16, which has zero bytes.
_UNUSUAL = re.compile(
    rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\x00|NaN|Infinity|\d[eE]\+?\d{3}|\d{300}"
)


def check_json(value: Any, name: str = "") -> None:
    """Check that JSON can be sent back: text in valid Unicode, and finite numbers."""
    problem = ""
    if isinstance(value, str) and not is_unicode(value):
        problem = "expected text, got half of a surrogate pair. Send valid Unicode."
    elif isinstance(value, float) and not math.isfinite(value):
        problem = f"expected a finite number, got {value}. Send another number, or leave it out."
    if problem:
        field = re.split(r"[.\[]", name)[0] or None
        raise ApiError(400, f"{name or 'body'}: {problem}", param=field)
    if isinstance(value, dict):
        for key, part in value.items():
            check_json(key, name)
            check_json(part, f"{name}.{key[:80]}" if name else key[:80])
    elif isinstance(value, list):
        for number, part in enumerate(value):
            check_json(part, f"{name}[{number}]")


def is_unicode(text: str) -> bool:
    """Check that a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class StrictJsonRequest(Request):
    """A request whose JSON has only valid Unicode and finite numbers."""

    async def json(self) -> Any:
        """Parse the body. An invalid value is an ApiError."""
        content = await super().json()
        if _UNUSUAL.search(await self.body()):
            check_json(content)
        return content


class StrictJsonRoute(APIRoute):
    """A route for ``StrictJsonRequest``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictJsonRequest(request.scope, request.receive))

        return handle_strictly


def _day_start(day: date | None, days_later: int) -> datetime | None:
    """Start of a day, or of a later one, by the clock at the place of an item."""
    if day is None:
        return None
    try:
        return datetime.combine(day + timedelta(days=days_later), time())
    except OverflowError:
        # No item is later than the last day of the calendar.
        return None


def describe_invalid(problem: Mapping[str, Any], name: str, known: Iterable[str] = ()) -> str:
    """Describe an error of pydantic on one line: the problem and its fix. ``known`` names are
    suggested in place of an unknown one.
    """
    name = name[:80]
    kind = problem["type"]
    text = problem["msg"]
    if kind == "extra_forbidden":
        fix = f": {suggest_name(name, known)}" if known else ". Remove it."
        return f"{name}: this name is unknown{fix}"
    if kind == "missing":
        return f"{name}: expected a value, got none. Pass it."
    if kind == "value_error":
        return f"{name}: {text.removeprefix('Value error, ')}."
    text, _, length = expected_value(problem).partition(" after validation, not ")
    text = re.sub("^[A-Z][a-z]+ should (be|have|match) ", "", text)
    given = length or ("null" if problem["input"] is None else format_value(problem["input"]))
    return f"{name}: expected {text}, got {given}. Send {text}."


OPENAI_PREFIX = "/v1/"
"""Start of the paths whose errors have OpenAI's form."""
OPENAI_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


def error_response(
    status: int,
    message: str,
    headers: Mapping[str, str] | None = None,
    *,
    path: str = "",
    param: str | None = None,
    code: str | None = None,
) -> JSONResponse:
    """Make the response to a request that cannot be answered."""
    authenticate = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    error: Any = message
    if path.startswith(OPENAI_PREFIX):
        kind = {429: "rate_limit_error"}.get(
            status, "server_error" if status >= 500 else "invalid_request_error"
        )
        code = code or OPENAI_CODES.get(status)
        error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status, {**authenticate, **(headers or {})})
