"""Plain model of the votes on the results of one query, and a check that a history of calls is
linearizable: each call can be given one moment between its begin and its end, so that the calls in
this order are correct.

A call that was not acknowledged may have happened at any time after its begin, or not at all. The
search is the one of Wing and Gong, Testing and verifying concurrent objects, 1993.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Live = tuple[tuple[str, str, bool | None], ...]
"""Names, items and values of the votes that were not undone, oldest first."""


@dataclass(eq=False)
class Operation:
    """A call, and its result once it is acknowledged."""

    history: VoteHistory
    kind: str
    query: str
    start: int
    name: str | None = None
    item: str = ""
    relevant: bool | None = None
    end: float = float("inf")
    result: Any = None
    found: bool | None = None

    @property
    def is_acknowledged(self) -> bool:
        """Whether the caller knows that it happened."""
        return self.end != float("inf")


class VoteHistory:
    """All calls about votes."""

    def __init__(self) -> None:
        self.operations = list[Operation]()

    def begin(self, kind: str, query: str, now: int, *values: Any) -> Operation:
        """Record the begin of a call."""
        operation = Operation(self, kind, query, now, *values)
        self.operations.append(operation)
        return operation

    def names(self, query: str) -> list[str]:
        """Names of the votes on a query that clients know."""
        return [
            each.name
            for each in self.operations
            if each.kind == "vote" and each.query == query and each.is_acknowledged and each.name
        ]

    def check(self, query: str) -> str | None:
        """Find an order of the calls about a query. Returns None, or the calls without one."""
        # A crash before the vote had a name left nothing.
        calls = [
            each
            for each in self.operations
            if each.query == query and (each.is_acknowledged or (each.kind != "read" and each.name))
        ]
        calls.sort(key=lambda call: (call.start, call.end))
        seen = set[tuple[frozenset[int], Live]]()
        stack: list[tuple[frozenset[int], Live]] = [(frozenset(), ())]
        while stack:
            done, live = stack.pop()
            if (done, live) in seen:
                continue
            seen.add((done, live))
            left = [number for number in range(len(calls)) if number not in done]
            if not any(calls[number].is_acknowledged for number in left):
                return None
            first_end = min(calls[number].end for number in left)
            for number in left:
                if calls[number].start > first_end:
                    break
                after = _apply(calls[number], live)
                if after is not None:
                    stack.append((done | {number}, after))
        return "no order of " + "; ".join(
            f"{call.kind} {call.name or ''} {call.item} {call.relevant} {call.start}-{call.end} -> "
            f"{call.result} {call.found}"
            for call in calls
        )


def _apply(call: Operation, live: Live) -> Live | None:
    """The votes after a call. None: its result contradicts the votes before it."""
    if call.kind == "vote":
        assert call.name is not None
        return (*live, (call.name, call.item, call.relevant))
    if call.kind == "undo":
        rest = tuple(vote for vote in live if vote[0] != call.name)
        if call.found is not None and call.found != (rest != live):
            return None
        return rest
    if call.kind == "read":
        return live if call.result == {item: relevant for _, item, relevant in live} else None
    return live if call.result == list(live) else None
