"""What goes in and out of the service, as OpenAPI shows it."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from visavis.data.judgements import Asked
from visavis.retrieval.item import Kind, Where
from visavis.serving.limits import Limits

LIMITS = Limits()
Key = Annotated[str, StringConstraints(max_length=4096)]
Digest = Annotated[str, StringConstraints(pattern="^([0-9a-f]{64})?$")]
SideName = Literal["only", "left", "right"]


class Error(BaseModel):
    """What was wrong, in one sentence."""

    error: str


class Params(BaseModel):
    """Of whom it is asked and what for."""

    model_config = ConfigDict(extra="forbid")


class Question(Params):
    """What to look for; nothing: the newest items. text: ``-word`` is what must not be there."""

    text: str = Field("", max_length=LIMITS.text, description='A sentence; -word or -"several words" is what must not be there.')
    like: Key = Field("", description="The key of an item: more like this.")
    picture: Digest = Field("", description="The SHA-256 of a picture that was posted before.")

    @field_validator("text", "like")
    @classmethod
    def _plain(cls, value: str) -> str:
        if any(ord(letter) < 32 or 0xD800 <= ord(letter) < 0xE000 for letter in value):
            raise ValueError("it holds control characters or half a character")
        return " ".join(value.split()) if value else value

    def asked(self) -> Asked:
        return Asked(self.text, self.like, self.picture)


class Filters(BaseModel):
    """Which items may be found."""

    path: str = Field("", max_length=500, description="A part of the path, or a pattern of all of it in which * and ? stand for anything.")
    kind: Kind | None = None
    since: date | None = Field(None, description="The first day of change.")
    until: date | None = Field(None, description="The last day of change.")
    tag: list[Annotated[str, StringConstraints(pattern="^[^=\\x00]+=[^\\x00]*$", max_length=500)]] = Field(
        [], max_length=8, description="NAME=VALUE of the metadata."
    )

    def where(self) -> Where:
        pattern = self.path if not self.path or "*" in self.path or "?" in self.path else f"*{self.path}*"
        tags = dict(tag.split("=", 1) for tag in self.tag)
        return Where(pattern, self.kind, _start(self.since, 0), _start(self.until, 1), tags)


class Search(Question, Filters):
    """A query, its filters, and which of the results."""

    offset: int = Field(0, ge=0, le=LIMITS.results)
    limit: int = Field(40, ge=1, le=LIMITS.page)


class Hit(BaseModel):
    """An item that was found. match: how likely it fits, 0 to 1, where that is known. vote: what was said of it for this query."""

    key: str
    name: str
    path: str
    kind: Kind
    changed: datetime
    start: float | None
    end: float | None
    score: float | None
    match: float | None
    vote: bool | None
    duplicates: list[str]
    metadata: dict[str, str]
    version: str


class Side(BaseModel):
    """The results of one index. index: its number, for pictures and votes. nothing_fits: null where that is not known."""

    side: SideName
    index: int
    hits: list[Hit]
    more: bool
    nothing_fits: bool | None


class Answer(BaseModel):
    """Results, best first."""

    query: Question
    sides: list[Side]
    milliseconds: float


class IndexAbout(BaseModel):
    """An index that is served."""

    name: str
    model: str
    count: int


class About(BaseModel):
    """What is served, and what it can do. votes: whether they are kept."""

    indexes: list[IndexAbout]
    blind: bool
    votes: bool
    version: str


class Facets(BaseModel):
    """What one can filter by, and how many items have it."""

    kinds: dict[str, int]
    folders: dict[str, int]
    years: dict[str, int]
    metadata: dict[str, dict[str, int]]


class Vote(Params):
    """Whether an item fits a query; null takes it back."""

    query: Question
    index: int = Field(0, ge=0, le=1)
    key: Key
    fits: bool | None


class VoteKept(BaseModel):
    """The vote that now stands."""

    fits: bool | None


class Choice(Params):
    """Which side answered a query better."""

    query: Question
    prefers: Literal["left", "right", "neither"]


class Revealed(BaseModel):
    """Which index was which."""

    left: str
    right: str
    kept: bool


class Doubt(BaseModel):
    """A query and an item of which the answer would teach most."""

    query: Question
    index: int
    hit: Hit


class Doubts(BaseModel):
    """Pairs to judge, the most doubtful first."""

    pairs: list[Doubt]


class Health(BaseModel):
    """That the service lives."""

    status: Literal["ok"]
    items: int


def _start(day: date | None, later: int) -> int | None:
    """The begin of a day, or of one later, in ns, by the clock of this machine; None where there is no such time."""
    if day is None:
        return None
    try:
        return int(datetime.combine(day + timedelta(days=later), time()).timestamp()) * 10**9
    except (OverflowError, ValueError, OSError):
        return None if later else -(2**63)
