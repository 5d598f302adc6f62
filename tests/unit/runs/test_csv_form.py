"""Runs of other tools as CSV: what is read, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cases import each_case

from hpcpace.core.errors import UsageError
from hpcpace.runs.load import read_csv


def _file(folder: Path, text: str) -> Path:
    path = folder / "runs.csv"
    path.write_text(text)
    return path


def test_reads_date_speed_and_nodes_of_each_run(tmp_path: Path) -> None:
    path = _file(
        tmp_path, "date,run,job,step_time_s,nodes\n2026-05-07T14:00:00+00:00,r1,gpt,0.5,n[1-3]\n,r2,gpt,0.6,4\n"
    )
    first, second = read_csv(path)
    assert (first.begun_unix_ns, first.run, first.job) == (1778162400 * 10**9, "r1", "gpt")
    assert (first.step_ns, first.nodes, first.num_nodes) == (5e8, ("n1", "n2", "n3"), 3)
    assert (second.begun_unix_ns, second.nodes, second.num_nodes) == (0, (), 4)


def test_reads_a_throughput_with_ranks_and_batch(tmp_path: Path) -> None:
    (run,) = read_csv(_file(tmp_path, "run,throughput,ranks,batch\nr1,1200.5,64,512\n"))
    assert (run.throughput, run.step_ns, run.num_ranks, run.batch) == (1200.5, None, 64, 512.0)


def test_a_throughput_of_one_gpu_or_node_is_known_by_the_name_of_its_column(tmp_path: Path) -> None:
    of_gpu = ["samples/s/GPU", "tokens/s/gpu", "throughput_per_gpu", "per_gpu_throughput", "tokens_per_sec_per_gpu"]
    of_gpu += ["Throughput (img/s/GPU)", "imagesPerSecondPerDevice", "samples/sec/rank", "tok/s/card", "per_gpu"]
    texts = {name: f"run,{name},nodes,ranks\nr1,10,2,16\n" for name in [*of_gpu, "samples/s/node"]}
    found = {name: read_csv(_file(tmp_path, text))[0].throughput for name, text in texts.items()}
    assert found == dict.fromkeys(of_gpu, 160.0) | {"samples/s/node": 20.0}


def test_columns_have_the_names_that_other_tools_give_them(tmp_path: Path) -> None:
    rates = ["samples_per_s", "tokens/s", "imagesPerSecond", "Throughput (img/sec)", "tokens_per_second"]
    texts = [f"name,job_name,{rate},num_nodes,world_size,samples_per_step\nr1,gpt,10,2,16,64\n" for rate in rates]
    runs = [read_csv(_file(tmp_path, text))[0] for text in texts]
    seen = [(run.run, run.job, run.throughput, run.num_nodes, run.num_ranks, run.batch) for run in runs]
    assert seen == [("r1", "gpt", 10.0, 2, 16, 64.0)] * len(rates)
    assert {run.is_rate_assumed for run in runs} == {True}


def test_a_throughput_of_one_gpu_needs_the_ranks_and_has_no_other_beside_it(tmp_path: Path) -> None:
    for text, message in (
        ("run,samples/s/GPU,nodes\nr1,10,2\n", "column ranks is needed"),
        ("run,samples/s/GPU,throughput,ranks\nr1,10,20,2\n", "leave one throughput"),
        ("run,gpu memory,ranks\nr1,10,2\n", "neither a column"),
        ("run,samples,ranks\nr1,10,2\n", "neither a column"),
        ("run,throughput,gpu memory\nr1,10,2\n", "has a column 'gpu memory'"),
        ("run,throughput,gpus,ranks\nr1,10,2,2\n", "has a column twice"),
    ):
        with pytest.raises(UsageError, match=message):
            read_csv(_file(tmp_path, text))


def test_runs_without_names_are_told_apart_by_their_lines(tmp_path: Path) -> None:
    runs = read_csv(_file(tmp_path, "nodes,throughput\n1,100\n2,190\n2,188\n"))
    assert [(run.run, run.num_nodes, run.throughput) for run in runs] == [
        ("line 2", 1, 100.0),
        ("line 3", 2, 190.0),
        ("line 4", 2, 188.0),
    ]


def test_a_mean_step_may_be_longer_than_its_median(tmp_path: Path) -> None:
    """Of a tenth of the steps, each five times as long, throughput knows, and the median does not."""
    (run,) = read_csv(_file(tmp_path, "run,step_time_s,throughput,batch\nr1,1.0,45.7,64\n"))
    assert (run.throughput, run.batch) == (45.7, 64.0)


@each_case(
    ("text", "words"),
    [
        ("", "neither a column step_time_s nor throughput in its first line: write one, like `nodes,throughput`"),
        ("1,100\n2,190\n", "neither a column step_time_s nor throughput in its first line: write one"),
        ("run,nodes\nr1,n1\n", "neither a column step_time_s nor throughput"),
        ("run,step_time_s,speed\nr1,1,2\n", "a column 'speed'"),
        ("run,step_time_s,run\nr1,1,2\n", "a column twice"),
        ("run,step_time_s\n", "no runs below its header"),
        ("run,step_time_s\nr1,\n", "line 2: it has neither a step time nor a throughput"),
        ("run,step_time_s\nr1,fast\n", "line 2: step_time_s is 'fast': write a number"),
        ("run,step_time_s\nr1,nan\n", "write a number like 1200.5, from 1e-09 to 1e+15"),
        ("run,step_time_s\nr1,-0.5\n", "write a number like 1200.5, from 1e-09 to 1e+15"),
        ("run,step_time_s\nr1,0\n", "write a number like 1200.5, from 1e-09 to 1e+15"),
        ("run,step_time_s\n,1\n", "line 2: its run has no name"),
        ("run,step_time_s\nr1,1,2\n", "line 2: it has more values than there are columns"),
        ("run,step_time_s,date\nr1,1,last week\n", "write a date like 2026-05-07"),
        ("run,step_time_s,date\nr1,1,1900-01-01\n", "write a date after 1970"),
        ("run,step_time_s,date\nr1,1,2500-01-01\n", "date is '2500-01-01': write a date that is not to come"),
        ("run,step_time_s,nodes\nr1,1,n[1-\n", "no list of hosts"),
        ("run,step_time_s,nodes\nr1,1,n[1-999999999]\n", "more than 65536 hosts"),
        ("run,step_time_s\nr1,1e300\n", "write a number like 1200.5, from 1e-09 to 1e+15"),
        ("run,throughput\nr1,1e-320\n", "throughput is '1e-320': write a number like 1200.5, from 1e-09 to 1e+15"),
        ("run,throughput,batch\nr1,1e-8,1e8\n", "batch / throughput is 1e+16 s"),
        ("run,throughput,batch\nr1,1e8,1e-8\n", "batch / throughput is 1e-16 s"),
        ("run,step_time_s,nodes\nr1,1,0\n", "nodes is '0': write a whole number from 1 to 10000000"),
        ("run,step_time_s,nodes\nr1,1,-1\n", "nodes is '-1': write a whole number"),
        ("run,step_time_s,nodes\nr1,1,2.0\n", "nodes is '2.0': write a whole number"),
        ("run,step_time_s,nodes\nr1,1,NaN\n", "nodes is 'NaN': write a whole number"),
        ("run,step_time_s,nodes\nr1,1,1e2\n", "nodes is '1e2': write a whole number"),
        (
            "run,step_time_s,nodes\nr1,1,4 nodes\n",
            "nodes is '4 nodes': 4 is no name of a node: write their number alone",
        ),
        ('run,step_time_s,nodes\nr1,1,"1,024"\n', "nodes is '1,024': 1 is no name of a node"),
        ("run,step_time_s,nodes\nr1,1,1 024\n", "nodes is '1 024': 1 is no name of a node"),
        ("run,step_time_s\nr1,1_0.5\n", "step_time_s is '1_0.5': write a number like 1200.5"),
        ("run,step_time_s\nr1,\N{ARABIC-INDIC DIGIT FIVE}\n", "write a number like 1200.5"),
        ("run,step_time_s,ranks\nr1,1,2.5\n", "write a whole number from 1 to 10000000"),
        (
            "run,step_time_s,throughput,batch\nr1,1.10,465,64\n",
            "throughput x step_time_s is 511.5 samples, batch is 64: both are of all ranks, in one unit",
        ),
        ("run,step_time_s,throughput,batch\nr1,1.02,62.5,128\n", "throughput x step_time_s is 63.75 samples"),
        ('run,step_time_s\n"r1,1\n', "not CSV"),
        ("run,step_time_s\n" + "r,x\n" * 5, "2 more"),
    ],
)
def test_refuses_a_wrong_file_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_csv(_file(tmp_path, text))
    assert words in str(caught.value)


def test_refuses_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(b"run,step_time_s\n\xff\xfe,1\n")
    with pytest.raises(UsageError, match="no CSV in UTF-8"):
        read_csv(path)


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_csv(tmp_path / "none.csv")


def test_a_number_of_many_digits_is_refused_in_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"run,step_time_s\na,{'9' * 130_000}x\n")
    begin_s = time.process_time()
    with pytest.raises(UsageError, match="write a number"):
        read_csv(path)
    assert time.process_time() - begin_s < 3


def test_a_file_names_a_million_nodes_at_most_and_reads_each_list_once(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("run,step_time_s,nodes\n" + "a,1.0,n[0-16383]\n" * 64)
    assert sum(run.num_nodes for run in read_csv(path)) == 1 << 20
    path.write_text("run,step_time_s,nodes\n" + "a,1.0,n[0-16383]\n" * 20_000)
    begin_s = time.process_time()
    with pytest.raises(UsageError, match=r"line 66: .*names more than 1,048,576 nodes: write only their number"):
        read_csv(path)
    assert time.process_time() - begin_s < 3
