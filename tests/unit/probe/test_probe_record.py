"""A saved probe: what is written is read back, and what is no probe is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from hpcpace.cli.probe import _Call, _shown
from hpcpace.core.errors import EXIT_USAGE, ProbeError
from hpcpace.probe.record import (
    LatencyLaw,
    LawPiece,
    ProbedHost,
    ProbeRecord,
    RankSkew,
    SweepRow,
    probe_from,
    read_probe,
)

ROW = SweepRow(
    op="all_reduce",
    num_nodes=2,
    num_ranks=2,
    size_bytes=1024,
    num_repetitions=9,
    p50_ns=1000.0,
    p95_ns=1100.0,
    p99_ns=1200.0,
    rounds_ns=(1000.0, 1010.0),
    algbw=1.024e9,
    busbw=1.024e9,
    limit=1.25e9,
)


def piece(from_bytes: float) -> LawPiece:
    return LawPiece(
        from_bytes=from_bytes,
        from_low_bytes=from_bytes / 2,
        from_high_bytes=from_bytes * 2,
        latency_ns=1000.0,
        latency_low_ns=900.0,
        latency_high_ns=1100.0,
        ns_per_byte=0.5,
        ns_per_byte_low=0.4,
        ns_per_byte_high=0.6,
    )


LAW = LatencyLaw(
    op="all_reduce",
    num_nodes=2,
    num_ranks=2,
    pieces=(piece(0), piece(4096)),
    least_bytes=8,
    most_bytes=1 << 20,
    least_error=-0.1,
    most_error=0.1,
    single_least_error=-0.7,
    single_most_error=0.3,
)


def host(name: str, *ranks: int, rate: float | None = 1.25e9) -> ProbedHost:
    return ProbedHost(
        name=name,
        topology_addr=f"spine.leaf1.{name}",
        ranks=ranks,
        interfaces=("eth0",),
        line_rate=rate,
        pcie_rate=None,
        rate_words="1 x 10 Gb/s",
    )


RECORD = ProbeRecord(
    versions={"hpcpace": "1", "torch": "2"},
    cluster="lab",
    job_id="7",
    started_unix_ns=1,
    device="cpu",
    device_name="",
    backend="gloo",
    time_s=60.0,
    took_s=59.0,
    part_s={"sweep": 30.0},
    hosts=(host("n1", 0), host("n2", 1)),
    sweep=(ROW,),
    laws=(LAW,),
    skews=(RankSkew(rank=0, host="n1", mean_ns=0.0, p99_ns=10.0),),
    problems=("n3 has no speed",),
)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(RECORD.to_json()))
    assert read_probe(path) == RECORD


def changed(**values: Any) -> str:
    return json.dumps({**RECORD.to_json(), **values})


def row(**values: Any) -> list[dict[str, Any]]:
    return [{**RECORD.to_json()["sweep"][0], **values}]


@each_case(
    ("content", "reason"),
    [
        ("", "cut off or not JSON"),
        (json.dumps(RECORD.to_json())[:-40], "cut off or not JSON"),
        ("[" * 100_000, "cut off or not JSON"),
        ("[]", "no saved probe"),
        ("{}", "no saved probe"),
        (json.dumps({"schema": "hpcpace-trial/1"}), "no saved probe"),
        (changed(schema="hpcpace-probe/2"), "schema hpcpace-probe/2; .* probe again"),
        (changed(schema=7), "no saved probe"),
        (changed(hosts=None), "hosts is None: expected a list"),
        (changed(time_s="60"), "time_s is '60': expected a number"),
        (changed(took_s=float("inf")), "cut off or not JSON"),
        (changed(sweep=row(p50_ns=-1.0)), "a row with p50_ns -1"),
        (changed(sweep=row(size_bytes=0)), "size_bytes 0"),
        (changed(laws=[{**RECORD.to_json()["laws"][0], "pieces": []}]), "pieces begin at"),
    ],
)
def test_a_file_that_is_no_probe_is_refused_with_its_reason(content: str, reason: str) -> None:
    with pytest.raises(ProbeError, match=f"^probe.json .*{reason}"):
        probe_from(content, "probe.json")


def test_fields_of_a_later_minor_version_are_ignored() -> None:
    assert probe_from(changed(colour="blue")) == RECORD


def test_a_file_that_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="hpcpace probe --json"):
        read_probe(tmp_path / "none.json")


def test_a_folder_is_no_probe(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="cannot read the probe"):
        read_probe(tmp_path)


@each_case(("size_bytes", "time_ns"), [(0, 1000.0), (1000, 1500.0), (8192, 5096.0)])
def test_a_law_tells_the_time_of_any_size(size_bytes: int, time_ns: float) -> None:
    assert LAW.time_ns(size_bytes) == time_ns


def test_the_lower_of_line_rate_and_pcie_rate_limits_a_host() -> None:
    assert host("n1", 0).limit == 1.25e9
    assert host("n1", 0, rate=None).limit is None


def test_results_are_shown_even_if_a_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: str | bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hpcpace.cli.probe.write_file", full)
    call = _Call(
        parts=("sweep",),
        cores_in_turn=False,
        time_s=1.0,
        timeout_s=1.0,
        json_file=tmp_path / "probe.json",
        html_file=None,
        against=None,
        has_other_hosts=False,
    )
    assert _shown(call, RECORD, None) == EXIT_USAGE
    out, err = capsys.readouterr()
    assert "probe of" in out
    assert err == f"error: cannot write {tmp_path / 'probe.json'} (No space left on device): name another file\n"
