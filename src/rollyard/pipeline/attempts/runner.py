"""Runs the stages of one rollout, for every caller: the service's attempts, rescoring, and commands without a service.

The caller decides when each stage runs, and what follows from its result. The runner holds what the stages share: the
resolved task, the workspace of INIT and RUN, EVAL's sandbox, and the ledger of the hosts that sandboxes reached.
"""

from __future__ import annotations

from dataclasses import replace

from rollyard.core import Deadline, Rollout, Run, Score, Trajectory
from rollyard.core.failure import PolicyFailure
from rollyard.envs.findings import Findings
from rollyard.observe.metrics import Metrics
from rollyard.pipeline.attempts import stages
from rollyard.pipeline.attempts.evaluation import evaluate
from rollyard.pipeline.attempts.sandbox_start import ended_by_policy
from rollyard.pipeline.attempts.stages import RunObserver, RunResult, RunState, Workspace
from rollyard.pipeline.resources import StageResources
from rollyard.sandbox.base import Sandbox
from rollyard.sandbox.egress import EgressLedger


class StageRunner:
    """INIT, RUN and EVAL of one rollout, or EVAL alone from a saved trajectory. `close` it, then `forget`."""

    def __init__(
        self, resources: StageResources, rollout: Rollout, run: Run, *, lease_s: float, metrics: Metrics | None = None
    ) -> None:
        self.resolved = resources.resolve(rollout.task)
        self.ledger = EgressLedger()
        self.state = RunState()
        self.workspace: Workspace | None = None
        self._rollout = rollout
        self._run = run
        self._lease_s = lease_s
        self._metrics = metrics
        self._eval_sandbox: Sandbox | None = None

    async def init(self, clock: Deadline) -> Workspace:
        """INIT. Leaves nothing running if it fails."""
        self.workspace = await stages.init(
            self.resolved,
            self._rollout.id,
            clock,
            owner=self._run.owner,
            lease_s=self._lease_s,
            metrics=self._metrics,
            ledger=self.ledger,
        )
        return self.workspace

    async def run(self, clock: Deadline, observer: RunObserver | None = None) -> RunResult:
        """RUN. Policy and infrastructure failures are in the result, with what was sampled; only cancels raise."""
        assert self.workspace is not None
        return await stages.run(
            self.resolved, self._rollout, self._run, self.workspace, self.state, clock, observer or RunObserver()
        )

    async def collect(self, result: RunResult) -> RunResult:
        """Saves RUN's artifacts and, for EVAL `same`, its files. Returns the result with them; if the policy ended its
        sandbox, the result says so, and there is nothing to evaluate."""
        workspace = self.workspace
        assert workspace is not None
        policy_failure = ended_by_policy(workspace.sandbox)
        if workspace.sandbox is not None and not result.is_sandbox_gone:
            try:
                artifacts = await stages.collect(self.resolved, self._rollout, workspace)
                result = replace(result, trajectory=replace(result.trajectory, artifacts=tuple(artifacts)))
                if workspace.plan.eval_mode == "same":
                    await workspace.freeze(self.resolved.layers)
            except PolicyFailure as error:
                result, policy_failure = replace(result, is_sandbox_gone=True), error
        if result.is_sandbox_gone and result.failure is None and policy_failure is not None:
            result = replace(result, failure=policy_failure.failure("run"))
        return result

    async def evaluate(
        self, trajectory: Trajectory, clock: Deadline, *, is_last: bool = True, findings: Findings | None = None
    ) -> Score:
        """EVAL, one try. `evaluation.evaluate` describes the exceptions. `findings` gets what the verifier printed."""
        workspace = self.workspace
        try:
            return await evaluate(
                self.resolved,
                self._rollout.id,
                trajectory,
                clock,
                lease_s=self._lease_s,
                watch=self._hold,
                metrics=self._metrics,
                layers=workspace.eval_layers if workspace is not None else (),
                ran_on=workspace.sandbox.spec if workspace is not None and workspace.sandbox is not None else None,
                ledger=self.ledger,
                is_last=is_last,
                findings=findings,
                owner=self._run.owner,
            )
        finally:
            self._eval_sandbox = None

    def _hold(self, sandbox: Sandbox) -> None:
        self._eval_sandbox = sandbox

    def renew(self) -> None:
        """Renews the leases of its sandboxes."""
        for sandbox in (self.workspace.sandbox if self.workspace else None, self._eval_sandbox):
            if sandbox is not None:
                sandbox.renew(self._lease_s)

    async def close(self) -> None:
        """Ends the workspace and proves its sandbox gone. RUN's files remain for EVAL until `forget`."""
        if self.workspace is not None:
            await self.workspace.close()

    def forget(self) -> None:
        """Releases the files that the workspace shares or left."""
        if self.workspace is not None:
            self.workspace.forget()
