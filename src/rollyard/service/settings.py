"""What an operator can set, in one frozen model, and where each value came from.

Four places, in this order: flags, ROLLYARD_* environment variables, one TOML file, the defaults here.

Invariants. A key that nobody knows is an error that names it and the nearest one that exists; for environment
variables only where it looks like a slip of the pen, since that prefix is shared with other programs. Secrets are
`SecretStr`: they show in no repr, log or listing. It is longer than other files because it is the list of all settings.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, model_validator

from rollyard.core.ceilings import Ceilings
from rollyard.core.egress import EgressCeiling
from rollyard.sandbox.base import SandboxLimits
from rollyard.service.egress import Host, Method, Mirrors, PrivateHost, ceiling_of

PREFIX = "ROLLYARD_"
_NOT_SETTINGS = ("CONFIG", "URL", "TOKEN")  # ROLLYARD_… that the client and the loader read themselves

FIRST_UID, LAST_UID = 1000, (1 << 32) - 3
"""Of sandboxes: below are the system's own, above it are `nobody` of 32 bits and −1, which is no user."""


class SettingsError(Exception):
    """A setting that cannot be. The message says which, from where, and what would be right."""


def _split(value: object) -> object:
    """A list as text: JSON if it begins like it, else comma-separated."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ValueError(f"this begins like a JSON list, but is none: {error}") from error
    return [part.strip() for part in value.split(",") if part.strip()]


def _table(value: object) -> object:
    """A table as text is JSON."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise ValueError(f"a JSON object was expected: {error}") from error


