"""The served description of the endpoints, OpenAPI 3.1: made from the classes that check bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from hvd_ray import __version__
from hvd_ray.serving.protocol import (
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

Json = dict[str, Any]

BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_REFUSALS = {
    400: "the body is no JSON object, or a field is unknown, not served or out of range",
    401: "no valid API key",
    404: "another model is served here",
    408: "the request took too long",
    413: "the body is too large",
    415: "the body is not application/json",
    429: "all places are taken; Retry-After says when to come again",
    500: "a fault of the server",
    503: "no replica answers; Retry-After says when to come again",
}
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_COUNT: Json = {"type": "integer", "minimum": 0}
_USAGE: Json = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _COUNT),
}
_TEXT: Json = {"type": "string"}


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


def _completion(kind: str, **of_choice: Json) -> Json:
    choice = _object(index=_COUNT, finish_reason={"enum": ["stop", "length"]}, **of_choice)
    return _object(
        id=_TEXT,
        object={"const": kind},
        created=_COUNT,
        model=_TEXT,
        choices={"type": "array", "items": choice},
        usage=_USAGE,
    )


_ANSWERS: Mapping[str, Json] = {
    "/v1/completions": _completion("text_completion", text=_TEXT),
    "/v1/chat/completions": _completion(
        "chat.completion", message=_object(role={"const": "assistant"}, content=_TEXT)
    ),
    "/tokenize": _object(
        count=_COUNT, max_model_len=_COUNT, tokens={"type": "array", "items": _COUNT}
    ),
    "/detokenize": _object(prompt=_TEXT),
}
_GETS: Mapping[str, Json] = {
    "/health": _object(status={"const": "ok"}),
    "/version": _object(version=_TEXT),
    "/v1/models": _object(object={"const": "list"}, data={"type": "array"}),
    "/ui/state": _object(model=_TEXT, engine=_TEXT, policy=_TEXT),
}


def description(bodies: Mapping[str, Json] | None = None) -> Json:
    """What may be asked and what comes back.

    Args:
        bodies: JSON schemas of the bodies by path, where they are not our own classes'.
    """
    schemas: Json = {"Error": _ERROR}
    given = own_bodies(schemas) if bodies is None else bodies
    answers = _ANSWERS if bodies is None else {path: {"type": "object"} for path in given}
    posts = {path: {"post": _post(path, body, answers[path])} for path, body in given.items()}
    gets = {path: {"get": _get(path, answer)} for path, answer in _GETS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "hvd_ray", "version": __version__},
        "paths": {**posts, **gets},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def own_bodies(schemas: Json) -> dict[str, Json]:
    """The schemas of our own bodies; what they refer to is added to `schemas`."""
    bodies = {}
    for path, model in BODIES.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        if path.startswith("/v1/"):
            neutral = {name: {"enum": [None, *values]} for name, values in NEUTRAL.items()}
            schema["properties"] = neutral | schema["properties"]
        bodies[path] = schema
    return bodies


def _post(path: str, body: Json, answer: Json) -> Json:
    content = {"application/json": {"schema": answer}}
    if path.startswith("/v1/"):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "security": [{"key": []}, {}],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "the answer", "content": content}} | _refusals(),
    }


def _get(path: str, answer: Json) -> Json:
    content = {"application/json": {"schema": answer}}
    return {
        "operationId": path.strip("/").replace("/", "_"),
        "security": [{"key": []}, {}],
        "responses": {"200": {"description": "the answer", "content": content}} | _refusals(),
    }


def _refusals() -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        str(status): {"description": words, "content": content}
        for status, words in _REFUSALS.items()
    }
