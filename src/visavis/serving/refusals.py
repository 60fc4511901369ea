"""How the service says no: one sentence, with the status that tells programs the same."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response


class Refused(Exception):
    """A request is refused. status: of HTTP, 400 to 499. retry_after: seconds until it may be tried again."""

    def __init__(self, status: int, sentence: str, *, retry_after: int | None = None):
        super().__init__(sentence)
        self.status, self.retry_after = status, retry_after

    def response(self) -> Response:
        return refusal(self.status, str(self), retry_after=self.retry_after)


def refusal(status: int, sentence: str, *, retry_after: int | None = None) -> JSONResponse:
    """The answer to a request that is refused."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": sentence}, status, headers)
