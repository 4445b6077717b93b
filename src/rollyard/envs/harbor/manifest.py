"""Parses task.toml. Keys that are used have a type; errors name the file and the key. Other keys become notes."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollyard.core.failure import TaskInvalid

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Network = Literal["public", "no-network", "allowlist"]
Texts = dict[str, str]
ANYWHERE = ("*",)


class Table(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    network_mode: Network | None = None
    allowed_hosts: list[str] = Field(default_factory=list)

    def hosts(self) -> tuple[str, ...] | None:
        """The table's hosts, or None if it does not set any."""
        if self.network_mode == "public":
            return ANYWHERE
        if self.network_mode == "allowlist" or (self.network_mode is None and self.allowed_hosts):
            return tuple(self.allowed_hosts)
        return () if self.network_mode == "no-network" else None


class AgentTable(Table):
    timeout_sec: Seconds | None = None


class VerifierTable(Table):
    timeout_sec: Seconds = 600.0
    env: Texts = Field(default_factory=dict)
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None


class SolutionTable(Table):
    env: Texts = Field(default_factory=dict)


class EnvironmentTable(Table):
    docker_image: str | None = None
    cpus: Annotated[float, Field(gt=0, le=4096)] = 1
    memory_mb: Count = 2048
    storage_mb: Count = 10240
    memory: str | None = None  # "4G", in older task formats
    storage: str | None = None
    gpus: Annotated[int, Field(ge=0)] = 0
    os: str = "linux"
    workdir: str | None = None
    allow_internet: bool | None = None
    env: Texts = Field(default_factory=dict)
    build_timeout_sec: Seconds = 600.0
    mcp_servers: list[Any] = Field(default_factory=list)


class Manifest(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    version: str | float = "1.0"
    schema_version: str | float = "1.0"
    metadata: dict[str, Any] = Field(default_factory=dict)
    task: dict[str, Any] = Field(default_factory=dict)
    steps: list[Any] = Field(default_factory=list)
    agent: AgentTable = Field(default_factory=AgentTable)
    verifier: VerifierTable = Field(default_factory=VerifierTable)
    environment: EnvironmentTable = Field(default_factory=EnvironmentTable)
    solution: SolutionTable = Field(default_factory=SolutionTable)

    @property
    def memory_bytes(self) -> int:
        return _size(self.environment.memory, self.environment.memory_mb, "memory")

    @property
    def disk_bytes(self) -> int:
        return _size(self.environment.storage, self.environment.storage_mb, "storage")

    def unknown_keys(self) -> Iterator[str]:
        yield from sorted(self.model_extra or ())
        for name in ("agent", "verifier", "environment", "solution"):
            yield from (f"{name}.{key}" for key in sorted(getattr(self, name).model_extra or ()))

    def hosts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The hosts that RUN and EVAL request. `agent` and `verifier` take precedence over `environment`, and
        `network_mode` over the older `allow_internet`."""
        common = self.environment.hosts()
        if common is None:
            common = ANYWHERE if self.environment.allow_internet else ()
        run, judging = self.agent.hosts(), self.verifier.hosts()
        return common if run is None else run, common if judging is None else judging

    @property
    def omits_network(self) -> bool:
        return self.environment.allow_internet is None and self.environment.network_mode is None


def read_manifest(path: Path) -> Manifest:
    try:
        return Manifest.model_validate(tomllib.loads(path.read_text()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise TaskInvalid(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise TaskInvalid(f"{path}: {key}: {first['msg']}", field=key) from error


def _size(text: str | None, megabytes: int, key: str) -> int:
    if text is None:
        return megabytes << 20
    match = re.fullmatch(r"\s*([1-9][0-9]*)\s*([KMGT])(i?B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise TaskInvalid(f'task.toml: environment.{key}: a size such as "4G" was expected', field=f"environment.{key}")
    return int(match[1]) << {"K": 10, "M": 20, "G": 30, "T": 40}[match[2].upper()]
