"""One training of `train.py`: the warm start and RL, their checkpoints, and the calls of the service."""

from __future__ import annotations

import argparse
import json
import random
import secrets
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner import Learner, anchors, has_saved, in_rounds, rate
from log import Log, by_lag, passed

import rollyard
from rollyard.client.batching import collate
from rollyard.envs.yardwork import YardworkEnvironment

WAIT_S = 60.0
VALIDATION, TEST = 1, 2  # seeds of the held-out split: one decides when to stop, the other is only for tests


class Cut(Exception):
    """The time limit was reached, and everything is saved."""


class Training:
    """The warm start and RL. `weights` is the digest of the adapter that the engine has."""

    def __init__(self, args: argparse.Namespace, client: rollyard.Client) -> None:
        self.args = args
        self.client = client
        self.name = _name(args.out)
        self.weights = ""  # the digest of the engine's adapter
        self.learner = Learner(args)
        self.log = Log(args.out, has_tensorboard=args.tensorboard, wandb_project=args.wandb)
        self.spent: dict[str, float] = defaultdict(float)
        self.anchors: list[dict[str, np.ndarray]] = []
        self.ends = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
        self.agent = {"schemas": False}  # the model learns the tools from the demonstrations
        latency = {"tool_latency_s": args.tool_latency_s}
        limits = {"max_turns": args.max_turns, "max_tokens": 320, "max_context": 1024, "run_s": 120.0}
        self.defaults: dict[str, Any] = {
            "sampling": {"temperature": 1.0, "max_tokens": 80},
            "limits": limits | {"tool_s": 10.0},  # a command that hangs would delay a whole evaluation
            "agent": {"name": "native", "options": self.agent | latency},
        }
        self.tasks = {"levels": args.levels, "families": args.families}

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.spent[what] += time.monotonic() - started

    # --- weights and scores

    def push(self, version: int) -> None:
        """Loads the current adapter into the engine. Calls in flight pause, then continue with the new weights."""
        with self.spending("push_s"):
            folder = self.learner.save_adapter(self.args.out / "pushed")
            self.weights = sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()[:12]
            with self.client.policy("default").update(version=version, mode="keep"):
                body = json.dumps({"path": str(folder), "version": version}).encode()
                request = urllib.request.Request(f"{self.args.engine}/update_weights_from_folder", body)
                urllib.request.urlopen(request, timeout=120).close()

    def score(self, what: str, seed: int, count: int, heat: float, rules: str = "trained") -> dict[str, Any]:
        """Evaluates the engine's weights on the held-out split. Returns the result, with pass@1 and its interval."""
        chosen = {**self._options("held_out", seed, count), "rules": rules}
        body = {"environment": "yardwork", "options": chosen}
        defaults = {**self.defaults, "sampling": {**self.defaults["sampling"], "temperature": heat}}
        for attempt in range(3):  # an id identifies one evaluation of these weights for ever
            id = f"{self.name}-{what}-{self.weights}" + (f"-{attempt}" if attempt else "")
            with self.spending("score_s"):
                evaluation = self.client.evaluate(
                    source=body, id=id, seed=self.args.seed, pool_share=1.0, by="family", defaults=defaults
                )
            if evaluation.state == "done" and evaluation.result is not None:
                return evaluation.result
        raise RuntimeError(f"evaluation {evaluation.id} {evaluation.state}: {evaluation.reason} {evaluation.detail}")

    def _options(self, split: str, seed: int, count: int) -> dict[str, str]:
        return {**self.tasks, "split": split, "seed": str(seed), "count": str(count)}

    def test(self, what: str) -> None:
        """The final test of some weights, on tasks that decided nothing: sampled, greedy, and on new rules."""
        ways = [("_greedy", 0.0, "trained"), ("_new_rules", 1.0, "new")] if what != "raw" else []
        known = {line["phase"] for line in self.log.lines() if line.get("what") == what}
        for tag, heat, rules in [*ways, ("", 1.0, "trained")]:
            if f"test{tag}" in known or not self.args.test_tasks:
                continue
            result = self.score(f"{what}-test{tag}", TEST, self.args.test_tasks, heat, rules)
            self.log.write(f"test{tag}", 0, what=what, **passed(result), result=result)

    def needs_test(self, what: str) -> bool:
        return bool(self.args.test_tasks) and not self.log.has_tested(what)

    def cut(self) -> None:
        if time.monotonic() > self.ends:
            raise Cut

    # --- 1. the warm start

    def demonstrations(self) -> list[dict[str, np.ndarray]]:
        """Traces of the tasks' own solutions, as if the policy had sampled them."""
        archive = self.args.out / "demonstrations.npz"
        if not archive.exists():
            run = f"{self.name}-demonstrations"
            self.client.create_run(
                run, defaults={**self.defaults, "agent": {"name": "demonstrate", "options": self.agent}}
            )
            chosen = self._options("train", 1000 + self.args.seed, self.args.demonstrations)
            tasks = [dict(task) for task in YardworkEnvironment().generate(chosen)]
            records = self.client.submit(tasks, run=run, ids=[f"{run}-{n}" for n in range(len(tasks))])
            arrays = {}
            for number, record in enumerate(self.client.wait_all([record.id for record in records])):
                for trace in self.client.traces(record.id) if record.reward == 1.0 else ():
                    arrays[f"ids{number}"], arrays[f"mask{number}"] = trace.token_ids, trace.mask
            if not arrays:
                raise SystemExit(f"of {len(records)} demonstrations, 0 got a reward: see rollyard rollouts list")
            np.savez(archive.with_name("new.npz"), **arrays)
            archive.with_name("new.npz").replace(archive)
        loaded = np.load(archive)
        return [
            {"ids": loaded[n], "mask": loaded[n.replace("ids", "mask")]} for n in loaded.files if n.startswith("ids")
        ]

    def warm(self) -> None:
        """Trains until pass@1 stops rising. `warm` is the current checkpoint, `best` is the one that RL starts from."""
        out, args = self.args.out, self.args
        state = {"epoch": 0, "best": -1.0, "waited": 0}
        if has_saved(out / "warm"):
            state = self.learner.load(out / "warm")
        self.log.rewind("warm", state["epoch"])
        rows = self.demonstrations()
        while state["epoch"] < args.max_epochs and state["waited"] < args.patience:
            epoch = state["epoch"] + 1
            loss = self._epoch(rows, epoch)
            self.push(epoch)
            result = self.score(f"warm-{epoch}", VALIDATION, args.validate_tasks, 1.0)
            score = passed(result)["pass_at_1"]
            is_best = score > state["best"]
            waited = 0 if is_best else state["waited"] + 1
            state = {"epoch": epoch, "best": max(score, state["best"]), "waited": waited}
            self.log.write("warm", epoch, loss=loss, **passed(result), busy_s=self.learner.busy_s)
            if is_best:
                self.learner.save(out / "best", state)
            self.learner.save(out / "warm", state)
            self.cut()

    def _epoch(self, rows: Sequence[dict[str, np.ndarray]], epoch: int) -> float:
        shuffled = random.Random(f"{self.args.seed}/{epoch}")
        order = [row for _ in range(self.args.passes) for row in shuffled.sample(rows, len(rows))]
        losses: list[float] = []
        for start in range(0, len(order), self.args.warm_batch):
            _, logprobs = self.learner.learn(order[start : start + self.args.warm_batch], self.args.warm_lr)
            losses.append(-float(torch.cat(logprobs).mean()))
        return sum(losses) / len(losses)

    def more_warm(self) -> None:
        """Measures what the same time on the device gives without RL: at its end, and at the best validation. It has no
        checkpoints: if interrupted, it starts again."""
        if self.log.has_tested("more-warm-best"):
            return
        args, learner, rows, best = self.args, self.learner, self.demonstrations(), -1.0
        self.log.forget("more_warm", "more-warm", "more-warm-best")
        started, epoch = learner.busy_s, 0
        while learner.busy_s - started < args.more_warm_s:
            epoch += 1
            loss = self._epoch(rows, 1000 + epoch)
            if epoch.bit_count() == 1:  # 1, 2, 4, 8…
                self.push(1000 + epoch)
                figures = passed(self.score(f"more-warm-{epoch}", VALIDATION, args.validate_tasks, 1.0))
                self.log.write("more_warm", epoch, loss=loss, **figures, busy_s=learner.busy_s - started)
                if figures["pass_at_1"] > best:
                    best = figures["pass_at_1"]
                    learner.save(args.out / "more-warm-best", {"epoch": epoch})
        self.push(1000 + epoch)
        self.test("more-warm")
        learner.load(args.out / "more-warm-best")
        self.push(1)
        self.test("more-warm-best")

    # --- 2. RL

    def reinforce(self) -> None:
        out, args, client = self.args.out, self.args, self.client
        last_step = self.learner.load(out / "rl")["step"] if has_saved(out / "rl") else 0
        self.log.rewind("rl", last_step)
        client.create_run(f"{self.name}-rl", defaults=self.defaults, seed=args.seed)
        draw = client.draw(
            f"{self.name}-rl",
            source={"environment": "yardwork", "options": self._options("train", args.seed, 40 * args.steps)},
            id=f"{self.name}-rl",
            group_size=args.group_size,
            keep=args.keep,
            **pace(args.max_staleness, oversample=args.oversample),
            seed=args.seed,
            epochs=1000,
        )
        self.anchors = self.demonstrations() if args.anchor and not args.start else []
        self.push(last_step)
        draw.rewind(batch=last_step, version=last_step)
        for step in range(last_step + 1, args.steps + 1):
            before, started = dict(self.spent), time.monotonic()
            with self.spending("wait_s"):
                batch = self._next(draw, step)
            with self.spending("learn_s"):
                facts = self._learn(batch, step)
            self.push(step)
            if step % args.validate_every == 0:
                facts |= passed(self.score(f"rl-{step}", VALIDATION, args.validate_tasks, 1.0))
            facts |= {name: self.spent[name] - before.get(name, 0.0) for name in self.spent}
            self.log.write("rl", step, **facts, step_s=time.monotonic() - started, figures=batch.figures)
            is_over = time.monotonic() > self.ends
            if step % args.save_every == 0 or is_over:
                self.learner.save(out / "rl", {"step": step})
                draw.ack(batch)
            self.cut()
        self.learner.save(out / "rl", {"step": args.steps})
        draw.close()

    def _next(self, draw: Any, step: int) -> Any:
        """The next batch. While it waits, it reports the state of the draw and checks the time limit."""
        while True:
            try:
                return draw.batch(want=self.args.want, timeout_s=WAIT_S)
            except rollyard.DrawEnded as ended:
                raise SystemExit(f"the draw has ended: {ended}") from ended
            except TimeoutError:
                counts = draw.status().get("figures") or {}
                print(
                    f"step {step} waits for groups: {counts.get('all_zero')} all zero, {counts.get('all_one')} all one"
                )
                if time.monotonic() > self.ends and step > 1:
                    self.learner.save(self.args.out / "rl", {"step": step - 1})
                self.cut()

    def _learn(self, batch: Any, step: int) -> dict[str, Any]:
        arrays = collate(batch.groups, advantages="grpo")
        assert np.isfinite(arrays["logprobs"]).all(), "a token without a logprob"
        sizes = arrays["attention_mask"].sum(1)
        rows = [
            {
                "ids": arrays["input_ids"][n, :size],
                "mask": arrays["loss_mask"][n, :size],
                "old": arrays["logprobs"][n, :size],
                "versions": arrays["versions"][n, :size],
                "advantage": arrays["advantages"][n],
            }
            for n, size in enumerate(sizes)
        ]
        parts = in_rounds(rows, f"{self.args.seed}/{step}", self.args.rounds, self.args.minibatches)
        lr = rate(self.args.lr, step, self.args.rise, self.args.steps, self.args.fall)
        places = [f"{self.args.seed}/{step}/{number}" for number in range(len(parts))]
        more = [
            anchors(self.anchors, place, round(self.args.anchor * len(part)))
            for place, part in zip(places, parts, strict=True)
        ]
        learned = (self.learner.learn([*part, *some], lr) for part, some in zip(parts, more, strict=True))
        norms, logprobs = zip(*learned, strict=True)
        records = [rollout.record for group in batch.groups for rollout in group.rollouts]
        timings = [record.timings or {} for record in records]
        return {
            "reward_before": batch.figures.get("reward_before"),
            "staleness": float(np.mean([group.staleness or 0 for group in batch.groups])),
            "grad_norm": float(np.mean(norms)),
            "rollouts": len(records),
            "tokens_trained": int(arrays["loss_mask"].sum()),
            "tokens_seen": int(sizes.sum()),
            "stages_s": {n: float(np.mean([t.get(n) or 0.0 for t in timings])) for n in ("init_s", "run_s", "eval_s")},
            "by_lag": by_lag(parts[0], logprobs[0][: len(parts[0])], step - 1),
        }


