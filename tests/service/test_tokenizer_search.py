"""The tokenizer of an engine that reports a hub name, as `vllm serve Qwen/Qwen3-8B` does: found without being named."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
from collections.abc import Generator
from pathlib import Path

import huggingface_hub.constants
import pytest

from rollyard.pipeline import tokenizer_search
from rollyard.testing.script import FolderTokenizer
from rollyard.testing.scripted_engine import ScriptedEngine
from rollyard.testing.tokenizer_files import tokenizer_dir
from rollyard.tokens.hub import download_tokenizer
from tests.embedded.index import REPOSITORY, REVISION, Index, serving
from tests.service.site import Site, open_site, scripted

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Index, None, None]:
    """A hub with the tokenizer, and an empty cache of it on this machine."""
    folder, cache = tmp_path / "repository", tmp_path / "hub"
    shutil.copytree(tokenizer_dir(), folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    with serving(Index(folder=folder)) as index:
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", index.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(cache))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))  # it reads the variable at import
        yield index


def reporting(root: str, model: str = "scripted") -> ScriptedEngine:
    engine = scripted()
    engine.root, engine.model = root, model
    return engine


def without_token(path: Path, content: str) -> None:
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] != content]
    path.write_text(json.dumps(tokenizer))


async def add(site: Site, engine: ScriptedEngine, **fields: object) -> tuple[int, dict[str, object]]:
    answer = await site.post("/v1/engines", {"id": "e1", "url": engine.url, **fields})
    return answer.status, answer.body


async def rolls(site: Site) -> None:
    """A rollout is scored and trainable, so its tokenizer is the engine's."""
    await site.submit("r1")
    assert (await site.ended("r1"))["reward"] == 1.0
    (trace,) = (await site.get("/v1/rollouts/r1/traces")).body["traces"]
    assert (trace["tokenizer_verified"], trace["trainable"]) == (True, True)


@pytest.mark.parametrize(("root", "model"), [(REPOSITORY, "scripted"), ("/models/tiny", REPOSITORY)])
async def test_a_hub_name_is_downloaded_once(
    hub: Index, tmp_path: Path, root: str, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with reporting(root, model) as engine, open_site(tmp_path) as site:
        with caplog.at_level(logging.INFO, "rollyard.tokens"):
            assert (await add(site, engine))[0] == 201
        (done,) = [record for record in caplog.records if record.message == "tokenizer downloaded"]
        assert (done.tokenizer, done.revision) == (REPOSITORY, REVISION)  # type: ignore[attr-defined]
        await rolls(site)
    assert not [*(tmp_path / "hub").rglob("*.safetensors")], "only the tokenizer is downloaded"
    hub.folder = None
    async with reporting(root, model) as engine, open_site(tmp_path / "other") as site:
        assert (await add(site, engine))[0] == 201, "it is in the cache now"


async def test_a_named_tokenizer_is_downloaded_too(hub: Index, tmp_path: Path) -> None:
    async with reporting("/models/tiny") as engine, open_site(tmp_path) as site:
        assert (await add(site, engine, tokenizer=REPOSITORY))[0] == 201
        await rolls(site)


async def test_a_downloaded_tokenizer_that_is_not_the_engines_is_refused(hub: Index, tmp_path: Path) -> None:
    assert hub.folder is not None
    without_token(hub.folder / "tokenizer.json", "<|im_start|>")
    async with reporting(REPOSITORY) as engine, open_site(tmp_path) as site:
        _, body = await add(site, engine)
    assert body["code"] == "tokenizer_mismatch" and REPOSITORY in str(body["detail"]), body


async def test_an_engine_can_serve_its_tokenizer(tmp_path: Path) -> None:
    async with reporting("/models/of/another/machine") as engine, open_site(tmp_path) as site:
        engine.tokenizer_folder = tokenizer_dir()
        assert (await add(site, engine))[0] == 201
        await rolls(site)


async def test_files_with_another_digest_than_the_listed_one_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reporting("/models/of/another/machine") as engine, open_site(tmp_path) as site:
        engine.tokenizer_folder = tokenizer_dir()
        with monkeypatch.context() as patch:
            patch.setattr(hashlib, "file_digest", lambda *_: hashlib.sha256(b"something else"))
            _, body = await add(site, engine)
        assert "arrived with another digest" in str(body["detail"]), body
        assert not [*(tmp_path / "data" / "tokenizers").glob("*")], "nothing of it is stored"


async def test_an_error_lists_everything_that_was_tried_and_the_fix(
    hub: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    async with reporting("Qwen/Qwen3-8B") as engine, open_site(tmp_path) as site:
        _, body = await add(site, engine)
    assert body["code"] == "tokenizer_not_found" and body["detail"] == (
        "the tokenizer of engine e1 (model 'Qwen/Qwen3-8B') was not found. "
        "Tried: Qwen/Qwen3-8B in the local hub cache (not there); "
        "a download of Qwen/Qwen3-8B from the hub (offline mode is set (HF_HUB_OFFLINE)); "
        "the engine itself (it does not serve its tokenizer). "
        "To fix it, on a machine with a network, run "
        "`hf download Qwen/Qwen3-8B --include 'tokenizer*' 'chat_template*' 'special_tokens_map.json'`; "
        "or name a folder that has tokenizer.json and tokenizer_config.json: --tokenizer PATH"
    )


async def test_an_engine_comes_up_when_its_tokenizer_is_there(
    hub: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_search, "RETRY_S", 0.0)
    folder, hub.folder = hub.folder, None
    async with reporting(REPOSITORY) as engine:
        table = {"id": "e1", "url": engine.url}
        async with open_site(tmp_path, engines=[table], health_s=0.1) as site, asyncio.timeout(90):
            while "was not found" not in str((listed := (await site.get("/v1/engines")).body["engines"]) and listed[0]):
                await asyncio.sleep(0.05)
            assert listed[0]["state"] == "down"
            hub.folder = folder
            await rolls(site)


async def test_engines_that_report_the_same_folder_of_other_machines_have_their_own_tokenizers(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tokenizer_dir(), other)
    without_token(other / "tokenizer.json", "<|im_start|>")
    async with reporting("/models/m") as first, reporting("/models/m") as second, open_site(tmp_path) as site:
        first.tokenizer_folder, second.tokenizer_folder = tokenizer_dir(), other
        second.tokenizer = FolderTokenizer(other)
        assert (await add(site, first))[0] == 201
        status, body = await add(site, second, id="e2")
        assert status == 201, body


async def test_a_failed_download_is_not_repeated_at_once(
    hub: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = list[str]()

    async def counted(name: str) -> object:
        downloads.append(name)
        return await download_tokenizer(name)

    monkeypatch.setattr(tokenizer_search, "download_tokenizer", counted)
    async with reporting("no-such/model") as engine, open_site(tmp_path) as site:
        for _ in range(2):
            _, body = await add(site, engine)
            assert "a download of no-such/model from the hub (RepositoryNotFound" in str(body["detail"]), body
        assert downloads == ["no-such/model"]
        monkeypatch.setattr(tokenizer_search, "RETRY_S", 0.0)
        await add(site, engine)
    assert downloads == ["no-such/model"] * 2


async def test_a_download_has_a_deadline(hub: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard.tokens.hub.DOWNLOAD_S", 0.01)
    async with reporting(REPOSITORY) as engine, open_site(tmp_path) as site:
        _, body = await add(site, engine)
    assert f"a download of {REPOSITORY} from the hub (not finished within 0.01 s)" in str(body["detail"]), body
