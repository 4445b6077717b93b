"""Rollyard: rollouts for reinforcement learning of LLM agents, as a service.

`rollyard.AsyncClient` and `rollyard.Client` talk to a service; `rollyard.Handler` is for those who write an environment
and its agent in one class. They are imported when they are first named, so that `import rollyard` stays light.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard.client import AsyncClient, Client, DrawEnded
    from rollyard.core.version import __version__
    from rollyard.pipeline.handler import Handler

__all__ = ["AsyncClient", "Client", "DrawEnded", "Handler", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("AsyncClient", "Client", "DrawEnded"):
        from rollyard import client

        return getattr(client, name)
    if name == "__version__":
        from rollyard.core.version import __version__

        return __version__
    if name == "Handler":
        from rollyard.pipeline.handler import Handler

        return Handler
    raise AttributeError(f"module 'rollyard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
