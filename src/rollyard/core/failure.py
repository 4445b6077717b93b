"""All failures and errors of Rollyard: for each its code, its blame, and what follows from them.

    RollyardError                      code · blame · retryable · trainable · HTTP status
    ├── PolicyFailure                  caused by the model: keeps its reward, is trained on
    │   ├── TurnLimit  TokenLimit  ContextLimit        (outcome truncated)
    │   ├── RunDeadline                                (truncated; untrainable unless the run allows it)
    │   ├── AgentCrashed                               (truncated; untrainable: the cause is unknown)
    │   ├── MemoryLimit  ProcessLimit  DiskLimit  FileLimit  SandboxEndedByPolicy
    │   └── EvalDeadline                               (the environment's failing score)
    ├── InfraFailure                   caused by Rollyard or the cluster: never has a reward, is retried
    │   ├── EngineFailure
    │   │   ├── EngineUnavailable  EngineRefused  EngineTimeout
    │   │   └── EngineBroken  TokenizerMismatch
    │   ├── SandboxFailure
    │   │   ├── SandboxStartFailed  SandboxLost  SandboxStuck
    │   ├── VerifierCrashed  JudgeUnreachable  ToolUnreachable  ArtifactLost
    │   ├── Stalled  LostToRestarts  NodeLost  SessionLost
    │   └── TraceInvalid  InternalError
    ├── TaskFailure                    the task cannot be done as given: no reward, no retry
    │   ├── SetupFailed  SetupDeadline  PromptTooLong  TaskInvalid  EnvironmentBroken  AgentBroken
    ├── Cancelled                      requested by the client
    ├── SessionAbandoned               the client gave no reward in time
    └── RequestError                   only in an HTTP response; never in a record
        ├── InvalidRequest  MalformedId  UnknownEnvironment  UnknownAgent  UnknownTool
        ├── SamplingInvalid
        ├── RuntimeNotAllowed  EgressNotAllowed  ImageMissing  AgentMissing
        ├── Unauthorized  Forbidden  ForeignHost  NotFound  Gone  IdConflict  AmbiguousId  EngineExists
        ├── SessionConflict  BatchConflict  SourceClosed  VersionConflict
        ├── NodeUnknown  NodeReplaced
        ├── PolicyConflict  PolicyPinned  PolicyStuck
        ├── MalformedRequest  RequestTimedOut  HeadersTooLarge  TooManyConnections
        └── BodyTooLarge  QueueFull  QuotaExceeded  RateLimited  StoreLost  Draining

Invariants. A code never changes: trainers switch on it. Blame follows the cause, and blame infra needs positive
evidence from the host. Only a PolicyFailure may carry a reward. A failure without any model call is never blamed on the
policy: see `Failure.without_model_call`. The file is long because it is one list of short classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Self

from rollyard.core.json import Json


class Blame(StrEnum):
    """The cause of a failure. Decides reward, training and retries."""

    POLICY = "policy"  # the model: trained on, with its reward
    INFRA = "infra"  # engine, sandbox, verifier, this service: retried, never a reward
    TASK = "task"  # the task as given: reported once, not retried
    CLIENT = "client"  # the caller


class Outcome(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"  # the agent ended by itself and was scored
    TRUNCATED = "truncated"  # a limit ended it; what it had done was scored
    FAILED = "failed"  # see failure.code
    CANCELLED = "cancelled"  # requested by the client


CODES: dict[str, type[RollyardError]] = {}
"""Every code and its class, filled as the classes below are defined. Read-only."""


class RollyardError(Exception):
    """The root. `detail` describes what went wrong, `remedy` what to do about it: the class's, or a specific one."""

    code: ClassVar[str] = "error"
    blame: ClassVar[Blame] = Blame.INFRA
    retryable: ClassVar[bool] = False
    trainable: ClassVar[bool] = False
    status: ClassVar[int] = 500
    outcome: ClassVar[Outcome] = Outcome.FAILED
    remedy: str = ""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "code" not in cls.__dict__:
            cls.code = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        if cls.code in CODES:
            raise TypeError(f"failure code {cls.code!r} is taken by {CODES[cls.code].__name__}")
        CODES[cls.code] = cls

    def __init__(self, detail: str = "", *, remedy: str = "", **data: Json) -> None:
        super().__init__(detail or self.code)
        self.detail = detail or self.code
        if remedy:
            self.remedy = remedy
        if self.remedy:
            self.add_note(self.remedy)  # a traceback then ends with it
        self.data: dict[str, Json] = dict(data)

    def with_detail(self, detail: str) -> Self:
        """Returns this error with another detail, and the same remedy and data."""
        error = type(self)(detail, remedy=self.remedy)
        error.data.update(self.data)
        return error

    def failure(self, stage: str | None = None) -> Failure:
        """Returns this error as it is stored in a record."""
        return Failure(
            code=self.code,
            blame=self.blame,
            detail=self.detail.encode("utf-8", "replace").decode(),  # a lone surrogate cannot be stored
            retryable=self.retryable,
            trainable=self.trainable,
            stage=stage,
            data=self.data,
        )


