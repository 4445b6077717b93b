"""`rollyard demo`: everything real but the model, and it says so."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(120)
def test_the_demo_runs_and_says_who_plays_the_model():
    done = subprocess.run([sys.executable, "-m", "rollyard", "demo"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "scripted engine" in done.stdout
    assert done.stdout.count("completed") == 7
    assert "turn_limit" in done.stdout
    assert "sampled in 3 calls" in done.stdout
