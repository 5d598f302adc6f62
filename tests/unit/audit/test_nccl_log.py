"""What the audit says of NCCL's logs: of all versions, behind all prefixes, of one rank or many, whole or cut."""

from __future__ import annotations

import codecs
import gzip
import os
import resource
from pathlib import Path

import pytest

from hpcpace.audit.findings import AuditFinding, Severity
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.nccl_log import read_nccl_log
from hpcpace.audit.rulebook import run_rules
from hpcpace.core.errors import UsageError

DATA = Path(__file__).parents[2] / "data" / "nccl-logs"

HEALTHY_DGX = """\
dgx1:100:100 [0] NCCL INFO Bootstrap : Using ens0:10.0.0.1<0>
dgx1:100:100 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
NCCL version 2.18.3+cuda12.1
dgx1:100:130 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ens0:10.0.0.1<0>
dgx1:100:130 [0] NCCL INFO Using network IB
dgx1:100:130 [0] NCCL INFO comm 0x55aa rank 0 nranks 4 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xabc1 - Init START
dgx1:101:131 [1] NCCL INFO Using network IB
dgx1:101:131 [1] NCCL INFO comm 0x55ab rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 2c000 commId 0xabc1 - Init START
dgx2:200:230 [0] NCCL INFO Using network IB
dgx2:200:230 [0] NCCL INFO comm 0x55ac rank 2 nranks 4 cudaDev 0 nvmlDev 0 busId 1b000 commId 0xabc1 - Init START
dgx2:201:231 [1] NCCL INFO Using network IB
dgx2:201:231 [1] NCCL INFO comm 0x55ad rank 3 nranks 4 cudaDev 1 nvmlDev 1 busId 2c000 commId 0xabc1 - Init START
dgx1:100:130 [0] NCCL INFO Setting affinity for GPU 0 to ffff,ffffffff
dgx1:101:131 [1] NCCL INFO Setting affinity for GPU 1 to ffff0000,00000000
dgx1:100:130 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
dgx1:100:130 [0] NCCL INFO GPU Direct RDMA Disabled for GPU 1b000 / HCA 1 (distance 5 > 4)
dgx1:100:130 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 8, bw 24.0/24.0, type NVL/PIX, sameChannels 1
dgx1:100:130 [0] NCCL INFO GPU/1B000 :GPU/1B000 (0/5000/LOC) NET/0 (3/24.0/PIX) NET/1 (6/12.0/SYS)
dgx1:100:130 [0] NCCL INFO Channel 00/16 :    0   1   2   3
dgx1:100:130 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
dgx1:101:131 [1] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0
dgx2:200:230 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [receive] via NET/IB/0/GDRDMA
dgx2:200:230 [0] NCCL INFO 16 coll channels, 0 nvls channels, 16 p2p channels, 2 p2p channels per peer
"""

HEALTHY = {
    "two DGX": HEALTHY_DGX,
    "one node without a network": """\
ws:7:7 [0] NCCL INFO Failed to open libibverbs.so[.1]
ws:7:7 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.9<0>
ws:7:7 [0] NCCL INFO Using network Socket
ws:7:9 [0] NCCL INFO comm 0x1 rank 0 nRanks 2 nNodes 1 localRanks 2 localRank 0 MNNVL 0
ws:7:9 [0] NCCL INFO Channel 00/02 : 0 1
ws:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
""",
    "NCCL 2.4 on one node": """\
old:5:9 [0] NCCL INFO NET/IB : No device found.
old:5:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.9<0>
old:5:9 [0] NCCL INFO Setting affinity for GPU 0 to ff
old:5:9 [0] NCCL INFO Ring 00 : 0[0] -> 1[1] via P2P/IPC
old:5:9 [0] NCCL INFO comm 0x7f11 rank 0 nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE
old:6:9 [1] NCCL INFO comm 0x7f12 rank 1 nranks 2 cudaDev 1 nvmlDev 1 - Init COMPLETE
""",
    "EFA": """\
[1,0]<stdout>:p4d-0:26:26 [0] NCCL INFO NET/OFI Selected Provider is efa
[1,0]<stdout>:p4d-0:26:26 [0] NCCL INFO Using network AWS Libfabric
[1,0]<stdout>:p4d-0:26:30 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [receive] via NET/AWS Libfabric/0/GDRDMA
[1,8]<stdout>:p4d-1:26:30 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/AWS Libfabric/0/GDRDMA
""",
    "RCCL": """\
amd1:31:71 [1] NCCL INFO Setting affinity for GPU 1 to ffff,ffffffff
amd1:31:71 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/direct pointer comm 0x5fa3 nRanks 02
""",
}


