"""`hpcpace hang` and `hpcpace import flight-recorder` on dumps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cases import each_case
from click.testing import CliRunner, Result

from hpcpace.cli import cli
from hpcpace.core.errors import HpcpaceError
from hpcpace.core.text import folded_message
from hpcpace.trace.schema import Op

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "runs"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "hang"))
from known_dumps import dump, entry, hung_job, unfinished, write
from known_logs import signal, waiting
from written_job import WrittenJob

COMMANDS = [("hang",), ("import", "flight-recorder")]


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_hang_is_named_with_what_was_read(tmp_path: Path, command: tuple[str, ...]) -> None:
    result = run(*command, write(tmp_path, hung_job()))
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert lines[:2] == [
        "Verdict    hang: all_reduce 6 of group default_pg waits for rank 2, which never",
        "           called it; since 2025-09-23 06:55:05 UTC",
    ]
    assert "Why        ranks 0-1, 3 wait" in lines
    assert "Read       dumps of 4 of 4 ranks (format 2.10, NCCL 2.27.3); 1 group, 23" in lines
    assert "   2        5    0 none" in [line.rstrip() for line in lines]
    assert max(map(len, lines)) <= 80


def test_files_of_any_name_are_taken_one_by_one(tmp_path: Path) -> None:
    folder = write(tmp_path, hung_job())
    assert run("hang", *sorted(folder.iterdir())).exit_code == 1


@each_case(
    ("contents", "code", "says"),
    [
        ({f"rank_{rank}": dump([entry(0)]) for rank in range(4)}, 0, "no hang: every operation has finished"),
        ({"rank_0": dump([entry(0)])}, 3, "ranks 1-3 left no dump"),
        ({name: one for name, one in hung_job().items() if name[-1] != "2"}, 3, "may wait for rank 2, but that is not"),
    ],
)
def test_exit_codes(tmp_path: Path, contents: dict[str, object], code: int, says: str) -> None:
    result = run("hang", write(tmp_path, contents))
    assert (result.exit_code, says in " ".join(result.output.split())) == (code, True)


def test_a_file_that_is_left_out_is_a_warning(tmp_path: Path) -> None:
    folder = write(tmp_path, {f"rank_{rank}": dump([entry(0)]) for rank in range(4)})
    (folder / "core.4711").write_bytes(b"\x7fELF")
    result = run("hang", folder)
    assert result.exit_code == 1
    assert "core.4711 was left out: it is neither a pickle nor JSON" in " ".join(result.output.split())


def test_json_has_what_the_text_says_and_more(tmp_path: Path) -> None:
    result = run("hang", write(tmp_path, hung_job()), "--json")
    content = json.loads(result.output)
    assert content["hang"]["kind"] == "never_called"
    assert content["hang"]["culprits"] == [2]
    assert content["hang"]["waiting"] == [0, 1, 3]
    assert content["hang"]["operation"]["where"] == "train.py:44 in step"
    assert (content["ranks"], content["missing"], content["versions"]) == ([0, 1, 2, 3], [], ["2.10"])
    assert content["groups"] == {"default_pg": [0, 1, 2, 3]}
    assert [row["num_open"] for row in content["last"]] == [1, 1, 0, 1]


def test_a_timeline_is_written(tmp_path: Path) -> None:
    timeline = tmp_path / "out.json"
    result = run("import", "flight-recorder", write(tmp_path / "dumps", hung_job()), "--timeline", timeline)
    assert f"written: {timeline}" in result.output
    assert json.loads(timeline.read_text())["traceEvents"]


def test_a_timeline_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    result = run("hang", write(tmp_path / "dumps", hung_job()), "--timeline", tmp_path / "no" / "out.json")
    assert isinstance(result.exception, HpcpaceError)
    assert result.exception.exit_code == 2


def test_a_timeline_does_not_replace_a_dump(tmp_path: Path) -> None:
    folder = write(tmp_path / "dumps", hung_job())
    dump_file = min(folder.iterdir())
    before = dump_file.read_bytes()
    result = run("hang", folder, "--timeline", dump_file)
    assert isinstance(result.exception, HpcpaceError) and "would be lost" in str(result.exception)
    assert result.exception.exit_code == 2 and dump_file.read_bytes() == before


def test_names_of_files_and_groups_steer_no_terminal(tmp_path: Path) -> None:
    contents = {f"a\x1b[2Jrank_{name[-1]}": one for name, one in hung_job().items()}
    for one in contents.values():
        one["pg_config"]["0"]["desc"] = "dp\x1b[31m"
    output = run("hang", write(tmp_path, contents)).output
    assert "\x1b" not in output
    assert "group dp\\x1b[31m waits" in " ".join(output.split())


def _lines(text: str) -> int:
    """Return how many lines of a terminal of 120 columns a text takes."""
    return sum(max(-(-len(line) // 120), 1) for line in text.splitlines())


def _pairs_that_wait(num_pairs: int) -> dict[str, object]:
    """Return the dumps of pairs, each in a group of its own, of which one rank waits for the other; all is long."""
    contents: dict[str, object] = {}
    for pair in range(0, 2 * num_pairs, 2):
        name = f"tp{pair}" + "y" * 150
        groups = {name: (name, (pair, pair + 1))}
        call = unfinished(1, "z" * 150, process_group=(name, name), pg_id=1, collective_seq_id=1)
        for rank, calls in ((pair, [entry(0), call]), (pair + 1, [entry(0)])):
            software = {"version": f"2.{rank}" + "0" * 30, "comm_lib_version": f"{rank}" + "9" * 30}
            contents[f"rank_{rank}"] = dump(calls, world=2 * num_pairs, groups=groups, **software)
    return contents


@each_case(
    "contents",
    [
        _pairs_that_wait(100),
        {f"rank_{rank}": dump([entry(0, state="\u202e" * rank)]) for rank in range(300)},
        {f"{'x' * 200}rank_{rank}": dump([entry(0)], version=f"3.{rank}") for rank in range(300)},
        {f"rank_{rank}": dump([entry(0)], pg_config={"0": {"ranks": [0, rank]}}) for rank in range(1, 100)},
        {f"rank_{rank}": dump([entry(0)], world=2000) for rank in range(0, 200, 2)},
    ],
    ids=["pairs that wait", "faults that differ", "other versions", "other jobs", "every second rank"],
)
def test_whatever_is_in_a_folder_takes_a_screen(tmp_path: Path, contents: dict[str, object]) -> None:
    result = run("hang", write(tmp_path, contents))
    told = folded_message(str(result.exception)) if isinstance(result.exception, HpcpaceError) else ""
    assert result.exit_code in (1, 2, 3)
    assert _lines(told) <= 20
    assert _lines(result.output) <= 60


def hung_run(path: Path) -> Path:
    """Write a run of which rank 2 stays out of the all_reduce of step 40."""
    job = WrittenJob(num_ranks=4)
    job.all_steps(40)
    for rank in job.ranks:
        if rank.rank != 2:
            rank.call(Op.ALL_REDUCE, 4.08, step=40)
    job.write(path)
    return path


def test_without_a_path_the_newest_run_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = run("hang")
    assert "no run in runs" in str(nothing.exception)
    (tmp_path / "runs").mkdir()
    hung_run(tmp_path / "runs" / "one")
    assert run("hang").exit_code == 1


@each_case(
    ("words", "says"),
    [
        (["run", "--timeline", "x.json"], "--ras and --timeline go with Flight Recorder dumps"),
        (["run", "--ras", "x.json"], "--ras and --timeline go with Flight Recorder dumps"),
        (["dumps", "run"], "no Flight Recorder dump"),
        (["nothing"], "cannot read nothing"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    hung_run(tmp_path / "run")
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "rank_0").write_text("x")
    result = run("hang", *words)
    assert isinstance(result.exception, HpcpaceError)
    assert result.exception.exit_code == 2
    assert says in str(result.exception)


PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
rank, world, folder = int(sys.argv[1]), 3, sys.argv[2]
store = dist.FileStore(folder + "/store", world)
dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
group = dist.new_group([0, 1])
tensor = torch.ones(8)
dist.all_reduce(tensor)
if rank < 2:
    dist.all_reduce(tensor, group=group)
dist.barrier()
if rank != 1:
    work = dist.all_reduce(tensor, async_op=True)
def is_recorded():  # gloo's threads record an operation as they begin and end it
    entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
    num_open = sum(not entry["retired"] for entry in entries)
    return (len(entries), num_open) == {0: (4, 1), 1: (3, 0), 2: (3, 1)}[rank]
while not is_recorded():
    pass
with open(f"{folder}/dumps/rank_{rank}", "wb") as file:
    file.write(_dump_fr_trace(True, True, False))
with open(f"{folder}/json/rank_{rank}.json", "wb") as file:
    file.write(_dump_fr_trace_json(True, False))
store.set(f"done {rank}", "")
store.wait([f"done {other}" for other in range(world)])
os._exit(0)
"""


