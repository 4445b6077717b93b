"""/v1/fleet: calls of nodes to their head, in msgpack (`fleet.messages`); /v1/nodes: the state of nodes, for people."""

from __future__ import annotations

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from rollyard.core import Json
from rollyard.core.failure import Draining, InvalidRequest, NotFound
from rollyard.fleet.messages import MEDIA_TYPE, Join, Poll, Report, View, Viewed, decode, encode
from rollyard.fleet.nodes import ConnectedNode
from rollyard.pipeline.tokenizer_search import TokenizerFiles
from rollyard.service.app_state import AppState, app_state_of
from rollyard.service.node_settings import for_nodes
from rollyard.service.schemas.records import reply, without_password
from rollyard.service.security.access import require_admin, require_node
from rollyard.service.security.bounds import while_connected

router = APIRouter(prefix="/v1", tags=["nodes"])


@router.get("/fleet/settings", include_in_schema=False)
async def settings(request: Request) -> Response:
    """Returns the settings that a node takes over before it joins. They contain secrets: only for nodes."""
    require_node(request)
    app_state = app_state_of(request)
    _ = app_state.head
    return reply(for_nodes(app_state.settings))


@router.post("/fleet/join", include_in_schema=False)
async def join(request: Request) -> Response:
    """A node joins, or joins again, with the list of rollouts that it holds."""
    require_node(request)
    return _packed(encode(app_state_of(request).head.join(decode(await request.body(), Join))))


@router.post("/fleet/poll", include_in_schema=False)
async def poll(request: Request, wait_s: float = 0.0) -> Response:
    """Returns a node's orders, as soon as there are any."""
    require_node(request)
    app_state = app_state_of(request)
    if not 0 <= wait_s <= 3600:
        raise InvalidRequest("wait_s: 0 to 3600 seconds")
    message = decode(await request.body(), Poll)
    orders = await while_connected(request, app_state.head.poll(message, wait_s), app_state.closing)
    if orders is None:
        raise Draining("the head is closing; it may be restarted, here or elsewhere")
    return _packed(encode(orders))


@router.post("/fleet/report", include_in_schema=False)
async def report(request: Request) -> Response:
    """Receives a node's events. The response is sent when they are durable."""
    require_node(request)
    head = app_state_of(request).head
    return _packed(encode(await head.report(decode(await request.body(), Report))))


@router.post("/fleet/view", include_in_schema=False)
async def view(request: Request) -> Response:
    """Receives a running rollout's messages or calls, which the head asked for."""
    require_node(request)
    app_state_of(request).head.view(decode(await request.body(), View))
    return _packed(encode(Viewed()))


@router.get("/fleet/tokenizers/{engine_id}", include_in_schema=False)
async def tokenizer(request: Request, engine_id: str) -> Response:
    """Returns the list of an engine's tokenizer files, for nodes that lack them."""
    require_node(request)
    app_state = app_state_of(request)
    files = _tokenizer_of(app_state, engine_id)
    return _packed(encode(replace(await app_state.tokenizers.list(files.folder), name=files.name)))


@router.get("/fleet/tokenizers/{engine_id}/{sha256}", include_in_schema=False)
async def tokenizer_file(request: Request, engine_id: str, sha256: str) -> Response:
    """Returns one tokenizer file."""
    require_node(request)
    app_state = app_state_of(request)
    data = await app_state.tokenizers.read(_tokenizer_of(app_state, engine_id).folder, sha256)
    return Response(data, media_type="application/octet-stream")


def _tokenizer_of(app_state: AppState, engine_id: str) -> TokenizerFiles:
    _ = app_state.head
    for status in app_state.router.list():
        if status.spec.id == engine_id:
            files = None
            if status.info is not None:
                files = app_state.resources.renderers.files_of(app_state.router.engine(engine_id))
            if files is None and status.spec.tokenizer:  # the engine has not answered here yet
                files = TokenizerFiles(status.spec.tokenizer, status.spec.tokenizer)
            if files is not None:
                return files
    raise NotFound(f"there is no engine {engine_id!r} whose tokenizer is known here")


@router.get("/nodes")
async def list_nodes(request: Request) -> Response:
    """Returns all nodes of the fleet."""
    return reply({"nodes": [node_object(node) for node in app_state_of(request).head.nodes.by_name.values()]})


@router.post("/nodes/{name}/drain")
async def drain(request: Request, name: str) -> Response:
    """Drains a node: it takes no more rollouts and finishes those it has. It is empty when `live` is 0."""
    return await _set_drained(request, name, is_drained=True)


@router.post("/nodes/{name}/resume")
async def resume(request: Request, name: str) -> Response:
    """Lets a drained node take rollouts again."""
    return await _set_drained(request, name, is_drained=False)


async def _set_drained(request: Request, name: str, *, is_drained: bool) -> Response:
    require_admin(request)
    app_state = app_state_of(request)
    node = app_state.head.nodes.named(name)
    await app_state.audit(request, "drain_node" if is_drained else "resume_node", name)
    node.drain(is_drained)
    return reply(node_object(node))


def node_object(node: ConnectedNode) -> dict[str, Json]:
    status = node.status
    return {
        "name": node.name,
        "host": node.host,
        "version": node.version,
        "joined_at": node.joined_at,
        "heard_s_ago": node.heard_s_ago,
        "state": "draining" if node.is_drained and node.out else "drained" if node.is_drained else "up",
        "live": len(node.out) + node.promised,
        "ended": node.ended,
        "wants": node.room.want,
        "gates": status.gates,
        "pools": {
            name: {"size": places.size, "active": places.active, "waiting": places.waiting}
            for name, places in status.pools.items()
        },
        "engines": {
            use.engine: {
                "sessions": use.sessions,
                "in_flight": use.in_flight,
                "is_reachable": use.is_reachable,
                "error": without_password(node.unreachable.get(use.engine, "")) or None,
            }
            for use in status.engines
        },
    }


def _packed(body: bytes) -> Response:
    return Response(body, media_type=MEDIA_TYPE)
