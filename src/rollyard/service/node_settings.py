"""Settings that a node takes over from its head: all that affect how a rollout runs, no tokens.

A node has its own data folder, name and sizes; everything else is the head's, so that a rollout runs the same on every
node. Images and agent programs, which the head keeps below its data folder, are looked up below the node's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from rollyard.core import Json
from rollyard.service.settings import Settings, SettingsError

TAKEN_OVER = (
    *("runtimes", "runtime", "images", "oci_command", "oci_image", "layer_bytes"),
    *("sandbox_memory_bytes", "sandbox_processes", "sandbox_disk_bytes", "sandbox_open_files", "sandbox_cpus"),
    *("sandbox_files", "max_task_memory_bytes", "max_task_disk_bytes", "max_task_files", "max_task_cpus"),
    "max_task_processes",
    *("sandbox_uids", "engine_wait_s", "health_s", "mcp_servers", "gym_servers", "environments"),
    *("init_slots", "run_slots", "eval_slots", "ready_slots", "max_live"),
    *("egress_hosts", "egress_methods", "egress_private", "egress_mirrors", "egress_bytes", "egress_connections"),
    *("max_attempts", "eval_attempts", "drain_s", "log_level", "log_format", "otlp_endpoint"),
)


def for_nodes(settings: Settings) -> dict[str, Json]:
    """The settings for nodes as JSON, including secrets."""
    return {name: _plain(getattr(settings, name)) for name in TAKEN_OVER}


def node_settings(taken_over: Mapping[str, Any], data_dir: Path, own: Mapping[str, Any]) -> Settings:
    """A node's settings: the head's, overridden by its own sizes. Raises `SettingsError`."""
    known = {name: value for name, value in taken_over.items() if name in TAKEN_OVER}
    try:
        return Settings.model_validate({**known, **own, "data_dir": data_dir})
    except ValidationError as error:
        raise SettingsError(f"the head's settings cannot be used here: {error.error_count()} errors") from error


def _plain(value: Any) -> Json:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if hasattr(value, "model_fields"):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
