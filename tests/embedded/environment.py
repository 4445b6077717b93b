"""The embedded engine as a process of its own, in its own virtual environment (scripts/trainer-env local)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.trainers.environment import ROOT, trainer_python

END_S = 20.0

TINY = """
import sys, torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
folder, source = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(source)
tokenizer.save_pretrained(folder)
LlamaForCausalLM(LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=8192, initializer_range=0.25, eos_token_id=tokenizer.eos_token_id,
    bos_token_id=None, pad_token_id=None,
)).save_pretrained(folder)
"""


def environ(home: Path) -> dict[str, str]:
    """One thread: beside other tests, more of them only wait for each other."""
    paths = {"PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **paths, **quiet}


def make_tiny_model(folder: Path, tokenizer: Path) -> Path:
    """A model with random weights and a real tokenizer, as a folder."""
    command = [str(trainer_python("local")), "-c", TINY, str(folder), str(tokenizer)]
    done = subprocess.run(command, env=environ(folder.parent), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def run_inside(folder: Path, home: Path, limit_s: float) -> None:
    """A folder of tests, in a process of that environment: all of them pass, and none is skipped."""
    options = ["-q", "-p", "no:cacheprovider", f"--confcutdir={folder}", f"--basetemp={home / 'inside'}"]
    done = subprocess.run(
        [str(trainer_python("local")), "-m", "pytest", *options, str(folder)],
        cwd=ROOT,
        env=environ(home / "hf"),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-2000:]


@contextmanager
def serving(model: Path, log: Path, *options: str) -> Generator[dict[str, Any], None, None]:
    """What it says when it is ready, while it runs."""
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
    assert not Path(f"/tmp/perf-{process.pid}.map").exists(), "torch's oneDNN left something"
