"""The settings of a session, as the job gives them and as they follow from files and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcpace.config import Config
from hpcpace.config_sources import REQUESTED, load_config
from hpcpace.core.environment import RankInfo, rank_info, rank_info_of_group
from hpcpace.known_variables import unknown_sentence, unknown_variables


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """What `Session` was given, see there, and `environ`, the environment that it found."""

    environ: Mapping[str, str]
    name: str
    run_dir: str | os.PathLike[str] | None
    config: Config | None
    config_file: str | os.PathLike[str] | None
    mesh: Mapping[str, int]
    coords: Mapping[str, int]
    samples_unit: str
    warmup_steps: int
    first_step: int
    record: Mapping[str, Any]
    world: RankInfo | None
    comm: Any
    step_from: str | None
    pace: str | None
    trace_dir: str | os.PathLike[str] | None
    steps: str | None = None
    detail: str | None = None
    keep_last: int | None = None

    @property
    def first_counted_step(self) -> int:
        """Number of the first step after the warm-up."""
        return self.first_step + self.warmup_steps

    def load_config(self) -> Config:
        """Return the configuration that applies.

        Raises:
            ConfigError: a file or variable has a setting that is unknown or out of range.
        """
        file = None if self.config_file is None else Path(self.config_file)
        config = self.config or load_config(file=file, environ=self.environ, requested=REQUESTED)
        if self.pace is not None:
            config = replace(config, pace=replace(config.pace, policy=self.pace))
        if self.trace_dir is not None:
            config = replace(config, trace=replace(config.trace, trace_dir=Path(self.trace_dir)))
        if self.steps is not None:
            config = replace(config, trace=replace(config.trace, detail_steps=self.steps))
        if self.keep_last is not None:
            config = replace(config, trace=replace(config.trace, keep_last=self.keep_last))
        if self.detail is not None:
            config = replace(config, trace=replace(config.trace, detail=self.detail))
        return config

    def unknown_variables(self) -> str:
        """Return which variables are ignored because they are no settings; empty if there are none, or none count."""
        unknown = unknown_variables(self.environ) if self.config is None else []
        return f"{unknown_sentence(unknown)}; ignored" if unknown else ""

    def find_rank(self) -> RankInfo:
        """Return this rank's place in the job: in torch's default group where there is one, which connects the ranks.

        Variables of a launcher count without it. Ranks that a script or framework starts by itself have none, or some
        of them (Lightning sets WORLD_SIZE without RANK), or those of the one process that started them.

        Raises:
            WorldError: there is no group, and the environment contradicts itself.
        """
        if self.world is not None:
            return self.world
        groups = sys.modules.get("torch.distributed")
        if self.comm is not None or groups is None or not (groups.is_available() and groups.is_initialized()):
            return rank_info(self.environ)
        return rank_info_of_group(groups.get_rank(), groups.get_world_size(), self.environ)


def shared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that decide which messages ranks exchange, and so have to be the same on all of them."""
    return {
        "trace.enabled": config.trace.enabled,
        "trace.snapshot": config.trace.snapshot,
        "trace.detail_steps": config.trace.detail_steps,
        "trace.detail": config.trace.detail,
        "trace.keep_last": config.trace.keep_last,
        "clock.enabled": config.clock.enabled,
        "clock.num_pings": config.clock.num_pings,
        "pace.policy": config.pace.policy,
    }
