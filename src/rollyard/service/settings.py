"""The settings of a service, in one frozen model, and the source of each value.

Sources, in order of precedence: flags, ROLLYARD_* environment variables, one TOML file, the defaults here.

Invariants. An unknown key is an error that contains the nearest existing one; an unknown environment variable is one
only if it looks like a typing error, because other programs may use the prefix too. Secrets are `SecretStr`: they are
in no repr, log or listing. This file is longer than others because it lists all settings.
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
from rollyard.core.paths import data_home
from rollyard.core.texts import nearest
from rollyard.sandbox.base import SandboxLimits
from rollyard.service.egress import Host, Method, Mirrors, PrivateHost, ceiling_of

PREFIX = "ROLLYARD_"
_NOT_SETTINGS = ("CONFIG", "URL", "TOKEN")  # ROLLYARD_… variables that the client and the loader read

URL = "^https?://"

FIRST_UID, LAST_UID = 1000, (1 << 32) - 3
"""Bounds of the uids of sandboxes: below are the system's own, above are 32-bit `nobody` and −1, which is no user."""


class SettingsError(Exception):
    """An invalid setting. The message contains the setting, its source, and what was expected or what to do."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what} — {remedy}" if remedy else what)
        self.remedy = remedy


def _split(value: object) -> object:
    """Parses a list in text form: JSON if it starts with a bracket, else comma-separated."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise ValueError(f"this starts with [ but is not a JSON list: {error}") from error
    return [part.strip() for part in value.split(",") if part.strip()]


def _table(value: object) -> object:
    """Parses a table in text form, which is JSON."""
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


class EngineSettings(BaseModel):
    """One `[[engines]]` table. Only the URL is required."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=URL, description="URL of the engine.")
    id: str = Field(default="", description="Name of the engine; empty: derived from the URL.")
    kind: Literal["vllm", "sglang", "openai", "prorl"] = Field(default="vllm", description="The engine's API.")
    policy: str = Field(default="default", description="The policy whose weights it serves.")
    model: str = Field(default="", description="Name of the model; empty: the first that it lists.")
    role: Literal["policy", "judge"] = Field(
        default="policy", description="Whether it samples rollouts or scores answers."
    )
    tokenizer: str = Field(default="", description="A folder or hub name; empty: found by its model.")
    renderer: str = Field(default="", description="The chat renderer; empty: chosen by the model's name.")
    capacity: Count = Field(default=256, description="Maximum number of sessions at once.")
    admission: Literal["adaptive", "fixed"] = Field(
        default="adaptive", description="Limit on sessions: what its KV cache allows up to capacity, or capacity."
    )
    api_key: SecretStr = Field(default=SecretStr(""), description="Sent to the engine as a bearer token.")
    trust_tokenizer: bool = Field(
        default=False, description="Train on its tokens even if its tokenizer cannot be verified."
    )


Engines = Annotated[tuple[Annotated[EngineSettings, BeforeValidator(_url_only)], ...], BeforeValidator(_split)]


class McpServerSettings(BaseModel):
    """One `[mcp_servers.NAME]` table: an MCP server that tasks may name. It uses streamable HTTP."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(pattern=URL, description="URL of the server.")
    headers: dict[str, SecretStr] = Field(default={}, description="Sent with every request; not visible in sandboxes.")


McpServers = Annotated[dict[str, Annotated[McpServerSettings, BeforeValidator(_url_only)]], BeforeValidator(_table)]


GymServers = Annotated[dict[str, Annotated[str, Field(pattern=r"^https?://")]], BeforeValidator(_table)]

PLACE = r"^[^:]+:[A-Za-z_]\w*$"
Places = Annotated[dict[str, Annotated[str, Field(pattern=PLACE)]], BeforeValidator(_table)]


class Settings(BaseModel):
    """All settings. `rollyard config` prints the description of each field."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="Address to listen on; beyond loopback it needs tokens.")
    port: int = Field(default=8127, ge=0, le=65535, description="Port to listen on; 0: any free one, printed at start.")
    hosts: Words = Field(default=(), description="Additional names (or name:port) accepted in a Host header.")
    data_dir: SomePath = Field(
        default_factory=lambda: data_home(os.environ), description="Folder of all persistent data."
    )
    store: str = Field(
        default="", description="The SQLite file, or postgresql://…; empty: rollyard.db in data_dir.", repr=False
    )
    tls: Literal["off", "own"] = Field(
        default="off", description="own: serve HTTPS with a self-signed certificate, which the URL pins."
    )
    tls_cert: SomePath | None = Field(default=None, description="Serve HTTPS with this certificate chain (PEM).")
    tls_key: SomePath | None = Field(default=None, description="The key of tls_cert (PEM).")
    token_file: SomePath | None = Field(
        default=None, description="File for the admin token that the first start creates."
    )
    admin_tokens: Secrets = Field(default=(), description="Tokens with full access; @FILE: those in a file.")
    node_tokens: Secrets = Field(default=(), description="Tokens with which nodes join; @FILE: those in a file.")
    trainer_tokens: Secrets = Field(default=(), description="Tokens for runs and rollouts; @FILE: those in a file.")

    runtimes: Words = Field(default=("bubblewrap",), min_length=1, description="Sandbox runtimes that tasks may use.")
    runtime: str = Field(default="bubblewrap", description="The runtime of a task that names none.")
    images: Words = Field(
        default=(), description="Folders of images that tasks may use, besides those of `rollyard images`."
    )
    sandbox_memory_bytes: int = Field(default=8 << 30, ge=1 << 20, description="Default memory limit of a sandbox.")
    sandbox_processes: Count = Field(default=2048, description="Default limit on processes of a sandbox.")
    sandbox_disk_bytes: int = Field(default=20 << 30, ge=1 << 20, description="Default disk limit of a sandbox.")
    sandbox_files: int = Field(default=1_000_000, ge=1000, description="Default limit on files of a sandbox.")
    sandbox_open_files: Count = Field(
        default=4096, description="Default limit on open files of each process in a sandbox."
    )
    sandbox_cpus: float | None = Field(
        default=None, gt=0, description="Default CPU limit of a sandbox; unset: all CPUs."
    )
    max_task_memory_bytes: int = Field(
        default=1 << 40, ge=1 << 20, description="Maximum memory that a task may request."
    )
    max_task_disk_bytes: int = Field(
        default=4 << 40, ge=1 << 20, description="Maximum disk space that a task may request."
    )
    max_task_files: int = Field(
        default=10_000_000, ge=1, description="Maximum number of files that a task may request."
    )
    max_task_cpus: float = Field(default=1024, gt=0, description="Maximum number of CPUs that a task may request.")
    max_task_processes: Count = Field(
        default=65_536, description="Maximum number of processes that a task may request."
    )
    max_task_s: Seconds = Field(
        default=7 * 86_400.0,
        description="Longest deadline of a stage that a task may request; also the default, if shorter.",
    )
    sandbox_uids: str = Field(
        default="200000-265535",
        pattern=r"^(\d+-\d+)?$",
        description="If run as root: host uids for sandboxes, one each; empty: root itself, which is less safe.",
    )
    oci_command: str = Field(
        default="", description='The container engine ("podman --runtime runc"); empty: podman or docker.'
    )
    oci_image: str = Field(default="", description="The image of containers for tasks that name none.")
    egress_hosts: Annotated[tuple[Host, ...], BeforeValidator(_split)] = Field(
        default=(),
        description="Hosts that tasks may request: NAME, *.NAME or *, with :PORT if not 80 and 443; empty: no hosts.",
    )
    egress_methods: Annotated[tuple[Method, ...], BeforeValidator(_split)] = Field(
        default=("GET", "HEAD"), min_length=1, description="Methods of plain HTTP that tasks may request."
    )
    egress_private: Annotated[tuple[PrivateHost, ...], BeforeValidator(_split)] = Field(
        default=(), description="HOST:PORT that may resolve to private addresses; other hosts never may."
    )
    egress_mirrors: Annotated[Mirrors, BeforeValidator(_table)] = Field(
        default={}, description="Package mirrors (pip, npm, apt): URLs configured in sandboxes with egress."
    )
    egress_bytes: int = Field(
        default=1 << 30, ge=1, description="Bytes that one attempt may send and receive through egress, in total."
    )
    egress_connections: Count = Field(
        default=32, le=1024, description="Egress connections that a sandbox may have open."
    )
    layer_bytes: int = Field(
        default=20 << 30,
        ge=0,
        description="Disk space for layers, per runtime; they may have one file for each 16 KiB of it.",
    )

    task_folders: Words = Field(default=(), description="Folders from which draws and evaluations may read task files.")
    environments: Places = Field(
        default={},
        description="Environments that no package registers, by name: MODULE:CLASS, or FILE.py:CLASS below the folder"
        " of the TOML file. Nodes of a fleet need the same module or file.",
    )

    engines: Engines = Field(default=(), description="Engines to add at start: URLs or tables.")
    engine_wait_s: Seconds = Field(default=120.0, description="How long a rollout waits for an engine to be up.")
    health_s: Seconds = Field(default=2.0, description="Seconds between two health checks of an engine.")

    mcp_servers: McpServers = Field(default={}, description="MCP servers that tasks may name: URLs or tables, by name.")

    gym_servers: GymServers = Field(
        default={}, description="NeMo Gym resources servers that tasks may name: URLs, by name."
    )

    prorl: bool = Field(default=False, description="Also serve the API of ProRL Agent: /start, /process and so on.")
    prorl_tokenizer: str = Field(default="", description="Tokenizer of engines added with /add_llm_server.")
    prorl_images: str = Field(
        default="",
        description="Images of its SWE tasks: a folder of .sif files or a template, as for `tasks import`.",
    )
    prorl_timeout_s: Seconds = Field(default=900.0, description="How long a /process call waits before it returns 504.")

    init_slots: Count = Field(default=16, description="Rollouts in INIT at once.")
    run_slots: Count = Field(default=256, description="Rollouts in RUN at once.")
    eval_slots: Count = Field(default=32, description="Rollouts in EVAL at once.")
    ready_slots: int = Field(default=16, ge=0, le=1_000_000, description="Size of the READY buffer.")
    max_live: Count | None = Field(
        default=None, description="Maximum number of live rollouts, from INIT to EVAL; unset: the sum of all slots."
    )
    max_runs: Count = Field(
        default=5000, description="Maximum number of runs that one token may have created; evaluations have a run each."
    )
    max_draws: Count = Field(
        default=500, description="Maximum number of active draws in the runs that one token has created."
    )
    max_queued: Count = Field(
        default=100_000, le=10_000_000, description="Maximum number of queued rollouts; further submits get 429."
    )
    max_attempts: Count = Field(
        default=3, description="Maximum number of attempts at a rollout if infrastructure fails."
    )
    eval_attempts: Count = Field(default=3, description="Maximum number of attempts at scoring a rollout.")
    drain_s: float = Field(default=60.0, ge=0, allow_inf_nan=False, description="Seconds for RUN and EVAL at shutdown.")
    on_term: Literal["drain", "stop"] = Field(
        default="drain",
        description="At SIGTERM: drain, or requeue all work at once, for batch systems that also signal sandboxes.",
    )
    retain_s: Seconds = Field(default=7 * 86_400.0, description="How long ended work is kept; see Operate.")

    fleet: Literal["nodes", "ray"] | None = Field(
        default=None,
        description="What runs rollouts: unset: this process; nodes: nodes that join; ray: a node per Ray node.",
    )
    ray_address: str = Field(default="", description="Address of the fleet's Ray cluster; empty: start one here.")
    head_url: str = Field(default="", description="URL of this service for nodes; empty: where it listens.")
    plain_http_nodes: bool = Field(
        default=False, description="In a fleet beyond loopback: allow nodes without TLS, on a network you trust."
    )
    loopback_engines: bool | None = Field(
        default=None,
        description="In a fleet: accept engines at loopback addresses; unset: only if the head itself listens on one.",
    )
    node_lease_s: Seconds = Field(default=30.0, description="A node that makes no call for this long is lost.")
    node_hold_s: Seconds = Field(default=600.0, description="How long a node keeps its rollouts without a head.")

    max_body_bytes: int = Field(default=64 << 20, ge=1024, description="Largest request body.")
    max_header_bytes: int = Field(
        default=32 << 10, ge=1024, le=1 << 20, description="Largest headers of a request, including its URL."
    )
    max_headers: Count = Field(default=128, description="Maximum number of headers of a request.")
    max_connections: Count = Field(
        default=4096,
        description="Maximum number of open connections; never more than half of the process's open files.",
    )
    max_connections_per_address: Count = Field(
        default=2048, description="Maximum number of open connections from one IPv4 address or one IPv6 /64."
    )
    http_header_s: Seconds = Field(default=10.0, description="Seconds to receive the headers of a request.")
    http_body_s: Seconds = Field(default=60.0, description="Seconds to receive a body, plus one for each KiB received.")
    http_idle_s: Seconds = Field(default=75.0, description="Seconds that a connection may be open without a request.")
    http_unread_s: Seconds = Field(default=120.0, description="Seconds that a client may leave a response unread.")
    login_s: Seconds = Field(default=43200.0, description="Seconds that a browser stays signed in to the dashboard.")
    max_wait_s: float = Field(
        default=60.0, ge=0, allow_inf_nan=False, description="Longest long poll; longer ones are cut."
    )

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged."
    )
    log_format: Literal["console", "json"] = Field(default="console", description="Format of the log on stderr.")
    otlp_endpoint: str = Field(default="", description="Endpoint for OpenTelemetry spans; empty: none are sent.")

    @model_validator(mode="before")
    @classmethod
    def _default_runtime_is_allowed(cls, data: Any) -> Any:
        """If bubblewrap is not allowed and no default is set, the first allowed runtime becomes the default."""
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
                "a fleet beyond loopback needs TLS, because keys and prompts are sent to nodes: set tls = own, or"
                " tls_cert and tls_key; or set plain_http_nodes if you trust the network"
            )
        if self.is_in_clear and any(server.headers for server in self.mcp_servers.values()):
            raise ValueError("mcp_servers: their headers would be sent to the nodes in the clear: set tls = own")
        return self

    @property
    def has_tls(self) -> bool:
        return self.tls == "own" or self.tls_cert is not None

    @property
    def is_in_clear(self) -> bool:
        """Whether data for a fleet's nodes crosses a network unencrypted."""
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
        """Defaults for tasks that set no limits, never above the ceilings for tasks."""
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
        first, separator, last = self.sandbox_uids.partition("-")
        return range(int(first), int(last) + 1) if separator else None

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
        """Names in addition to those that the gate always accepts (the address of the connection, loopback names)."""
        is_name = not re.fullmatch(r"[0-9.]+|.*:.*|localhost", self.host)
        return (*self.hosts, self.host) if is_name else self.hosts

    @property
    def store_path(self) -> Path:
        named = self.store.removeprefix("sqlite://")
        return Path(named).expanduser() if named else self.data_dir / "rollyard.db"

    @property
    def store_place(self) -> str | Path:
        """A PostgreSQL URL, or the path of the SQLite file."""
        return self.store if self.store.startswith(("postgresql://", "postgres://")) else self.store_path

    @property
    def node_token_path(self) -> Path:
        return self.data_dir / "node-token"

    @property
    def token_path(self) -> Path:
        return self.token_file or self.data_dir / "token"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and the source of each field's value."""

    settings: Settings
    sources: dict[str, str]


def load_settings(flags: Mapping[str, object], environ: Mapping[str, str], toml_path: Path | None = None) -> Loaded:
    """Loads the settings from all sources. A flag that is None was not given. Raises `SettingsError`."""
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
            continue  # an empty variable counts as unset
        if name in Settings.model_fields:
            values[name], sources[name] = value, f"env {variable}"
        elif difflib.get_close_matches(name, Settings.model_fields, 1, cutoff=_typo_similarity(name)):
            _known(name, f"as {variable} in the environment", PREFIX)
    for name, value in flags.items():
        if value is not None:
            _known(name, "among the flags")
            values[name], sources[name] = value, "flag"
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(item, sources) for item in error.errors())) from error
    above = file.parent if file is not None and sources["environments"].startswith("file") else Path()
    places = {name: _absolute(place, above) for name, place in settings.environments.items()}
    return Loaded(settings.model_copy(update={"environments": places}), sources)