def _found(text: str | bytes, folder: Path, name: str = "log") -> list[AuditFinding]:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(run_rules(AuditedJob([], nccl_log=read_nccl_log(folder / name))).findings)


def _rules(text: str | bytes, folder: Path) -> set[str]:
    return {f"{f.severity} {f.rule}" for f in _found(text, folder)}


def test_healthy_logs_have_no_findings(tmp_path: Path) -> None:
    found = {name: [f.seen for f in _found(text, tmp_path)] for name, text in HEALTHY.items()}
    assert found == {name: [] for name in HEALTHY}


_TWO = """\
n1:1:1 [0] NCCL INFO comm 0x1 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0
n2:1:1 [0] NCCL INFO comm 0x2 rank 1 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0
"""
_SOCKET = "n1:1:1 [0] NCCL INFO Using network Socket\n"
FAULTS = {
    "sockets by order": (_TWO + _SOCKET + "n1:1:1 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n", "W C03"),
    "sockets by NCCL_NET": (_TWO + _SOCKET + "n1:1:1 [0] NCCL INFO NCCL_NET set by environment to Socket.\n", "W C03"),
    "IPoIB": (_TWO + _SOCKET + "n1:1:1 [0] NCCL INFO Bootstrap : Using ibp12s0:10.1.0.1<0>\n", "W C03"),
    "no device, asked for": (
        _TWO + "n1:1:1 [0] NCCL INFO NCCL_IB_HCA set to mlx5_0:1\nn1:1:1 [0] NCCL INFO NET/IB : No device found.\n"
        "n1:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>\n",
        "W C03",
    ),
    "no device, another has one": (_TWO + _SOCKET + "n2:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\n", "W C03"),
    "perhaps no device at all": (_TWO + _SOCKET + "n1:1:1 [0] NCCL INFO NET/IB : No device found.\n", "I C03"),
    "plugin of RCCL": (
        _TWO + "n1:1:1 [0] NCCL INFO External network plugin librccl-net-x.so is unsupported\n" + _SOCKET,
        "W C03",
    ),
    "plugin not found": (
        _TWO + "n1:1:1 [0] NCCL INFO NCCL_NET_PLUGIN set by environment to aws\n"
        "n1:1:1 [0] NCCL INFO NET/Plugin: Could not find: aws libnccl-net-aws.so. Using internal network plugin.\n"
        + _SOCKET,
        "W C03",
    ),
    "docker's bridge": (_TWO + "n2:1:1 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>\n", "W C03"),
    "a container's interface beside another one": (
        _TWO
        + "n2:1:1 [0] NCCL INFO Bootstrap : Using [0]ens5:10.0.0.2<0> [1]veth75fa783:fe80::14ad:64ff:fe64:b31e%v<0>\n",
        "W C03",
    ),
    "slow port": (
        "".join(
            f"n{n}:1:1 [0] NCCL INFO NET/IB: [0] mlx5_0:uverbs0:1/IB provider=Mlx5 speed={rate} context=0x1\n"
            for n, rate in enumerate((200000, 100000, 200000))
        ),
        "W C03",
    ),
    "one core, mask": ("n1:1:1 [1] NCCL INFO Setting affinity for GPU 1 to 01\n", "W C04"),
    "one core, long mask": ("n1:1:1 [1] NCCL INFO Setting affinity for GPU 1 to 80000000,00000000\n", "W C04"),
    "one core, list": (
        "n1:1:1 [1] NCCL INFO Setting affinity for GPU 1 to 17\n"
        "n1:2:2 [0] NCCL INFO Setting affinity for GPU 0 to 0-7\n",
        "W C04",
    ),
    "no GPUDirect": (
        _TWO + "n2:1:1 [0] NCCL INFO NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0' (no module)\n"
        "n2:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [receive] via NET/IB/0\n",
        "W C05",
    ),
    "no GPUDirect, 2.4": ("n1:1:1 [0] NCCL INFO Ring 00 : 3 -> 0 [receive] via NET/IB/0\n", "W C05"),
    "P2P off": (
        "n1:1:1 [0] NCCL INFO NCCL_P2P_DISABLE set by environment to 1\n"
        "n1:1:1 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[2c000] via direct shared memory\n",
        "W C02",
    ),
    "P2P refused": (
        "n1:1:1 [0] NCCL INFO Could not enable P2P between dev 0(=1000) and dev 1(=2000)\n"
        "n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct\n",
        "W C02",
    ),
    "shared memory, perhaps as it must be": (
        "n1:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct\n",
        "I C02",
    ),
    "far adapter": (_TWO + "n1:1:1 [0] NCCL INFO GPU/B000 :GPU/B000 (0/5000/LOC) NET/0 (6/12.0/SYS)\n", "W C07"),
    "few channels": (
        "n1:1:1 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 1, bw 20.0/20.0, type NVL/PIX, sameChannels 1\n"
        "n1:1:1 [0] NCCL INFO 2 coll channels, 2 p2p channels, 1 p2p channels per peer\n",
        "W C07",
    ),
    "topology file": (
        "n1:1:1 [0] NCCL INFO Could not open XML topology file /topo.xml : No such file or directory\n",
        "W C07",
    ),
    "time-out of RDMA": (
        "n1:1:9 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<54862> with status=12 "
        "opcode=0 len=0 vendor err 129 (Recv)\n",
        "F C06",
    ),
    "time-out of RDMA, 2.8": (
        "n1:1:9 [4] transport/net_ib.cc:839 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len 0\n",
        "F C06",
    ),
    "port down": ("n1:1:9 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error\n", "F C06"),
    "shared memory full": (
        "n1:1:9 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-a to 9637892 bytes\n",
        "F C06",
    ),
    "memory that cannot be pinned": (
        "n1:1:9 [0] misc/ibvwrap.cc:198 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory\n",
        "F C06",
    ),
    "a route that does not exist": (
        "n1:1:9 [0] misc/ibvwrap.cc:262 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev"
        " mlx5_0:1, curr state INIT, next state RTR, local GID index 3\n",
        "F C06",
    ),
    "versions": (
        "n1:1:9 [0] init.cc:571 NCCL WARN Mismatched NCCL version detected : rank 0 version 1 rank 1\n",
        "F C06",
    ),
    "broken connection": (
        "n1:1:9 [0] misc/socket.cc:58 NCCL WARN socketProgress: Connection closed by remote peer n2\n",
        "W C06",
    ),
    "a peer that cannot be reached": (
        "n1:1:9 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.0.0.2<45763> failed : Software"
        " caused connection abort\n",
        "F C06",
    ),
    "a peer that cannot be reached, 2.4": (
        "n1:1:9 [0] include/socket.h:390 NCCL WARN Connect to 10.0.0.2<21724> failed : Verbindungsaufbau abgelehnt\n",
        "F C06",
    ),
    "no interface of the right network": (
        "n1:1:9 [0] misc/socket.cc:237 NCCL WARN Net : No interface found in the same subnet as remote address"
        " 10.1.0.2<1778>\n",
        "F C06",
    ),
    "different collectives": (
        "n1:1:9 [3] init.cc:1247 NCCL WARN Mismatched collective detected, please check your collective calls at and"
        " around rank 11. You can use NCCL_DEBUG=INFO\n",
        "F C06",
    ),
    "different collectives, 2.7": (
        "n1:1:9 [0] init.cc:1256 NCCL WARN Your program may be hanging, this may be caused by a collective mismatch"
        " around rank 1. Please check your collective calls at and around this rank.\n",
        "F C06",
    ),
    "different sizes": (
        "n1:1:9 [0] transport/net_ib.cc:667 NCCL WARN NET/IB : collective mismatch error local size 32768 remote"
        " 1048576 addr 0 rkey 3beac3 seq adf/adf\n",
        "F C06",
    ),
    "some other warning": ("n1:1:9 [0] ras/x.cc:1 NCCL WARN Something that nobody knows\n", "I C06"),
}


