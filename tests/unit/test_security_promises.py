"""Each promise of SECURITY.md has tests, named here, and some have theirs here."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import h5py
import pytest
from cases import chosen, each_case
from click.testing import CliRunner
from packaging.version import Version

from experiments.synthetic_run import SyntheticRun
from hpcpace.cli import cli
from hpcpace.core.errors import UsageError
from hpcpace.observe.settings import ClockConfig, TraceConfig
from hpcpace.trace.hdf5_files import MIN_HDF5

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
CHILD = Path(__file__).with_name("promises_child.py")
TRACE = ROOT / "tests" / "data" / "imports" / "trace-ST.parquet"
_HERE = "unit/test_security_promises.py"
_FILES, _HOSTILE = "unit/test_files.py", "unit/trace/test_hostile_files.py"

# How a promise begins, and the tests that fail when it is broken.
PROMISES = {
    "Opening a run executes no code from it.": (f"{_HERE}::test_opening_a_run_does_nothing_else",),
    "Nothing outside the run is read": (
        f"{_HOSTILE}::test_a_hostile_table_is_left_out_and_the_others_are_read",
        f"{_FILES}::test_reads_regular_files_only",
        f"{_FILES}::test_a_folder_that_is_a_link_is_not_entered",
    ),
    "Nothing outside the run is written": (
        f"{_HERE}::test_opening_a_run_does_nothing_else",
        f"{_FILES}::test_a_swapper_in_the_folder_gets_nothing",
        "unit/test_planted_links.py::test_what_is_written_into_a_run_stays_in_the_run_that_was_opened",
        "cli/test_races.py::test_nothing_elsewhere_is_read_or_changed",
    ),
    "`collect` also looks into the folders": (
        "unit/observe/test_left_traces.py::test_what_belongs_to_somebody_else_is_left_alone",
        "unit/observe/test_left_traces.py::test_the_trace_of_another_run_stays",
    ),
    "`history` writes its index into the folder": (
        f"{_HERE}::test_opening_a_run_does_nothing_else",
        f"{_HERE}::test_an_import_writes_into_no_folder_that_exists",
    ),
    "`dump`, `audit --from`, `list`, `watch`,": (f"{_HERE}::test_opening_a_run_does_nothing_else",),
    "A file that you name": (
        "cli/test_outputs.py::test_each_file_that_a_command_may_write_is_tried_here",
        "cli/test_outputs.py::test_what_is_no_file_is_left_as_it_was",
        "cli/test_outputs.py::test_a_link_is_replaced_and_never_written_through",
        "cli/test_targets.py::test_a_file_that_is_read_is_refused_as_a_target",
    ),
    "`export` writes only into the folder": (f"{_HERE}::test_opening_a_run_does_nothing_else",),
    "The scripts in analysis/ write only where": (
        f"{_HERE}::test_opening_a_run_does_nothing_else",
        "unit/test_planted_links.py::test_a_link_with_the_name_of_the_file_is_replaced",
    ),
    "No file changes its mode or its owner.": (
        f"{_HERE}::test_opening_a_run_does_nothing_else",
        "unit/test_planted_links.py::test_a_swapper_gets_neither_content_nor_mode_of_a_file",
    ),
    "What is written has the mode": (
        f"{_FILES}::test_the_umask_decides_the_mode",
        "mpi/test_umask.py::test_a_traced_script_and_its_report_leave_nothing_open",
    ),
    "The tables of a run take at most": (
        f"{_HOSTILE}::test_a_billion_rows_in_a_few_megabytes_are_refused_by_what_they_take",
        "cli/test_damaged_runs.py::test_what_failed_once_does_not_fail_again",
        f"{_HERE}::test_the_memory_is_that_of_the_campaign",
    ),
    "A file that is damaged, of another run": (
        f"{_HOSTILE}::test_a_hostile_table_is_left_out_and_the_others_are_read",
        "unit/diagnosis/test_lost_ranks.py::test_traces_of_another_run_are_left_out",
        "unit/diagnosis/test_lost_ranks.py::test_each_contradiction_is_listed_with_the_file",
    ),
    "No file can hang or crash a report.": (
        f"{_FILES}::test_reads_regular_files_only",
        "cli/test_damaged_runs.py::test_damage_is_reported_or_a_clear_error",
    ),
    "A hostile file of another format costs": (
        "cli/test_hostile_formats.py::test_a_hostile_file_is_read_or_refused_within_bounds",
    ),
    "Names and texts from a run": (
        "unit/report/test_html.py::test_text_from_files_is_only_text",
        "unit/diagnosis/test_verdict.py::test_names_from_files_cannot_steer_the_terminal",
        "unit/plots/test_csv_text.py::test_what_would_be_a_formula_is_text",
    ),
    "What remains is the risk of the HDF5 library": (
        f"{_HERE}::test_the_hdf5_that_is_recommended_is_the_one_that_is_installed",
        "cli/test_dump.py::test_somebody_elses_file_is_read_by_an_old_hdf5_with_a_warning",
        "cli/test_report.py::test_somebody_elses_run_is_read_by_an_old_hdf5_with_a_warning",
    ),
    "Checkpoints: `--resume` refuses": (
        "unit/train/test_checkpoint_access.py::test_a_checkpoint_of_somebody_else_is_refused",
        "unit/train/test_checkpoint_access.py::test_a_checkpoint_that_others_can_write_to_is_refused",
        "unit/train/test_checkpoint_access.py::test_a_copy_of_a_checkpoint_of_somebody_else_is_resumed",
        "unit/train/test_hostile_checkpoint.py::test_code_in_other_files_is_not_run",
        "unit/train/test_hostile_checkpoint.py::test_code_in_a_file_of_tensors_is_not_run",
    ),
    "Training scripts, data, configuration files": ("unit/test_sbatch_scripts.py::test_runs_the_prelude_first",),
    "`python -m hpcpace` is unsafe": (
        f"{_HERE}::test_python_looks_for_the_package_in_the_working_folder_first",
        "mpi/test_working_folder.py::test_a_report_imports_nothing_from_the_working_folder",
    ),
    "torch's rendezvous, gloo, NCCL and MPI": (
        f"{_HERE}::test_whoever_reaches_the_rendezvous_of_torch_reads_it",
        "mpi/test_world.py::test_the_interface_of_the_user_is_kept",
    ),
    "A session opens no ports itself": (f"{_HERE}::test_no_module_but_the_labs_opens_a_port",),
    "`hpcpace probe` listens on each host": (
        "unit/probe/test_pair_sockets.py::test_a_connection_without_the_secret_is_no_partner",
    ),
    "Connections to a probe that do not prove": (
        "unit/probe/test_pair_sockets.py::test_silent_connections_do_not_hold_up_the_partner",
        "unit/probe/test_pair_sockets.py::test_who_does_not_say_its_hello_in_time_is_dropped",
    ),
    "The last line of `hpcpace trace` comes over a Unix socket": (
        f"{_HERE}::test_what_stays_on_a_host_uses_unix_sockets_alone",
    ),
    "`hpcpace hang` asks ranks on its own host": (
        "unit/observe/test_answers.py::test_only_processes_of_one_user_talk",
        "unit/observe/test_answers.py::test_the_kernel_says_whose_process_is_at_the_other_end",
    ),
    "No command that opens other people's runs uses the network": (
        f"{_HERE}::test_opening_a_run_does_nothing_else",
        "unit/report/test_html.py::test_nothing_in_the_page_can_be_loaded",
    ),
    "Only `hpcpace lab`, `make test-lab`": (
        f"{_HERE}::test_what_needs_root_is_named",
        "unit/lab/test_requirements.py::test_refuses_another_user_than_root",
    ),
    "The lab's munge key": (
        "unit/lab/test_hostile_folders.py::test_the_munge_key_is_never_readable_by_others",
        "unit/lab/test_hostile_folders.py::test_a_link_in_place_of_the_munge_key_is_not_followed",
    ),
    "[docs/recorded-data.md](docs/recorded-data.md) lists": (
        "unit/test_recorded_data.py::test_every_attribute_and_column_of_a_trace_is_documented",
        "unit/test_recorded_data.py::test_every_field_of_a_snapshot_is_documented",
        "unit/test_recorded_data.py::test_every_field_of_run_json_is_documented",
        "unit/test_recorded_data.py::test_every_field_of_trial_json_is_documented",
        "unit/test_recorded_data.py::test_every_field_of_a_summary_is_documented",
        "unit/test_recorded_data.py::test_every_field_of_a_checkpoint_is_documented",
        "unit/test_recorded_data.py::test_every_field_of_a_study_is_documented",
    ),
    "Values of arguments, variables and settings": (
        "unit/test_redaction.py::test_a_name_tells_of_a_secret",
        "unit/test_redaction.py::test_a_token_of_known_shape_is_found_anywhere",
        "mpi/test_recorded_secrets.py::test_no_secret_of_a_traced_script_is_recorded",
    ),
    "Webhooks, passwords in options of well-known programs": (
        "unit/test_redaction.py::test_no_secret_of_the_list_stays",
        "unit/test_redaction.py::test_nothing_harmless_of_the_list_changes",
    ),
    "`hpcpace task-prolog` never fails a task": (
        "cli/test_task_prolog.py::test_never_fails_whatever_a_variable_holds",
        "cli/test_task_prolog.py::test_a_launch_that_cannot_be_read_is_left_alone",
    ),
    "A secret without such a name or shape": (
        "unit/test_redaction.py::test_a_command_line_without_secrets_stays_as_it_was",
    ),
    "Only the listed environment variables": (
        "unit/test_recorded_data.py::test_only_the_variables_that_are_documented_are_kept",
    ),
    "An error of hpcpace never ends a job": (
        "mpi/test_session.py::test_a_run_directory_that_cannot_be_made_costs_one_warning",
        "mpi/test_job_safety.py::test_a_rank_that_does_not_take_part_leaves_nobody_recording",
    ),
    "A rank that fails, hangs or dies delays": (
        "mpi/test_job_safety.py::test_no_rank_is_held_up_for_longer_than_promised",
        f"{_HERE}::test_the_seconds_are_those_of_the_settings",
    ),
    "Orders to a running job are taken only from": (
        "unit/observe/test_switching.py::test_an_order_that_somebody_else_can_have_given_is_not_followed",
        "unit/observe/test_switching.py::test_an_order_of_root_is_followed",
    ),
    "Ranks believe notices of a hang": (
        "unit/observe/test_planted_notices.py::test_a_verdict_of_somebody_else_ends_nobody",
        "unit/observe/test_planted_notices.py::test_a_notice_of_somebody_else_is_no_reason_to_be_silent",
    ),
    "A full disk costs rows": (
        "unit/trace/test_lost_rows.py::test_rows_read_and_rows_lost_are_the_rows_recorded",
        "mpi/test_session_disk.py::test_a_disk_that_stays_full_costs_rows_that_stderr_file_and_report_count",
    ),
}


def _promises() -> list[str]:
    """Return the points and paragraphs below the headings, but for how to report, in one line each."""
    sections = re.split(r"^## (.*)\n", TEXT, flags=re.MULTILINE)[1:]
    found = []
    for title, content in zip(sections[::2], sections[1::2], strict=True):
        if title != "Reporting a vulnerability":
            found += [" ".join(part.split()) for part in re.split(r"^- |\n\n", content, flags=re.MULTILINE)]
    return [part for part in found if part and not part.endswith(":")]


@each_case("promise", _promises())
def test_each_promise_has_its_tests(promise: str) -> None:
    assert [begin for begin in PROMISES if promise.startswith(begin)]


@each_case(("begin", "tests"), PROMISES.items())
def test_the_tests_of_a_promise_are_there(begin: str, tests: tuple[str, ...]) -> None:
    assert begin in " ".join(TEXT.split())
    for test in tests:
        file, name = test.split("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


@dataclass(frozen=True, kw_only=True)
class Opening:
    """A call that opens a run, and what it may do beside reading.

    Attributes:
        words: RUN, OTHER, RUNS, OWN are a run, one of another size, the folder of both, and a folder of the caller.
        writes: names of the files that it makes or replaces.
        removes: names of the files that it removes.
        makes: names of the folders that it makes.
        may: further events that are its own.
    """

    words: str
    writes: str = r"\0"
    removes: str = r"\0"
    makes: str = r"\0"
    may: frozenset[str] = frozenset()


COMMANDS = {
    "report": Opening(words="hpcpace report RUN", writes=r"summary\.json|report\.html"),
    "dump": Opening(words="hpcpace dump RUN/attempt-0/trace/rank-00000.h5"),
    "audit --from": Opening(words="hpcpace audit --from RUN"),
    "list": Opening(words="hpcpace list RUNS"),
    "watch": Opening(words="hpcpace watch RUN --once"),
    "hang": Opening(words="hpcpace hang RUN"),
    "compare": Opening(words="hpcpace compare OTHER RUN --anyway --html OWN/page.html", writes=r"page\.html"),
    "scale": Opening(words="hpcpace scale OTHER RUN --csv OWN/sizes.csv", writes=r"sizes\.csv"),
    "history": Opening(words="hpcpace history RUNS --html OWN/page.html", writes=r"page\.html|hpcpace-history\.json"),
    "timeline": Opening(words="hpcpace timeline RUN", writes=r"timeline\.pftrace"),
    "export": Opening(words="hpcpace export RUN -o OWN", writes=r"\w+\.parquet"),
    "collect": Opening(words="hpcpace collect RUN --trace-dir OWN"),
    # Ranks follow an order only if nobody else can write to it, whatever the umask.
    "switch": Opening(words="hpcpace switch RUN on", writes="switch", may=frozenset({"os.chmod"})),
    # The pack is readable by nobody else until it is whole, and its parts are read by processes of its own.
    "pack": Opening(
        words="hpcpace pack RUN --ended",
        writes=r"pack-\d{5}-[0-9a-f]{8}\.h5",
        removes=r"rank-\d{5}\.h5",
        may=frozenset({"os.chmod", "os.fork", "os.truncate"}),
    ),
    # Parquet is decoded by a process that may take little memory.
    "import": Opening(
        words=f"hpcpace import wia {TRACE} --run-dir OWN/imported",
        writes=r"rank-\d{5}\.(h5|journal)|run\.json",
        removes=r"rank-\d{5}\.journal",
        makes="attempt-0|trace",
        may=frozenset({"os.fork", "os.truncate"}),
    ),
    "analysis": Opening(
        words=f"{ROOT}/analysis/jitter_amplification.py RUN --out OWN/out",
        writes=r"jitter_amplification\.(csv|png|svg)",
    ),
}
_PICKLED = ("concurrent.futures.process", "hpcpace.", "multiprocessing.reduction", "numpy", "pathlib")
"""Modules of what processes of one command send each other."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    path = SyntheticRun(pipeline=2, slow={2: 1.3}, noise=0.02).write(folder / "run").path
    SyntheticRun(num_ranks=8, hosts=("n1", "n2"), noise=0.02).write(folder / "other")
    config = {"clock": {"interval_s": 60.0, "enabled": True}, "pace": {"policy": "none"}, "trace": {"trace_dir": None}}
    (path / "attempt-0" / "run.json").write_text(json.dumps({"ranks": [], "config": config}))
    subprocess.run(
        [sys.executable, "-P", "-m", "hpcpace", "audit", "--save", str(path / "attempt-0" / "snapshot")],
        capture_output=True,
        check=False,
    )
    assert list((path / "attempt-0" / "snapshot").glob("*.json"))
    return folder


