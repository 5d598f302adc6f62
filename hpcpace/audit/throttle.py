"""Reasons for a lower clock of a GPU, as NVML numbers them."""

from __future__ import annotations

from enum import IntFlag


class Throttle(IntFlag):
    """A reason for a lower clock, as NVML numbers it."""

    IDLE = 0x1
    CLOCK_SETTING = 0x2
    POWER_CAP = 0x4
    HARDWARE = 0x8
    SYNC_BOOST = 0x10
    SOFTWARE_THERMAL = 0x20
    HARDWARE_THERMAL = 0x40
    POWER_BRAKE = 0x80
    DISPLAY = 0x100


FAULTS = Throttle.HARDWARE | Throttle.HARDWARE_THERMAL | Throttle.POWER_BRAKE
"""Reasons that are faults by themselves, also if all GPUs have them; HARDWARE is set along with the other two."""

WORDS = {
    Throttle.HARDWARE_THERMAL: "HW thermal slowdown",
    Throttle.POWER_BRAKE: "HW power brake",
    Throttle.HARDWARE: "HW slowdown",
    Throttle.SOFTWARE_THERMAL: "SW thermal slowdown",
    Throttle.POWER_CAP: "SW power cap",
    Throttle.SYNC_BOOST: "sync boost",
}
"""The reasons that a report names, the most specific first."""