def test_each_fault_is_found_and_nothing_else(tmp_path: Path) -> None:
    info = "n1:1:1 [0] NCCL INFO cudaDriverVersion 12010\n"
    wrong = {name: found for name, (text, rule) in FAULTS.items() if (found := _rules(info + text, tmp_path)) != {rule}}
    assert wrong == {}


def test_a_log_of_warnings_alone_does_not_say_what_nccl_chose(tmp_path: Path) -> None:
    assert _rules(FAULTS["port down"][0], tmp_path) == {"F C06", "U C02", "U C03", "U C04", "U C05", "U C07"}


def test_a_finding_says_where_and_shows_its_line(tmp_path: Path) -> None:
    (found,) = _found(DATA.joinpath("affinity.log").read_bytes(), tmp_path)
    assert (found.rule, found.hosts, found.place) == ("C04", ("testgpu1",), "GPU 1")
    assert found.evidence == "log:2: testgpu1:2832:2839 [1] NCCL INFO Setting affinity for GPU 1 to 01"
    (found,) = _found(DATA.joinpath("no-libibverbs.log").read_bytes(), tmp_path)
    assert (found.rule, found.severity, found.hosts) == ("C03", Severity.WARNING, ("node1",))
    assert "TCP sockets on enp36s0f1: libibverbs is missing" in found.seen and ":3: " in found.evidence


