"""Resources for one command that runs the pipeline's stages without a service."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard.cli._console import CommandError

if TYPE_CHECKING:
    from rollyard.pipeline import StageResources
    from rollyard.sandbox.images import ImageStore

LAYER_BYTES = 1 << 40  # enough for the layers of one command


@asynccontextmanager
async def local_resources(folder: Path, runtime: str) -> AsyncGenerator[StageResources, None]:
    """Opens the stages' resources. Sandboxes and artifacts are below `folder`; images and installed agents are those of
    the service. There is no engine: add one to the router if a model is needed."""
    from rollyard.agents.installation import AgentInstalls
    from rollyard.agents.registry import Agents
    from rollyard.core.texts import unknown
    from rollyard.engines.routing.router import Router, RouterSettings
    from rollyard.pipeline import ArtifactFolder, Renderers, StageResources
    from rollyard.sandbox.layers import LayerCache
    from rollyard.sandbox.python import PythonBuilds
    from rollyard.service.machine import AGENTS, TOKENIZERS, all_environments, mcp_servers
    from rollyard.service.runtimes import NAMES, make_runtime
    from rollyard.service.settings import load_settings

    if runtime not in NAMES:
        raise CommandError(unknown("runtime", runtime, NAMES), "give one of these with --runtime")
    settings = load_settings({}, os.environ, None).settings
    async with (
        make_runtime(runtime, settings, folder / "sandboxes") as opened_runtime,
        LayerCache(opened_runtime.layer_root, LAYER_BYTES, remove=opened_runtime.remove) as layers,
        Router(RouterSettings()) as router,
        all_environments(settings) as environments,
    ):
        yield StageResources(
            runtimes={runtime: opened_runtime},
            default_runtime=runtime,
            router=router,
            environments=environments,
            agents=Agents(installs=AgentInstalls(settings.data_dir / AGENTS)),
            renderers=Renderers(cache=settings.data_dir / TOKENIZERS),
            artifacts=ArtifactFolder(folder / "artifacts"),
            layers={runtime: layers},
            images=_image_store(),
            pythons=PythonBuilds(settings.data_dir / "python"),
            mcp_servers=mcp_servers(settings),
            egress=settings.egress,
        )


def _image_store() -> ImageStore:
    """Returns the service's image store, so that tasks may name the same images."""
    from rollyard.sandbox.images import ImageStore
    from rollyard.service.machine import IMAGES
    from rollyard.service.settings import load_settings

    return ImageStore(load_settings({}, os.environ).settings.data_dir / IMAGES)


def default_runtime() -> str:
    from rollyard.service.settings import load_settings

    return load_settings({}, os.environ).settings.runtime
