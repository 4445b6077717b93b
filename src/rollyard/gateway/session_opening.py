"""Opens the gateway of one rollout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollyard.core import Deadline, Run, Task
from rollyard.core.failure import EngineRefused
from rollyard.engines.base import Engine, Kind, Session
from rollyard.gateway.session import GatewaySession
from rollyard.observe.call_log import CallLog
from rollyard.observe.metrics import Metrics
from rollyard.observe.spans import NO_SPAN, Span
from rollyard.tokens import Renderer


async def open_gateway(
    session: Session,
    renderer_of: Callable[[Engine], Awaitable[Renderer]],
    *,
    task: Task,
    run: Run,
    rollout_id: str,
    clock: Deadline,
    beat: Callable[[], None] = lambda: None,
    span: Span = NO_SPAN,
    metrics: Metrics | None = None,
    call_log: CallLog | None = None,
) -> GatewaySession:
    """Opens the gateway of one rollout. Raises EngineRefused for an engine that returns no tokens: its traces would not
    be exact."""
    if session.engine.spec.kind is Kind.OPENAI:
        raise EngineRefused(
            f"engine {session.engine.spec.id} returns only text: an agent program behind the gateway needs token ids; "
            "use a vllm or sglang engine, or the native agent"
        )
    renderer = await renderer_of(session.engine)
    return GatewaySession(
        session,
        renderer,
        task=task,
        run=run,
        rollout_id=rollout_id,
        clock=clock,
        beat=beat,
        span=span,
        metrics=metrics,
        call_log=call_log,
    )