def test_a_text_that_may_be_several_cpus_is_not_one(tmp_path: Path) -> None:
    silent = ["16", "03", "0f", "0,32", "ffff0000,00000000", "0-1", "1-3,5", "zz", ""]
    line = "n1:1:1 [1] NCCL INFO Setting affinity for GPU 1 to {}\n"
    assert [text for text in silent if _rules(line.format(text), tmp_path)] == []


LINE = "node1:13:14 [3] NCCL INFO Setting affinity for GPU 3 to 08\n"
PREFIXES = [
    "3: ", "[1,3]<stdout>:", "[default3]:", "[rank3]: ", "2026-01-02T03:04:05.678Z ", "[2026-01-02 03:04:05] ",
    "\ufeff", "\x1b[32m[rank3]\x1b[0m ", "(RayTrainWorker pid=13, ip=10.0.0.1) ", "Mär 02 03:04:05: ", "日本語 ",
]  # fmt: skip


def test_prefixes_of_launchers_and_containers_hide_nothing(tmp_path: Path) -> None:
    assert [prefix for prefix in PREFIXES if _found(prefix + LINE, tmp_path)[0].hosts != ("node1",)] == []


def test_a_log_in_any_encoding_says_the_same(tmp_path: Path) -> None:
    text = HEALTHY_DGX + LINE
    packed = gzip.compress(text.encode())
    forms = [
        text.encode("utf-16"), codecs.BOM_UTF16_BE + text.encode("utf-16-be"), text.encode("utf-16-le"), packed,
        gzip.compress(text.encode("utf-16")), text.replace("\n", "\r\n").encode(),
    ]  # fmt: skip
    assert [number for number, form in enumerate(forms) if _rules(form, tmp_path) != {"W C04"}] == []


def test_lines_that_are_cut_or_run_into_each_other_say_nothing_wrong(tmp_path: Path) -> None:
    cut = [LINE[:end] for end in range(1, len(LINE))]  # the end of the file is missing
    assert [text for text in cut if "NCCL INFO" in text and _rules(HEALTHY_DGX + text, tmp_path)] == []
    heads = [line[start:] for line in HEALTHY_DGX.splitlines()[:9] for start in range(1, 20)]
    assert [head for head in heads if _rules(head + "\n" + HEALTHY_DGX, tmp_path)] == []
    assert _rules(LINE.strip() + LINE, tmp_path) == {"W C04"}
    mixed = "dgx1:100:130 [0] NCCL INFO Using netdgx2:200:230 [0] NCCL INFO Setting affinity for GPU 0 to 01\n"
    assert [f.hosts for f in _found(HEALTHY_DGX + mixed, tmp_path)] == [("dgx2",)]


def test_lines_without_a_process_are_counted(tmp_path: Path) -> None:
    bare = "".join(line.partition(" ")[2] for line in HEALTHY_DGX.splitlines(True) if ":" in line)
    (tmp_path / "bare").write_text(bare)
    with pytest.raises(UsageError, match=r"bare has 22 lines of NCCL, but without host:pid:thread"):
        read_nccl_log(tmp_path / "bare")
    (tmp_path / "both").write_text(HEALTHY_DGX + bare)
    assert read_nccl_log(tmp_path / "both").problems[0].startswith("22 lines of NCCL left out: without host")