def _absolute(place: str, above: Path) -> str:
    """Returns FILE.py:CLASS with the whole path of the file. Anything else is unchanged."""
    file, _, attribute = place.rpartition(":")
    return f"{(above / Path(file).expanduser()).absolute()}:{attribute}" if file.endswith(".py") else place


_TABLES: Mapping[str, type[BaseModel]] = {"mcp_servers": McpServerSettings}


def _typo_similarity(name: str) -> float:
    """The similarity from which a variable is taken for a mistyped setting: of PROT and PORT it is 0.75."""
    return 0.85 if len(name) > 4 else 0.75


def _find_file(environ: Mapping[str, str], explicit: Path | None) -> Path | None:
    named = explicit or (Path(environ[f"{PREFIX}CONFIG"]) if environ.get(f"{PREFIX}CONFIG") else None)
    if named is not None:
        named = named.expanduser()
        if not named.is_file():
            raise SettingsError(f"there is no settings file {named}", "correct --config or ROLLYARD_CONFIG")
        return named
    home = Path(environ["HOME"]) if environ.get("HOME") else Path.home()
    config = Path(environ["XDG_CONFIG_HOME"]) if environ.get("XDG_CONFIG_HOME") else home / ".config"
    places = (Path("rollyard.toml"), config / "rollyard" / "config.toml")
    return next((place for place in places if place.is_file()), None)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise SettingsError(f"{path} cannot be read as TOML: {error}", "correct the file") from error


