"""The OpenAPI description and the reference page match the app."""

import re
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from rollyard.core import CODES
from rollyard.gateway.app import PATHS
from rollyard.service import openapi
from rollyard.service.app import PARTS
from rollyard.service.session_gateway import CALLS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http.md"

CONTRACT = {
    "POST /v1/runs",
    "GET /v1/runs",
    "GET /v1/runs/{run_id}",
    "GET /v1/runs/{run_id}/series",
    "DELETE /v1/runs/{run_id}",
    "POST /v1/runs/{run_id}/ack",
    "POST /v1/rollouts",
    "POST /v1/tasks/check",
    "GET /v1/rollouts",
    "GET /v1/results",
    "GET /v1/rollouts/{rollout_id}",
    "DELETE /v1/rollouts/{rollout_id}",
    "GET /v1/rollouts/{rollout_id}/messages",
    "GET /v1/rollouts/{rollout_id}/traces",
    "GET /v1/rollouts/{rollout_id}/texts",
    "GET /v1/rollouts/{rollout_id}/timeline",
    "GET /v1/rollouts/{rollout_id}/requests",
    "GET /v1/rollouts/{rollout_id}/artifacts",
    "GET /v1/rollouts/{rollout_id}/artifacts/{name}",
    "POST /v1/rollouts/{rollout_id}/rescore",
    "POST /v1/groups",
    "GET /v1/groups",
    "GET /v1/groups/{group_id}",
    "DELETE /v1/groups/{group_id}",
    "POST /v1/draws",
    "GET /v1/draws",
    "GET /v1/draws/{draw_id}",
    "DELETE /v1/draws/{draw_id}",
    "POST /v1/draws/{draw_id}/batches",
    "GET /v1/draws/{draw_id}/batches",
    "GET /v1/draws/{draw_id}/batches/{number}",
    "GET /v1/draws/{draw_id}/groups",
    "POST /v1/draws/{draw_id}/tasks",
    "POST /v1/draws/{draw_id}/ack",
    "POST /v1/draws/{draw_id}/rewind",
    "POST /v1/evals",
    "GET /v1/evals",
    "GET /v1/evals/{eval_id}",
    "GET /v1/evals/{eval_id}/tasks",
    "DELETE /v1/evals/{eval_id}",
    "GET /v1/policies",
    "GET /v1/policies/{name}",
    "GET /v1/policies/{name}/versions",
    "POST /v1/policies/{name}/pause",
    "POST /v1/policies/{name}/resume",
    "POST /v1/policies/{name}/renew",
    "GET /v1/ids",
    "POST /v1/sessions",
    "GET /v1/sessions/{session_id}",
    "POST /v1/sessions/{session_id}/reward",
    "DELETE /v1/sessions/{session_id}",
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "POST /v1/engines",
    "GET /v1/engines",
    "DELETE /v1/engines/{engine_id}",
    "DELETE /v1/engines",
    "GET /v1/nodes",
    "POST /v1/nodes/{name}/drain",
    "POST /v1/nodes/{name}/resume",
    "GET /v1/status",
    "GET /v1/overview",
    "POST /v1/tokens",
    "GET /v1/tokens",
    "POST /v1/tokens/{token_id}/rotate",
    "PUT /v1/tokens/{token_id}/quota",
    "DELETE /v1/tokens/{token_id}",
    "GET /v1/audit",
    "POST /v1/login",
    "GET /v1/login",
    "DELETE /v1/login",
    "POST /v1/login/codes",
    "PUT /v1/policies/{name}/owner",
    "PATCH /v1/pools",
    "GET /v1/events",
    "GET /healthz",
    "GET /readyz",
    "GET /metrics",
}


def described() -> dict[str, Any]:
    app = FastAPI(title="Rollyard", version="0")
    for part in PARTS:
        app.include_router(part.router)
    return openapi.describe(app)


def calls(schema: dict[str, Any]) -> set[str]:
    return {f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods}


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


def test_every_call_of_the_contract_is_described_and_no_other() -> None:
    assert calls(described()) == CONTRACT


def test_the_page_lists_the_same_calls() -> None:
    assert set(re.findall(r"^\| `((?:GET|POST|PUT|PATCH|DELETE) \S+)` \|", PAGE.read_text(), re.MULTILINE)) == CONTRACT


def test_the_page_names_only_codes_that_exist() -> None:
    table = PAGE.read_text().partition("| status | codes |")[2]
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE)
    assert rows
    for number, cell in rows:
        for code in re.findall(
            r"`([a-z_]+)`", cell.replace("`fields`", "").replace("`path`", "").replace("`problem`", "")
        ):
            assert code in CODES
            if number not in ("405",):  # an unsupported method has no exception class of its own
                assert CODES[code].status == int(number), code


def test_bodies_are_described_and_every_reference_resolves() -> None:
    schema = described()
    body = schema["paths"]["/v1/rollouts"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"anyOf": [{"$ref": "#/components/schemas/SubmitBody"}, {"$ref": "#/components/schemas/SingleBody"}]}
    for reference in references(schema):
        assert reference.removeprefix("#/components/schemas/") in schema["components"]["schemas"], reference
    limits = schema["components"]["schemas"]["LimitsBody"]["properties"]
    assert limits["run_s"]["default"] == 1800.0


def test_the_gateways_calls_take_a_sessions_key_and_no_token() -> None:
    schema = described()
    call = schema["paths"]["/v1/messages"]["post"]
    assert call["security"] == [{"session_key": []}, {"session_x_api_key": []}]
    assert {"token", "session_key", "session_x_api_key"} == schema["components"]["securitySchemes"].keys()
    assert "security" not in schema["paths"]["/v1/sessions"]["post"]
    assert {f"/v1{path}" for path in PATHS} == CALLS.keys()


def test_queries_are_described() -> None:
    parameters = described()["paths"]["/v1/rollouts"]["get"]["parameters"]
    assert {entry["name"] for entry in parameters} == {"state", "run", "group", "after", "limit", "order", "wait_s"}


def test_the_docs_page_needs_no_external_resources() -> None:
    page = openapi.page(described())
    assert "/v1/rollouts/{rollout_id}/rescore" in page
    assert "<script" not in page
    assert "http" not in page.replace("/openapi.json", "").replace("HTTP", "")
