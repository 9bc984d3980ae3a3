"""Errors as OpenAI's clients read them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hvd_ray.serving.calls import Failure

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_STATUS = {"bad_request": 400, "busy": 429, "timeout": 408, "fault": 500, "dead": 503}
_OF_SAMPLING = re.compile(r"sampling: (\w+) ")


@dataclass(eq=False)
class ApiError(Exception):
    """Ends a request with a status and a message that names the culprit."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "api_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, round(self.retry_after_s)))}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the client must change the request."""
    return ApiError(400, message, param, code)


def from_failure(failure: Failure) -> ApiError:
    """What a replica reported, as an HTTP error."""
    retry_after_s = failure.retry_after_s if failure.kind in ("busy", "dead") else None
    code = failure.code or {"busy": "overloaded", "timeout": "timeout"}.get(failure.kind)
    return ApiError(_STATUS[failure.kind], failure.message, failure.param, code, retry_after_s)


def named_param(message: str) -> str | None:
    """The request field that a message of `SamplingParams` is about."""
    found = _OF_SAMPLING.match(message)
    return found.group(1) if found else None
