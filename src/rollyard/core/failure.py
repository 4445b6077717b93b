"""Every way a thing can go wrong here, once: its code, whose fault it is, and what follows from that.

    RollyardError                      code · blame · retryable · trainable · HTTP status
    ├── PolicyFailure                  the model's own doing: keeps its reward, is trained on
    │   ├── TurnLimit  TokenLimit  ContextLimit        (outcome truncated)
    │   ├── RunDeadline                                (truncated; untrainable unless the run says so)
    │   ├── AgentCrashed                               (truncated; untrainable: nobody can say whose doing it was)
    │   ├── MemoryLimit  ProcessLimit  DiskLimit  FileLimit  SandboxEndedByPolicy
    │   └── EvalDeadline                               (the environment's failing score)
    ├── InfraFailure                   ours or the cluster's: never has a reward, is tried again
    │   ├── EngineFailure
    │   │   ├── EngineUnavailable  EngineRefused  EngineTimeout
    │   │   └── EngineBroken  TokenizerMismatch
    │   ├── SandboxFailure
    │   │   ├── SandboxStartFailed  SandboxLost  SandboxStuck
    │   ├── VerifierCrashed  JudgeUnreachable  ToolUnreachable  ArtifactLost
    │   ├── Stalled  LostToRestarts  NodeLost  SessionLost
    │   └── TraceInvalid  InternalError
    ├── TaskFailure                    the task as given cannot be done: no reward, no retry
    │   ├── SetupFailed  SetupDeadline  PromptTooLong  TaskInvalid  EnvironmentBroken
    ├── Cancelled                      the client asked for it
    ├── SessionAbandoned               the client gave no reward in time
    └── RequestError                   an HTTP answer only; never in a record
        ├── InvalidRequest  MalformedId  UnknownEnvironment  UnknownAgent  UnknownTool
        ├── SamplingInvalid
        ├── RuntimeNotAllowed  EgressNotAllowed  ImageMissing  AgentMissing
        ├── Unauthorized  Forbidden  ForeignHost  NotFound  Gone  IdConflict  AmbiguousId  EngineExists
        ├── SessionConflict  BatchConflict  SourceClosed  VersionConflict
        ├── NodeUnknown  NodeReplaced
        ├── PolicyConflict  PolicyPinned  PolicyStuck
        └── BodyTooLarge  QueueFull  QuotaExceeded  RateLimited  StoreLost  Draining

Invariants. A code is stable for ever: trainers switch on it. Blame follows the cause, and infra needs
positive evidence from the host. Only a PolicyFailure may carry a reward. `no model call was made` is never
the policy's fault: `Failure.without_model_call` turns such a blame away. The file is
long because it is one list of short classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from rollyard.core.json import Json


class Blame(StrEnum):
    """Whose doing it was. Decides reward, training and retries."""

    POLICY = "policy"  # the model: trained on, with its reward
    INFRA = "infra"  # engine, sandbox, verifier, this service: retried, never a reward
    TASK = "task"  # the task as given: reported once, not retried
    CLIENT = "client"  # whoever called us


class Outcome(StrEnum):
    """How a rollout ended."""

    COMPLETED = "completed"  # the agent ended by itself and was scored
    TRUNCATED = "truncated"  # a limit ended it; what there was has been scored
    FAILED = "failed"  # see failure.code
    CANCELLED = "cancelled"  # the client asked


CODES: dict[str, type[RollyardError]] = {}
"""Every code and its class, filled as the classes below are defined. Read only."""


class RollyardError(Exception):
    """The root. `detail` says what was wrong; the class's `remedy` says what to do about it."""

    code: ClassVar[str] = "error"
    blame: ClassVar[Blame] = Blame.INFRA
    retryable: ClassVar[bool] = False
    trainable: ClassVar[bool] = False
    status: ClassVar[int] = 500
    outcome: ClassVar[Outcome] = Outcome.FAILED
    remedy: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "code" not in cls.__dict__:
            cls.code = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        if cls.code in CODES:
            raise TypeError(f"failure code {cls.code!r} is taken by {CODES[cls.code].__name__}")
        CODES[cls.code] = cls

    def __init__(self, detail: str = "", **data: Json) -> None:
        super().__init__(detail or self.code)
        self.detail = detail or self.code
        self.data: dict[str, Json] = dict(data)

    def failure(self, stage: str | None = None) -> Failure:
        """This error as it stands in a record."""
        return Failure(
            code=self.code,
            blame=self.blame,
            detail=self.detail.encode("utf-8", "replace").decode(),  # half a surrogate pair cannot be stored
            retryable=self.retryable,
            trainable=self.trainable,
            stage=stage,
            data=self.data,
        )


