"""Runs a row's script as its user would, with and without tracing, and collects what it left behind."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.attach.rows import Fault, Row
from experiments.attach.tiny_models import write_models
from experiments.jobs import free_port
from experiments.pages import ROOT, read_toml

_VOCABULARY = 64
_WITNESS = re.compile(r"\b(Witness|Slow|hold)\(")


class CheckoutError(Exception):
    """A source is not as the row expects it."""


def lay_out(row: Row, sources: Path | None, folder: Path) -> Path:
    """Put a row's public script into a folder, and return the folder to run it in.

    Raises:
        CheckoutError: there is no clone, it lacks the commit, or an edit does not fit.
    """
    assert row.source is not None
    clone = (sources or Path()) / row.source.folder
    if sources is None or not clone.is_dir():
        raise CheckoutError(f"needs a clone of {row.source.repository} at {clone}: give --sources")
    archive = subprocess.run(
        ["git", "-C", clone, "archive", row.source.commit, *(row.parts or filter(None, [row.folder]))],
        capture_output=True,
    )
    if archive.returncode:
        raise CheckoutError(f"{clone} has no commit {row.source.commit}: {archive.stderr.decode().strip()}")
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    place = folder / row.folder
    edits = read_toml(__file__, "edits")[row.name]
    for edit in edits:
        _apply(place, edit)
    for path in {edit["path"] for edit in edits if _WITNESS.search(str(edit))}:
        _import_witness(place / path)
    _make_data(place)
    write_models(place / "data" / "tiny")
    return place


def _apply(place: Path, edit: Mapping[str, str]) -> None:
    path, old = place / edit["path"], edit["old"]
    text = path.read_text()
    if text.count(old) != 1:
        raise CheckoutError(f"{edit['path']} has {text.count(old)} times, not once: {old!r}")
    new = edit.get("new", edit.get("before", "") + old + edit.get("after", ""))
    path.write_text(text.replace(old, new))


def _import_witness(path: Path) -> None:
    """Put the import of the witness before the first one of a script; those of `__future__` stay first."""
    text = path.read_text()
    line = "from experiments.attach.witness import Slow, Witness, hold\n"
    path.write_text(re.sub(r"^(?=import |from (?!__future__))", line, text, count=1, flags=re.MULTILINE))


def _make_data(place: Path) -> None:
    """Write the tokens that nanoGPT reads, the texts that others read, and a tokenizer of their words."""
    folder = place / "data" / "tiny"
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, _VOCABULARY, 20_000, dtype=np.uint16)
    for name in ("train.bin", "val.bin"):
        tokens.tofile(folder / name)
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": _VOCABULARY}))
    for name in ("held-out.txt", "text.txt"):
        (folder / name).write_text(" ".join(map(str, tokens)))
    vocabulary = {word: number for number, word in enumerate((*map(str, range(_VOCABULARY - 1)), "<unk>"))}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": {"type": "Whitespace"}}))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))
    texts = place / "tests" / "assets" / "c4_test" / "data.json"
    texts.parent.mkdir(parents=True, exist_ok=True)
    words = [" ".join(np.binary_repr(number) for number in row) for row in tokens[:16_000].reshape(-1, 80)]
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in words))


_PROGRAMS = Path(__file__).with_name("programs")
_PLAIN, _CODE = "plain", "exit-code"
_LIMIT_S = 600
HOLD_S = 0.08
"""How long a fault sleeps in each step, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """One run of a script.

    Attributes:
        folder: it ran with this folder for output.
        code: its exit code; of the launcher where there is one.
        stdout, stderr: what it printed.
        witnesses: what its witnesses wrote, by rank.
    """

    folder: Path
    code: int
    stdout: str
    stderr: str
    witnesses: dict[int, Any] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """Where a traced script has its traces."""
        return self.folder / "run"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and with what all rows run.

    Attributes:
        python: an interpreter that has the frameworks.
        sources: folder with clones of public repositories.
        torchvision: folder with torchvision, where it is apart from the other packages.
        folder: for everything that the runs write.
        reuse: whether runs without a fault that are there count.
        hold_s: how long a fault sleeps in each step.
    """

    python: Path
    sources: Path | None
    torchvision: Path | None
    folder: Path
    reuse: bool = False
    hold_s: float = HOLD_S

    def run(self, row: Row, *, traced: bool, fault: Fault | None = None) -> Ran:
        """Run a row's script once, or return its last run without a fault if that may be reused.

        Raises:
            CheckoutError: the public script is not there as expected.
        """
        folder = self.folder / row.name / (("traced" if traced else _PLAIN) + (f"-{fault}" if fault else ""))
        if self.reuse and not fault and (folder / _CODE).exists():
            return read_run(folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        place, script = folder, _PROGRAMS / row.program
        if row.source is not None:
            place = lay_out(row, self.sources, folder / "source")
            script = place / row.program
        command = self._command(row, script, folder / "run" if traced else None)
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            code = _run(command, place, self._environ(row, folder, fault), out, err)
        (folder / _CODE).write_text(str(code))
        return read_run(folder)

    def _command(self, row: Row, script: Path, run_dir: Path | None) -> list[str]:
        launcher = [str(self.python)]
        if row.is_mpi:
            launcher = ["mpiexec", "-n", str(row.num_ranks), *launcher]
        elif not row.launches_itself:
            launcher += [
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={row.num_ranks}",
                f"--master-port={free_port()}",
            ]
        # The script itself opens the session where it has our callback.
        by_trace = run_dir is not None and not row.has_callback
        trace = ["-m", "hpcpace", "trace", "--run-dir", str(run_dir), "--"] if by_trace else []
        return [*launcher, *trace, *(("-m", row.program) if row.is_module else (str(script),)), *row.arguments]

    def _environ(self, row: Row, folder: Path, fault: Fault | None) -> dict[str, str]:
        paths = [ROOT, *([self.torchvision] if self.torchvision and "torchvision" in row.packages else [])]
        return {
            **os.environ,
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TQDM_DISABLE": "" if "litdata" in row.packages else "1",  # bars follow the clock; litdata fails without
            "ATTACH_FOLDER": str(folder),
            "ATTACH_RANKS": str(row.num_ranks),
            "ATTACH_PORT": str(free_port()),
            "ATTACH_FAULT": fault or "",
            "ATTACH_HOLD_S": str(self.hold_s),
            "ATTACH_PROFILE": "1" if row.is_profiled and not fault else "",
            # Scripts with a callback open the session by themselves, in the run that is traced.
            "ATTACH_RUN": str(folder / "run"),
            "HPCPACE_TRACE_ENABLED": "0" if folder.name == _PLAIN else "1",
            "HPCPACE_TRACE_SUMMARY": "0",  # stderr is compared with that of the plain run, and the report follows
        }


def read_run(folder: Path) -> Ran:
    """Return what a run that has ended left in its folder."""
    witnesses = [json.loads(path.read_text()) for path in sorted(folder.glob("witness-*.json"))]
    return Ran(
        folder=folder,
        code=int((folder / _CODE).read_text()),
        stdout=(folder / "stdout").read_text(errors="replace"),
        stderr=(folder / "stderr").read_text(errors="replace"),
        witnesses={witness["rank"]: witness for witness in witnesses},
    )


def report(python: Path, run_dir: Path) -> dict[str, Any] | None:
    """Return the summary of a run; None if there is no report."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([python, "-m", "hpcpace", "report", run_dir], env=environ, capture_output=True)
    path = run_dir / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None


def _run(command: list[str], place: Path, environ: dict[str, str], out: Any, err: Any) -> int:
    """Run a command in a session of its own, and end all of it when its time is up."""
    with subprocess.Popen(command, cwd=place, env=environ, stdout=out, stderr=err, start_new_session=True) as process:
        try:
            return process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)

            return 124
