"""Processors, cores, packages, caches and frequency governors, read from sysfs.

Kernels older than 2.6.32 write sets of CPUs as masks only, and have no list of the CPUs that are online; both are read
where the newer files are missing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpcpace.audit import cpusets
from hpcpace.audit.facts import Cache, Cpus
from hpcpace.audit.tree import Tree, Unreadable
from hpcpace.quoting import printable

_CPU = "sys/devices/system/cpu"
_MOST_CPUS = 8_192
_SMALL_SHARE = 0.8


def collect_cpus(tree: Tree) -> Cpus:
    """Return the processors; facts that cannot be read are None, with the reason in `tree.unreadable`."""
    online = tree.fact("cpus/online", _online, tree)
    cpus = [cpu for cpu in cpusets.members(cpusets.parse_list(online or "")) if cpu < _MOST_CPUS]
    siblings = tree.fact("cpus/cores", _siblings, tree, cpus) if cpus else None
    driver = f"{_CPU}/cpu{cpus[0]}/cpufreq/scaling_driver" if cpus else ""
    return Cpus(
        online=online,
        offline=_offline(tree),
        model=tree.fact("cpus/model", _cpu_model, tree),
        packages=tree.fact("cpus/packages", _packages, tree, siblings or {cpu: str(cpu) for cpu in cpus})
        if cpus
        else None,
        cores=None if siblings is None else tuple(dict.fromkeys(siblings.values())),
        caches=tree.fact("cpus/caches", _caches, tree, cpus) if cpus else None,
        governors=tree.fact("cpus/governors", _governors, tree, cpus) if cpus else None,
        driver=tree.fact("cpus/driver", tree.word, driver) or "" if driver and tree.exists(driver) else "",
        fast=_fast_cpus(tree, cpus),
    )


def read_cpus(tree: Tree, listed: str, mask: str) -> str:
    """Return the set of CPUs in a file, as a list.

    Args:
        tree: where to read.
        listed: file with a list, like `cpulist`.
        mask: file with the same set as a mask, which is read where the list is missing.

    Raises:
        Unreadable: neither can be read.
        ValueError: the file is damaged.
    """
    if not tree.exists(listed) and tree.exists(mask):
        return cpusets.format_list(cpusets.parse_mask(tree.text(mask)))
    return cpusets.format_list(cpusets.parse_list(tree.text(listed)))


def _some_cpus(tree: Tree, listed: str, mask: str = "") -> str:
    cpus = read_cpus(tree, listed, mask or listed)
    if not cpus:
        raise Unreadable("empty")
    return cpus


def _online(tree: Tree) -> str:
    if tree.exists(f"{_CPU}/online"):
        return _some_cpus(tree, f"{_CPU}/online")
    numbers = [int(name[3:]) for name in tree.names(_CPU) if re.fullmatch(r"cpu\d{1,5}", name)]
    online = [number for number in numbers if tree.word_or_empty(f"{_CPU}/cpu{number}/online") != "0"]
    if not online:
        raise Unreadable("no such file or directory")
    return cpusets.format_list(cpusets.of(online))


def _offline(tree: Tree) -> str | None:
    """Return the CPUs that could be switched on; empty if the kernel has no CPU hot-plugging."""
    if not tree.exists(f"{_CPU}/offline"):
        return ""
    text = tree.fact("cpus/offline", read_cpus, tree, f"{_CPU}/offline", "")
    if not text:
        return text
    # `offline` also lists CPUs that could be plugged in one day; only those in `present` exist.
    present = tree.fact("cpus/present", _some_cpus, tree, f"{_CPU}/present")
    if present is None:
        return None
    return cpusets.format_list(cpusets.parse_list(text) & cpusets.parse_list(present))


def _siblings(tree: Tree, cpus: Sequence[int]) -> dict[int, str]:
    """Return all CPUs of each core, by the core's first CPU."""
    found: dict[int, str] = {}
    seen = 0
    # The second name is the newer one; kernels have both, copied trees may have one of them.
    names = ("thread_siblings", "core_cpus")
    places = [f"{_CPU}/cpu{cpu}/topology/{name}" for cpu in cpus[:1] for name in names]
    name = next((name for name, at in zip(names, places, strict=True) if tree.exists(at)), names[0])
    for cpu in cpus:
        if seen >> cpu & 1:
            continue
        place = f"{_CPU}/cpu{cpu}/topology/{name}"
        text = _some_cpus(tree, f"{place}_list", place)
        core = cpusets.parse_list(text)
        if not core >> cpu & 1 or core & seen:
            raise Unreadable(f"thread_siblings_list of cpu{cpu} contradicts those of other CPUs")
        seen |= core
        found[cpu] = text
    return found