# --- the policy's own doing ---------------------------------------------------------------------------


class PolicyFailure(RollyardError):
    blame = Blame.POLICY
    trainable = True
    status = 200
    outcome = Outcome.TRUNCATED


class TurnLimit(PolicyFailure):
    remedy = "Raise limits.max_turns if the task needs more turns."


class TokenLimit(PolicyFailure):
    remedy = "Raise limits.max_tokens if the task needs more sampled tokens."


class ContextLimit(PolicyFailure):
    remedy = "Raise limits.max_context or serve the model with a longer context."


class RunDeadline(PolicyFailure):
    trainable = False
    remedy = "Raise limits.run_s, or set trainable_on_deadline on the run to train on such rollouts."


class AgentCrashed(PolicyFailure):
    """A harness's program ended with an exit status that its preset does not call an end."""

    trainable = False
    remedy = "Look at the program's last lines in the detail, and at all it said in the trajectory's info.harness."


class MemoryLimit(PolicyFailure):
    remedy = "Raise sandbox.memory_bytes if the task needs more memory."


class ProcessLimit(PolicyFailure):
    remedy = "Raise sandbox.processes if the task needs more processes."


class DiskLimit(PolicyFailure):
    remedy = "Raise sandbox.disk_bytes if the task needs more disk."


class FileLimit(PolicyFailure):
    remedy = "Raise sandbox.files if the task needs to make more files and folders."


class SandboxEndedByPolicy(PolicyFailure):
    remedy = "The agent ended its own sandbox; nothing to mend."


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
    remedy = "Add an engine for this policy (POST /v1/engines) or look at /v1/engines for its health."


class EngineRefused(EngineFailure):
    """The engine answered 4xx: the same call would be refused again."""

    retryable = False
    remedy = "Look at the engine's answer in the detail; check model name, context length and sampling."


class EngineTimeout(EngineFailure):
    remedy = "Raise limits.model_s, or give the engine less load."


class EngineBroken(EngineFailure):
    """The engine answered nonsense: not JSON, fields missing, or fewer logprobs than tokens."""

    remedy = "Check the engine's version and flags (docs/how-to/connect-engines.md)."


class TokenizerMismatch(EngineFailure):
    retryable = False
    status = 422
    remedy = "Give the engine the tokenizer of the model that it serves."


class SandboxFailure(InfraFailure):
    code = "sandbox_failed"


class SandboxStartFailed(SandboxFailure):
    remedy = "Run `rollyard doctor` on this machine."


class SandboxLost(SandboxFailure):
    """It ended from outside: nobody in it, and nobody here, asked for that."""


class SandboxStuck(SandboxFailure):
    """It could not be proven gone within its bound. Its slot stays quarantined."""

    remedy = "A process in it hangs in the kernel; look at its pid with ps, then restart the service."


class VerifierCrashed(InfraFailure):
    remedy = "The environment's eval raised; see the service's log."


class JudgeUnreachable(InfraFailure):
    remedy = "Add an engine of role judge, or mend the one there is."


class ToolUnreachable(InfraFailure):
    remedy = (
        "A server that `mcp_servers` or `gym_servers` names, or a host of sandbox.egress, does not answer; look at it."
    )


