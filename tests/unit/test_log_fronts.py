"""What launchers, containers and loggers put in front of lines of a log."""

from __future__ import annotations

import pytest

from hpcpace.core.log_text import front_of, year_ns

LINE = "    all_reduce (train.py:44)"
TEN = year_ns(11, 29, 10, 0, 0, 123_000_000)


@pytest.mark.parametrize(
    ("front", "task", "host", "actor"),
    [
        ("", None, "", ""),
        ("3: ", 3, "", ""),
        ("   3: ", 3, "", ""),
        ("[1,3]<stderr>: ", 3, "", ""),
        ("[prterun-n1-4711@1,3]<stdout>: ", 3, "", ""),
        ("n3: ", None, "n3", ""),
        ("10.0.0.3: ", None, "10.0.0.3", ""),
        ("[n3]: ", None, "n3", ""),
        ("n3: [0] ", None, "n3", ""),
        ("3: n3: ", 3, "n3", ""),
        ("[pod/train-worker-3/pytorch] ", None, "", ""),
        ("train-worker-3  | ", None, "", ""),
        ("(RayTrainWorker pid=4009, ip=10.0.0.3) ", None, "", "RayTrainWorker"),
        ("Nov 29 10:00:00 n3 train.sh[4711]: ", None, "n3", ""),
        ("11月 29 10:00:00 n3 train.sh[4711]: ", None, "n3", ""),
        ("[default3]: ", None, "default3", ""),
        ("3: I1129 10:00:00.123456 4711 train.cc:12] ", 3, "", ""),
    ],
)
def test_labels_in_front_of_a_line_with_and_without_times(front: str, task: int | None, host: str, actor: str) -> None:
    times = ("", "2026-11-29T10:00:00.123456789Z ", "[2026-11-29 10:00:00,123] ", "10:00:00 ", "29 nov. 10:00:00 - ")
    for before in times:
        for behind in times:
            found = front_of(f"{before}{front}{behind}{LINE}")
            assert (found.text, found.task, found.host, found.actor) == (LINE, task, host, actor), (before, behind)


@pytest.mark.parametrize(
    ("time", "hours"),
    [
        ("2026-11-29 10:00:00,123", 0),
        ("2026-11-29T10:00:00.123", 0),
        ("2026-11-29T10:00:00.123456789Z", 0),
        ("2026-11-29T11:00:00.123+01:00", 0),
        ("2026-11-29T04:30:00.123-0530", 0),
        ("[2026/11/29 10:00:00.123 UTC]", 0),
        ("2026-11-29 12:00:00.123 CET", 2),
        ("2026-11-29T10:00:00.123Z stderr F", 0),
    ],
)
def test_times_with_an_offset_are_in_utc(time: str, hours: int) -> None:
    for front in (f"{time} ", f"{time} - ", f"{time} | ", f"3: {time} "):
        found = front_of(f"{front}loss 3.1")
        assert TEN is not None and found.at_ns is not None, front
        assert (found.at_ns - TEN) // 10**6 == hours * 3_600_000, front
        assert found.text == "loss 3.1"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "   1.5 it/s",
        "Process 4711: python train.py",
        'Thread 0x7FA6 (idle): "MainThread"',
        "            rank: 3",
        "  NIC0: mlx5_0",
        "\tGPU0\tGPU1",
        "[rank3 is here]",
    ],
)
def test_other_lines_have_no_front(line: str) -> None:
    assert front_of(line).text == line