@pytest.mark.parametrize("command", chosen(COMMANDS, 8))
def test_opening_a_run_does_nothing_else(command: str, runs: Path, tmp_path: Path) -> None:
    opening = COMMANDS[command]
    own, copies = tmp_path / "own", tmp_path / "copies"
    own.mkdir()
    shutil.copytree(runs, copies)
    places = {"RUNS": copies, "RUN": copies / "run", "OTHER": copies / "other", "OWN": own}
    pattern = re.compile(rf"\b({'|'.join(places)})\b")
    words = [pattern.sub(lambda found: str(places[found[0]]), word) for word in opening.words.split()]
    done = subprocess.run(
        [sys.executable, "-B", "-P", str(CHILD), str(tmp_path / "log"), *words],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": str(own), "MPLCONFIGDIR": str(own)},
        check=False,
    )
    assert done.returncode in (0, 1, 3, 4) and "Traceback" not in done.stderr, done.stderr
    is_harmless = _harmless(opening, own)
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [entry for entry in log if not is_harmless(entry)] == []
    # Else the check sees nothing at all.
    renamed = [entry[2] for entry in log if entry[0] == "os.rename"]
    assert bool(renamed) == (opening.writes != r"\0")


def test_the_commands_of_the_list_are_those_that_are_tried() -> None:
    (line,) = re.findall(r"For (`report`.*?) this means", " ".join(TEXT.split()))
    assert set(re.findall(r"`(.*?)`", line)) == set(COMMANDS) - {"analysis"}