class ArtifactLost(InfraFailure):
    remedy = "What RUN left could not be saved or read back; look at the disk below data_dir."


class Stalled(InfraFailure):
    remedy = "Nothing moved within limits.stall_s; look at the engine and the sandbox host."


class LostToRestarts(InfraFailure):
    retryable = False
    remedy = "The service died too often while this ran; raise max_attempts or find out why it dies."


class NodeLost(InfraFailure):
    """The node that had it was killed, frozen or cut off for longer than its lease."""

    remedy = "Find out why nodes go away (their logs, memory, network); raise max_attempts if they have to."


class SessionLost(InfraFailure):
    """What an agent elsewhere had sampled is gone, with the process or the engine that had it. Only its client could
    do it again."""

    retryable = False
    remedy = "Open a new session."


class TraceInvalid(InfraFailure):
    """A trajectory did not prove itself. Always a bug here or a lying engine; never repaired in silence."""

    retryable = False
    status = 500
    remedy = "Report it with the record; the traces are not to be trained on."


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
    remedy = "Compare the task's data with the environment's schema."


class EnvironmentBroken(TaskFailure):
    remedy = "The environment's own code raised; see the service's log."


# --- the client ---------------------------------------------------------------------------------------


class Cancelled(RollyardError):
    blame = Blame.CLIENT
    status = 200
    outcome = Outcome.CANCELLED


class SessionAbandoned(RollyardError):
    """A session's time was over and nobody had said what it was worth: no reward is made up for it."""

    blame = Blame.CLIENT
    status = 200
    remedy = "Post the reward before limits.run_s is over, or raise it."


class RequestError(RollyardError):
    blame = Blame.CLIENT
    status = 400
    code = "request_error"


class InvalidRequest(RequestError):
    status = 422


class MalformedId(RequestError):
    status = 422
    remedy = "Use 1 to 128 of letters, digits and . _ : - and begin with a letter or a digit."


class UnknownEnvironment(RequestError):
    status = 422
    remedy = "GET /v1/status lists the environments; install the package that brings this one."


class UnknownAgent(RequestError):
    status = 422
    remedy = "GET /v1/status lists the agents."


class UnknownTool(RequestError):
    status = 422


class SamplingInvalid(RequestError):
    """`sampling.extra` has something that an engine of the policy may not be given."""

    status = 422
    remedy = "Leave it out of sampling.extra (docs/how-to/connect-engines.md lists what each kind of engine takes)."


class RuntimeNotAllowed(RequestError):
    status = 403
    remedy = "The operator names what is allowed in the settings `runtimes` and `images`."


class EgressNotAllowed(RequestError):
    status = 403
    remedy = "The operator names the hosts that tasks may reach in the setting `egress_hosts`."


class ImageMissing(RequestError):
    status = 422
    remedy = "Fetch it first: rollyard images pull REFERENCE; `rollyard images list` shows what is here."


class AgentMissing(RequestError):
    status = 422
    remedy = "Install it first: rollyard agents install NAME; `rollyard agents list` shows what is here."


class Unauthorized(RequestError):
    status = 401
    remedy = "Send `Authorization: Bearer TOKEN`; the token file is named by `rollyard config`."


class Forbidden(RequestError):
    status = 403
    remedy = "Use a token that may do this. An admin creates one: rollyard access create."


class ForeignHost(RequestError):
    status = 403
    remedy = "Name the host in the setting `hosts`; browsers' pages are never allowed."


class NotFound(RequestError):
    status = 404


class Gone(RequestError):
    status = 410
    remedy = "It was acknowledged or is older than the retention; only the short record is left."


class IdConflict(RequestError):
    status = 409
    remedy = "Use a new id, or send the same body again."


class AmbiguousId(RequestError):
    """More than one run has something of that id."""

    status = 409
    remedy = "Add ?run= to say which one."


class EngineExists(RequestError):
    status = 409


