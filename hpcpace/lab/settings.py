"""The settings that a lab was started with, saved in its folder for later commands."""

from __future__ import annotations

import dataclasses
import json

from hpcpace.config import LabConfig
from hpcpace.lab.files import LabFiles
from hpcpace.rundir import write_json


def write_config(files: LabFiles, config: LabConfig) -> None:
    """Save the settings of a lab."""
    write_json(files.config_json, dataclasses.asdict(config))


def read_config(files: LabFiles) -> LabConfig:
    """Return the settings that a lab was started with."""
    values = json.loads(files.config_json.read_text())
    return LabConfig(**{**values, "share": tuple(values["share"])})
