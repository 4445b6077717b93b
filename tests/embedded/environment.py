"""Runs the embedded engine as a separate process, in its own virtual environment (scripts/trainer-env local)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.trainers.environment import ROOT, trainer_python

END_S = 20.0

MAKE = """
import sys, torch
from argparse import Namespace
from pathlib import Path
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from learner import Learner
folder, source = map(Path, sys.argv[1:])
model, adapter = folder / "tiny", folder / "adapter"
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(source)
tokenizer.save_pretrained(model)
LlamaForCausalLM(LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=8192, initializer_range=0.25, eos_token_id=tokenizer.eos_token_id,
    bos_token_id=None, pad_token_id=None,
)).save_pretrained(model)
Learner(Namespace(model=str(model), rank=4, device="cpu", seed=1, bf16=False)).save_adapter(adapter)
tensors = load_file(adapter / "adapter_model.safetensors")
save_file({name: torch.randn_like(one) for name, one in tensors.items()}, adapter / "adapter_model.safetensors")
"""


def environ(home: Path) -> dict[str, str]:
    """The environment, with one thread: with other tests running, more threads only wait for each other."""
    paths = {"PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **paths, **quiet}


def make_tiny_model(folder: Path) -> None:
    """Creates a model with random weights and a real tokenizer, `folder/tiny`, and an adapter, `folder/adapter`."""
    command = [str(trainer_python("local")), "-c", MAKE, str(folder), str(tokenizer_dir())]
    completed = subprocess.run(
        command, cwd=ROOT / "examples" / "yardwork", env=environ(folder), capture_output=True, text=True, timeout=120
    )
    assert completed.returncode == 0, completed.stderr[-3000:]


IN_TURN = """
import json, os, sys
from rollyard.cli import main
for number, argv in enumerate(json.load(open("argvs.json"))):
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), fd)
    status = main(argv)
    sys.stdout.flush(), sys.stderr.flush()
    open(f"{number}.status", "w").write(str(status))
"""


def commands(folder: Path, *argvs: Sequence[str], limit_s: float = 240.0) -> list[subprocess.CompletedProcess[str]]:
    """Runs `rollyard …` several times in one process, because the import of torch takes most of the time."""
    home = folder / "commands"
    home.mkdir()
    (home / "argvs.json").write_text(json.dumps(argvs))
    completed = subprocess.run(
        [str(trainer_python("local")), "-c", IN_TURN], cwd=home, env=environ(home), capture_output=True, timeout=limit_s
    )
    results: list[subprocess.CompletedProcess[str]] = []
    for number, argv in enumerate(argvs):
        out, err = (home / f"{number}.{name}" for name in ("out", "err"))
        assert (home / f"{number}.status").exists(), completed.stderr.decode()[-2000:] + err.read_text()[-2000:]
        status = int((home / f"{number}.status").read_text())
        results.append(subprocess.CompletedProcess(argv, status, out.read_text(), err.read_text()))
    return results


def run_inside(folder: Path, home: Path, limit_s: float) -> None:
    """Runs a folder of tests in a process of that environment. If one was skipped, the caller is skipped as well."""
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={folder}", f"--basetemp={home / 'inside'}"]
    completed = subprocess.run(
        [str(trainer_python("local")), "-m", "pytest", *options, str(folder)],
        cwd=ROOT,
        env=environ(home / "hf"),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert completed.returncode == 0, completed.stdout[-6000:] + completed.stderr[-2000:]
    if "skipped" in completed.stdout.splitlines()[-1]:
        pytest.skip(completed.stdout[-2000:])


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Generator[dict[str, Any], None, None]:
    """Runs the engine, and yields the object that it prints when it is ready."""
    command = [str(trainer_python("local")), "-m", "rollyard", "engine", "--model", str(model), "--port", "0", "--json"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*command, *options], stdout=subprocess.PIPE, stderr=errors, env=environ(log.parent), text=True
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, log.read_text(errors="replace")[-3000:]
            yield json.loads(line)
        finally:
            process.terminate()
            try:
                status = process.wait(END_S)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
    assert status == 0, log.read_text(errors="replace")[-3000:]
    assert not Path(f"/tmp/perf-{process.pid}.map").exists(), "torch's oneDNN left a file"