def _known(name: str, where: str, prefix: str = "") -> None:
    if name in Settings.model_fields:
        return
    near = nearest(name, Settings.model_fields)
    hint = f"did you mean {_shown(near, prefix)}?" if near else "`rollyard config` lists the settings"
    raise SettingsError(f"there is no setting {_shown(name, prefix)} ({where})", hint)


def _shown(name: str, prefix: str) -> str:
    return f"{prefix}{name.upper() if prefix else name}"


def _explain(item: Any, sources: Mapping[str, str]) -> str:
    """One validation error as a sentence, without the value, which may be a secret."""
    path = ".".join(str(part) for part in item["loc"])
    field = str(item["loc"][0]) if item["loc"] else ""
    source = f" (from {sources[field]})" if sources.get(field, "default") != "default" else ""
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        known = _TABLES.get(field, EngineSettings).model_fields
        near = nearest(str(item["loc"][-1]), known)
        message = "unknown setting" + (f"; did you mean {near}?" if near else "")
    elif item["type"] == "string_pattern_mismatch" and item["ctx"]["pattern"] == URL:
        message = "a URL starts with http:// or https://"
    elif item["type"] == "string_pattern_mismatch" and item["ctx"]["pattern"] == PLACE:
        message = "write it as FILE.py:CLASS or MODULE:CLASS"
    return f"{path}{source}: {message}" if path else message
