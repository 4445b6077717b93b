"""Recovery: what an opening does, in one transaction, to the rows that the last process left.

cancel requested                    → ended, cancelled
INIT, READY, RUN                    → queued, attempt + 1; or ended, lost_to_restarts, when attempts are used up
EVAL, can be scored from what RUN left → stays, leased to no node, and is listed in `Recovery.evals`; lost_to_restarts
                                      after max_attempts times: a check that kills the service must end
EVAL otherwise                      → as INIT, READY, RUN
leased to a node, and leases are kept → unchanged, and listed in `Recovery.leased`; a cancel still ends it
queued                              → unchanged: only counted, so that ten thousand of them cost nothing

It also deletes the tasks of draws and evaluations whose creation the end of the last process interrupted.
"""

from __future__ import annotations

from collections.abc import Callable

from rollyard.core import Ending, Json, LostAttempt, Outcome, Position, State, Task
from rollyard.core.failure import LostToRestarts
from rollyard.store.base import LeasedRow, Recovery
from rollyard.store.codec import from_json
from rollyard.store.sql.dialect import Connection
from rollyard.store.sql.groups import forget_unowned_items
from rollyard.store.sql.moves import RequeueWrite
from rollyard.store.sql.rows import EncodedEnding, cancelled, finish

_LIVE = """SELECT r.seq, r.id, r.state, r.attempt, r.node, r.excused, r.evals_lost,
    CASE r.state WHEN 'eval' THEN COALESCE(b.task, t.task) END, j.info, j.sampled_tokens
    FROM rollouts r LEFT JOIN bodies b ON b.id = r.body LEFT JOIN tasks t ON t.seq = r.seq
    LEFT JOIN trajectories j ON j.seq = r.seq
    WHERE r.state IN ('init', 'ready', 'run', 'eval') ORDER BY r.seq"""


def recover(
    connection: Connection,
    max_attempts: int,
    can_reevaluate: Callable[[str], bool],
    *,
    keeps_leases: bool = False,
) -> tuple[int, Recovery]:
    """Increments the epoch and moves the rows, in the caller's transaction. Returns the epoch and what was found."""
    (epoch,) = connection.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch' RETURNING value").fetchone()
    asked = connection.execute(
        "SELECT seq, state, cancel_detail FROM rollouts WHERE cancel_detail IS NOT NULL AND ended_seq IS NULL "
        "ORDER BY seq"
    ).fetchall()
    for seq, state, detail in asked:
        finish(connection, seq, cancelled(detail, state))
    (queued,) = connection.execute("SELECT COUNT(*) FROM rollouts WHERE state = 'queued'").fetchone()
    failed, evals, leased, lost = 0, list[str](), list[LeasedRow](), list[RequeueWrite]()
    for row in connection.execute(_LIVE).fetchall():
        seq, rollout_id, state, attempt, node, excused, evals_lost, task, info, tokens = row
        if keeps_leases and node is not None:
            leased.append(LeasedRow(rollout_id, attempt, node, State(state)))
            continue
        is_evaluable = state == State.EVAL and _is_reevaluable(info, task, can_reevaluate)
        if is_evaluable and evals_lost < max_attempts:
            # It is scored here now: if its lease stayed, a later opening would wait for a node that no longer has it.
            connection.execute("UPDATE rollouts SET evals_lost = evals_lost + 1, node = NULL WHERE seq = ?", (seq,))
            evals.append(rollout_id)
        elif not is_evaluable and attempt - excused < max_attempts:
            how = LostAttempt(attempt, "server_restarted", f"the service ended in {state}", state, tokens or 0)
            lost.append(RequeueWrite(rollout_id, Position(State(state), attempt), how))
        else:
            times = evals_lost + 1 if is_evaluable else attempt - excused
            error = LostToRestarts(f"the service ended {times} times while this rollout was running, last in {state}")
            finish(connection, seq, EncodedEnding.of(Ending(Outcome.FAILED, failure=error.failure(state))))
            failed += 1
    RequeueWrite.together(connection, lost)
    forget_unowned_items(connection)
    return epoch, Recovery(queued, len(lost), tuple(evals), failed, len(asked), tuple(leased))


def _is_reevaluable(info: str | None, task: str, can_reevaluate: Callable[[str], bool]) -> bool:
    if info is None or from_json(info, dict[str, Json]).get("is_reevaluable") is not True:
        return False
    return can_reevaluate(from_json(task, Task).environment)
