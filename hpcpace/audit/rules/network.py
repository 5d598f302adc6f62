"""Rules N01 to N09: adapters near GPUs, GPUDirect, ports, MTUs, errors, and the variables that select adapters."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from hpcpace.audit.collect_hardware import LINK_ERRORS
from hpcpace.audit.facts import ORDER, NetDevice, PciDevice, RankFacts, RdmaDevice, RdmaPort
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip, unknown, unset_fix
from hpcpace.audit.job import AuditedHost, AuditedJob, FabricPort, has_peermem
from hpcpace.audit.tree import Unreadable
from hpcpace.core.text import printable, shell_word


def n03_selections(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find variables that select no adapter or interface, or a slow one."""
    variables = rank_variables(host, rank)
    if "NCCL_IB_HCA" in variables:
        yield from _check_hca(host, rank, variables["NCCL_IB_HCA"])
    if "UCX_NET_DEVICES" in variables:
        yield from _check_ucx(host, variables["UCX_NET_DEVICES"])
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if name in variables:
            yield from _check_interface(job, host, rank, name, variables[name])


def n04_sockets(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find what makes NCCL use sockets although the node has RDMA."""
    if not host.has_active_port:
        return
    variables, fact = rank_variables(host, rank), f"rank/{rank.rank}"
    locked = host.known(rank.locked_bytes, "its locked-memory limit", f"{fact}/locked_bytes", f"{fact}/limits")
    reasons = []
    if variables.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        reasons.append((f"NCCL_IB_DISABLE={variables['NCCL_IB_DISABLE']}", unset_fix(rank, "NCCL_IB_DISABLE")))
    if variables.get("NCCL_NET", "").lower() == "socket":
        reasons.append((f"NCCL_NET={variables['NCCL_NET']}", unset_fix(rank, "NCCL_NET")))
    if not host.snapshot.kernel.has_verbs:
        fix = "srun --container-mounts=/dev/infiniband ...  # or docker run --device=/dev/infiniband"
        reasons.append(("/dev/infiniband is missing", fix))
    if 0 <= locked < job.settings.least_locked:
        fix = "ulimit -l unlimited  # Slurm: PropagateResourceLimitsExcept=MEMLOCK and LimitMEMLOCK=infinity"
        reasons.append((f"it may lock only {locked >> 10} KiB of memory", fix))
    for seen, fix in reasons:
        yield AuditFinding(
            severity=Severity.FAIL,
            seen=f"the node has RDMA, but {seen}",
            fix=fix,
        )


def n07_gid(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find an NCCL_IB_GID_INDEX that does not select a RoCE v2 address."""
    text = rank_variables(host, rank).get("NCCL_IB_GID_INDEX", "")
    if not text or text == "-1":
        return
    for device, port in host.rdma_ports:
        if port.link_layer != "Ethernet" or port.state != "ACTIVE":
            continue
        kinds = {str(gid.index): gid.kind for gid in port.gids}
        if not kinds:
            raise Unreadable(f"the addresses of {device.name}: {host.reason(f'rdma/{device.name}/ports')}")
        if kinds.get(text) == "RoCE v2":
            continue
        better = next((index for index, kind in kinds.items() if kind == "RoCE v2"), "")
        yield AuditFinding(
            severity=Severity.WARNING,
            place=f"{device.name} port {port.number}",
            seen=f"NCCL_IB_GID_INDEX={printable(text)} is {printable(kinds.get(text, 'empty'))}",
            fix=unset_fix(rank, "NCCL_IB_GID_INDEX")
            + (f"  # NCCL before 2.21: {better}" if better else "  # NCCL 2.21 chooses it"),
        )


@lru_cache(maxsize=4096)
def hca_selects(value: str, device: str, port: int) -> bool:
    """Return whether NCCL_IB_HCA selects a port: names are prefixes, with `=` exact names, and `^` excludes them."""
    exclude, rest = value.startswith("^"), value.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    for word in filter(None, rest.split(",")):
        name, _, number = word.partition(":")
        if (device == name if exact else device.startswith(name)) and (not number or number == str(port)):
            return not exclude
    return exclude


def rank_variables(host: AuditedHost, rank: RankFacts) -> Mapping[str, str]:
    """Return a rank's variables, NCCL's files included; the environment wins over ~/.nccl.conf, that over /etc."""
    return {**host.snapshot.kernel.nccl_conf, **rank.user_conf, **rank.variables}


def _check_hca(host: AuditedHost, rank: RankFacts, value: str) -> Iterator[AuditFinding]:
    ports = host.rdma_ports
    chosen = [(device, port) for device, port in ports if hca_selects(value, device.name, port.number)]
    seen, unset = f"NCCL_IB_HCA={printable(value)}", unset_fix(rank, "NCCL_IB_HCA")
    fastest = max((port.rate_gbps or 0.0 for _, port in ports if port.state == "ACTIVE"), default=0.0)
    slowest = min((port.rate_gbps or 0.0 for _, port in chosen), default=0.0)
    if not chosen:
        have = ",".join(dict.fromkeys(device.name for device, _ in ports)) or "none"
        yield _named("NCCL_IB_HCA", Severity.FAIL, f"{seen} matches no adapter (this node has {have})", unset)
    elif all(port.state != "ACTIVE" for _, port in chosen):
        yield _named("NCCL_IB_HCA", Severity.FAIL, f"{seen} selects only ports that are down", unset)
    elif slowest < fastest:
        text = f"{seen} selects a port of {slowest:g} Gb/s, but the fastest has {fastest:g}"
        fast = [device.name for device, port in ports if port.state == "ACTIVE" and port.rate_gbps == fastest]
        fix = f"export NCCL_IB_HCA={shell_word('=' + ','.join(dict.fromkeys(fast)))}"
        yield _named("NCCL_IB_HCA", Severity.WARNING, text, fix)


def _check_ucx(host: AuditedHost, value: str) -> Iterator[AuditFinding]:
    have = {f"{device.name}:{port.number}" for device, port in host.rdma_ports} | {net.name for net in host.net}
    words = {word.strip() for word in value.split(",") if word.strip()}
    if "all" not in words and not value.startswith("^") and not have & words:
        seen = f"UCX_NET_DEVICES={printable(value)} matches no device (this node has {', '.join(sorted(have)[:8])})"
        yield _named("UCX_NET_DEVICES", Severity.FAIL, seen, "unset UCX_NET_DEVICES")


def _check_interface(
    job: AuditedJob, host: AuditedHost, rank: RankFacts, variable: str, value: str
) -> Iterator[AuditFinding]:
    # gloo takes exact names separated by commas; NCCL takes prefixes, in the syntax of NCCL_IB_HCA without ports.
    whole = variable == "GLOO_SOCKET_IFNAME"
    words, prefixes = value.split(","), value.replace(":", "\0")
    chosen = [net for net in host.net if (net.name in words if whole else hca_selects(prefixes, net.name, 0))]
    candidates = [net for net in host.between_hosts if net.state == "up" and net.has_route is not False]
    best = max(candidates, key=lambda net: net.speed_mbps or 0, default=None)
    fastest = (best.speed_mbps or 0) if best else 0
    use = f"export {variable}={shell_word(('' if whole else '=') + best.name)}" if best else unset_fix(rank, variable)
    seen, names = f"{variable}={printable(value)}", ",".join(net.name for net in chosen)
    failure = ""
    if not chosen:
        failure = f"matches no interface (this node has {','.join(net.name for net in host.net[:8])})"
    elif all(net.state == "down" for net in chosen):
        failure = "selects only interfaces that are down"
    elif all(net.has_route is False and net.kind != "loopback" for net in chosen):
        failure = f"selects {names}, which no route uses: it has no address"
    if failure:
        yield _named(variable, Severity.FAIL, f"{seen} {failure}", use)
        return
    if any(net.has_route is None for net in chosen):
        what = f"whether a route uses what {variable} selects: {host.reason('net/routes')}"
        yield unknown(what, place=variable)
    speed = max(net.speed_mbps or 0 for net in chosen)
    if best and 0 < speed < job.settings.slow_share * fastest:
        text = f"{seen} selects {names} at {speed / 1000:g} Gb/s, but {best.name} has {fastest / 1000:g}"
        yield _named(variable, Severity.WARNING, text, use)


def _named(variable: str, severity: Severity, seen: str, fix: str) -> AuditFinding:
    return AuditFinding(
        severity=severity,
        place=variable,
        seen=seen,
        cost="ranks fail to connect, or use a network that is not meant for them"
        if severity == Severity.FAIL
        else "traffic goes over the slow network",
        fix=fix,
    )


_LAST_GOOD_NCCL_GAP = (2, 22, 3)


def n01_far_nic(job: AuditedJob, host: AuditedHost, gpu: PciDevice) -> Iterator[AuditFinding]:
    """Find a GPU whose nearest adapter is too far for GPUDirect RDMA."""
    ports = _usable(host)
    if not ports:
        raise Skip("no active RDMA or Slingshot port")
    ranked = sorted((ORDER.index(host.hardware.class_of(gpu.address, port.pci)), port.name) for port in ports)
    nearest, name = ORDER[ranked[0][0]], ranked[0][1]
    if nearest in ("PIX", "PXB") or (nearest != "SYS" and host.hardware.is_c2c(gpu.address)):
        return
    if nearest == "UNKNOWN":
        raise Unreadable("the class of its path to any adapter: the firmware hides where they are")
    yield AuditFinding(
        severity=Severity.FAIL if nearest == "SYS" else Severity.WARNING,
        seen=f"its nearest adapter, {name}, is {nearest}",
        fix="# first what N09 says: without GPUDirect RDMA no NCCL_NET_GDR_LEVEL helps; then check BIOS, slot map"
        if host.has_gdr is False
        else f"export NCCL_NET_GDR_LEVEL={'SYS' if nearest == 'SYS' else 'PHB'}  # measure first; check BIOS, slot map",
        certainty=Certainty.INFERRED if host.snapshot.kernel.is_virtual else Certainty.READ,
    )


def n02_shared_nic(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find adapters that more GPUs map to than necessary, and adapters far from all GPUs that NCCL would use."""
    ports = _usable(host)
    gpus = host.hardware.of_kind("gpu")
    if not gpus or not ports:
        raise Skip("no GPU, or no active RDMA or Slingshot port")
    classes = {
        gpu.address: {port.name: ORDER.index(host.hardware.class_of(gpu.address, port.pci)) for port in ports}
        for gpu in gpus
    }
    if any(ORDER[value] == "UNKNOWN" for of_gpu in classes.values() for value in of_gpu.values()):
        raise Unreadable("which adapter is near which GPU: the firmware hides where they are")
    best = {port.name: min(of_gpu[port.name] for of_gpu in classes.values()) for port in ports}
    nearest = min(best.values())
    far = [port for port in ports if best[port.name] > max(nearest, ORDER.index("PXB"))]
    if nearest <= ORDER.index("PXB"):
        yield from _far_adapters(host, far, best)
    near = [port.name for port in ports if port not in far]
    load = _falling_on(classes, near)
    most, fair = max(load.values()), -(-len(gpus) // len(near))
    if most > fair:
        crowded = sorted(name for name, count in load.items() if count == most)
        yield AuditFinding(
            severity=Severity.WARNING,
            place=crowded[0],
            seen=f"{most} GPUs map to it; spread evenly over {len(near)} ports it would be {fair} each",
            cost=f"these GPUs share the rate of one port: 1/{most} each when all {most} send at once",
            fix="export NCCL_CROSS_NIC=1  # measure first; admin: as many adapters as GPUs on each switch",
            certainty=Certainty.INFERRED,
        )


def n09_gpudirect(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find nodes on which RDMA adapters cannot reach NVIDIA's GPUs directly."""
    if not host.has_nvidia or not host.has_active_port:
        raise Skip("no NVIDIA driver, or no active RDMA port")
    kernel = host.snapshot.kernel
    modules = host.known(kernel.modules, "the kernel modules", "kernel/modules")
    if host.has_dmabuf:
        return
    old = [rank.nccl_version for rank in host.ranks if (0,) < _version(rank.nccl_version) <= _LAST_GOOD_NCCL_GAP]
    if not has_peermem(modules):
        seen = "has neither nvidia_peermem nor dma-buf (Linux 5.12 with NVIDIA's open module)"
        fix = "modprobe nvidia-peermem  # admin; or NVIDIA's open kernel module with Linux 5.12 or newer"
    elif not has_peermem(
        host.known(kernel.rdma_holders, "which modules have registered with RDMA", "kernel/rdma_holders")
    ):
        seen = "nvidia_peermem is loaded but not registered with RDMA"
        fix = "modprobe -r nvidia_peermem && modprobe nvidia_peermem  # admin, after the RDMA stack"
    elif old:
        seen = f"NCCL {printable(old[0])} with nvidia_peermem and without dma-buf"
        fix = "pip install --upgrade nvidia-nccl-cu12  # 2.23 or newer"
    else:
        return
    yield AuditFinding(
        severity=Severity.FAIL if job.has_many_hosts else Severity.WARNING,
        seen=seen,
        fix=fix,
    )


def _usable(host: AuditedHost) -> list[FabricPort]:
    return [port for port in host.fabric if port.is_active and port.pci in host.hardware.devices]


def _falling_on(classes: Mapping[str, Mapping[str, int]], near: Sequence[str]) -> Counter[str]:
    """Return how many GPUs map to each port if each GPU takes the least used of its nearest ports."""
    load = Counter(dict.fromkeys(near, 0))
    # GPUs with the fewest choices go first; the others can still use the ports that are left.
    choices = []
    for gpu, of_gpu in classes.items():
        best = min(of_gpu[name] for name in near)
        choices.append((gpu, [name for name in near if of_gpu[name] == best]))
    for _, names in sorted(choices, key=lambda choice: (len(choice[1]), choice[0])):
        load[min(names, key=lambda name: (load[name], name))] += 1
    return load


def _far_adapters(host: AuditedHost, far: Sequence[FabricPort], best: Mapping[str, int]) -> Iterator[AuditFinding]:
    values = (rank_variables(host, rank).get("NCCL_IB_HCA", "") for rank in host.ranks)
    value = next(filter(None, values), "")
    rdma = {device.name for device, _ in host.rdma_ports}
    for port in far:
        if port.device not in rdma or (value and not hca_selects(value, port.device, port.number)):
            continue
        yield AuditFinding(
            severity=Severity.WARNING,
            place=port.name,
            seen=f"is {ORDER[best[port.name]]} from the nearest GPU, while other adapters share a switch with the GPUs",
            fix=f"export NCCL_IB_HCA=^{shell_word(port.device)}",
            certainty=Certainty.INFERRED,
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,6}", text)[:3])


def n05_ports(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find ports that are down, and ports and interfaces that are slower than others of their kind."""
    up: set[tuple[str, int]] = set()
    fastest: dict[tuple[str, str | None], float] = {}
    for host in job.hosts:
        for device, port in _ports(host):
            if port.state == "ACTIVE":
                up.add((device.name, port.number))
                kind = (device.board, port.link_layer)
                fastest[kind] = max(fastest.get(kind, 0.0), port.rate_gbps or 0.0)
    for host in job.hosts:
        if host.snapshot.rdma is None:
            yield unknown(f"the RDMA adapters: {host.reason('rdma')}", host.name)
        for device, port in _ports(host):
            yield from _check_port(job, host, device, port, up, fastest.get((device.board, port.link_layer), 0.0))
    yield from _slow_interfaces(job)


def n06_mtu(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find Ethernet interfaces whose MTU is too small for RDMA, or differs between hosts."""
    values: dict[str, list[tuple[AuditedHost, int, bool]]] = {}
    for host in job.hosts:
        roce = _roce_names(host)
        for net in _nets(host):
            if net.mtu is not None:
                values.setdefault(net.name, []).append((host, net.mtu, net.name in roce))
    for name, entries in values.items():
        yield from _check_mtu(job, name, entries)
    for host in job.hosts:
        if host.snapshot.net is None:
            yield unknown(f"the network interfaces: {host.reason('net')}", host.name)
        for net in host.snapshot.net or ():
            if net.mtu is None and net.is_physical:
                yield unknown(f"its MTU: {host.reason(f'net/{net.name}/mtu')}", host.name, net.name)


def n08_errors(job: AuditedJob, host: AuditedHost) -> Iterator[AuditFinding]:
    """Find error and drop counters that are high, or that grew during the probe window."""
    counters = host.snapshot.counters
    if "counters" in host.snapshot.unreadable:
        raise host.unreadable("the error counters", "counters")
    for name in sorted(host.snapshot.unreadable):
        kind, _, rest = name.partition("/")
        device = rest.removesuffix("/counters")
        if kind in ("rdma", "net") and name.endswith("/counters") and _is_up(host, kind, device):
            port = device.replace("/", " port ")
            yield unknown(f"its counters: {host.reason(name)}", place=port)
    for name, value in sorted(counters.values.items()):
        kind, _, rest = name.partition("/")
        device, _, counter = rest.rpartition("/")
        if kind not in ("rdma", "net") or counter.endswith("_packets") or not _is_up(host, kind, device):
            continue
        grown = (counters.growth or {}).get(name, 0)
        if not grown and value <= _limit(job, counters.values, kind, device, counter):
            continue
        port = device.replace("/", " port ")
        yield AuditFinding(
            severity=Severity.FAIL if grown and kind == "rdma" else Severity.WARNING,
            place=port,
            seen=f"{counter} grew by {grown} in {counters.window_s:g} s"
            if grown
            else f"{counter} is {value} since boot",
            fix=f"mlxlink -d {shell_word(device.split('/')[0])} -c; ibdiagnet  # then reseat or replace the cable"
            if kind == "rdma"
            else f"ethtool -S {shell_word(device)}; ethtool -g {shell_word(device)}  # then cable, ring size, driver",
            certainty=Certainty.MEASURED if grown else Certainty.READ,
        )


def _ports(host: AuditedHost) -> list[tuple[RdmaDevice, RdmaPort]]:
    return host.rdma_ports if host.snapshot.rdma is not None else []


def _nets(host: AuditedHost) -> list[NetDevice]:
    return host.between_hosts if host.snapshot.net is not None else []


def _check_port(
    job: AuditedJob, host: AuditedHost, device: RdmaDevice, port: RdmaPort, up: set[tuple[str, int]], fastest: float
) -> Iterator[AuditFinding]:
    place = f"{device.name} port {port.number}"
    fact = f"rdma/{device.name}/{port.number}"
    if port.state is None or port.phys_state is None:
        yield unknown(f"its state: {host.reason(f'{fact}/state', f'{fact}/phys_state')}", host.name, place)
        return
    fix = f"ibdiagnet; mlxlink -d {shell_word(device.name)}  # then reseat or replace the cable, check the switch port"
    if port.state != "ACTIVE" or port.phys_state != "LinkUp":
        # A port without a cable is down on all hosts; a disabled one was switched off on purpose.
        unused = (device.name, port.number) not in up and (len(job.hosts) > 1 or port.phys_state == "Disabled")
        yield AuditFinding(
            severity=Severity.WARNING if unused else Severity.FAIL,
            hosts=(host.name,),
            place=place,
            seen=f"is {printable(port.state)}, {printable(port.phys_state)}"
            + (", as on all hosts" if unused and len(job.hosts) > 1 else ""),
            cost="the node has one rail less, and NCCL may hang if the other nodes use it",
            fix=_down_fix(device, port, fix),
        )
        return
    if port.rate_gbps is None:
        yield unknown(f"its rate: {host.reason(f'{fact}/rate')}", host.name, place)
        return
    wanted = max(fastest, job.settings.expect_rate_gbps or 0.0)
    if port.rate_gbps < wanted:
        yield AuditFinding(
            severity=Severity.FAIL,
            hosts=(host.name,),
            place=place,
            seen=f"runs at {port.rate_gbps:g} Gb/s, others of its kind at {wanted:g}",
            cost="every collective waits for the slowest port",
            fix=fix,
        )


def _down_fix(device: RdmaDevice, port: RdmaPort, otherwise: str) -> str:
    """Return what brings a port up; no cable helps a port that is disabled, or has a link but no subnet manager."""
    if port.phys_state == "Disabled":
        return f"mlxlink -d {shell_word(device.name)} -p {port.number} --port_state UP  # admin"
    if port.phys_state == "LinkUp" and port.link_layer == "InfiniBand":
        return "sminfo; systemctl status opensm  # admin: the link is up, and no subnet manager has activated the port"
    return otherwise


_Rates = dict[str, list[tuple[AuditedHost, float]]]


def _slow_interfaces(job: AuditedJob) -> Iterator[AuditFinding]:
    """Yield adapters that are slower, and interfaces that are shaped to less, than those of their name elsewhere."""
    speeds: _Rates = {}
    shapes: _Rates = {}
    for host in job.hosts:
        nets = _nets(host)
        if any(net.shaped_mbps is None for net in nets):
            yield unknown(f"whether its interfaces are shaped: {host.reason('net/shaping')}", host.name)
        for net in nets:
            if net.is_physical and net.kind == "ethernet" and net.speed_mbps:
                speeds.setdefault(net.name, []).append((host, net.speed_mbps))
            if net.shaped_mbps is not None:
                shapes.setdefault(net.name, []).append((host, net.shaped_mbps or math.inf))
    for name, host, rate, fastest in _below_fastest(speeds):
        yield AuditFinding(
            severity=Severity.FAIL,
            hosts=(host.name,),
            place=name,
            seen=f"runs at {rate / 1000:g} Gb/s, but at {fastest / 1000:g} on other hosts",
            fix=f"ethtool {shell_word(name)}  # then cable, switch port, autonegotiation",
        )
    for name, host, rate, fastest in _below_fastest(shapes):
        others = "not shaped on other hosts" if fastest == math.inf else f"to {fastest / 1000:g} on other hosts"
        yield AuditFinding(
            severity=Severity.FAIL,
            hosts=(host.name,),
            place=name,
            seen=f"is shaped to {rate / 1000:g} Gb/s, but {others}",
            fix=f"tc qdisc show dev {shell_word(name)}  # admin: find who set it; `tc qdisc del` removes it",
        )


def _below_fastest(rates: _Rates) -> Iterator[tuple[str, AuditedHost, float, float]]:
    for name, entries in rates.items():
        fastest = max(rate for _, rate in entries)
        yield from ((name, host, rate, fastest) for host, rate in entries if rate < fastest)


def _roce_names(host: AuditedHost) -> set[str]:
    if host.snapshot.net is None:
        return set()
    roce = [(d, port) for d, port in _ports(host) if port.link_layer == "Ethernet" and port.state == "ACTIVE"]
    return {net.name for device, port in roce for net in host.net_of(device, port)}


def _check_mtu(job: AuditedJob, name: str, entries: Sequence[tuple[AuditedHost, int, bool]]) -> Iterator[AuditFinding]:
    counts = Counter(mtu for _, mtu, _ in entries)
    usual = max(counts, key=lambda mtu: (counts[mtu], mtu))
    expected, least = job.settings.expect_mtu or usual, job.settings.roce_mtu
    for host, mtu, is_roce in entries:
        wanted, severity = expected if is_roce else usual, Severity.WARNING
        if mtu != usual:
            seen, severity = f"has MTU {mtu}, but {usual} on {counts[usual]} of {len(entries)} hosts", Severity.FAIL
        elif is_roce and mtu != wanted:
            seen = f"has MTU {mtu}, the site expects {wanted}"
        elif is_roce and mtu < least:
            seen, wanted = f"has MTU {mtu}, below {least}: RDMA cannot send 4096 bytes at once", max(9000, least)
        else:
            continue
        yield AuditFinding(
            severity=severity,
            hosts=(host.name,),
            place=name,
            seen=seen,
            cost="packets too large for the smaller MTU are dropped, which has hung NCCL (nccl#1524, #1957)"
            if severity == Severity.FAIL
            else "the same bytes take more packets",
            fix=f"ip link set dev {shell_word(name)} mtu {wanted}  # admin; the same on all hosts and switches",
        )


def _is_up(host: AuditedHost, kind: str, device: str) -> bool:
    """Return whether the counters of a device matter: one that is down carries no traffic."""
    if kind == "net":
        return host.snapshot.net is None or any(net.name == device for net in host.between_hosts)
    return any(f"{d.name}/{port.number}" == device and port.state == "ACTIVE" for d, port in _ports(host))


def _limit(job: AuditedJob, values: Mapping[str, int], kind: str, device: str, counter: str) -> float:
    if kind == "rdma":
        return job.settings.link_errors if counter in LINK_ERRORS else job.settings.congestion_errors
    packets = values.get(f"net/{device}/{counter[:2]}_packets", 0)
    return max(job.settings.congestion_errors, job.settings.drop_share * packets)