# --- caused by the policy -----------------------------------------------------------------------------


class PolicyFailure(RollyardError):
    blame = Blame.POLICY
    trainable = True
    status = 200
    outcome = Outcome.TRUNCATED


class TurnLimit(PolicyFailure):
    remedy = "Raise limits.max_turns if the task needs more turns."


class TokenLimit(PolicyFailure):
    remedy = (
        "If one reply was cut off, raise sampling.max_tokens; if all tokens of the rollout were used up, raise"
        " limits.max_tokens."
    )


class ContextLimit(PolicyFailure):
    remedy = "Raise limits.max_context or serve the model with a longer context."


class RunDeadline(PolicyFailure):
    trainable = False
    remedy = "Raise limits.run_s, or set trainable_on_deadline on the run to train on such rollouts."


class AgentCrashed(PolicyFailure):
    """An agent program ended with an exit status that its preset does not list as a normal end."""

    trainable = False
    remedy = "Read the program's last lines in the detail, and its whole output in the trajectory's info.harness."


class MemoryLimit(PolicyFailure):
    remedy = "Raise sandbox.memory_bytes if the task needs more memory."


class ProcessLimit(PolicyFailure):
    remedy = "Raise sandbox.processes if the task needs more processes."


class DiskLimit(PolicyFailure):
    remedy = "Raise sandbox.disk_bytes if the task needs more disk."


class FileLimit(PolicyFailure):
    remedy = "Raise sandbox.files if the task needs to create more files and folders."


class SandboxEndedByPolicy(PolicyFailure):
    remedy = "The agent ended its own sandbox; there is nothing to fix."


class EvalDeadline(PolicyFailure):
    outcome = Outcome.FAILED
    remedy = "Raise limits.eval_s if the checks need longer on a correct solution."


# --- infrastructure -----------------------------------------------------------------------------------


class InfraFailure(RollyardError):
    blame = Blame.INFRA
    retryable = True
    status = 503


class EngineFailure(InfraFailure):
    code = "engine_failed"
    status = 502


class EngineUnavailable(EngineFailure):
    remedy = "Start the engine, or add one that answers; `rollyard engines list` shows their states."


class EngineRefused(EngineFailure):
    """The engine answered 4xx: it would refuse the same call again."""

    retryable = False
    remedy = "Read the engine's answer in the detail; check model name, context length and sampling."


class EngineTimeout(EngineFailure):
    remedy = "Raise limits.model_s, or reduce the engine's load."


class EngineBroken(EngineFailure):
    """The engine's answer is invalid: not JSON, fields missing, or fewer logprobs than tokens."""

    remedy = "Check the engine's version and flags (docs/how-to/connect-engines.md)."


class TokenizerNotFound(EngineFailure):
    """The files of an engine's tokenizer are not on this machine, and could not be fetched. They may come later."""

    status = 422
    remedy = "Name the tokenizer of the engine's model, or download it into the local hub cache."


class TokenizerMismatch(EngineFailure):
    retryable = False
    status = 422
    remedy = "Give the engine the tokenizer of the model that it serves."


class SandboxFailure(InfraFailure):
    code = "sandbox_failed"


class SandboxStartFailed(SandboxFailure):
    remedy = "Run `rollyard doctor` on this machine."


class SandboxLost(SandboxFailure):
    """It was ended from outside: neither a process in it nor the service requested that."""


class SandboxStuck(SandboxFailure):
    """Its end could not be verified in time. Its slot stays quarantined."""

    remedy = "A process in it hangs in the kernel; inspect its pid with ps, then restart the service."


class VerifierCrashed(InfraFailure):
    remedy = "The environment's eval failed; the detail names the cause, and the service's log has the traceback."


class JudgeUnreachable(InfraFailure):
    remedy = "Add an engine of role judge, or fix the existing one."


class ToolUnreachable(InfraFailure):
    remedy = "A server in `mcp_servers` or `gym_servers`, or a host in sandbox.egress, does not answer; check it."


class ArtifactLost(InfraFailure):
    remedy = "An artifact of RUN could not be saved or read back; check the disk of data_dir."


class Stalled(InfraFailure):
    remedy = "There was no progress within limits.stall_s; check the engine and the sandbox host."