def pace(max_staleness: int, *, oversample: bool) -> dict[str, Any]:
    """A draw's options. With `max_staleness` 0 nothing is sampled during learning: the draw repeatedly starts only what
    the batch still needs, and nothing is discarded. With `oversample` it starts as many groups as the kept share
    requires and discards the surplus, running or done: that is faster, and biased towards short rollouts."""
    if max_staleness:
        return {"max_staleness": max_staleness}
    strict = {"on_stale": "drop", "surplus": "cancel"} if oversample else {"on_stale": "wait"}
    return {"max_staleness": 0, **strict}


def _name(out: Path) -> str:
    """The name prefix of its runs, draws and evaluations. It is random, so that a deleted folder's are not reused."""
    id_file = out / "id"
    if not id_file.exists() or not id_file.read_text():
        id_file.write_text(f"{out.resolve().name}-{secrets.token_hex(3)}")
    return id_file.read_text()


def run(args: argparse.Namespace) -> None:
    """Runs or continues the training in its folder."""
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    with rollyard.Client(args.service, args.token) as client:
        training = Training(args, client)
        try:
            if training.needs_test("raw"):
                training.push(0)  # an untrained adapter changes nothing
                training.test("raw")
            if args.start:
                training.learner.lora.load(args.start)
            else:
                training.warm()
                has_saved(args.out / "best")
                training.learner.load(args.out / "best", with_optimizer=bool(args.more_warm_s))
            if training.needs_test("warm"):
                training.push(1)
                training.test("warm")
            if args.more_warm_s:
                training.more_warm()
                return
            training.learner.optimizer = training.learner.new_optimizer()
            training.reinforce()
            if training.needs_test("rl"):
                training.test("rl")
            print(f"done: try it with rollyard demo --adapter {args.out / 'rl'}", flush=True)
        except Cut:
            print("the time is over and everything is saved: run the same command again to continue", flush=True)
