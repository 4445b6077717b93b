"""The OpenAPI description. Routes read their bodies with `requests.read_body`, so the schemas are added here.

`/docs` is a plain page generated from it: no scripts and no external resources, so it works without a network.
"""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from rollyard.service import session_gateway
from rollyard.service.schemas import draws, engine, evals, policies, requests, task, tokens

BODIES: tuple[type[BaseModel], ...] = (
    requests.RunBody,
    requests.AckBody,
    requests.SubmitBody,
    requests.CheckBody,
    requests.SingleBody,
    task.TaskBody,
    requests.SessionBody,
    requests.RewardBody,
    engine.EngineBody,
    requests.PoolsBody,
    draws.SingleGroupBody,
    draws.GroupsBody,
    draws.DrawBody,
    draws.BatchBody,
    draws.TasksBody,
    draws.DrawAckBody,
    draws.RewindBody,
    evals.EvalBody,
    policies.PauseBody,
    policies.ResumeBody,
    policies.RenewBody,
    policies.OwnerBody,
    tokens.TokenBody,
    tokens.RotateBody,
    tokens.LoginBody,
)

PROBLEM: dict[str, Any] = {
    "type": "object",
    "required": ["type", "title", "status", "code", "detail", "remedy"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "Stable: switch on this."},
        "detail": {"type": "string", "description": "What is wrong."},
        "remedy": {"type": "string", "description": "What to do about it."},
    },
}


_FASTAPIS = ("HTTPValidationError", "ValidationError")  # schemas of FastAPI's own 422, which is not used


def json_body(*bodies: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` for a route that reads one of these bodies."""
    references = [{"$ref": f"#/components/schemas/{body.__name__}"} for body in bodies]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole schema, generated once per app."""
    if app.openapi_schema:
        return app.openapi_schema
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, definitions = models_json_schema(
        [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
    )
    components = schema.setdefault("components", {})
    own_schemas = {name: part for name, part in components.get("schemas", {}).items() if name not in _FASTAPIS}
    components["schemas"] = {**own_schemas, "Problem": PROBLEM, **definitions["$defs"]}
    components["securitySchemes"] = {
        "token": {"type": "http", "scheme": "bearer"},
        "session_key": {"type": "http", "scheme": "bearer", "description": "The key of a session."},
        "session_x_api_key": {
            "type": "apiKey",
            "in": "header",
            "name": "x-api-key",
            "description": "The key of a session.",
        },
    }
    schema["security"] = [{"token": []}]
    problem = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    for calls in schema["paths"].values():
        for call in calls.values():
            call["responses"].pop("422", None)
            call["responses"]["default"] = {"description": "An error", "content": problem}
    session_gateway.describe(schema["paths"])
    app.openapi_schema = schema
    return schema


def page(schema: dict[str, Any]) -> str:
    """The description as an HTML page."""
    rows = [
        f"<tr><td><code>{method.upper()}</code><td><code>{escape(path)}</code>"
        f"<td>{escape(call.get('description') or call.get('summary') or '')}"
        for path, calls in schema["paths"].items()
        for method, call in calls.items()
    ]
    title = f"{escape(schema['info']['title'])} {escape(schema['info']['version'])}"
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto}"
        "td{padding:.3em 1em .3em 0;vertical-align:top;border-top:1px solid #ccc}</style>"
        f"<h1>{title}</h1><p>The full description, for tools: <a href=/openapi.json>openapi.json</a>."
        f"<table>{''.join(rows)}</table>\n"
    )
