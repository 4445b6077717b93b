"""Converts rows of SWE-bench, SWE-Gym and R2E-Gym to tasks: the row, its image, the image's Python, and limits."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rollyard.core import Json, Task
from rollyard.core.failure import TaskInvalid
from rollyard.envs.base import check_options
from rollyard.envs.swe.data import SweData
from rollyard.envs.swe.suites import SUITES

NAME = "swe"

LIMITS: Mapping[str, Json] = {"init_s": 600, "run_s": 3600, "eval_s": 1800, "max_turns": 100}

SWE_BENCH = "docker://swebench/sweb.eval.x86_64.{name}:latest"
SWE_GYM = "docker://xingyaoww/sweb.eval.x86_64.{name}:latest"
"""{name} is the instance's id in lower case, with the double underscore, which registries do not allow, replaced as in
each dataset."""

DATA_OPTIONS = ("instruction", "log_parser", "system_prompt", "test_command", "workdir")
"""Options that are copied unchanged into each task's data."""

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONDA_PATH = f"/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:{_SYSTEM_PATH}"
VENV_PATH = f"/testbed/.venv/bin:{_SYSTEM_PATH}"
"""The PATH of the repository's Python in images of SWE-bench and SWE-Gym, and of R2E-Gym. Both rely on a login shell to
set it; Rollyard's commands start without one."""


def task_of(row: Mapping[str, Json], options: Mapping[str, str]) -> dict[str, Json]:
    """Returns the body of a task. Raises TaskInvalid with what is wrong with the row."""
    check_options(NAME, options, ("images", *DATA_OPTIONS))
    is_r2e = row.get("expected_output_json") is not None
    data: dict[str, Json] = dict(row)
    if row.get("env") is None:
        if is_r2e:
            data["env"] = {"PATH": VENV_PATH}
        elif str(row.get("repo")) in SUITES:
            data["env"] = {"PATH": CONDA_PATH}
    data |= {name: options[name] for name in DATA_OPTIONS if name in options}
    SweData.read(Task(NAME, data))
    return {
        "environment": NAME,
        "data": data,
        "limits": dict(LIMITS),
        "sandbox": {"image": _image(row, options.get("images"), is_r2e=is_r2e)},
    }


def _image(row: Mapping[str, Json], template: str | None, *, is_r2e: bool) -> str:
    """The image by the option's template, else the row's own, else by its dataset's naming scheme."""
    instance = row.get("instance_id")
    if is_r2e and not instance:
        instance = f"{row.get('repo_name')}-{row.get('commit_hash')}"
    if not isinstance(instance, str) or not instance:
        raise TaskInvalid("swe: instance_id: a string was expected", field="instance_id")
    own = row.get("image") or row.get("docker_image") or row.get("image_name")
    if template is None and isinstance(own, str):
        return own if "://" in own or own.startswith(("/", ".")) else f"docker://{own}"
    is_swe_bench = "environment_setup_commit" in row
    template = template or (SWE_BENCH if is_swe_bench else SWE_GYM)
    if "{" not in template and "://" not in template and not template.endswith(".sif"):  # a folder of images
        template = template.rstrip("/") + "/{instance_id}.sif"
    separator = "_1776_" if is_swe_bench or template == SWE_BENCH else "_s_"
    places = {"instance_id": instance, "name": instance.lower().replace("__", separator)}
    unknown = sorted(set(re.findall(r"\{(.*?)\}", template)) - set(places))
    if unknown:
        raise TaskInvalid(f"swe: option images: there is no {{{unknown[0]}}}; there are {{instance_id}} and {{name}}")
    for place, value in places.items():
        template = template.replace(f"{{{place}}}", value)
    return template
