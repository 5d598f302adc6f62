"""Rules C02 to C07: what NCCL's log says of transports, network, CPUs, GPUDirect, topology and failures."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from hpcpace.audit import cpusets
from hpcpace.audit.findings import AuditFinding, Certainty, Severity, Skip
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.nccl_log import LogProcess, NcclLog, Seen, Topic
from hpcpace.audit.tree import Unreadable
from hpcpace.core.records import dataclass
from hpcpace.core.text import plural, printable

_RDMA_NAME = re.compile(r"\b(ib[ops]?\d\w*|ibp\w+|ibs\d\w*|hsn\d+|opa\d+)\b")
"""Interfaces of InfiniBand, Slingshot and Omni-Path by their usual names: the node has a fast network."""
_LOCAL_NAME = re.compile(r"(?:^|\[\d+\])(lo|docker\w*|veth\w*|virbr\w*|br-\w+|cni\w*|flannel\w*|podman\w*):")
_INTERFACE = re.compile(r"(?:\[\d+\])?([A-Za-z][\w.\-]*):")
_LOOK_FOR_RDMA = "ls /dev/infiniband; ibv_devinfo  # a container needs --device=/dev/infiniband and libibverbs"


def c02_transports(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find connections with slower transports than the nodes allow."""
    log = _log(job)
    if not job.hosts:
        yield from _each_host(job, log, _within_host)
        return
    host_of = {rank.rank: host for host in job.hosts for rank in host.ranks}
    slow: dict[tuple[bool, str], list[tuple[int, int]]] = {}
    for sender, receiver, transport in sorted(log.edges):
        host, other = host_of.get(sender), host_of.get(receiver)
        if host is None or other is None:
            missing = sender if host is None else receiver
            raise Unreadable(f"the node of rank {missing} in the NCCL log: no snapshot has it")
        is_between = host is not other
        if (
            transport.startswith("NET/Socket") and host.has_active_port
            if is_between
            else not transport.startswith("P2P")
        ):
            slow.setdefault((is_between, host.name), []).append((sender, receiver))
    for (is_between, name), edges in sorted(slow.items(), key=lambda item: item[0][0]):
        if is_between:
            yield _connections(name, edges, "sockets although the node has RDMA", "NCCL_IB_DISABLE NCCL_NET")
        else:
            what = "host memory within the node instead of P2P"
            yield _connections(name, edges, what, "NCCL_P2P_DISABLE NCCL_P2P_LEVEL")