class LostToRestarts(InfraFailure):
    retryable = False
    remedy = "The service ended too often while this rollout ran; raise max_attempts or find out why it ends."


class NodeLost(InfraFailure):
    """The rollout's node was killed, frozen or disconnected for longer than its lease."""

    remedy = "Find out why nodes disappear (logs, memory, network); raise max_attempts if that is expected."


class SessionLost(InfraFailure):
    """What an external agent had sampled was lost with the process or the engine that held it. Only its client can
    repeat it."""

    retryable = False
    remedy = "Open a new session."


class TraceInvalid(InfraFailure):
    """A trajectory failed its verification. The cause is a bug here or an engine that reports wrong data; a trajectory
    is never repaired silently."""

    retryable = False
    status = 500
    remedy = "Report it with the record; do not train on the traces."


class InternalError(InfraFailure):
    status = 500
    remedy = "A bug in Rollyard; report it with the service's log."


# --- the task -----------------------------------------------------------------------------------------


class TaskFailure(RollyardError):
    blame = Blame.TASK
    status = 422


class SetupFailed(TaskFailure):
    remedy = "Try the task by hand: rollyard shell TASK."


class SetupDeadline(TaskFailure):
    remedy = "Raise limits.init_s or make the set-up shorter."


class PromptTooLong(TaskFailure):
    remedy = "Shorten the instruction or serve the model with a longer context."


class TaskInvalid(TaskFailure):
    remedy = "`rollyard tasks fields ENVIRONMENT` lists the fields of its data (docs/reference/task.md)."


class EnvironmentBroken(TaskFailure):
    """An environment's code cannot be loaded, or raised an exception that another try would raise again."""

    remedy = "Fix the environment's code where the detail says; the service's log has the traceback. Then restart it."


class AgentBroken(TaskFailure):
    """The code of an agent from another package cannot be loaded, or raised an exception."""

    remedy = "Fix the agent's code where the detail says; the service's log has the traceback. Then restart it."


# --- the client ---------------------------------------------------------------------------------------


class Cancelled(RollyardError):
    blame = Blame.CLIENT
    status = 200
    outcome = Outcome.CANCELLED


class SessionAbandoned(RollyardError):
    """A session's time ended before its client posted a reward: no reward is invented for it."""

    blame = Blame.CLIENT
    status = 200
    remedy = "Post the reward within limits.run_s, or raise that limit."


class RequestError(RollyardError):
    blame = Blame.CLIENT
    status = 400
    code = "request_error"


class InvalidRequest(RequestError):
    status = 422


class MalformedId(RequestError):
    status = 422
    remedy = "Use 1 to 128 letters, digits and . _ : - and start with a letter or a digit."


class UnknownEnvironment(RequestError):
    status = 422
    remedy = (
        "Name it under [environments] in the service's rollyard.toml, or install the package that provides it, on every"
        " node of a fleet too, and restart the service."
    )


class UnknownAgent(RequestError):
    status = 422
    remedy = "Name one of these, or write a preset for it: rollyard agents show NAME prints one to start from."


class UnknownTool(RequestError):
    status = 422


class SamplingInvalid(RequestError):
    """`sampling.extra` contains a parameter that may not be sent to an engine of the policy."""

    status = 422
    remedy = "Remove it from sampling.extra (docs/how-to/connect-engines.md lists what each kind of engine accepts)."


class RuntimeNotAllowed(RequestError):
    status = 403
    remedy = "The operator's settings `runtimes` and `images` list what is allowed."


class EgressNotAllowed(RequestError):
    status = 403
    remedy = "The operator's setting `egress_hosts` lists the hosts that tasks may reach."


class ImageMissing(RequestError):
    status = 422
    remedy = "`rollyard images list` shows the images on the service's machine, and in which form."


class AgentMissing(RequestError):
    status = 422
    remedy = "Install it first: rollyard agents install NAME; `rollyard agents list` shows the installed agents."


class Unauthorized(RequestError):
    status = 401
    remedy = (
        "Give the service's token with --token or ROLLYARD_TOKEN, in HTTP as `Authorization: Bearer TOKEN`; "
        "`rollyard serve` prints the path of its file."
    )


class Forbidden(RequestError):
    status = 403
    remedy = "Use a token that allows this. An admin can create one: rollyard access create."


class ForeignHost(RequestError):
    status = 403
    remedy = "Add the host to the setting `hosts`; requests of other sites' web pages are never allowed."


class NotFound(RequestError):
    status = 404


class Gone(RequestError):
    status = 410
    remedy = "It was acknowledged or is older than the retention period; only the short record is left."


