"""An image that a task names is checked at submit, so that it does not fail n times at INIT."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollyard.sandbox.images import ImageInUse, ImageStore
from tests.sandbox.registry import BUSYBOX, Registry, busybox, file, pack, tar
from tests.service.site import engine_table, finish, open_site, scripted, shell, task

pytestmark = pytest.mark.slow


def with_image(image: str, **sandbox: Any) -> dict[str, Any]:
    return {"task": task(sandbox={"image": image, **sandbox})}


async def pulled(folder: Path, name: str = "busy:1") -> ImageStore:
    """The service's image store, with one image as a folder."""
    store = ImageStore(folder / "data" / "images")
    async with Registry() as registry:
        layer = tar(*busybox(), file("etc/mark", "of-the-image"))
        await store.pull(registry.put(name, pack(layer, env=["TASTE=sweet"])), name=name)
    return store


@pytest.mark.skipif(not BUSYBOX.exists(), reason="this machine has no busybox")
async def test_a_missing_image_is_refused_at_submit_and_found_as_soon_as_it_is_pulled(tmp_path: Path):
    async with open_site(tmp_path, runtimes=["bubblewrap", "local"]) as site:
        await site.hold()
        answer = await site.post("/v1/rollouts", with_image("busy:1"))
        assert (answer.status, answer.code) == (422, "image_missing")
        assert "'busy:1' is not on this machine" in answer.body["detail"]
        assert "rollyard images pull busy:1" in answer.body["detail"]
        store = await pulled(tmp_path)
        assert (await site.post("/v1/rollouts", with_image("busy:1"))).status == 202
        answer = await site.post("/v1/rollouts", with_image("busy:1", runtime="local"))
        assert (answer.status, answer.code) == (422, "image_missing")
        assert "the runtime local has no images" in answer.body["detail"]
        store.remove("busy:1")
        assert (await site.post("/v1/rollouts", with_image("busy:1"))).code == "image_missing"
        answer = await site.post("/v1/rollouts", with_image("../data/images"))
        assert (answer.status, answer.code) == (403, "runtime_not_allowed")


@pytest.mark.skipif(not BUSYBOX.exists(), reason="this machine has no busybox")
async def test_a_rollout_runs_in_the_image_it_names_with_its_variables(tmp_path: Path):
    store = await pulled(tmp_path)
    command = "test $(cat /etc/mark) = of-the-image && test $TASTE = sweet && echo it is > done"
    async with (
        scripted(shell(command), finish()) as engine,
        open_site(tmp_path, runtimes=["bubblewrap"], engines=[engine_table(engine)]) as site,
    ):
        body = with_image("busy:1")
        body["task"]["data"] = {"instruction": "look", "checks": ["test $TASTE = sweet && test -s done"]}
        await site.post("/v1/rollouts", {"id": "r1", **body})
        record = await site.ended("r1")
        assert (record["outcome"], record["score"]["reward"]) == ("completed", 1.0), record
    store.remove("busy:1")  # it is no longer in use


@pytest.mark.skipif(not BUSYBOX.exists(), reason="this machine has no busybox")
async def test_an_image_is_not_removed_while_a_rollout_uses_it(tmp_path: Path):
    store = await pulled(tmp_path)
    async with (
        scripted(shell("sleep 1000")) as engine,
        open_site(tmp_path, runtimes=["bubblewrap"], engines=[engine_table(engine)]) as site,
    ):
        await site.post("/v1/rollouts", {"id": "r1", **with_image("busy:1")})
        async with asyncio.timeout(90):
            while (await site.get("/v1/rollouts/r1")).body["state"] != "run":
                await asyncio.sleep(0.02)
        with pytest.raises(ImageInUse):
            store.remove("busy:1")
        assert not store.prune(max_bytes=0).images
        await site.delete("/v1/rollouts/r1")
        await site.ended("r1")
        async with asyncio.timeout(90):
            while site.served.app_state.pipeline.live:
                await asyncio.sleep(0.02)
        store.remove("busy:1")


@pytest.mark.skipif(not BUSYBOX.exists(), reason="this machine has no busybox")
async def test_an_image_removed_after_the_submit_is_an_infrastructure_failure(tmp_path: Path):
    store = await pulled(tmp_path)
    async with (
        scripted() as engine,
        open_site(tmp_path, runtimes=["bubblewrap"], engines=[engine_table(engine)], max_attempts=1) as site,
    ):
        await site.hold()
        await site.post("/v1/rollouts", {"id": "r1", **with_image("busy:1")})
        store.remove("busy:1")
        assert (await site.call("PATCH", "/v1/pools", json={"init": 1})).status == 200
        failure = (await site.ended("r1"))["failure"]
        assert (failure["code"], failure["blame"]) == ("sandbox_start_failed", "infra")
        assert "since the submit: image 'busy:1' is not on this machine" in failure["detail"]