def c03_network(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find ranks whose network is slower than their hosts allow, and why."""
    log = _log(job)
    yield from _each_host(job, log, _network)
    yield from _each_host(job, log, _local_interface)
    yield from _slow_ports(job, log)


def c04_affinity(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find ranks whose NCCL threads may run on a single CPU."""
    log = _log(job)
    texts = [value for process in log.processes for value in process.values(Topic.AFFINITY)]
    are_lists = any("-" in text for text in texts)
    are_masks = any(_is_only_mask(text.split()[-1]) for text in texts)
    for process in log.processes:
        for text, seen in process.values(Topic.AFFINITY).items():
            gpu, _, cpus = text.rpartition(" ")
            readings = {cpus_of for cpus_of in _readings(cpus, as_list=not are_masks, as_mask=not are_lists) if cpus_of}
            if not readings or max(mask.bit_count() for mask in readings) > 1:
                continue
            number = f"CPU {cpusets.format_list(readings.pop())}" if len(readings) == 1 else "one CPU"
            yield process_finding(
                job,
                process,
                seen,
                place=gpu,
                text=f"NCCL's threads of this rank may run on {number} alone",
                cost="its proxy threads and the training's own share one core, and every collective waits for it",
                fix="srun -c N --cpu-bind=cores ...  # N: the node's cores / its ranks; torchrun: taskset, container",
            )


def c05_gpudirect(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find ranks that use RDMA without GPUDirect."""
    yield from _each_host(job, _log(job), _gpudirect)


def c07_topology(job: AuditedJob) -> Iterator[AuditFinding]:
    """Find adapters far from GPUs, few channels, and topologies that NCCL could not read."""
    yield from _each_host(job, _log(job), _topology)


def _log(job: AuditedJob) -> NcclLog:
    log = given_log(job)
    if not log.has_info:
        raise Unreadable("what NCCL chose: its log has only warnings, run the job with NCCL_DEBUG=INFO")
    return log


@dataclass(frozen=True, kw_only=True)
class _Host:
    """The processes of one host in one start, and what the log says of that start."""

    job: AuditedJob
    log: NcclLog
    name: str
    processes: list[LogProcess]
    has_many_hosts: bool | None

    def values(self, topic: Topic) -> dict[str, Seen]:
        """Return what any of its processes said on a topic."""
        found: dict[str, Seen] = {}
        for process in self.processes:
            for value, seen in process.values(topic).items():
                found.setdefault(value, seen)
        return found

    def variable(self, *names: str) -> tuple[str, str]:
        """Return the name and the value of the first of some variables that is set; empty if none is."""
        for name in names:
            for process in self.processes:
                if value := process.variable(name):
                    return name, value
        return "", ""

    def via(self, wanted: Callable[[str], bool]) -> tuple[int, str, str]:
        """Return how many connections use some transports, the first transport, and its line."""
        found = [(name, seen) for process in self.processes for name, seen in process.via.items() if wanted(name)]
        if not found:
            return 0, "", ""
        return sum(seen.count for _, seen in found), found[0][0], found[0][1].evidence

    def finding(
        self,
        text: str,
        cost: str,
        fix: str,
        evidence: str,
        *,
        processes: Sequence[LogProcess] = (),
        severity: Severity = Severity.WARNING,
        certainty: Certainty = Certainty.READ,
    ) -> AuditFinding:
        """Return a finding on the ranks of some of its processes, or of all."""
        return AuditFinding(
            severity=severity,
            place=self.log.start_text(self.processes[0].start),
            seen=text,
            cost=cost,
            fix=fix,
            evidence=evidence,
            certainty=certainty,
            hosts=(self.job.name_of(self.name),),
            ranks=tuple(sorted({process.rank for process in processes or self.processes if process.rank >= 0})),
        )


def _each_host(
    job: AuditedJob, log: NcclLog, check: Callable[[_Host], Iterator[AuditFinding]]
) -> Iterator[AuditFinding]:
    """Yield what a check finds on each host of each start."""
    for start in range(log.num_starts):
        by_host: dict[str, list[LogProcess]] = {}
        for process in log.of_start(start):
            by_host.setdefault(process.host, []).append(process)
        has_many_hosts = log.has_many_hosts(start)
        for name, processes in by_host.items():
            yield from check(_Host(job=job, log=log, name=name, processes=processes, has_many_hosts=has_many_hosts))


def _connections(host: str, edges: list[tuple[int, int]], what: str, variables: str) -> AuditFinding:
    sender, receiver = edges[0]
    users = f"{len(edges)} connections, such as rank {sender} to {receiver}, use"
    if len(edges) == 1:
        users = f"the connection from rank {sender} to {receiver} uses"
    return AuditFinding(
        severity=Severity.WARNING,
        hosts=(host,),
        seen=f"{users} {what}",
        fix=f"unset {variables}  # see also A09, N01, N04",
        ranks=tuple(sorted({rank for edge in edges for rank in edge})),
    )


def _within_host(host: _Host) -> Iterator[AuditFinding]:
    """Find connections within a host that do without P2P: certain with a reason, else only noted."""
    count, transport, evidence = host.via(lambda name: name.startswith("SHM"))
    if not count:
        return
    name, value = host.variable("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
    refused = host.values(Topic.P2P_OFF)
    has_nvlink = any("NV" in value for value in host.values(Topic.PATTERN))
    text = f"{plural(count, 'connection')} within the node through host memory ({transport}) instead of P2P"
    severity, fix = Severity.WARNING, "nvidia-smi topo -p2p r; dmesg | grep -i -e iommu -e acs  # see P05"
    if name and value not in ("0", ""):
        text, fix = f"{text}: {name}={value}", f"unset {name}"
    elif refused:
        text, evidence = f"{text}: {next(iter(refused))}", next(iter(refused.values())).evidence
    elif not has_nvlink:
        severity, fix = Severity.INFORMATION, f"{fix}; usual between sockets without NVLink"
    yield host.finding(text, "collectives run at the rate of these connections", fix, evidence, severity=severity)


def _network(host: _Host) -> Iterator[AuditFinding]:
    """Find a host on TCP sockets: a fault where something shows that it has more, else a note."""
    sockets = [process for process in host.processes if process.network == "Socket"]
    if not sockets or host.has_many_hosts is False:
        return
    named = next(iter(host.values(Topic.SOCKETS)), "")
    interface = _INTERFACE.match(named)
    text = "NCCL uses TCP sockets" + (f" on {interface[1]}" if interface else "")
    evidence = _evidence(host, Topic.NETWORK, Topic.SOCKETS)
    why, fix, shown = _why_sockets(host)
    yield host.finding(
        f"{text}: {why}",
        "TCP over Ethernet has a fraction of InfiniBand's rate, and copies by the CPU; all collectives between nodes "
        "run at it",
        fix,
        shown or evidence,
        severity=Severity.WARNING if shown else Severity.INFORMATION,
        certainty=Certainty.READ if shown else Certainty.INFERRED,
        processes=sockets,
    )


def _why_sockets(host: _Host) -> tuple[str, str, str]:
    """Return why a host uses sockets, the fix, and the line that shows it; no line if it may have nothing else."""
    for name, is_off in (
        ("NCCL_IB_DISABLE", lambda value: value not in ("0", "")),
        ("NCCL_NET", lambda value: value.lower() == "socket"),
    ):
        _, value = host.variable(name)
        if value and is_off(value):
            return f"{name}={value}", f"unset {name}", host.values(Topic.VARIABLE)[f"{name}={value}"].evidence
    verbs, devices = _evidence(host, Topic.NO_VERBS), _evidence(host, Topic.RDMA)
    if verbs:
        fix = "apt-get install libibverbs1 ibverbs-providers  # in the image; then ls /dev/infiniband"
        return "libibverbs is missing, so InfiniBand and RoCE cannot be used", fix, verbs
    failed = host.values(Topic.PLUGIN)
    if failed:
        value, seen = next(iter(failed.items()))
        return f"the network plugin failed ({value[:80]})", "look at the plugin's lines above this one", seen.evidence
    name, wanted = host.variable("NCCL_NET_PLUGIN")
    missing = host.values(Topic.NO_PLUGIN)
    if wanted and wanted.lower() != "none" and missing:
        fix = f"ls $LD_LIBRARY_PATH | grep nccl-net  # the library that {name}={wanted} names"
        return f"its plugin {next(iter(missing))} is not found", fix, next(iter(missing.values())).evidence
    if devices:
        return "although it found RDMA devices", "unset NCCL_NET  # see the warnings of C06", devices
    no_device = _evidence(host, Topic.NO_RDMA)
    snapshot = next((one for one in host.job.hosts if one.name == host.job.name_of(host.name)), None)
    if snapshot is not None and snapshot.has_active_port:
        shown = no_device or _evidence(host, Topic.NETWORK, Topic.SOCKETS)
        return "although the node has an active RDMA port", _LOOK_FOR_RDMA, shown
    hint, shown = _rdma_hint(host)
    if hint:
        return f"no RDMA device found, although {hint}", _LOOK_FOR_RDMA, no_device or shown
    return "no RDMA device found: fine if the node has none", "ls /sys/class/infiniband  # on the node", ""


def _rdma_hint(host: _Host) -> tuple[str, str]:
    """Return what shows that a host has a fast network, and its line; empty if nothing does."""
    for topic in (Topic.BOOTSTRAP, Topic.SOCKETS):
        for value, seen in host.values(topic).items():
            if named := _RDMA_NAME.search(value):
                return f"{named[1]} is an interface of a fast network", seen.evidence
    name, value = host.variable("NCCL_IB_HCA")
    if name:
        return f"{name}={value} asks for one", host.values(Topic.VARIABLE)[f"{name}={value}"].evidence
    for process in host.log.of_start(host.processes[0].start):
        is_of_job = process.num_ranks > 0 and process.num_ranks == host.processes[0].num_ranks
        if is_of_job and process.host != host.name and process.values(Topic.RDMA):
            evidence = next(iter(process.values(Topic.RDMA).values())).evidence
            return f"{process.host} of the same job has one", evidence
    return "", ""


def _local_interface(host: _Host) -> Iterator[AuditFinding]:
    """Find interfaces over which no other host can be reached."""
    if not host.has_many_hosts:
        return
    for topic in (Topic.SOCKETS, Topic.BOOTSTRAP):
        for value, seen in host.values(topic).items():
            if named := _LOCAL_NAME.search(value):
                yield host.finding(
                    f"NCCL uses {named[1]}, which leads to no other host",
                    "ranks of other hosts cannot connect, or hang",
                    "export NCCL_SOCKET_IFNAME=^lo,docker,veth,virbr,br-  # or the fabric's interface",
                    seen.evidence,
                )
                return


def _slow_ports(job: AuditedJob, log: NcclLog) -> Iterator[AuditFinding]:
    """Find ports that are slower than the others of their kind in the job."""
    rates: dict[tuple[str, str], tuple[int, str, LogProcess]] = {}
    for process in log.processes:
        for value, seen in process.values(Topic.SPEED).items():
            device, port, mbps = value.split(" ")[:3]
            rates.setdefault((process.host, f"{device}:{port}"), (int(mbps), seen.evidence, process))
    by_kind: dict[str, Counter[int]] = {}
    for (_, name), (rate, _, _) in rates.items():
        by_kind.setdefault(name.rpartition("/")[2], Counter())[rate] += 1
    for (_, name), (rate, evidence, process) in rates.items():
        usual, count = by_kind[name.rpartition("/")[2]].most_common(1)[0]
        if rate < usual and count > 1:
            yield process_finding(
                job,
                process,
                Seen(evidence),
                place=name.partition("/")[0],
                text=f"runs at {rate / 1000:g} Gb/s, {count} others of its kind at {usual / 1000:g}",
                cost="its GPU's traffic waits for this port",
                fix=f"ibstat; mlxlink -d {name.partition(':')[0]}  # then reseat or replace the cable",
            )


def _evidence(host: _Host, *topics: Topic) -> str:
    """Return the first line on one of some topics; empty if there is none."""
    return next((seen.evidence for topic in topics for seen in host.values(topic).values()), "")


def _is_only_mask(text: str) -> bool:
    return bool(re.search(r"[a-fA-F]|(^|,)0[0-9a-fA-F]", text))


def _readings(text: str, *, as_list: bool, as_mask: bool) -> Iterator[int]:
    """Yield the sets of CPUs that a text of NCCL may mean: a mask of whole bytes up to 2.26, a list since 2.27."""
    groups = text.split(",")
    is_mask = re.fullmatch(r"([0-9a-fA-F]{2}){1,4}(,[0-9a-fA-F]{8})*", text) is not None
    is_list = re.fullmatch(r"(0|[1-9]\d{0,4})(-[1-9]\d{0,4})?(,[1-9]\d{0,4}(-[1-9]\d{0,4})?)*", text) is not None
    if is_mask and (as_mask or not is_list):
        yield cpusets.parse_mask(",".join(groups))
    if is_list and (as_list or not is_mask):
        try:
            yield cpusets.parse_list(text)
        except ValueError:
            return


def _gpudirect(host: _Host) -> Iterator[AuditFinding]:
    """Find a host whose connections over RDMA all go through host memory."""
    if host.has_many_hosts is False:
        return
    count, transport, evidence = host.via(lambda name: _is_rdma(name) and not name.endswith("[send]"))
    direct, _, _ = host.via(lambda name: _is_rdma(name) and "GDRDMA" in name)
    off = host.values(Topic.GDR_OFF)
    reason = next(iter(off), "")
    if direct or (not count and (not off or host.values(Topic.GDR_ON))):
        return
    uses = f"{plural(count, 'connection')} over {transport}" if count else "RDMA"
    why = f": disabled for {reason}" if reason else ""
    yield host.finding(
        f"{uses} without GPUDirect RDMA{why}",
        "every message between nodes is copied through host memory",
        _gdr_fix(reason),
        off[reason].evidence if reason else evidence,
        certainty=Certainty.READ if count else Certainty.INFERRED,
    )


def _is_rdma(transport: str) -> bool:
    return transport.startswith("NET/") and not transport.startswith("NET/Socket")


def _gdr_fix(reason: str) -> str:
    if "distance" in reason:
        return "use an adapter near the GPU (see N01, nvidia-smi topo -m)  # NCCL_NET_GDR_LEVEL after measuring"
    return "modprobe nvidia-peermem  # admin; or Linux 5.12+ with NVIDIA's open kernel module (dma-buf)"


def _topology(host: _Host) -> Iterator[AuditFinding]:
    far = {value.split()[0]: seen for value, seen in host.values(Topic.NIC_PATH).items() if value.endswith(" SYS")}
    patterns = host.values(Topic.PATTERN)
    if not far and host.has_many_hosts is not False:
        lines = [seen for value, seen in patterns.items() if value.endswith("/SYS")]
        far = {"a GPU": lines[0]} if lines else {}
    if far and host.has_many_hosts is not False:
        yield host.finding(
            f"the nearest adapter of {', '.join(list(far)[:8])} is on another NUMA node (SYS)",
            "its traffic crosses the interconnect of the processors, and GPUDirect RDMA is off",
            "nvidia-smi topo -m; hpcpace audit --topo FILE  # check slots, BIOS and NCCL_IB_HCA",
            next(iter(far.values())).evidence,
        )
    for value, seen in host.values(Topic.TOPOLOGY).items():
        name, file = host.variable("NCCL_TOPO_FILE")
        fix = f"ls -l {printable(file)}; unset {name}" if name else "mount /sys in the container; unset NCCL_TOPO_FILE"
        cost = "NCCL guesses where GPUs and adapters are"
        yield host.finding(f"NCCL has no correct topology: {value}", cost, fix, seen.evidence)
    counts: Mapping[int, str] = {int(value): seen.evidence for value, seen in host.values(Topic.CHANNELS).items()}
    has_nvlink = any(value.startswith("NV") for value in patterns)
    name, value = host.variable("NCCL_MAX_NCHANNELS", "NCCL_MAX_NRINGS", "NCCL_MAX_CTAS")
    if counts and max(counts) <= _MAX_FEW_CHANNELS and (has_nvlink or name):
        why = f": {name}={value}" if name else " although the GPUs have NVLink"
        yield host.finding(
            f"NCCL has only {plural(max(counts), 'channel')}{why}",
            "few channels use only a part of NVLink's and the adapters' rate",
            f"unset {name}" if name else "nvidia-smi nvlink -s; nvidia-smi topo -m  # a missing link or a far adapter",
            counts[max(counts)],
        )


_MAX_FEW_CHANNELS = 2  # two per ring is NCCL's least; a machine with NVLink gets 8 to 32


_MAX_RETRIES = 20  # peers that start seconds later cost a few


def c06_failures(job: AuditedJob) -> Iterator[AuditFinding]:
    """Report errors, timeouts, retries and other warnings."""
    log = given_log(job)
    yield from _failures(job, log)
    if log.problems:
        raise Unreadable(f"all failures: {log.problems[0]}")


def given_log(job: AuditedJob) -> NcclLog:
    """Return NCCL's log of a job; skip the rule without one."""
    if job.nccl_log is None:
        raise Skip("no NCCL log was given: add --nccl-log")
    return job.nccl_log


def process_finding(
    job: AuditedJob,
    process: LogProcess,
    seen: Seen,
    *,
    text: str,
    cost: str,
    fix: str,
    host: str = "",
    place: str = "",
    severity: Severity = Severity.WARNING,
) -> AuditFinding:
    """Return a finding on one process."""
    name = host or process.host
    times = f" ({seen.count} lines)" if seen.count > 1 else ""
    return AuditFinding(
        severity=severity,
        place=place or (f"GPU {process.device}" if process.device >= 0 else ""),
        seen=text + times,
        cost=cost,
        fix=fix,
        evidence=seen.evidence,
        hosts=(job.name_of(name),) if name else (),
        ranks=(process.rank,) if process.rank >= 0 else (),
    )


def _failures(job: AuditedJob, log: NcclLog) -> Iterator[AuditFinding]:
    for process in log.processes:
        for value, seen in process.values(Topic.ERROR).items():
            failure = next(one for one in _failures_known() if re.match(one.pattern, value))
            yield process_finding(
                job,
                process,
                seen,
                host="" if process.host else log.host_of(process.rank),
                text=failure.text.format(value=value),
                cost=failure.cost,
                fix=failure.fix,
                severity=Severity[failure.severity],
            )
        for value, seen in process.values(Topic.RETRY).items():
            is_often = seen.count > _MAX_RETRIES
            yield process_finding(
                job,
                process,
                seen,
                text=f"{value}: {'retried often' if is_often else 'retried'}",
                cost="the other end was not there yet, or cannot be reached",
                fix="look at the rank at that address: did it start?",
                severity=Severity.WARNING if is_often else Severity.INFORMATION,
            )
        for value, seen in process.values(Topic.SETTING).items():
            fix = "echo 0 > /proc/sys/kernel/numa_balancing  # admin" if "NUMA" in value else "add iommu=pt  # admin"
            what = "NUMA balancing is on" if "NUMA" in value else f"the kernel's command line lacks {value}"
            yield process_finding(job, process, seen, text=what, cost="RCCL warns of hangs and varying speed", fix=fix)
        for value, seen in process.values(Topic.WARNING).items():
            yield process_finding(
                job, process, seen, text=f"NCCL warns: {value}", cost="", fix="", severity=Severity.INFORMATION
            )


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """What a kind of error is, where the pattern matches its text."""

    pattern: str
    text: str
    cost: str
    fix: str
    severity: str = "FAIL"


@cache
def _failures_known() -> list[_Failure]:
    text = Path(__file__).parents[1].joinpath("nccl_failures.toml").read_text(encoding="utf-8")
    return [_Failure(**failure) for failure in tomllib.loads(text)["failure"]]
