"""The metrics of a run, held to the parsers of Prometheus' own client and of its server."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import each_case
from live_run import LiveRun
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from test_watch_view import HANG

from hpcpace.core.errors import UsageError
from hpcpace.core.exposition import OPENMETRICS_TYPE, TEXT_TYPE, MetricType, exposition
from hpcpace.watch import export
from hpcpace.watch.export import MAX_CLIENTS, TOP_RANKS, Exporter, families

MONITORING = Path(__file__).parents[3] / "docs" / "monitoring"
Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples(text: str, *, is_openmetrics: bool = False) -> Samples:
    found: Samples = {}
    for family in parse_openmetrics(text) if is_openmetrics else parse_text(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_both_texts_are_read_by_prometheus_own_parser_and_say_the_same(run: LiveRun, is_openmetrics: bool) -> None:
    run.look()
    run.steps(10, own_s={2: 0.09})
    run.flush(dropped=3)
    text = exposition(families(run.look()), is_openmetrics=is_openmetrics)
    found = samples(text, is_openmetrics=is_openmetrics)
    job = {"jobid": "17", "step": ""}
    assert found["hpcpace_step_seconds"] == [(job, pytest.approx(0.1))]
    assert found["hpcpace_last_step_timestamp_seconds"][0][1] == pytest.approx(1_700_000_000 + run.now_s, abs=0.01)
    assert found["hpcpace_hang_ranks"] == [(job, 0.0)] and found["hpcpace_running"] == [(job, 1.0)]
    assert found["hpcpace_dropped_rows_total"] == [(job, 12.0)] and found["hpcpace_steps_total"] == [(job, 40.0)]
    assert 0 < found["hpcpace_exposed_wait_ratio"][0][1] < 1
    assert found["hpcpace_rank_own_seconds"][0][0] == {**job, "node": "n2", "rank": "2"}
    assert found["hpcpace_run_info"][0][0].keys() > {"run", "name", "mesh", "torch_version"}


def test_a_hang_counts_its_ranks(run: LiveRun) -> None:
    found = samples(exposition(families(run.look(hang=HANG))))
    assert found["hpcpace_hang_ranks"][0][1] == 1 and found["hpcpace_hanging"][0][1] == 1


def test_what_is_not_known_has_no_sample(tmp_path: Path) -> None:
    found = samples(exposition(families(LiveRun(tmp_path).look())))
    assert "hpcpace_step_seconds" not in found and found["hpcpace_running"][0][1] == 0


def test_few_ranks_have_series_of_their_own(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, ranks=20)
    run.begin()
    run.steps(12)
    run.flush()
    assert len(samples(exposition(families(run.look())))["hpcpace_rank_own_seconds"]) == TOP_RANKS
    run.close()


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_labels_of_hostile_names_are_escaped(tmp_path: Path, is_openmetrics: bool) -> None:
    name = 'a"b\\c\nd\x1b[2J'
    run = LiveRun(tmp_path, host=name, job_id=name)
    run.begin(name=name)
    run.steps(12)
    run.flush()
    text = exposition(families(run.look()), is_openmetrics=is_openmetrics)
    assert "\x1b" not in text
    assert samples(text, is_openmetrics=is_openmetrics)["hpcpace_rank_own_seconds"]
    run.close()


def _expressions() -> list[str]:
    """Return what the dashboard and the alert rules ask of Prometheus."""
    board = json.loads((MONITORING / "dashboard.json").read_text())
    rules = re.findall(r"expr: (?:>-)?(.*?)\n\s+(?:for|labels):", (MONITORING / "alerts.yml").read_text(), re.DOTALL)
    return [*rules, *(target["expr"] for panel in board["panels"] for target in panel["targets"])]


def test_dashboard_and_alerts_ask_for_metrics_that_there_are(run: LiveRun) -> None:
    run.look()
    known = {family.name + {MetricType.COUNTER: "_total"}.get(family.kind, "") for family in families(run.look())}
    asked = {name for text in _expressions() for name in re.findall(r"hpcpace_\w+", text)}
    assert len(_expressions()) > 15 and asked <= known


def test_the_document_names_every_metric(run: LiveRun) -> None:
    text = (MONITORING.parent / "site.md").read_text()
    suffixes = {MetricType.COUNTER: "_total", MetricType.INFO: "_info", MetricType.GAUGE: ""}
    names = {family.name + suffixes[family.kind] for family in families(run.look())}
    assert [name for name in sorted(names) if f"`{name}`" not in text and "network" not in name] == []


def test_the_dashboard_is_laid_out_without_overlaps() -> None:
    board = json.loads((MONITORING / "dashboard.json").read_text())
    cells = [
        (x, y)
        for panel in board["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.tool
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_promtool_takes_the_alert_rules_and_they_fire_as_they_should() -> None:
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *words], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.tool
@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_promtool_finds_nothing_wrong(run: LiveRun) -> None:
    run.look()
    text = exposition(families(run.look()))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_file_is_replaced_and_goes_with_the_watch(run: LiveRun, tmp_path: Path) -> None:
    file = tmp_path / "job.prom"
    with Exporter(file=file, address=None) as exporter:
        assert not file.exists()
        exporter.export(run.look())
        before = file.stat().st_ino
        exporter.export(run.look())
        assert file.stat().st_ino != before and samples(file.read_text())["hpcpace_steps_total"]
    assert not file.exists() and [path.name for path in tmp_path.glob(".job*")] == []


def test_metrics_over_http_are_on_this_host_alone(run: LiveRun) -> None:
    with Exporter(file=None, address=":0") as exporter:
        exporter.export(run.look())
        url = f"http://127.0.0.1:{exporter.port}/metrics"
        with urllib.request.urlopen(url) as reply:
            assert reply.headers["Content-Type"] == TEXT_TYPE
            assert "hpcpace_steps_total" in samples(reply.read().decode())
        wanted = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        with urllib.request.urlopen(wanted) as reply:
            assert reply.headers["Content-Type"] == OPENMETRICS_TYPE
            assert "hpcpace_steps_total" in samples(reply.read().decode(), is_openmetrics=True)
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/")
        refused.value.close()


@each_case("address", ["", "9464", ":99999", "a b:1", "host:", ":x", "256.1.1.1:1"])
def test_addresses_that_cannot_be(address: str) -> None:
    with pytest.raises(UsageError):
        Exporter(file=None, address=address)


def test_an_address_that_is_taken_is_refused() -> None:
    with (
        Exporter(file=None, address=":0") as exporter,
        pytest.raises(UsageError, match=r"cannot listen .* choose another"),
    ):
        Exporter(file=None, address=f":{exporter.port}")


def test_a_file_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no folder"):
        Exporter(file=tmp_path / "none" / "a.prom", address=None)


def test_many_clients_that_say_nothing_are_ended_the_oldest_first(run: LiveRun) -> None:
    with ExitStack() as clients, Exporter(file=None, address=":0") as exporter:
        exporter.export(run.look())
        silent = [clients.enter_context(_client(exporter)) for _ in range(3 * MAX_CLIENTS)]
        with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as reply:
            assert "hpcpace_steps_total" in samples(reply.read().decode())
        assert [one.recv(1) for one in silent[: 2 * MAX_CLIENTS]] == [b""] * (2 * MAX_CLIENTS)


@pytest.mark.parametrize(
    "request_", [b"GET /metrics HTTP/1.1\r\nA: " + b"a" * 20_000, b"\r" * 20_000, b"\0" * (1 << 20)]
)
def test_a_request_of_any_size_is_ended_before_it_is_read(run: LiveRun, request_: bytes) -> None:
    with Exporter(file=None, address=":0") as exporter, _client(exporter) as client:
        exporter.export(run.look())
        with suppress(ConnectionError):
            client.sendall(request_)
        assert _is_ended(client)


def test_a_client_that_says_something_now_and_then_has_no_more_time(
    run: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = iter(range(0, 1000, 9))
    monkeypatch.setattr(export, "time", SimpleNamespace(monotonic=lambda: next(times_s)))
    with Exporter(file=None, address=":0") as exporter, _client(exporter) as client:
        exporter.export(run.look())
        with suppress(ConnectionError):
            for _ in range(100):  # each byte comes nine seconds later
                client.sendall(b"G")
        assert _is_ended(client)


def test_a_request_with_something_behind_it_is_answered(run: LiveRun) -> None:
    with Exporter(file=None, address=":0") as exporter, _client(exporter) as client:
        exporter.export(run.look())
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n\r\nmore")
        assert client.recv(100).startswith(b"HTTP/1.0 200 OK")


def _client(exporter: Exporter) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", exporter.port), timeout=8)  # less than the server waits
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def _is_ended(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True