def test_ranks_of_several_hosts_are_told_apart(tmp_path: Path) -> None:
    late = HEALTHY_DGX + "dgx2:201:231 [1] NCCL INFO Setting affinity for GPU 1 to 02\n"
    (found,) = _found(late, tmp_path)
    assert (found.hosts, found.ranks, found.place) == (("dgx2",), (3,), "GPU 1")


def test_a_restart_is_told_from_the_first_start(tmp_path: Path) -> None:
    again = HEALTHY_DGX.replace(":10", ":30").replace(":20", ":40").replace("0xabc1", "0xabc2")
    off = "".join(f"dgx1:30{n}:330 [{n}] NCCL INFO NCCL_NET set by environment to Socket\n" for n in range(2))
    sockets = again.replace("network IB", "network Socket").replace("NET/IB/0/GDRDMA", "NET/Socket/0")
    found = [
        f for f in _found(HEALTHY_DGX + sockets.replace("NET/IB/0", "NET/Socket/0") + off, tmp_path) if f.rule == "C03"
    ]
    assert {f.place for f in found} == {"start 2 of 2"} and found[0].hosts == ("dgx1",)


def test_a_timeout_of_torch_is_a_failure_on_the_host_of_its_rank(tmp_path: Path) -> None:
    line = (
        "[rank2]:[E101 10:00:00.1 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds "
        "before timing out.\n"
    )
    (found,) = _found(HEALTHY_DGX + line, tmp_path)
    assert (found.rule, found.severity, found.hosts, found.ranks) == ("C06", Severity.FAIL, ("dgx2",), (2,))
    assert "ALLREDUCE 7 after 600 s" in found.seen


def test_a_folder_of_logs_is_one_job(tmp_path: Path) -> None:
    for number, line in enumerate(HEALTHY_DGX.splitlines()):
        (tmp_path / f"nccl.{number}").write_text(line + "\n")
    (tmp_path / "README").write_text("about\n")
    log = read_nccl_log(tmp_path)
    assert (log.hosts, log.num_ranks, log.problems, log.num_starts) == (("dgx1", "dgx2"), 4, (), 1)


def test_what_is_no_log_is_refused_and_named(tmp_path: Path) -> None:
    cases = {
        "empty": (b"", "no line of NCCL"),
        "zst": (b"\x28\xb5\x2f\xfd1234", "packed with zstd"),
        "zip": (b"PK\x03\x041234", "packed with zip"),
        "gz": (b"\x1f\x8b\x08\x00damaged", "cannot read"),
        "bin": (bytes(range(256)) * 200, "no line of NCCL"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=message):
            read_nccl_log(tmp_path / name)
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path / "missing", Path("/dev/zero")):
        with pytest.raises(UsageError):
            read_nccl_log(path)


def test_a_cut_gzip_file_says_so_and_gives_what_it_has(tmp_path: Path) -> None:
    packed = gzip.compress((LINE + os.urandom(50_000).hex() + "\n" + LINE).encode())
    (tmp_path / "log.gz").write_bytes(packed[: len(packed) // 2])
    log = read_nccl_log(tmp_path / "log.gz")
    assert log.hosts == ("node1",) and "log.gz" in log.problems[0]


def test_memory_is_bounded_whatever_a_log_holds(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        stream.write("x" * 20_000_000 + "NCCL" * 1000 + "\n")
        for number in range(20_000):
            stream.write(f"h{number}:{number}:1 [0] NCCL INFO Channel 00/0 : {number}[0] -> 1[1] via P2P/{number}\n")
            stream.write(f"h1:1:1 [0] a.cc:1 NCCL WARN warning {number}\n")
        stream.write(LINE)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    log = read_nccl_log(tmp_path / "log")
    assert "left out" in log.problems[0] and len(log.processes) <= 16_384
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_secrets_are_not_cited(tmp_path: Path) -> None:
    secrets = "https://user:hunter2secret@host/ token=hf_abcdefghijklmnopqrstuvwxyz0123"
    found = _found(f"n1:1:1 [0] x.cc:1 NCCL WARN cannot reach {secrets}\n", tmp_path)
    assert "hunter2secret" not in repr(found) and "hf_abcdef" not in repr(found)