def test_an_import_writes_into_no_folder_that_exists(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["import", "wia", str(TRACE), "--run-dir", str(tmp_path)])
    assert isinstance(result.exception, UsageError) and "nothing is overwritten" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


KERNELS = str(ROOT / "hpcpace/metrics/_kernels*.so")


def _harmless(opening: Opening, own: Path) -> Callable[[list[str]], bool]:
    """Return what says of an event whether it is one that opening a run may cause.

    Args:
        opening: the call.
        own: a folder in which libraries may keep what is theirs.
    """
    temporary = re.compile(rf"\.(?:{opening.writes})\.[0-9a-f]+")

    def is_harmless(entry: list[str]) -> bool:
        event, first, *more = (*entry, "")
        if event == "subprocess.Popen":  # Python's own for platform.processor(), Matplotlib's for its list of fonts
            return first in ("uname", "fc-list")
        if event == "ctypes.dlopen":  # of HDF5, which is loaded already, and of our own kernels
            return first == "None" or "h5py" in first or bool(Path(first).match(KERNELS))
        if event == "pickle.find_class":
            return "os.fork" in opening.may and first.startswith(_PICKLED)
        if event in opening.may:  # of a number: a file that is open already
            return first.isdigit() or not first
        if event.startswith(("open", "os.")) and Path(first).is_relative_to(own):
            return True
        if event == "open":
            return first.isdigit() or first == "/dev/null" or bool(temporary.fullmatch(first))
        if event == "os.remove":
            return bool(re.fullmatch(opening.removes, first))
        if event == "os.mkdir":
            return bool(re.fullmatch(opening.makes, first))
        is_written = event == "os.rename" and bool(re.fullmatch(opening.writes, more[0]))
        return is_written and bool(temporary.fullmatch(first))

    return is_harmless