def _url_only(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


def _expand(value: object) -> object:
    return Path(value).expanduser() if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(_split)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SomePath = Annotated[Path, BeforeValidator(_expand)]


def data_home(environ: Mapping[str, str]) -> Path:
    """Where data lies when nobody says: $XDG_DATA_HOME/rollyard, else ~/.local/share/rollyard."""
    base = environ.get("XDG_DATA_HOME")
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    return (Path(base).expanduser() if base else home / ".local" / "share") / "rollyard"


class EngineSettings(BaseModel):
    """One `[[engines]]` table. Only the URL is needed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://", description="Where the engine is.")
    id: str = Field(default="", description="A name for it; empty: made from the URL.")
    kind: Literal["vllm", "sglang", "openai", "prorl"] = Field(default="vllm", description="Which API it speaks.")
    policy: str = Field(default="default", description="Whose weights it serves.")
    model: str = Field(default="", description="The model's name there; empty: the first that it lists.")
    role: Literal["policy", "judge"] = Field(default="policy", description="What it is for.")
    tokenizer: str = Field(default="", description="A folder or hub name; empty: as the engine says.")
    renderer: str = Field(default="", description="The chat renderer; empty: by the model's name.")
    capacity: Count = Field(default=256, description="Sessions it should hold at once.")
    admission: Literal["adaptive", "fixed"] = Field(
        default="adaptive", description="Sessions it gets: as its KV cache allows, up to its capacity, or just that."
    )
    api_key: SecretStr = Field(default=SecretStr(""), description="Sent to the engine as a bearer token.")
    trust_tokenizer: bool = Field(default=False, description="Train on it even if it cannot show its tokenizer.")


Engines = Annotated[tuple[Annotated[EngineSettings, BeforeValidator(_url_only)], ...], BeforeValidator(_split)]


class McpServerSettings(BaseModel):
    """One `[mcp_servers.NAME]` table: an MCP server that tasks may name. It speaks streamable HTTP."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=r"^https?://", description="Where the server is.")
    headers: dict[str, SecretStr] = Field(default={}, description="Sent with every request to it; never shown inside.")


McpServers = Annotated[dict[str, Annotated[McpServerSettings, BeforeValidator(_url_only)]], BeforeValidator(_table)]


GymServers = Annotated[dict[str, Annotated[str, Field(pattern=r"^https?://")]], BeforeValidator(_table)]


class Settings(BaseModel):
    """See the module. Each field's description is what `rollyard config` prints."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address to listen on; beyond loopback, set tokens too.")
    port: int = Field(default=8127, ge=0, le=65535, description="Port to listen on; 0: any free one, told at start.")
    hosts: Words = Field(default=(), description="Further names (or name:port) that a Host header may have.")
    data_dir: SomePath = Field(
        default_factory=lambda: data_home(os.environ), description="Where everything that must last is kept."
    )
    store: str = Field(
        default="", description="The SQLite file, or postgresql://…; empty: rollyard.db in data_dir.", repr=False
    )
    tls: Literal["off", "own"] = Field(
        default="off", description="own: serve HTTPS with a certificate that is made here, and that the URL names."
    )
    tls_cert: SomePath | None = Field(default=None, description="Serve HTTPS with this certificate chain (PEM).")
    tls_key: SomePath | None = Field(default=None, description="The key of tls_cert (PEM).")
    token_file: SomePath | None = Field(
        default=None, description="Where the first start puts the admin token it makes."
    )
    admin_tokens: Secrets = Field(default=(), description="Tokens that may do everything; @FILE: those in a file.")
    node_tokens: Secrets = Field(default=(), description="Tokens that nodes join with; @FILE: those in a file.")
    trainer_tokens: Secrets = Field(default=(), description="Tokens for runs and rollouts; @FILE: those in a file.")

    runtimes: Words = Field(default=("bubblewrap",), min_length=1, description="Sandbox runtimes that tasks may use.")
    runtime: str = Field(default="bubblewrap", description="The runtime of a task that names none.")
    images: Words = Field(
        default=(), description="Folders that tasks' images may lie in, beside what `rollyard images` keeps."
    )
    sandbox_memory_bytes: int = Field(default=8 << 30, ge=1 << 20, description="Memory of a sandbox that names none.")
    sandbox_processes: Count = Field(default=2048, description="Processes of a sandbox that names none.")
    sandbox_disk_bytes: int = Field(default=20 << 30, ge=1 << 20, description="Disk of a sandbox that names none.")
    sandbox_files: int = Field(default=1_000_000, ge=1000, description="Files of a sandbox that names no number.")
    sandbox_open_files: Count = Field(default=4096, description="Open files of each process in a sandbox.")
    sandbox_cpus: float | None = Field(default=None, gt=0, description="CPUs of a sandbox that names none; unset: all.")
    max_task_memory_bytes: int = Field(
        default=1 << 40, ge=1 << 20, description="Memory that a task may ask for, at most."
    )
    max_task_disk_bytes: int = Field(default=4 << 40, ge=1 << 20, description="Disk that a task may ask for, at most.")
    max_task_files: int = Field(default=10_000_000, ge=1, description="Files that a task may ask for, at most.")
    max_task_cpus: float = Field(default=1024, gt=0, description="CPUs that a task may ask for, at most.")
    max_task_processes: Count = Field(default=65_536, description="Processes that a task may ask for, at most.")
    max_task_s: Seconds = Field(
        default=7 * 86_400.0, description="Seconds that a task may ask for in a stage, at most."
    )
    sandbox_uids: str = Field(
        default="200000-265535",
        pattern=r"^(\d+-\d+)?$",
        description="Run by root: the host's uids for sandboxes, one each; empty: root itself, which is less safe.",
    )
    oci_command: str = Field(default="", description='The container engine ("podman --runtime runc"); empty: as found.')
    oci_image: str = Field(default="", description="The image of containers for tasks that name none.")
    egress_hosts: Annotated[tuple[Host, ...], BeforeValidator(_split)] = Field(
        default=(),
        description="Hosts that tasks may ask to reach: NAME, *.NAME or *, with :PORT if not 80 and 443; none: none.",
    )
    egress_methods: Annotated[tuple[Method, ...], BeforeValidator(_split)] = Field(
        default=("GET", "HEAD"), min_length=1, description="Methods of plain HTTP that tasks may ask for."
    )
    egress_private: Annotated[tuple[PrivateHost, ...], BeforeValidator(_split)] = Field(
        default=(), description="HOST:PORT of yours that may have private addresses; others never may."
    )
    egress_mirrors: Annotated[Mirrors, BeforeValidator(_table)] = Field(
        default={}, description="Package mirrors (pip, npm, apt): URLs that tasks with a network are set up for."
    )
    egress_bytes: int = Field(
        default=1 << 30, ge=1, description="Bytes that one attempt may send and receive outside, together."
    )
    egress_connections: Count = Field(
        default=32, le=1024, description="Connections outside that a sandbox may have open."
    )
    layer_bytes: int = Field(
        default=20 << 30,
        ge=0,
        description="Disk that kept set-ups may take, per runtime, and a file for each 16 KiB of it.",
    )

    task_folders: Words = Field(default=(), description="Folders that draws and evaluations may read task files from.")

    engines: Engines = Field(default=(), description="Engines to begin with: URLs or tables.")
    engine_wait_s: Seconds = Field(default=120.0, description="How long a rollout waits for an engine to be up.")
    health_s: Seconds = Field(default=2.0, description="Between two looks at the health of an engine.")

    mcp_servers: McpServers = Field(default={}, description="MCP servers that tasks may name: URLs or tables, by name.")

    gym_servers: GymServers = Field(
        default={}, description="NeMo Gym resources servers that tasks may name: URLs, by name."
    )

    prorl: bool = Field(
        default=False, description="Answer the reference system's own API too: /start, /process and so on."
    )
    prorl_tokenizer: str = Field(default="", description="Tokenizer of engines added by /add_llm_server.")
    prorl_images: str = Field(
        default="",
        description="Images of its SWE tasks: a folder of .sif files or a template, as `tasks import` takes.",
    )
    prorl_timeout_s: Seconds = Field(default=900.0, description="How long a /process waits before it answers 504.")

    init_slots: Count = Field(default=16, description="Rollouts being set up at once.")
    run_slots: Count = Field(default=256, description="Agents at work at once.")
    eval_slots: Count = Field(default=32, description="Rollouts being scored at once.")
    ready_slots: int = Field(default=16, ge=0, le=1_000_000, description="Set-up rollouts that may wait for RUN.")
    max_live: Count | None = Field(default=None, description="Budget of live sandboxes; unset: the sum of all slots.")
    max_queued: Count = Field(default=100_000, le=10_000_000, description="Queued rollouts; beyond it submits get 429.")
    max_attempts: Count = Field(default=3, description="Attempts at a rollout when infrastructure fails.")
    eval_attempts: Count = Field(default=3, description="Attempts at scoring one of them.")
    drain_s: float = Field(default=60.0, ge=0, allow_inf_nan=False, description="What RUN and EVAL get at shutdown.")
    on_term: Literal["drain", "stop"] = Field(
        default="drain",
        description="At SIGTERM: drain, or give all back at once, where a batch system signals sandboxes as well.",
    )
    retain_s: Seconds = Field(default=7 * 86_400.0, description="How long what has ended is kept; see Operate.")

    fleet: Literal["nodes", "ray"] | None = Field(
        default=None, description="Who runs rollouts: unset: this process; nodes: those that join; ray: one a Ray node."
    )
    ray_address: str = Field(default="", description="The Ray cluster of a fleet; empty: one is started here.")
    head_url: str = Field(default="", description="Where nodes find this service; empty: where it listens.")
    plain_http_nodes: bool = Field(
        default=False, description="In a fleet beyond loopback: talk to nodes without TLS, over a network you trust."
    )
    loopback_engines: bool | None = Field(
        default=None,
        description="In a fleet: accept engines at loopback addresses; unset: only if the head itself listens on one.",
    )
    node_lease_s: Seconds = Field(default=30.0, description="A node that is not heard of for so long is lost.")
    node_hold_s: Seconds = Field(default=600.0, description="So long a node keeps what it has without a head.")

    max_body_bytes: int = Field(default=64 << 20, ge=1024, description="Largest request body.")
    max_header_bytes: int = Field(
        default=32 << 10, ge=1024, le=1 << 20, description="Largest headers of a request, its URL included."
    )
    max_headers: Count = Field(default=128, description="Headers of a request, at most.")
    max_connections: Count = Field(
        default=4096, description="Open connections to the port; never more than half of the process's open files."
    )
    max_connections_per_address: Count = Field(
        default=2048, description="Of them, those from one IPv4 address or one /64 of IPv6."
    )
    http_header_s: Seconds = Field(default=10.0, description="Seconds for the headers of a request to come.")
    http_body_s: Seconds = Field(
        default=60.0, description="Seconds for a body to come, and one more for each KiB that came."
    )
    http_idle_s: Seconds = Field(default=75.0, description="Seconds that a connection may be open without a request.")
    http_unread_s: Seconds = Field(default=120.0, description="Seconds that a client may read nothing of its answer.")
    max_wait_s: float = Field(default=60.0, ge=0, allow_inf_nan=False, description="Longest long-poll; others are cut.")

    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="What is logged.")
    log_format: Literal["console", "json"] = Field(default="console", description="How it is logged, on stderr.")
    otlp_endpoint: str = Field(default="", description="Where OpenTelemetry spans go; empty: nowhere.")

    @model_validator(mode="before")
    @classmethod
    def _default_runtime_is_allowed(cls, data: Any) -> Any:
        """Who allows only another runtime means that one: the first named becomes the default."""
        if isinstance(data, dict) and "runtime" not in data and "runtimes" in data:
            names = _split(data["runtimes"])
            if isinstance(names, (list, tuple)) and names and "bubblewrap" not in names:
                return {**data, "runtime": names[0]}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.runtime not in self.runtimes:
            raise ValueError(f"runtime {self.runtime!r} is not among runtimes ({', '.join(self.runtimes)})")
        uids = self.uid_range
        if uids is not None and not (uids and uids.start >= FIRST_UID and uids.stop <= LAST_UID + 1):
            raise ValueError(f"sandbox_uids: a range upward within {FIRST_UID}-{LAST_UID} was expected")
        scheme, separator, _ = self.store.partition("://")
        if separator and scheme not in ("sqlite", "postgresql", "postgres"):
            raise ValueError(f"store: a SQLite file or postgresql://… was expected, not {scheme}://")
        if (self.tls_cert is None) is not (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.is_in_clear and not self.plain_http_nodes:
            raise ValueError(
                "a fleet beyond loopback needs TLS, because nodes are sent keys and prompts: set tls = own, or tls_cert"
                " and tls_key; or set plain_http_nodes if you trust the network"
            )
        if self.is_in_clear and any(server.headers for server in self.mcp_servers.values()):
            raise ValueError("mcp_servers: their headers would cross to the nodes in the clear: set tls = own")
        return self

    @property
    def has_tls(self) -> bool:
        return self.tls == "own" or self.tls_cert is not None

    @property
    def is_in_clear(self) -> bool:
        """What a fleet's nodes are sent crosses a network unencrypted."""
        return self.fleet is not None and not self.is_loopback and not self.has_tls

    @property
    def ceilings(self) -> Ceilings:
        return Ceilings(
            memory_bytes=self.max_task_memory_bytes,
            disk_bytes=self.max_task_disk_bytes,
            cpus=self.max_task_cpus,
            processes=self.max_task_processes,
            files=self.max_task_files,
            seconds=self.max_task_s,
        )

    @property
    def egress(self) -> EgressCeiling:
        return ceiling_of(
            hosts=self.egress_hosts,
            methods=self.egress_methods,
            private=self.egress_private,
            mirrors=self.egress_mirrors,
            most_bytes=self.egress_bytes,
            connections=self.egress_connections,
        )

    @property
    def sandbox_limits(self) -> SandboxLimits:
        """Of a task that names none. They are never above what a task may ask for."""
        cpus = self.sandbox_cpus
        if self.max_task_cpus < (cpus or os.cpu_count() or 1):
            cpus = self.max_task_cpus
        return SandboxLimits(
            memory_bytes=min(self.sandbox_memory_bytes, self.max_task_memory_bytes),
            processes=min(self.sandbox_processes, self.max_task_processes),
            disk_bytes=min(self.sandbox_disk_bytes, self.max_task_disk_bytes),
            open_files=self.sandbox_open_files,
            cpus=cpus,
            files=min(self.sandbox_files, self.max_task_files),
        )

    @property
    def uid_range(self) -> range | None:
        first, found, last = self.sandbox_uids.partition("-")
        return range(int(first), int(last) + 1) if found else None

    @property
    def image_folders(self) -> tuple[Path, ...]:
        return tuple(Path(folder).expanduser() for folder in self.images)

    @property
    def task_folder_paths(self) -> tuple[Path, ...]:
        return tuple(Path(folder).expanduser() for folder in self.task_folders)

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Names beside those that the gate knows by itself (the address that a call came to, and loopback's names)."""
        is_name = not re.fullmatch(r"[0-9.]+|.*:.*|localhost", self.host)
        return (*self.hosts, self.host) if is_name else self.hosts

    @property
    def store_path(self) -> Path:
        named = self.store.removeprefix("sqlite://")
        return Path(named).expanduser() if named else self.data_dir / "rollyard.db"

    @property
    def store_place(self) -> str | Path:
        """A URL of PostgreSQL, or the file."""
        return self.store if self.store.startswith(("postgresql://", "postgres://")) else self.store_path

    @property
    def node_token_path(self) -> Path:
        return self.data_dir / "node-token"

    @property
    def token_path(self) -> Path:
        return self.token_file or self.data_dir / "token"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and for each field where its value came from."""

    settings: Settings
    sources: dict[str, str]


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], toml_path: Path | None = None) -> Loaded:
    """See the module. A flag that is None was not given. Raises `SettingsError`."""
    values: dict[str, object] = {"data_dir": data_home(environ)}
    sources: dict[str, str] = dict.fromkeys(Settings.model_fields, "default")
    file = _find_file(environ, toml_path)
    if file is not None:
        for name, value in _read_toml(file).items():
            _known(name, f"in {file}")
            values[name], sources[name] = value, f"file {file}"
    for variable, value in environ.items():
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or variable.removeprefix(PREFIX) in _NOT_SETTINGS or not value:
            continue  # an empty variable is as good as none
        if name in Settings.model_fields:
            values[name], sources[name] = value, f"env {variable}"
        elif difflib.get_close_matches(name, Settings.model_fields, 1, cutoff=0.85):
            _known(name, f"as {variable} in the environment", PREFIX)
    for name, value in flags.items():
        if value is not None:
            _known(name, "among the flags")
            values[name], sources[name] = value, "flag"
    try:
        return Loaded(Settings.model_validate(values), sources)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(item, sources) for item in error.errors())) from error


_TABLES: Mapping[str, type[BaseModel]] = {"mcp_servers": McpServerSettings}


def _find_file(environ: Mapping[str, str], given: Path | None) -> Path | None:
    named = given or (Path(environ[f"{PREFIX}CONFIG"]) if environ.get(f"{PREFIX}CONFIG") else None)
    if named is not None:
        named = named.expanduser()
        if not named.is_file():
            raise SettingsError(f"there is no settings file {named}")
        return named
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    config = Path(environ["XDG_CONFIG_HOME"]) if environ.get("XDG_CONFIG_HOME") else home / ".config"
    places = (Path("rollyard.toml"), config / "rollyard" / "config.toml")
    return next((place for place in places if place.is_file()), None)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise SettingsError(f"{path} cannot be read as TOML: {error}") from error


def _known(name: str, where: str, prefix: str = "") -> None:
    if name in Settings.model_fields:
        return
    near = difflib.get_close_matches(name, Settings.model_fields, 1, cutoff=0.5)
    hint = f"; did you mean {_shown(near[0], prefix)}?" if near else ""
    raise SettingsError(f"there is no setting {_shown(name, prefix)} ({where}){hint}")


def _shown(name: str, prefix: str) -> str:
    return f"{prefix}{name.upper() if prefix else name}"


def _explain(item: Any, sources: Mapping[str, str]) -> str:
    """One validation error as a sentence. Never the value: it may be a secret."""
    path = ".".join(str(part) for part in item["loc"])
    field = str(item["loc"][0]) if item["loc"] else ""
    source = f" (from {sources[field]})" if sources.get(field, "default") != "default" else ""
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        known = _TABLES.get(field, EngineSettings).model_fields
        near = difflib.get_close_matches(str(item["loc"][-1]), known, 1, cutoff=0.5)
        message = "there is no such setting" + (f"; did you mean {near[0]}?" if near else "")
    return f"{path}{source}: {message}" if path else message
