"""Rules N03, N04 and N07: variables that select adapters, interfaces and addresses, or keep NCCL from using RDMA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from hpcpace.audit.facts import RankFacts
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, unknown
from hpcpace.audit.job import AuditedHost, AuditedJob, rank_place
from hpcpace.audit.rules.fixes import unset_fix
from hpcpace.audit.tree import Unreadable
from hpcpace.core.text import printable, shell_word


def n03_selections(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find variables that select no adapter or interface, or a slow one."""
    variables = rank_variables(host, rank)
    if "NCCL_IB_HCA" in variables:
        yield from _check_hca(host, rank, variables["NCCL_IB_HCA"])
    if "UCX_NET_DEVICES" in variables:
        yield from _check_ucx(host, rank, variables["UCX_NET_DEVICES"])
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if name in variables:
            yield from _check_interface(job, host, rank, name, variables[name])


def n04_sockets(job: AuditedJob, host: AuditedHost, rank: RankFacts) -> Iterator[AuditFinding]:
    """Find what makes NCCL use sockets although the node has RDMA."""
    if not any(port.state == "ACTIVE" for _, port in host.rdma_ports):
        return
    variables = rank_variables(host, rank)
    if rank.locked_bytes is None:
        raise host.unreadable("its locked-memory limit", f"rank/{rank.rank}/locked_bytes", f"rank/{rank.rank}/limits")
    reasons = []
    if variables.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
        reasons.append((f"NCCL_IB_DISABLE={variables['NCCL_IB_DISABLE']}", unset_fix(rank, "NCCL_IB_DISABLE")))
    if variables.get("NCCL_NET", "").lower() == "socket":
        reasons.append((f"NCCL_NET={variables['NCCL_NET']}", unset_fix(rank, "NCCL_NET")))
    if not host.snapshot.kernel.has_verbs:
        reasons.append(
            (
                "/dev/infiniband is missing",
                "srun --container-mounts=/dev/infiniband ...  # or docker run --device=/dev/infiniband",
            )
        )
    if 0 <= rank.locked_bytes < job.settings.least_locked:
        seen = f"it may lock only {rank.locked_bytes >> 10} KiB of memory"
        reasons.append(
            (seen, "ulimit -l unlimited  # Slurm: PropagateResourceLimitsExcept=MEMLOCK and LimitMEMLOCK=infinity")
        )
    for seen, fix in reasons:
        yield AuditFinding(
            rule="N04",
            severity=Severity.FAIL,
            host=host.name,
            place=rank_place(rank),
            seen=f"the node has RDMA, but {seen}",
            cost="NCCL uses NET/Socket: a fraction of the rate, and CPU time for every byte",
            fix=fix,
            certainty=Certainty.READ,
            ranks=(rank.rank,),
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
            rule="N07",
            severity=Severity.WARNING,
            host=host.name,
            place=f"{device.name} port {port.number}",
            seen=f"NCCL_IB_GID_INDEX={printable(text)} is {printable(kinds.get(text, 'empty'))}",
            cost="RoCE v1 is not routed, and an empty entry cannot connect at all",
            fix=unset_fix(rank, "NCCL_IB_GID_INDEX")
            + (f"  # NCCL before 2.21: {better}" if better else "  # NCCL 2.21 chooses it"),
            certainty=Certainty.READ,
            ranks=(rank.rank,),
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


def _interface_selected(value: str, name: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME selects an interface: the syntax of NCCL_IB_HCA without ports."""
    return hca_selects(value.replace(":", "\0"), name, 0)


def rank_variables(host: AuditedHost, rank: RankFacts) -> Mapping[str, str]:
    """Return a rank's variables, NCCL's files included; the environment wins over ~/.nccl.conf, that over /etc."""
    return {**host.snapshot.kernel.nccl_conf, **rank.user_conf, **rank.variables}


def _check_hca(host: AuditedHost, rank: RankFacts, value: str) -> Iterator[AuditFinding]:
    ports = host.rdma_ports
    chosen = [(device, port) for device, port in ports if hca_selects(value, device.name, port.number)]
    seen = f"NCCL_IB_HCA={printable(value)}"
    have = ",".join(dict.fromkeys(device.name for device, _ in ports)) or "none"
    if not chosen:
        yield _named(
            host,
            rank,
            "NCCL_IB_HCA",
            Severity.FAIL,
            f"{seen} matches no adapter (this node has {have})",
            unset_fix(rank, "NCCL_IB_HCA"),
        )
        return
    rates = [port.rate_gbps or 0.0 for _, port in ports if port.state == "ACTIVE"]
    slowest = min((port.rate_gbps or 0.0 for _, port in chosen), default=0.0)
    if all(port.state != "ACTIVE" for _, port in chosen):
        text = f"{seen} selects only ports that are down"
        yield _named(host, rank, "NCCL_IB_HCA", Severity.FAIL, text, unset_fix(rank, "NCCL_IB_HCA"))
    elif rates and slowest < max(rates):
        text = f"{seen} selects a port of {slowest:g} Gb/s, but the fastest has {max(rates):g}"
        fast = [device.name for device, port in ports if port.state == "ACTIVE" and port.rate_gbps == max(rates)]
        fix = f"export NCCL_IB_HCA={shell_word('=' + ','.join(dict.fromkeys(fast)))}"
        yield _named(host, rank, "NCCL_IB_HCA", Severity.WARNING, text, fix)


def _check_ucx(host: AuditedHost, rank: RankFacts, value: str) -> Iterator[AuditFinding]:
    have = {f"{device.name}:{port.number}" for device, port in host.rdma_ports} | {net.name for net in host.net}
    words = [word.strip() for word in value.split(",") if word.strip()]
    if "all" in words or value.startswith("^"):
        return
    if not have & set(words):
        seen = f"UCX_NET_DEVICES={printable(value)} matches no device (this node has {', '.join(sorted(have)[:8])})"
        yield _named(host, rank, "UCX_NET_DEVICES", Severity.FAIL, seen, "unset UCX_NET_DEVICES")


def _check_interface(
    job: AuditedJob, host: AuditedHost, rank: RankFacts, variable: str, value: str
) -> Iterator[AuditFinding]:
    # gloo takes exact names separated by commas; NCCL takes prefixes.
    whole = variable == "GLOO_SOCKET_IFNAME"
    words = value.split(",")
    chosen = [net for net in host.net if (net.name in words if whole else _interface_selected(value, net.name))]
    candidates = [net for net in host.between_hosts if net.state == "up" and net.has_route is not False]
    fastest = max((net.speed_mbps or 0 for net in candidates), default=0)
    best = next((net.name for net in candidates if (net.speed_mbps or 0) == fastest), "")
    use = f"export {variable}={shell_word(best if whole else '=' + best)}" if best else unset_fix(rank, variable)
    seen = f"{variable}={printable(value)}"
    if not chosen:
        names = ",".join(net.name for net in host.net[:8])
        yield _named(host, rank, variable, Severity.FAIL, f"{seen} matches no interface (this node has {names})", use)
    elif all(net.state == "down" for net in chosen):
        yield _named(host, rank, variable, Severity.FAIL, f"{seen} selects only interfaces that are down", use)
    elif all(net.has_route is False and net.kind != "loopback" for net in chosen):
        names = ",".join(net.name for net in chosen)
        text = f"{seen} selects {names}, which no route uses: it has no address"
        yield _named(host, rank, variable, Severity.FAIL, text, use)
    else:
        if any(net.has_route is None for net in chosen):
            what = f"whether a route uses what {variable} selects: {host.reason('net/routes')}"
            yield unknown("N03", host.name, variable, what, (rank.rank,))
        speed = max(net.speed_mbps or 0 for net in chosen)
        if 0 < speed < job.settings.slow_share * fastest:
            names = ",".join(net.name for net in chosen)
            text = f"{seen} selects {names} at {speed / 1000:g} Gb/s, but {best} has {fastest / 1000:g}"
            yield _named(host, rank, variable, Severity.WARNING, text, use)


def _named(host: AuditedHost, rank: RankFacts, variable: str, severity: Severity, seen: str, fix: str) -> AuditFinding:
    return AuditFinding(
        rule="N03",
        severity=severity,
        host=host.name,
        place=variable,
        seen=seen,
        cost="ranks fail to connect, or use a network that is not meant for them"
        if severity == Severity.FAIL
        else "traffic goes over the slow network",
        fix=fix,
        certainty=Certainty.READ,
        ranks=(rank.rank,),
    )