class BatchConflict(RequestError):
    """A batch of a draw was asked for out of turn, or again with another size."""

    status = 409
    remedy = "GET /v1/draws/{id} says which batch is the last; ask for the next one, or for an earlier one as it was."


class SourceClosed(RequestError):
    status = 409
    remedy = "Make a new draw."


class VersionConflict(RequestError):
    """The policy is not at the version that the call needs."""

    status = 409
    remedy = "Resume the policy at that version first: POST /v1/policies/{name}/resume."


class NodeUnknown(RequestError):
    """The fleet does not know this node, or took it for lost: it joins, and says what it holds."""

    status = 409
    remedy = "POST /v1/fleet/join: a node does so by itself."


class NodeReplaced(RequestError):
    """Another process has joined the fleet under this node's name."""

    status = 409
    remedy = "Give each node a name of its own: rollyard node --name."


class SessionConflict(RequestError):
    """The session has not begun, has got another reward already, or has ended without one."""

    status = 409
    remedy = "GET /v1/sessions/{id} says how it stands; if it has ended, open a new one."


class PolicyConflict(RequestError):
    """Another is changing the policy's weights, or has changed them, or nobody is."""

    status = 409
    remedy = (
        "GET /v1/policies/{name} says who holds it and for how long. If that trainer is alive, give each a policy of "
        "its own; if it died, wait until its lease has run out, or resume with take_over (rollyard policies resume "
        "NAME VERSION --take-over)."
    )


class PolicyPinned(RequestError):
    """An evaluation samples from the policy's weights, and was to hold off their change until it has ended."""

    status = 409
    remedy = "Send it again to wait on, or end the evaluation that is named: DELETE /v1/evals/{id}."


class PolicyStuck(RequestError):
    """None of a policy's engines could be resumed: it stays paused."""

    status = 502
    remedy = "Mend the engines that are named, then resume again; until then every clock stands still."


class MalformedRequest(RequestError):
    """What came is not an HTTP/1.1 request, or can be read in two ways."""

    status = 400
    remedy = "Send plain HTTP/1.1: one Content-Length or chunked framing, and no TLS on a port without it."


class RequestTimedOut(RequestError):
    """The headers or the body of a request did not come in time."""

    status = 408
    remedy = "Send the request in one piece; settings `http_header_s` and `http_body_s` say how long it may take."


class HeadersTooLarge(RequestError):
    status = 431
    remedy = "Send fewer or shorter headers, or raise the settings `max_header_bytes` and `max_headers`."


class BodyTooLarge(RequestError):
    status = 413
    remedy = "Send fewer rollouts per call, or raise the setting `max_body_bytes`."


class QuotaExceeded(RequestError):
    """What the token may use at once is in use."""

    status = 429
    retryable = True
    remedy = "Wait until some of it is done, or ask an admin for a larger quota."


class RateLimited(RequestError):
    """More calls in a second than the token may make."""

    status = 429
    retryable = True
    remedy = "Send fewer calls at once: one call can wait for many rollouts."


class QueueFull(RequestError):
    status = 429
    remedy = "Wait as long as Retry-After says, then send the same body again."


class TooManyConnections(RequestError):
    """More connections are open than the service, or one address, may have."""

    status = 503
    retryable = True
    remedy = (
        "Reuse connections, or close some; settings `max_connections` and `max_connections_per_address` are the bounds."
    )


class StoreLost(RequestError):
    """The store cannot be used now: whether a write was stored is not known."""

    status = 503
    remedy = "Look at the database or the disk, and start the service again. What was acknowledged is safe."


class Draining(RequestError):
    status = 503
    remedy = "The service is shutting down; send it again to the next one."


# --- as it stands in a record -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rollout did not simply complete."""

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
        """The same end where the model was never asked: it cannot be the policy's fault."""
        if self.blame is not Blame.POLICY:
            return self
        return replace(self, blame=Blame.TASK, trainable=False)
