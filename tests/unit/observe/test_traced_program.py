"""What `hpcpace trace` becomes, what that inherits, and what the last line of the job says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from hpcpace.core.errors import DataError
from hpcpace.core.rundir import RunDirectory
from hpcpace.observe.launch import follower
from hpcpace.observe.launch.import_hook import ImportWatch
from hpcpace.observe.launch.last_line import last_line
from hpcpace.observe.launch.launch import Launch, find_launch, program_of, python_options, run_name, run_place

LAUNCH = Launch(
    run_dir="/scratch/run",
    is_new_run=True,
    identity="host/7/1",
    name="train",
    config_file=None,
    pace=None,
    trace_dir=None,
    warmup_steps=2,
    samples_unit="samples",
    step_from="auto",
    pid=7,
    teller="",
    had_python_path=False,
)
BEGAN = {"kind": "began", "run": "/work/runs/a", "attempt": 0, "rank": 0, "world_size": 4}
ENDED = {
    **{"kind": "ended", "attempt": 0, "rank": 0, "steps": 3, "steps_from": "one per x"},
    **{"phases": ["data", "forward"], "collectives_by": "compiled"},
}


@each_case(
    ("options", "expected"),
    [
        (["-m", "hpcpace"], []),
        (["-u", "-m", "hpcpace"], ["-u"]),
        (["-P", "-m", "hpcpace"], []),
        (["-uP", "-W", "error", "-X", "dev", "-m", "hpcpace"], ["-u", "-W", "error", "-X", "dev"]),
        (["-I", "-OO", "/venv/bin/hpcpace"], ["-OO"]),
        (["/venv/bin/hpcpace"], []),
    ],
)
def test_a_script_has_the_options_of_python_but_those_that_protect_hpcpace(
    options: list[str], expected: list[str]
) -> None:
    arguments = ["trace", "--", "train.py", "-m"]
    assert python_options(["python", *options, *arguments], ["hpcpace", *arguments]) == expected


def test_scripts_and_modules_are_run_by_this_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    own = (["python", "-m", "hpcpace"], ["hpcpace"])
    assert program_of([str(script), "--lr", "1"], *own) == [sys.executable, str(script), "--lr", "1"]
    assert program_of(["-m", "mine.train", "3"], *own) == [sys.executable, "-m", "mine.train", "3"]
    assert program_of(["-c", "pass"], *own) == [sys.executable, "-c", "pass"]


def test_a_program_is_found_on_the_path() -> None:
    assert program_of(["sh", "run.sh"], ["python", "hpcpace"], ["hpcpace"])[0].endswith("/sh")


def test_what_is_neither_script_nor_program_is_refused() -> None:
    with pytest.raises(DataError, match=r"no script at nothing\.py"):
        program_of(["nothing.py"], ["python", "hpcpace"], ["hpcpace"])


@each_case(
    ("command", "name"),
    [
        (["train.py", "--data", "x"], "train"),
        (["-m", "mine.train"], "train"),
        (["torchrun", "--nproc-per-node", "4", "examples/ddp.py"], "ddp"),
        (["torchrun", "-m", "mine.pretrain"], "pretrain"),
        (["python", "-m", "torch.distributed.run", "--nproc-per-node", "4", "ddp.py"], "ddp"),
        (["-m", "torch.distributed.run", "-m", "mine.pretrain"], "pretrain"),
        (["bash", "run.sh"], "run"),
    ],
)
def test_a_run_has_the_name_of_what_trains(command: list[str], name: str) -> None:
    assert run_name(command) == name


@each_case("before", [{}, {"PYTHONPATH": ""}, {"PYTHONPATH": "/a:/b"}])
def test_an_environment_is_left_as_it_was(before: dict[str, str]) -> None:
    launch = Launch(**{**vars(LAUNCH), "had_python_path": "PYTHONPATH" in before})
    traced = _changed(before, launch.changes(before))
    assert find_launch(traced) == launch
    assert traced["PYTHONPATH"].split(":")[1:] == [entry for entry in before.get("PYTHONPATH", "").split(":") if entry]
    assert _changed(traced, launch.changes(traced)) == traced
    assert _changed(traced, launch.changes_back(traced)) == before


def _changed(environ: dict[str, str], changes: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in {**environ, **changes}.items() if value is not None}


@each_case("text", ["", "{}", "[]", "null", "no json", '{"run_dir": 1}'])
def test_no_launch_is_found_where_none_is(text: str) -> None:
    assert find_launch({"HPCPACE_LAUNCH": text}) is None


@each_case("text", ["[" * 100_000, '{"run_dir":' * 50_000, "9" * 100_000, '"' + "x" * 1_000_000])
def test_no_launch_is_found_in_what_is_made_to_do_harm(text: str) -> None:
    assert find_launch({"HPCPACE_LAUNCH": text}) is None


@each_case("name", [field.name for field in fields(Launch)])
@each_case(
    "value", [[], {}, 1.5, "x" * 10_000, "/a\0b", "\ud800", -1, 1 << 40, 1e999], ids=lambda value: repr(value)[:12]
)
def test_a_launch_with_a_value_that_cannot_be_is_none(name: str, value: object) -> None:
    assert find_launch({"HPCPACE_LAUNCH": json.dumps({**vars(LAUNCH), name: value})}) is None


def test_a_launch_may_name_folders_that_are_no_text() -> None:
    launch = replace(LAUNCH, run_dir="/runs/\udcff")
    assert find_launch(_changed({}, launch.changes({}))) == launch


@each_case(
    ("notes", "line"),
    [
        (
            [BEGAN, ENDED],
            "recorded 4 ranks, 3 steps (one per x), phases data and forward, collectives by the compiled layer: "
            "hpcpace report runs/a",
        ),
        ([BEGAN], "recorded 4 ranks, cut off before the end: hpcpace report runs/a"),
        (
            [BEGAN, {**BEGAN, "attempt": 1, "world_size": 1}, {**ENDED, "attempt": 1, "steps": 1, "phases": []}],
            "recorded 1 rank, 1 step (one per x), no phases in attempt 1: hpcpace report runs/a",
        ),
        ([{"kind": "failed", "why": "see the warning above"}], "nothing was recorded: see the warning above"),
        ([], "nothing was recorded: no process group was made and no optimizer stepped"),
    ],
)
def test_the_last_line_says_what_was_recorded(notes: list[dict[str, Any]], line: str) -> None:
    assert last_line(notes, "", "/work") == f"hpcpace: {line}"


def test_the_last_line_says_that_the_world_is_unclear() -> None:
    assert last_line([], "RANK is 3", "/work").endswith("no optimizer stepped; RANK is 3")


def test_only_watched_modules_are_noted_and_they_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("complete = True")
    code = (
        "import sys\nfrom hpcpace.observe.launch.import_hook import ImportWatch\n"
        f"seen = []; sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.meta_path.insert(0, ImportWatch(seen.append, ['/of/hpcpace']))\n"
        "import json, torch\n"
        "print(seen == [torch], torch.complete, vars(torch.__loader__).keys(), sys.path[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"True True dict_keys(['name', 'path']) {tmp_path}\n"


def test_following_an_idle_process_loads_nothing_of_weight() -> None:
    code = "import sys; before = set(sys.modules); import hpcpace.observe.launch.import_hook as h; h.arm()\n"
    code += "print(sorted(n for n in set(sys.modules) - before if not n.startswith('hpcpace')))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['__future__']\n"


def test_what_fails_while_an_import_is_noted_does_not_reach_the_job() -> None:
    def fails(_: Any) -> None:
        raise RuntimeError

    ImportWatch(fails, [])._call_back(sys)


def _record(run: Path, launch: str, command: list[str]) -> None:
    attempt = RunDirectory(run).new_attempt()
    attempt.write_json(attempt.run_json, {"launch": launch, "command": command})


@each_case(
    ("launch", "command", "is_new_run", "expected"),
    [
        ("host/7/1", ["train.py"], True, "run"),
        ("host/7/1", ["other.py"], True, "run-2"),
        ("host/9/9", ["train.py"], True, "run-2"),
        ("host/9/9", ["other.py"], False, "run"),
    ],
    ids=["restart", "other command", "other launch", "requeue"],
)
def test_a_restart_comes_back_to_its_run(
    tmp_path: Path, launch: str, command: list[str], is_new_run: bool, expected: str
) -> None:
    _record(tmp_path / "run", launch, command)
    mine = replace(LAUNCH, run_dir=str(tmp_path / "run"), is_new_run=is_new_run)
    assert run_place(mine, ["train.py"]) == str(tmp_path / expected)


def test_a_run_that_cannot_be_read_is_another_one(tmp_path: Path) -> None:
    _record(tmp_path / "run", "host/7/1", ["train.py"])
    (tmp_path / "run" / "attempt-0" / "run.json").write_text("[]")
    assert run_place(replace(LAUNCH, run_dir=str(tmp_path / "run")), ["train.py"]) == str(tmp_path / "run-2")


def test_the_verdict_that_ended_a_job_is_its_last_line() -> None:
    stopped = {"kind": "stopped", "verdict": "hang: barrier 3 waits for rank 1; the job ends here: hpcpace hang runs/a"}
    assert last_line([BEGAN, stopped], "", "/work") == f"hpcpace: {stopped['verdict']}"


@each_case("content", ["[" * 100_000, '{"launch": {"launch": ' * 50_000, "[]", "5", '{"launch": "host/7/1"}'])
def test_a_run_with_a_record_that_is_none_is_not_that_of_the_launch(tmp_path: Path, content: str) -> None:
    run = RunDirectory(tmp_path / "run")
    run.new_attempt().run_json.write_text(content)
    assert run_place(replace(LAUNCH, run_dir=str(run.path)), ["train.py"]) == f"{run.path}-2"


def test_replicas_of_a_job_have_runs_of_their_own(tmp_path: Path) -> None:
    mine = replace(LAUNCH, run_dir=str(tmp_path / "run"))
    assert [run_place(mine, ["train.py"], replica) for replica in ("0", "1", "../1", "")] == [
        f"{tmp_path}/run-replica-0",
        f"{tmp_path}/run-replica-1",
        f"{tmp_path}/run",
        f"{tmp_path}/run",
    ]


_SEES_US = """
import os, sys
import hpcpace
print(sorted(name for name in os.environ if name in ("PYTHONPATH", "HPCPACE_LAUNCH", "HPCPACE_HANG_ON_HANG")))
print(sys.argv[1:], [type(finder).__name__ for finder in sys.meta_path if "hpcpace" in type(finder).__module__])
"""


def test_a_job_whose_user_opts_out_is_as_if_nothing_traced_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SEES_US)
    options = ("--on-hang", "stop", "--pace", "auto", "--run-dir", "run")
    command = [sys.executable, "-m", "hpcpace", "trace", *options, "--", "train.py", "--lr", "1"]
    ours = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    for environ in ({}, LAUNCH.changes({})):  # also inside another traced command
        result = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env={**ours, **environ, "HPCPACE_OPT_OUT": "yes"}
        )
        assert (result.returncode, result.stdout) == (0, "[]\n['--lr', '1'] []\n")
        assert result.stderr == "hpcpace: HPCPACE_OPT_OUT is set: this job runs without hpcpace\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_a_script_that_opts_out_inside_a_traced_command_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[dict[str, Any]] = []
    monkeypatch.setattr(follower, "send", lambda address, note: noted.append(note))
    monkeypatch.delitem(sys.modules, "hpcpace.cli", raising=False)
    for value, is_followed in (("1", False), ("0", True)):
        environ = {**replace(LAUNCH, teller="x").changes({}), "HPCPACE_OPT_OUT": value}
        monkeypatch.setattr(follower, "process_environ", lambda found=environ: found)
        assert (follower.find_follower() is not None) == is_followed
    assert noted == [{"kind": "failed", "why": "HPCPACE_OPT_OUT is set"}]