@pytest.fixture(scope="module")
def dumps_of_gloo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let PyTorch write the dumps of a job in which rank 1 stays out of the last all_reduce, as pickles and as JSON."""
    folder = tmp_path_factory.mktemp("gloo")
    for name in ("dumps", "json"):
        (folder / name).mkdir()
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(folder)], env=environ) for rank in range(3)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return folder


@pytest.mark.parametrize("form", ["dumps", "json"])
def test_dumps_that_pytorch_wrote_of_gloo(dumps_of_gloo: Path, form: str) -> None:
    content = json.loads(run("hang", dumps_of_gloo / form, "--json").output)
    assert content["hang"]["kind"] == "never_called"
    assert content["hang"]["culprits"] == [1]
    assert content["hang"]["operation"]["op"] == "all_reduce"
    assert content["groups"] == {"default_pg": [0, 1, 2], "1": [0, 1]}
    assert content["problems"] == []


def test_a_mixture_of_files_is_judged_together(tmp_path: Path) -> None:
    folder = write(tmp_path / "job", {name: one for name, one in hung_job().items() if name[-1] != "2"})
    (folder / "slurm-17.out").write_text("\n".join([*waiting([0, 1, 3], 6), signal(2, 5, 5)]))
    (folder / "notes.txt").write_text("nothing to see\n")
    result = run("hang", folder)
    assert result.exit_code == 1
    shown = " ".join(result.output.split())
    assert "waits for rank 2, which never called it" in shown
    assert "nccl_trace_rank_0 ... nccl_trace_rank_3 (3 files): Flight Recorder" in shown
    assert "slurm-17.out: log of the watchdog of ranks 0-3" in shown
    assert "Ignored notes.txt: nothing about a hang" in shown
    assert max(map(len, result.output.splitlines())) <= 80
    content = json.loads(run("hang", folder, "--json").output)
    assert (content["hang"]["culprits"], len(content["taken_for"]), content["missing"]) == ([2], 2, [2])


def test_a_timeline_needs_dumps(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text("\n".join(waiting([0, 1, 3])))
    result = run("hang", tmp_path / "job.out", "--timeline", tmp_path / "t.json")
    assert isinstance(result.exception, HpcpaceError)
    assert "--timeline needs Flight Recorder dumps" in str(result.exception)
