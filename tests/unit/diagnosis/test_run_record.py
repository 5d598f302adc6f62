from __future__ import annotations

import os

import pytest

from hpcpace.core.rundir import Attempt, json_text
from hpcpace.diagnosis.records import RunRecord, read_run_record


@pytest.fixture
def attempt(tmp_path):
    return Attempt(tmp_path)


def test_hosts_are_known_by_rank(attempt):
    attempt.run_json.write_text('{"ranks": [{"rank": 0, "host": "n1"}, {"rank": 1, "host": "n2"}]}')
    assert read_run_record(attempt, []).hosts == {0: "n1", 1: "n2"}


@pytest.mark.parametrize("content", ["", "[", "[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "null", '{"ranks": 5}'])
def test_what_is_no_record_tells_nothing(attempt, content):
    attempt.run_json.write_text(content)
    assert read_run_record(attempt, []) == RunRecord()


def test_a_fifo_is_not_waited_for(attempt):
    os.mkfifo(attempt.run_json)
    assert read_run_record(attempt, []) == RunRecord()


def test_a_device_without_end_is_not_read(attempt):
    attempt.run_json.symlink_to("/dev/zero")
    assert read_run_record(attempt, []) == RunRecord()


def test_a_file_too_large_for_memory_is_not_read(attempt):
    with open(attempt.run_json, "wb") as file:
        file.truncate(1 << 40)
    assert read_run_record(attempt, []) == RunRecord()


@pytest.mark.parametrize("value", ["[]", "{}", "1", '{"a": []}'])
def test_a_file_of_values_without_number_is_left_out(attempt, value):
    """Some megabytes of the smallest values take a gigabyte in memory."""
    attempt.run_json.write_text(f"[{','.join([value] * 600_000)}]")
    problems: list[str] = []
    assert read_run_record(attempt, problems) == RunRecord()
    assert len(problems) == 1 and "values, more than 524288" in problems[0]


def test_the_record_of_the_largest_job_is_read(attempt):
    row = {"host": "n00001.cluster", "host_key": "0123456789abcdef", "node": 1, "local_rank": 7, "gpu": "x" * 40}
    ranks = [{"rank": rank, **row} for rank in range(16_384)]
    attempt.run_json.write_text(json_text({"ranks": ranks, "environment": {f"NAME_{n}": "v" for n in range(500)}}))
    assert len(read_run_record(attempt, []).hosts) == 16_384


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "x" * 100}, "x" * 32),
        ({"dtype": "\x1b[2J"}, "\\x1b[2J"),
        ({}, ""),
        ("gpt2", ""),
        (None, ""),
    ],
)
def test_the_type_of_the_computation_is_that_of_the_model(attempt, model, dtype):
    attempt.run_json.write_text(json_text({"model": model}))
    assert read_run_record(attempt, []).dtype == dtype


@pytest.mark.parametrize(
    ("content", "is_lab", "shared_cores"),
    [
        ('{"config": {"train": {"shared_cores": true}}}', False, True),
        ('{"config": {"train": {"shared_cores": "yes"}}, "environment": {"HPCPACE_LAB_NAME": "lab"}}', True, False),
        ('{"config": {"trace": {}}, "environment": {}}', False, False),
    ],
)
def test_whether_ranks_shared_cores_on_purpose_or_in_a_lab_is_known(attempt, content, is_lab, shared_cores):
    attempt.run_json.write_text(content)
    record = read_run_record(attempt, [])
    assert (record.is_lab, record.shared_cores) == (is_lab, shared_cores)
