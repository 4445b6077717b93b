"""Tokenizer files that nodes get from their head: only the head's, complete, and once."""

import shutil
from pathlib import Path

import pytest

from rollyard.core.failure import NotFound
from rollyard.fleet.tokenizer_files import TokenizerServer
from rollyard.testing.tokenizer_files import tokenizer_dir
from tests.fleet.fleet_site import loop_node, node_token, open_head
from tests.service.site import TRAINER, engine_table, scripted


async def test_a_list_follows_the_files_and_contains_only_those_of_a_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_dir(), folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    server = TokenizerServer()
    listed = await server.list(str(folder))
    assert "model.safetensors" not in {file.name for file in listed.files} and listed == await server.list(str(folder))
    first = listed.files[0]
    assert await server.read(str(folder), first.sha256) == (folder / first.name).read_bytes()
    (folder / first.name).write_text("{}")
    changed = await server.list(str(folder))
    assert changed.digest != listed.digest
    with pytest.raises(NotFound):
        await server.read(str(folder), first.sha256)
    with pytest.raises(NotFound):
        await server.list(str(tmp_path / "nowhere"))


async def test_a_broken_cache_is_fetched_again_and_partial_downloads_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_dir(), folder)
    cache = tmp_path / "n1" / "tokenizers"
    async with scripted() as engine, open_head(tmp_path, engines=[engine_table(engine, tokenizer=str(folder))]) as site:
        digest = (await site.served.app_state.tokenizers.list(str(folder))).digest
        cached, half = cache / digest, cache / ".part-left"
        for path in (cached, half):
            path.mkdir(parents=True)
            (path / "tokenizer.json").write_text("{}")
        server = site.served.app_state.tokenizers
        read, reads = server.read, list[str]()

        async def counted(source: str, sha256: str) -> bytes:
            reads.append(sha256)
            return await read(source, sha256)

        server.read = counted  # type: ignore[method-assign]
        hidden = tmp_path / "hidden"
        async with loop_node(site, tmp_path, "n1"):
            await site.submit("r1")
            assert (await site.ended("r1"))["reward"] == 1.0
        assert reads == [] and (cached / "tokenizer.json").read_text() == "{}", "its own files are the head's"
        assert not half.exists()

        listed = await server.list(str(folder))
        real_list = server.list

        async def elsewhere(source: str) -> object:
            return listed

        async def from_hidden(source: str, sha256: str) -> bytes:
            reads.append(sha256)
            return await read(str(hidden), sha256)

        folder.rename(hidden)
        server.list, server.read = elsewhere, from_hidden  # type: ignore[method-assign,assignment]
        async with loop_node(site, tmp_path, "n1"):
            await site.submit("r2")
            assert (await site.ended("r2"))["reward"] == 1.0
        assert sorted(reads) == sorted(file.sha256 for file in listed.files)
        assert (cached / "tokenizer.json").read_bytes() == (hidden / "tokenizer.json").read_bytes()
        async with loop_node(site, tmp_path, "n1"):
            await site.submit("r3")
            assert (await site.ended("r3"))["reward"] == 1.0
        assert len(reads) == len(listed.files), "it does not fetch again what it has"
        server.list = real_list  # type: ignore[method-assign]


async def test_only_nodes_get_tokenizer_files(tmp_path: Path) -> None:
    async with scripted() as engine, open_head(tmp_path, engines=[engine_table(engine)]) as site:
        assert (await site.get("/v1/fleet/tokenizers/e1", token=node_token(site))).status == 200
        assert (await site.get("/v1/fleet/tokenizers/e1", token=TRAINER)).code == "forbidden"
        assert (await site.get("/v1/fleet/tokenizers/e9", token=node_token(site))).code == "not_found"
        assert (await site.get("/v1/fleet/tokenizers/e1/0000", token=node_token(site))).code == "not_found"