def test_the_hdf5_that_is_recommended_is_the_one_that_is_installed() -> None:
    least = ".".join(map(str, MIN_HDF5))
    assert f"Use HDF5 {least} or newer" in TEXT
    assert h5py.version.hdf5_version_tuple >= MIN_HDF5
    pinned = re.search(r"^h5py==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    named = re.search(r"h5py ([\d.]+\d) and later", " ".join(TEXT.split()))
    assert pinned and named and Version(pinned[1]) >= Version(named[1])


def test_python_looks_for_the_package_in_the_working_folder_first(tmp_path: Path) -> None:
    (tmp_path / "hpcpace").mkdir()
    (tmp_path / "hpcpace" / "__main__.py").write_text("print('not ours')")
    for options, is_ours in (([], False), (["-P"], True)):
        done = subprocess.run(
            [sys.executable, *options, "-m", "hpcpace", "--version"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=True,
        )
        assert ("not ours" not in done.stdout) == is_ours


def test_whoever_reaches_the_rendezvous_of_torch_reads_it() -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    stranger = dist.TCPStore(
        "127.0.0.1", store.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    assert stranger.get("key") == b"value"


def test_no_module_but_the_labs_opens_a_port() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "hpcpace").rglob("*.py"))
        if "lab" not in path.relative_to(ROOT).parts
        for name in _calls(ast.parse(path.read_text()))
        if name in ("bind", "listen", "create_server", "create_connection", "urlopen", "connect", "Open_port")
    ]
    known = {
        "hpcpace/audit/collect_hardware.py": {
            "bind",
            "connect",
        },  # the kernel's own socket for traffic shaping, on this host
        "hpcpace/observe/launch/last_line.py": {"bind", "listen", "connect"},  # a Unix socket, see below
        "hpcpace/observe/watchdog.py": {"bind", "listen"},  # likewise
        "hpcpace/hang/notices.py": {"connect"},  # likewise
        "hpcpace/world/connection.py": {"connect"},  # asks whether torch's store answers
        "hpcpace/callbacks/__init__.py": {"bind"},  # arguments of a signature
        "hpcpace/cli/train.py": {"connect"},  # the ranks of a training: hpcpace.world.connection
        "hpcpace/cli/probe.py": {"connect"},  # likewise those of a probe
        "hpcpace/runs/imports/nsys.py": {"connect"},  # to a file, by sqlite3
        "hpcpace/probe/pair_player.py": {"bind", "listen", "connect"},  # between the hosts of a probe, see SECURITY.md
    }
    unknown = [line for line in found if line.split(": ")[1] not in known.get(line.split(": ")[0], ())]
    assert unknown == []


