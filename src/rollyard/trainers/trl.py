"""TRL adapters: `RollyardRolloutWorker` for AsyncGRPOTrainer, `RollyardRolloutFunc` for GRPOTrainer (`_trl_func.py`).

    worker = RollyardRolloutWorker(run="grpo", tasks=tasks, group_size=8, want=16)
    trainer = AsyncGRPOTrainer(..., rollout_worker=worker, weight_transfer=worker.weights(backend))

The worker drives a draw in its own thread. Each trainable trace of a delivered group becomes one `RolloutSample`: its
tokens, its mask (0 on tool output), the logprobs that it was sampled with, its rollout's advantage in the group, the
oldest version of its sampled tokens (`_trl_samples.py`).

Invariants. An untrainable rollout is in neither loss nor baseline; a rollout that infrastructure failed is in no
sample. A group is delivered completely. The buffer is bounded: while it is full, nothing is read, and no further batch
is requested. A weight update has a fixed order: Rollyard pauses, the trainer writes, Rollyard resumes with the number.

TRL counts versions from 1 in every process; Rollyard's continue from the last one, or from that of the checkpoint. This
module converts them. A checkpoint's weights are in the engines before the draw rewinds to it: until then the policy has
those of the process that died, which may be newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rollyard.client import AsyncClient, AsyncDraw, AsyncUpdate, Batch, ServiceUnreachable
from rollyard.client.batching import Kind
from rollyard.core import Json, RollyardError, Task
from rollyard.trainers._trl_buffer import Buffer, RollyardWeights, WeightTransfer
from rollyard.trainers._trl_func import RollyardRolloutFunc, rollyard_reward
from rollyard.trainers._trl_samples import Decoder, RolloutsMissing, SampleBuilder

__all__ = ["RolloutsMissing", "RollyardRolloutFunc", "RollyardRolloutWorker", "RollyardWeights", "rollyard_reward"]

T = TypeVar("T")
log = logging.getLogger("rollyard.trainers")

HEALTH_S = 10.0
"""Timeout of one health check. TRL makes one every five seconds while it has nothing to train on."""

LEASE_S = 30.0
"""Lease of a pause. It is renewed while weights are written; a trainer killed then holds the policy this long."""

METRICS = 1024
"""Maximum reports of batches that wait to be logged; beyond it, the oldest is dropped."""

TOTALS = ("filtered", "failed", "dropped", "all_zero", "all_one", "stale", "infra_rollouts", "tokens_lost")
GAUGES = ("reward_before", "pass_rate_before", "keep_rate")
STATE_FILE = "rollyard.json"  # in a checkpoint


class RollyardRolloutWorker:
    """TRL's rollout worker, based on a draw.

    `run` is a run of the service; its policy is the one that is trained. Further arguments are those of
    `AsyncClient.draw`: keep, max_staleness, epochs, seed… A draw with an `id` is left open when training ends, so that
    it can be continued; any other is closed.
    `want` groups are requested at a time; `want * group_size` should be about the size of one optimizer step.
    The next batch is requested when no more than `ahead` samples wait for the trainer. Every batch ahead is one more
    version of age, on top of the draw's `max_staleness`; and TRL itself reads one micro-batch ahead.
    `temperature` is that of the trainer's own logprobs (`AsyncGRPOConfig.temperature`): a trace that was sampled with
    another one is an error, since the ratio of the two would be meaningless.
    With a `tokenizer`, samples contain their text, for TRL's own logs.
    `resume` is the checkpoint to continue from (see `callback`); the draw then needs its `id`.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        run: str,
        want: int,
        tasks: Sequence[Task | Mapping[str, Json]] | None = None,
        source: Mapping[str, Json] | None = None,
        group_size: int = 8,
        advantage: Kind = "grpo",
        ahead: int = 0,
        temperature: float = 1.0,
        tokenizer: Decoder | None = None,
        resume: str | os.PathLike[str] | None = None,
        **draw: Any,
    ) -> None:
        if resume is not None and draw.get("id") is None:
            raise ValueError("to continue from a checkpoint, give the id of its draw")
        self.rollout_buffer = Buffer(ahead + want * group_size)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue(METRICS)
        self._place = (url, token)
        self._run = run
        self._want = want
        self._ahead = ahead
        self._request = {**draw, "tasks": tasks, "source": source, "group_size": group_size}
        self._resume = None if resume is None else json.loads(Path(resume, STATE_FILE).read_text())
        self._sampler = lambda first: SampleBuilder(advantage, temperature, first, tokenizer)
        self._first = 0  # Rollyard's number of the version that is 0 in TRL
        self._version = 0  # TRL's number of the weights that are in the engines
        self._update: AsyncUpdate | None = None  # while weights are written
        self._silent_since: float | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: AsyncClient | None = None
        self._draw: AsyncDraw | None = None
        self._end: asyncio.Event | None = None
        self._policy = ""
        self._driving: Future[None] | None = None
        self._ends: deque[tuple[int, int]] = deque()  # the number of samples at the end of a batch, and its number
        self._taken = self._trained = 0  # batches: completely taken by the trainer, and certainly trained on

    # --- called by TRL --------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts to request batches. Weights may have been sent before."""
        if self._driving is None:
            self._open()
            self._go_back()  # if no weights are sent, the engines have them already
            assert self._loop is not None
            self._driving = asyncio.run_coroutine_threadsafe(self._drive(), self._loop)

    def stop(self) -> None:
        """Ends the thread, also while it waits. May be called twice."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return
        if self._driving is not None:
            self._driving.cancel()
        try:
            if self._draw is not None and self._request.get("id") is None:
                with contextlib.suppress(RollyardError, TimeoutError):
                    self._call(self._draw.close(), HEALTH_S)
        finally:
            assert self._end is not None
            loop.call_soon_threadsafe(self._end.set)
            thread.join()
            self._thread = self._loop = self._client = self._draw = self._driving = self._update = None

    def update_model_version(self, model_version: int) -> None:
        """Resumes rollouts with the weights of that version, which are in the engines."""
        update, self._update = self._update, None
        if update is None:
            raise RuntimeError(
                "weights were sent during rollouts, so the versions of tokens are unknown: give the trainer "
                "weight_transfer=worker.weights(...), and no LoRA that vLLM loads by name"
            )
        update.version = self._first + model_version
        self._call(update.__aexit__(None, None, None))
        self._version = model_version
        self._go_back(update.version)

    def check_health(self, stale_after_s: float) -> None:
        """Raises if the draw has ended or failed, or the service has not answered for that long."""
        driving = self._driving
        if driving is None:
            raise RuntimeError("the rollout worker was not started")
        if driving.done():
            raise RuntimeError(f"no more rollouts come: {driving.exception()}") from driving.exception()
        assert self._client is not None
        try:
            self._call(self._client.get_run(self._run), min(HEALTH_S, stale_after_s))
            self._silent_since = None
        except (ServiceUnreachable, TimeoutError) as error:
            now = time.monotonic()
            self._silent_since = self._silent_since or now
            if now - self._silent_since >= stale_after_s:
                raise RuntimeError(f"Rollyard has not answered for {now - self._silent_since:.0f} s") from error

    # --- called by the user ---------------------------------------------------------------------------

    def weights(self, inner: WeightTransfer | None = None) -> RollyardWeights:
        """Returns the trainer's weight transfer. `inner` writes the weights: TRL's or your own; None writes nothing."""
        return RollyardWeights(self.pause, inner)

    def pause(self) -> None:
        """Pauses before weights are written; `update_model_version` resumes. Partial completions are kept."""
        self._open()
        assert self._client is not None
        if self._update is None:
            policy = self._client.policy(self._policy)
            update = policy.update(self._first + self._version + 1, lease_s=LEASE_S, outlast_s=2 * LEASE_S)
            self._call(update.__aenter__())
            self._update = update

    def callback(self) -> Any:
        """Returns a TrainerCallback that writes the draw's position to `rollyard.json` in each checkpoint, and
        acknowledges the batches that were certainly trained on by then. Pass the checkpoint's folder as `resume` to
        continue from it: later batches are undone, and samples of newer weights are discarded."""
        from transformers import TrainerCallback  # type: ignore[import-not-found]

        worker = self

        class Checkpoints(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                worker._stepped()

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                worker._saved(Path(args.output_dir, f"checkpoint-{state.global_step}"))

        return Checkpoints()

    def _stepped(self) -> None:
        # TRL reads one micro-batch ahead, and may hold one more sample that did not fit into it: what it had taken a
        # step ago, except the last sample, is trained on by now.
        self._trained = self._taken
        while self._ends and self._ends[0][0] < self.rollout_buffer.taken:
            self._taken = self._ends.popleft()[1]

    def _saved(self, folder: Path) -> None:
        if self._draw is None:  # not the main process
            return
        state = {"draw": self._draw.id, "batch": self._trained, "version": self._first + self._version}
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n")
        if self._trained:
            self._call(self._draw.ack(self._trained))

    # --- its thread -----------------------------------------------------------------------------------

    def _open(self) -> None:
        """Starts the thread, with an open client and the draw. Raises if either cannot be opened."""
        if self._thread is not None:
            return
        opened: Future[None] = Future()
        work = threading.Thread(target=lambda: asyncio.run(self._live(opened)), name="rollyard-trl", daemon=True)
        work.start()
        opened.result()  # if that raises, the thread ends by itself
        self._thread = work

    async def _live(self, opened: Future[None]) -> None:
        try:
            async with AsyncClient(*self._place) as client:
                self._policy = str((await client.get_run(self._run)).get("policy") or "default")
                self._first = int((await client.policy(self._policy).status())["version"])
                self._draw = await client.draw(self._run, **self._request)
                self._begin_at(self._draw.id)
                self._loop, self._client, self._end = asyncio.get_running_loop(), client, asyncio.Event()
                opened.set_result(None)
                await self._end.wait()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    def _begin_at(self, draw_id: str) -> None:
        """Sets the position of the checkpoint, if there is one."""
        state = self._resume
        if state is None:
            return
        if state["draw"] != draw_id:
            raise ValueError(f"the checkpoint belongs to draw {state['draw']}, not to {draw_id}")
        self._first = state["version"]  # its weights may be newer than the last ones sent: they are the next version
        self._taken = self._trained = state["batch"]

    def _go_back(self, policy_version: int | None = None) -> None:
        """Rewinds the draw to the checkpoint, once, when its weights are in the engines. `policy_version` is their
        number, if it is new. Groups started before are discarded, so that no token of the lost weights remains."""
        if self._resume is None:
            return
        assert self._draw is not None
        state = self._resume
        self._call(self._draw.rewind(state["batch"], state["version"], policy_version=policy_version))
        self._resume = None

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs a coroutine on the thread's loop, called from the trainer's thread."""
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:  # Ctrl-C here must not leave the call running there
            future.cancel()
            raise

    async def _drive(self) -> None:
        """Puts batch after batch into the buffer. Raises when the draw has ended, for callers that wait for more."""
        draw, buffer = self._draw, self.rollout_buffer
        assert draw is not None
        sampler, numbers = self._sampler(self._first), itertools.count()
        with buffer.filled_here():
            while True:
                await buffer.until(lambda: buffer.qsize() <= self._ahead)
                try:
                    async for group in draw.stream(want=self._want):
                        for sample in sampler.samples(group, next(numbers)):
                            await buffer.offer(sample)
                except ServiceUnreachable as error:
                    # The draw is durable and continues from its position; `check_health` raises if it takes too long.
                    log.warning("the service cannot be reached", extra={"code": error.code})
                    continue
                batch = draw.last_batch
                assert batch is not None
                self._ends.append((buffer.added, batch.number))
                self._report(batch)
                if batch.is_last:
                    raise RuntimeError(f"the draw has ended ({batch.reason}) and its last group was delivered")

    def _report(self, batch: Batch) -> None:
        """Reports figures that the trainer does not have: rewards before the filter, and what was filtered out."""
        names = {f"rollyard/{name}": name for name in GAUGES} | {f"rollyard/{name}_total": name for name in TOTALS}
        figures = {name: batch.figures.get(figure) for name, figure in names.items()}
        with contextlib.suppress(queue.Empty):
            if self.metrics_queue.full():
                self.metrics_queue.get_nowait()
        self.metrics_queue.put_nowait({name: float(value) for name, value in figures.items() if value is not None})
