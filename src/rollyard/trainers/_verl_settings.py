"""Settings of the verl adapter: the section `rollyard` of verl's configuration, and checks of verl's own settings.

+rollyard.url=http://rollyard:8700 +rollyard.run=grpo-7b +rollyard.environment=math
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollyard.core import Json, check_id

SAMPLER = "RollyardReplayBuffer"


@dataclass(frozen=True, slots=True)
class Settings:
    """The section `rollyard` of verl's configuration. Without `url` and `token`, `AsyncClient` finds them."""

    url: str | None = None
    token: str | None = None
    run: str = "verl"  # of mode train; validation goes into NAME.val, of mode eval
    policy: str = "default"
    spares: int = 1  # of each group, for members that infrastructure fails
    engines: tuple[str, ...] | None = None  # URLs; None: verl's rollout servers; empty: the existing ones
    tokenizer: str | None = None  # of these engines; None: actor_rollout_ref.model.path
    renderer: str | None = None
    environment: str | None = None  # for rows without a task
    data: Mapping[str, str] = field(default_factory=dict[str, str])  # its fields: paths in the row
    defaults: Mapping[str, Json] = field(default_factory=dict[str, Json])  # of each task: a partial task
    lease_s: float = 7200.0  # of the pause between two batches
    retry_s: float = 600.0  # how long to wait for a service that does not answer


def read_settings(config: Any) -> Settings:
    """Reads the settings from verl's whole configuration."""
    raw = config.get("rollyard") or {}
    if not isinstance(raw, dict):  # OmegaConf's
        from omegaconf import OmegaConf  # type: ignore[import-not-found]

        raw = OmegaConf.to_container(raw, resolve=True)
    unknown = set(raw) - set(Settings.__dataclass_fields__)
    if unknown:
        raise ValueError(f"rollyard.{min(unknown)} is not a setting: {', '.join(Settings.__dataclass_fields__)}")
    try:
        settings = msgspec.convert(raw, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"rollyard in verl's configuration: {error}") from None
    check_id(settings.run, "rollyard.run")
    return settings


def refuse(config: Any) -> None:
    """Raises ValueError for settings of verl that do not work with Rollyard, before anything runs."""
    if at(config, "reward.reward_model.enable"):
        raise ValueError("reward.reward_model.enable: rewards come only from Rollyard's environments")
    if at(config, "distillation.enabled"):
        raise ValueError("distillation.enabled: Rollyard's rows have no teacher's logprobs")
    mode, sampler = at(config, "trainer.v1.trainer_mode"), at(config, "trainer.v1.sampler.custom_sampler.name")
    if not at(config, "trainer.use_v1") or mode in (None, "sync"):
        return
    if mode != "colocate_async":
        raise ValueError(
            f"trainer.v1.trainer_mode={mode}: it changes weights during rollouts without notice, so that tokens would "
            "have no known version; use sync or colocate_async"
        )
    if sampler != SAMPLER:
        raise ValueError(
            "trainer.v1.trainer_mode=colocate_async needs trainer.v1.sampler.custom_sampler, with "
            f"path=pkg://rollyard.trainers.verl_sampler and name={SAMPLER}: it pauses rollouts before weights change"
        )


def defaults_of(rollout: Any, settings: Settings, *, is_validation: bool) -> dict[str, Json]:
    """Returns the defaults of a run's tasks: verl's sampling parameters and lengths, then `rollyard.defaults`.

    `rollout` is actor_rollout_ref.rollout. The sum of verl's two lengths bounds a sequence.
    """
    source = rollout.val_kwargs if is_validation else rollout
    sampling: dict[str, Json] = {
        "temperature": float(source.temperature),
        "top_p": float(source.top_p),
        "top_k": int(source.top_k),
        "max_tokens": int(rollout.response_length),
    }
    defaults: dict[str, Json] = {
        "sampling": sampling,
        "limits": {"max_context": int(rollout.prompt_length) + int(rollout.response_length)},
    }
    for name, value in settings.defaults.items():
        below = defaults.get(name)
        defaults[name] = {**below, **value} if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return defaults


def at(place: Any, path: str) -> Any:
    """Returns the value at a path such as `a.b.0` in a configuration or a row of data, or None."""
    for name in path.split("."):
        if hasattr(place, "tolist"):  # numpy arrays
            place = place.tolist()
        if isinstance(place, list | tuple):
            place = place[int(name)] if name.isdigit() and int(name) < len(place) else None
        else:
            place = place.get(name) if hasattr(place, "get") else None
        if place is None:
            return None
    return place