@pytest.mark.parametrize("module", ["observe/launch/last_line.py", "observe/watchdog.py", "hang/notices.py"])
def test_what_stays_on_a_host_uses_unix_sockets_alone(module: str) -> None:
    tree = ast.parse((ROOT / "hpcpace" / module).read_text())
    made = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    sockets = [call for call in made if call.startswith("socket.socket(")]
    assert sockets and set(sockets) == {"socket.socket(socket.AF_UNIX)"}


def _calls(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Attribute):
                yield function.attr
            elif isinstance(function, ast.Name):
                yield function.id


def test_what_needs_root_is_named() -> None:
    makefile = (ROOT / "Makefile").read_text()
    needing = re.findall(r"^# Root\b.*\n(?:#.*\n)*([\w-]+):", makefile, re.MULTILINE)
    (line,) = [promise for promise in _promises() if promise.startswith("Only `hpcpace lab`")]
    assert set(re.findall(r"`make ([\w-]+)`", line)) == set(needing)


def test_the_seconds_are_those_of_the_settings() -> None:
    from hpcpace.core.config import Config

    config = Config()
    start_s = 2 * config.of(TraceConfig).start_timeout_s + 2 + 5 + config.of(ClockConfig).timeout_s
    end_s = 2 * config.of(ClockConfig).leave_timeout_s(is_meant=True) + 1 + 30
    said = f"at most {start_s:.0f} s at the start and "
    assert f"{said}{end_s:.0f} s at the end with the default settings, and in no step" in " ".join(TEXT.split())


def test_the_memory_is_that_of_the_campaign() -> None:
    from experiments.damage.child import memory_limit_bytes

    base, factor = memory_limit_bytes("1B"), memory_limit_bytes("2B") - memory_limit_bytes("1B")
    assert (base - factor, factor) == (1.25 * 2**30, 3)
    assert "at most 1.25 GiB and three times that" in " ".join(TEXT.split())
