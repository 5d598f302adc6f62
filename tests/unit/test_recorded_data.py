"""docs/recorded-data.md has every field that is recorded, and no other; no name of ours is taken for a secret's."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpcpace.audit import collect_host, facts
from hpcpace.core.config import DECLARED_BY, Config, section_class
from hpcpace.core.files import Folder
from hpcpace.core.redaction import MARK, is_secret
from hpcpace.diagnosis import summary
from hpcpace.hang.notices import Notice
from hpcpace.observe import joined
from hpcpace.observe.node_local import NodeLocalTrace
from hpcpace.pace.pacer import PacingRecord
from hpcpace.studies.setups import StudyFolder
from hpcpace.trace.schema import FORMAT_VERSION, PHASES_ON_CORES, TABLES, TraceHeader
from hpcpace.train.checkpoint_folder import CHECKPOINT_SCHEMA, TrainingHistory, write_history

DOCS = Path(__file__).parents[2] / "docs"
DOC, FORMAT_DOC = (DOCS / "recorded-data.md").read_text(), (DOCS / "trace-format.md").read_text()
SNAPSHOT_PARTS = [
    kind
    for kind in vars(facts).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == facts.__name__
]
# Of `hpcpace trace`, `hpcpace train` and a session; tests/mpi/test_recorded_secrets.py looks at real files.
OF_COMMANDS = {"script", "arguments", "launch", "model", "parallelism", "data", "inject", "resumed", "imported"}
OF_SESSION = {"launcher", "world_size", "mesh", "samples_unit", "coordinated_over"}


def _rows(section: str) -> list[list[str]]:
    """Return the cells of the first table of a section."""
    match = re.search(rf"^## {re.escape(section)}$(.*?)(?=^## |\Z)", DOC, re.MULTILINE | re.DOTALL)
    assert match, f"docs/recorded-data.md has no section {section!r}"
    lines = [line for line in match[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def _fields_by_part(section: str) -> dict[str, set[str]]:
    return {row[0]: set(_names(row[1])) for row in _rows(section)}


def _fields(section: str) -> set[str]:
    return {name for row in _rows(section) for name in _names(row[0])}


def _fields_of(kind: Any) -> set[str]:
    return {item.name for item in dataclasses.fields(kind)}


def _assert_documented(section: str, expected: Mapping[str, set[str]]) -> None:
    """Check that the rows of a section have the expected fields, and say which row lacks which, or has too many."""
    found = _fields_by_part(section)
    for part in {*found, *expected}:
        fields, wanted = found.get(part, set()), expected.get(part, set())
        wrong = {"add": sorted(wanted - fields), "remove": sorted(fields - wanted)}
        assert fields == wanted, f"docs/recorded-data.md, {section}, row {part}: {wrong}"


def test_every_attribute_and_column_of_a_trace_is_documented() -> None:
    expected = {name: {*(table.dtype.names or ()), *(table.device.names or ())} for name, table in TABLES.items()}
    _assert_documented("RUN/attempt-N/trace/rank-NNNNN.h5", {"header": _fields_of(TraceHeader), **expected})


def test_the_format_of_traces_is_described_with_its_version_and_every_column() -> None:
    text = FORMAT_DOC.replace("`PHASE_", "`data_")  # stands for each phase of own work
    assert f"`MAJOR.MINOR`, here `{FORMAT_VERSION}`" in text, f"docs/trace-format.md: it is {FORMAT_VERSION} now"
    phases = re.compile(rf"({'|'.join(phase.name.lower() for phase in PHASES_ON_CORES)})_(?=ns|cpu_ns|wait_ns)")
    columns = {name for table in TABLES.values() for name in (*(table.dtype.names or ()), *(table.device.names or ()))}
    missing = [name for name in sorted(columns) if f"`{phases.sub('data_', name)}`" not in text]
    assert missing == [], "docs/trace-format.md does not describe these columns"


def test_every_field_of_a_snapshot_is_documented() -> None:
    expected = {kind.__name__: _fields_of(kind) for kind in SNAPSHOT_PARTS}
    _assert_documented("RUN/attempt-N/snapshot/HOST.json", expected)


def test_every_field_of_run_json_is_documented() -> None:
    made = joined.run_record(name="mine", config=Config(), environ={}, hosts=[], facts={})
    assert _fields("RUN/attempt-N/run.json") == {*made, *OF_COMMANDS, *OF_SESSION}


def test_every_section_of_the_settings_in_run_json_is_documented() -> None:
    row = next(row for row in _rows("RUN/attempt-N/run.json") if row[0] == "`config`")
    assert set(re.findall(r"`\[(\w+)\]`", row[1])) == set(Config().to_json())


def test_every_field_of_a_claim_on_node_local_disk_is_documented(tmp_path: Path) -> None:
    trace = NodeLocalTrace(tmp_path, "mine", Path("/home/rank-00000.h5"))
    with trace.open_folder() as folder:
        claim = json.loads(folder.read("home.json", most_bytes=1000))
    assert _fields("TRACE_DIR/hpcpace-RUN-attempt-N-rank-R-TIME") == set(claim)


def test_every_field_of_a_notice_is_documented() -> None:
    assert _fields("RUN/attempt-N/hang/rank-NNNNN.json") == {"schema", *_fields_of(Notice)}


def test_every_field_of_trial_json_is_documented() -> None:
    assert _fields("RUN/attempt-N/trial.json") == set(PacingRecord(policy="slack").to_json())


def test_every_field_of_a_summary_is_documented() -> None:
    fields = _fields_of(summary.Summary) | {"schema", "hpcpace_version"}
    assert _fields("RUN/summary.json and RUN/report.html") == fields


def test_every_field_of_a_checkpoint_is_documented(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as folder:
        write_history(folder, TrainingHistory(), {})
    content = json.loads((tmp_path / "progress.json").read_text())
    assert content["schema"] == CHECKPOINT_SCHEMA
    assert _fields("RUN/checkpoints/step-NNNNNNNN") == set(content)


def test_every_field_of_a_study_is_documented(tmp_path: Path) -> None:
    study = StudyFolder(tmp_path)
    study.write_plan("mine", [])
    assert _fields("STUDY/plan.json") == set(json.loads(study.plan_json.read_text()))


@pytest.mark.parametrize(("file", "module"), [("run.json", joined), ("snapshots", collect_host)])
def test_every_variable_that_is_kept_is_documented(file: str, module: Any) -> None:
    row = next(row for row in _rows("Environment variables") if row[0] == file)
    assert set(_names(row[1])) == module.KEPT_VARIABLES
    assert set(_names(row[2])) == set(module.KEPT_PREFIXES)


def test_only_the_variables_that_are_documented_are_kept() -> None:
    environ = {
        **dict.fromkeys(("SLURM_JOB_ID", "NCCL_DEBUG", "HPCPACE_TRACE_COUNTERS", "OMP_NUM_THREADS"), "1"),
        **dict.fromkeys(("HOME", "SLURM_JOB_USER", "HPCPACE_PRELUDE", "HPCPACE_TRACE_OTHER", "WANDB_NAME"), "2"),
    }
    made = joined.run_record(name="mine", config=Config(), environ=environ, hosts=[], facts={})
    assert set(made["environment"].values()) == {"1"} and len(made["environment"]) == 4


def _names_within(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {name for entry in value.values() for name in _names_within(entry)}
    return set()


def test_no_name_of_ours_is_taken_for_that_of_a_secret() -> None:
    kinds = [TraceHeader, Notice, *SNAPSHOT_PARTS, *map(section_class, DECLARED_BY)]
    kinds += [kind for kind in vars(summary).values() if isinstance(kind, type) and dataclasses.is_dataclass(kind)]
    names = {name for kind in kinds for name in _fields_of(kind)} | OF_COMMANDS | OF_SESSION
    names |= _names_within(joined.run_record(name="mine", config=Config(), environ={}, hosts=[], facts={}))
    names |= {*DECLARED_BY} | joined.KEPT_VARIABLES | collect_host.KEPT_VARIABLES
    names |= _names_within(PacingRecord(policy="slack").to_json())
    assert [name for name in sorted(names) if is_secret(name, "correct-horse-7")] == []


def test_the_document_names_the_mark() -> None:
    assert f"becomes `{MARK}`" in DOC.replace("\n", " ")