class IdConflict(RequestError):
    status = 409
    remedy = "Use a new id, or send the same body again."


class AmbiguousId(RequestError):
    """More than one run has an item with that id."""

    status = 409
    remedy = "Add ?run= to select one."


class EngineExists(RequestError):
    status = 409
    remedy = "Remove that engine first, or give this one another id (--id)."


class BatchConflict(RequestError):
    """A batch of a draw was requested out of order, or again with another size."""

    status = 409
    remedy = "GET /v1/draws/{id} returns the last batch; request the next one, or an earlier one with its size."


class SourceClosed(RequestError):
    status = 409
    remedy = "Create a new draw."


class VersionConflict(RequestError):
    """The policy does not have the version that the call needs."""

    status = 409
    remedy = "Resume the policy at that version first: POST /v1/policies/{name}/resume."


class NodeUnknown(RequestError):
    """The node is not in the fleet, or was declared lost: it joins and reports what it holds."""

    status = 409
    remedy = "POST /v1/fleet/join; a node does this automatically."


class NodeReplaced(RequestError):
    """Another process has joined the fleet with this node's name."""

    status = 409
    remedy = "Give each node its own name: rollyard node --name."


class SessionConflict(RequestError):
    """The session has not started, already has another reward, or has ended without one."""

    status = 409
    remedy = "GET /v1/sessions/{id} returns its state; if it has ended, open a new one."


class PolicyConflict(RequestError):
    """Another trainer is changing the policy's weights or has changed them, or no change is in progress."""

    status = 409
    remedy = (
        "GET /v1/policies/{name} returns the holder and its lease. If that trainer is alive, give each trainer its own "
        "policy; if it died, wait until its lease has expired, or resume with take_over (rollyard policies resume "
        "NAME VERSION --take-over)."
    )


class PolicyPinned(RequestError):
    """An evaluation samples from the policy's weights and blocks their change until it has ended."""

    status = 409
    remedy = "Send the request again to keep waiting, or end the evaluation: DELETE /v1/evals/{id}."


class PolicyStuck(RequestError):
    """No engine of the policy could be resumed: it stays paused."""

    status = 502
    remedy = "Fix the engines that the detail lists, then resume again; until then no deadline counts."


class MalformedRequest(RequestError):
    """The data is not an HTTP/1.1 request, or is ambiguous."""

    status = 400
    remedy = "Send plain HTTP/1.1: one Content-Length or chunked framing, and no TLS on a port without it."


class RequestTimedOut(RequestError):
    """The headers or the body of a request did not arrive in time."""

    status = 408
    remedy = "Send the request in one piece; the settings `http_header_s` and `http_body_s` limit how long it may take."


class HeadersTooLarge(RequestError):
    status = 431
    remedy = "Send fewer or shorter headers, or raise the settings `max_header_bytes` and `max_headers`."


class BodyTooLarge(RequestError):
    status = 413
    remedy = "Send fewer rollouts per call, or raise the setting `max_body_bytes`."


class ArtifactTooLarge(RequestError):
    status = 413
    remedy = "Read it on the machine of the service, below the setting `data_dir`."


class QuotaExceeded(RequestError):
    """The token's quota is in use."""

    status = 429
    retryable = True
    remedy = "Wait until some of the work is done, or ask an admin for a larger quota."


class RateLimited(RequestError):
    """The token made more calls per second than its quota allows."""

    status = 429
    retryable = True
    remedy = "Send fewer calls: one call can wait for many rollouts."


class QueueFull(RequestError):
    status = 429
    remedy = "Wait for the time in Retry-After, then send the same body again."


class TooManyConnections(RequestError):
    """The service, or one address, has too many open connections."""

    status = 503
    retryable = True
    remedy = "Reuse connections, or close some; `max_connections` and `max_connections_per_address` set the limits."


class StoreLost(RequestError):
    """The store cannot be used: it is unknown whether a write was stored."""

    status = 503
    remedy = "Check the database or the disk, and restart the service. Acknowledged writes are safe."


class Draining(RequestError):
    status = 503
    remedy = "The service is shutting down; send the request again to the next instance."


# --- as stored in a record ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout did not complete normally."""

    code: str
    blame: Blame
    detail: str
    retryable: bool = False
    trainable: bool = False
    stage: str | None = None
    data: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def outcome(self) -> Outcome:
        cls = CODES.get(self.code)
        return cls.outcome if cls else Outcome.FAILED

    def without_model_call(self) -> Failure:
        """Returns this failure for a rollout that made no model call: blame policy becomes blame task."""
        if self.blame is not Blame.POLICY:
            return self
        return replace(self, blame=Blame.TASK, trainable=False)