def _packages(tree: Tree, siblings: dict[int, str]) -> dict[str, str]:
    packages: dict[str, int] = {}
    for cpu, core in siblings.items():
        place = f"{_CPU}/cpu{cpu}/topology"
        number = tree.number(f"{place}/physical_package_id")
        if number < 0:  # the firmware gives no numbers, as on POWER; the kernel knows which CPUs belong together
            others = cpusets.parse_list(_some_cpus(tree, f"{place}/core_siblings_list", f"{place}/core_siblings"))
            number = next(cpusets.members(others))
        packages[str(number)] = packages.get(str(number), 0) | cpusets.parse_list(core)
    return {package: cpusets.format_list(cpus) for package, cpus in packages.items()}


def _caches(tree: Tree, cpus: list[int]) -> tuple[Cache, ...]:
    found: dict[tuple[int, str, str], Cache] = {}
    covered: dict[tuple[int, str], int] = {}
    index_names = [name for name in tree.names(f"{_CPU}/cpu{cpus[0]}/cache") if re.fullmatch(r"index\d{1,2}", name)]
    kinds: dict[str, tuple[int, str]] = {}
    for cpu in cpus:
        for index in index_names:
            # All CPUs number their caches alike, except on hybrid processors, where the kinds are the same.
            place = f"{_CPU}/cpu{cpu}/cache/{index}"
            kind = kinds.get(index)
            if kind is None:
                kind = kinds[index] = (tree.number(f"{place}/level"), tree.word(f"{place}/type"))
            if covered.get(kind, 0) >> cpu & 1 or not tree.exists(place):
                continue
            shared = _some_cpus(tree, f"{place}/shared_cpu_list", f"{place}/shared_cpu_map")
            covered[kind] = covered.get(kind, 0) | cpusets.parse_list(shared)
            size = tree.word(f"{place}/size") if tree.exists(f"{place}/size") else ""
            found[(*kind, shared)] = Cache(level=kind[0], kind=kind[1], size=size, cpus=shared)
    return tuple(found.values())


def _governors(tree: Tree, cpus: list[int]) -> dict[str, str]:
    """Return the CPUs of each governor; empty if the kernel sets no frequencies, as in most virtual machines."""
    found: dict[str, int] = {}
    if not tree.exists(f"{_CPU}/cpu{cpus[0]}/cpufreq"):
        return {}
    for cpu in cpus:
        governor = tree.word(f"{_CPU}/cpu{cpu}/cpufreq/scaling_governor")
        found[governor] = found.get(governor, 0) | 1 << cpu
    return {governor: cpusets.format_list(of) for governor, of in found.items()}


def _fast_cpus(tree: Tree, cpus: list[int]) -> str:
    # Only Intel's hybrid processors have both folders.
    if tree.exists("sys/devices/cpu_atom/cpus") and tree.exists("sys/devices/cpu_core/cpus"):
        return tree.fact("cpus/fast", _some_cpus, tree, "sys/devices/cpu_core/cpus") or ""
    if not cpus or not tree.exists(f"{_CPU}/cpu{cpus[0]}/cpu_capacity"):
        return ""
    return tree.fact("cpus/fast", _of_much_capacity, tree, cpus) or ""


def _of_much_capacity(tree: Tree, cpus: list[int]) -> str:
    """Return the CPUs of the fast cores, by the kernel's capacity of each CPU; empty if all cores are alike.

    Cores of one kind differ by a few percent in their highest frequency; small cores have at most three quarters.
    """
    capacities = {cpu: tree.number(f"{_CPU}/cpu{cpu}/cpu_capacity") for cpu in cpus}
    least = _SMALL_SHARE * max(capacities.values())
    fast = [cpu for cpu, capacity in capacities.items() if capacity >= least]
    return "" if len(fast) == len(cpus) else cpusets.format_list(cpusets.of(fast))


def _cpu_model(tree: Tree) -> str:
    fields: dict[str, str] = {}
    for line in tree.beginning("proc/cpuinfo").split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    for name in ("model name", "cpu"):
        if fields.get(name):
            return printable(fields[name])[:100]
    if "CPU part" in fields:
        return printable(f"Arm implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}")[:100]
    raise Unreadable("no model in /proc/cpuinfo")
