"""Each machine's findings in full as text.

`python -m tests.audit_golden` rewrites tests/data/audit-trees: read the diff.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hpcpace.audit.findings import AuditFinding
from hpcpace.audit.job import AuditedJob
from hpcpace.audit.rulebook import audit
from tests.machines.cases import CASES, Case
from tests.machines.machine import memory_folder

GOLDEN = Path(__file__).parent / "data" / "audit-trees"


def listed(case: Case, folder: Path) -> str:
    """Return exit code, findings, rules without anything to look at, and bindings, as text."""
    result = audit(AuditedJob(case.snapshots(folder), case.settings, case.log, case.topo))
    lines = [f"exit {result.exit_code}", *map(_line, result.findings)]
    lines += [f"skipped {rule}: {reason}" for rule, reason in result.skipped.items()]
    for binding in result.bindings:
        left = ",".join(binding.left) or "nothing"
        lines.append(f"bind {','.join(binding.hosts)} {binding.option or binding.reason} leaves {left}")
    for matrix in result.matrices:
        for gpu, row, nccl in zip(matrix.gpus, matrix.class_physical, matrix.class_nccl, strict=True):
            cells = (f"{nic}={one}/{other}" for nic, one, other in zip(matrix.nics, row, nccl, strict=True))
            lines.append(f"path {','.join(matrix.hosts)} {gpu} {' '.join(cells)}")
    return "\n".join(lines) + "\n"


def _line(finding: AuditFinding) -> str:
    ranks = ",".join(map(str, finding.ranks))
    return (
        f"{finding.severity} {finding.rule} [{finding.host}] {finding.place}: {finding.seen}\n"
        f"    costs {finding.cost}\n    fix {finding.fix}\n    {finding.certainty}, ranks {ranks or '-'}"
    )


if __name__ == "__main__":
    for case_name, one in CASES.items():
        scratch = Path(tempfile.mkdtemp(dir=memory_folder()))
        try:
            (GOLDEN / f"{case_name}.txt").write_text(listed(one, scratch))
        finally:
            shutil.rmtree(scratch)
