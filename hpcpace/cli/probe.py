"""`hpcpace probe`: what the network, the cores and the memory of a job's hosts can do."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from hpcpace.cli.commands import RankZeroCommand
from hpcpace.cli.options import MIN_WIDTH, PATH, Real, headed, option, shown_progress, text_console
from hpcpace.core.config import Config
from hpcpace.core.environment import RankInfo, process_environ, rank_info, set_environ_default
from hpcpace.core.errors import (
    EXIT_CANNOT_TELL,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    EXIT_WARNING,
    ProbeError,
    UsageError,
    check_all,
)
from hpcpace.core.files import write_file
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import check_target, json_text
from hpcpace.core.settings import load_config
from hpcpace.core.text import folded_message, printable
from hpcpace.probe.changes import changes, check_comparable, is_unclear, left_out, outcome_words
from hpcpace.probe.record import ProbeRecord, read_probe
from hpcpace.probe.world import PART_NAMES, Measurement, ProbeWorld, measure_parts
from hpcpace.report.html import html_page
from hpcpace.report.sections.probe import probe_document
from hpcpace.report.terminal import print_document
from hpcpace.world.connection import Connection, check_torch, connect
from hpcpace.world.mpi import abort_guard
from hpcpace.world.settings import BACKENDS, DEVICES, WorldConfig

_MIN_TORCH = (2, 4)  # the oldest that it was tried with
DEFAULT_TIME_S = 60.0
DEFAULT_TIMEOUT_S = 15.0


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What was asked for."""

    parts: tuple[str, ...]
    cores_in_turn: bool
    time_s: float
    timeout_s: float
    json_file: Path | None
    html_file: Path | None
    against: Path | None
    has_other_hosts: bool


@click.command(cls=RankZeroCommand)
@headed(
    "What to measure",
    option(
        "--time",
        "time_s",
        type=Real(1, 86_400),
        default=DEFAULT_TIME_S,
        metavar="S",
        help="Measure for S seconds, over all parts together.",
    ),
    option(
        "--only",
        "parts",
        multiple=True,
        type=click.Choice(PART_NAMES),
        help="Measure this part only; may be repeated.",
        show_default="all parts",
    ),
    option(
        "--cores-in-turn", is_flag=True, help="Measure the noise of a host's cores one after another, not all at once."
    ),
)
@headed(
    "Ranks of a job",
    option(
        "--device", type=click.Choice(DEVICES), help="Send from GPUs (over NCCL) or from CPUs.", show_default="auto"
    ),
    option("--backend", type=click.Choice(BACKENDS), help="Send over this backend of torch.", show_default="auto"),
    option("--interface", help="Use these network interfaces, like eth0,eth1.", show_default="the fastest shared ones"),
    option(
        "--timeout-s",
        type=Real(1, 3600),
        default=DEFAULT_TIMEOUT_S,
        help="Give up on a host that does not answer for this long, in seconds.",
    ),
    option("--config", "config_file", type=PATH, help="Read settings from this TOML file.", show_default="none"),
)
@headed(
    "Output",
    option("--json", "json_file", type=PATH, help="Write the probe to this file.", show_default="not written"),
    option(
        "--html", "html_file", type=PATH, help="Write the probe as one page to this file.", show_default="not written"
    ),
)
@headed(
    "After maintenance",
    option(
        "--against",
        type=PATH,
        help="Compare with the probe saved in this file, and exit 1 if anything became slower.",
        show_default="not compared",
    ),
    option(
        "--other-hosts",
        "has_other_hosts",
        is_flag=True,
        help="Compare with --against although cluster, hosts, ranks or device differ.",
    ),
)
def command(
    time_s: float,
    parts: tuple[str, ...],
    cores_in_turn: bool,
    device: str | None,
    backend: str | None,
    interface: str | None,
    timeout_s: float,
    config_file: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    against: Path | None,
    has_other_hosts: bool,
) -> None:
    """Measure what a job's hosts can do: collectives, pairs of hosts, noise and copies.

    Start it as the job would start: srun hpcpace probe, mpiexec -n 4 hpcpace probe, or torchrun --no-python. Exit
    codes: 0 fine, 1 slower than the probe of --against, 2 bad input, 3 cannot tell, 4 a host stopped answering.
    """
    environ = process_environ()
    info = rank_info(environ)
    world_options = {"device": device, "backend": backend, "interface": interface}
    with abort_guard(None, info, errors_alike=True):
        config = load_config(file=config_file, environ=environ, options={"world": world_options})
        check_all(
            (
                partial(_check_targets, json_file, html_file, (against, config_file)),
                partial(_check_against, against, has_other_hosts),
            )
        )
        check_torch("hpcpace probe", _MIN_TORCH)
        connection = _connected(info, config)
    call = _Call(
        parts=parts or PART_NAMES,
        cores_in_turn=cores_in_turn,
        time_s=time_s,
        timeout_s=timeout_s,
        json_file=json_file,
        html_file=html_file,
        against=against,
        has_other_hosts=has_other_hosts,
    )
    with abort_guard(connection.comm, info):
        code = _probe(call, config, info, connection)
    # Outside of the guard, and of rank 0 alone: under srun --kill-on-bad-exit any rank would end the others.
    if info.rank == 0 and code != EXIT_OK:
        sys.exit(code)


def _check_targets(json_file: Path | None, html_file: Path | None, read: Sequence[Path | None]) -> None:
    for file, option_name in ((json_file, "--json"), (html_file, "--html")):
        check_target(file, read, option_name)
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"no folder {file.parent} for {file.name}: make it, or name another file")


def _check_against(against: Path | None, has_other_hosts: bool) -> None:
    if has_other_hosts and against is None:
        raise UsageError("--other-hosts says how to compare: name a probe with --against")


def _connected(info: RankInfo, config: Config) -> Connection:
    # MPI would end all ranks with the first host that dies; in a step of Slurm torch can do without.
    coordination = config.of(WorldConfig).coordination
    if coordination == "auto" and info.launcher == "slurm":
        coordination = "torch"
    return connect(
        info,
        process_environ(),
        coordination=coordination,
        rendezvous=config.of(WorldConfig).rendezvous,
        timeout_s=config.of(WorldConfig).start_timeout_s,
    )


def _probe(call: _Call, config: Config, info: RankInfo, connection: Connection) -> int:
    set_environ_default("OMP_NUM_THREADS", "1")
    # Imported this late because torch takes more than a second and reads the variable above.
    from hpcpace.probe.start import begin_record, probe_world
    from hpcpace.world.messages import own_store
    from hpcpace.world.process_group import init_process_group

    with init_process_group(
        info,
        connection.comm,
        device=config.of(WorldConfig).device,
        backend=config.of(WorldConfig).backend,
        interface=config.of(WorldConfig).interface,
        rendezvous=connection.rendezvous,
        timeout_s=call.timeout_s,
        start_timeout_s=config.of(WorldConfig).start_timeout_s,
    ) as device:
        store, _ = own_store(call.timeout_s)
        backend = _backend(config.of(WorldConfig).backend, device)
        world = probe_world(info, store, device=device, backend=backend, timeout_s=call.timeout_s)
        record = begin_record(world, process_environ(), time_s=call.time_s)
        before = _before(call, record, world)
        parts = _chosen_parts(call.parts, cores_in_turn=call.cores_in_turn)
        # A thread that redraws the bar would be noise on a core that is measured.
        is_shown = info.rank == 0 and sys.stderr.isatty()
        with shown_progress(is_shown=is_shown, redraws_alone=False) as begin_stage:
            record = measure_parts(world, parts, record, begin_stage=begin_stage)
        gc.collect()  # groups end before the process group does
        code = _shown(call, record, before) if info.rank == 0 else EXIT_OK
        if record.lost_hosts:
            raise SystemExit(EXIT_FAILED)  # what is left of the process group cannot end in order
        return code


def _before(call: _Call, record: ProbeRecord, world: ProbeWorld) -> ProbeRecord | None:
    """Return the probe to compare with, on rank 0; checked before anything is measured.

    Collective: every rank calls this.

    Raises:
        ProbeError: it cannot be read, or is one of another world; the same on all ranks.
    """
    before, problem = None, ""
    if world.is_first and call.against is not None:
        try:
            before = read_probe(call.against)
            if not call.has_other_hosts:
                check_comparable(before, record)
        except ProbeError as error:
            problem = folded_message(str(error))
    problem = world.agree(problem)
    if problem:
        raise ProbeError(problem)
    return before


def _backend(name: str, device: Any) -> str:
    if name != "auto":
        return name
    return "nccl" if device.type == "cuda" else "gloo"


def _shown(call: _Call, record: ProbeRecord, before: ProbeRecord | None) -> int:
    """Print and save a probe on rank 0, and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a job's locale may be ASCII, and names more
        sys.stdout.reconfigure(errors="backslashreplace")
    found = changes(before, record) if before is not None else []
    remarks = left_out(before, record) if before is not None else []
    outcome = outcome_words(found) if before is not None else ""
    document = probe_document(record, found, remarks, outcome)
    print_document(text_console(log_width=MIN_WIDTH), document)
    # Results come first: a file that cannot be written must not cost what was measured.
    is_saved = True
    for file, content in ((call.json_file, json_text(record.to_json())), (call.html_file, "")):
        if file is None:
            continue
        try:
            write_file(file, content or html_page(document))
        except OSError as error:
            click.echo(f"error: cannot write {printable(str(file))} ({error.strerror}): name another file", err=True)
            is_saved = False
    if record.lost_hosts:
        return EXIT_FAILED
    if not is_saved:
        return EXIT_USAGE
    if any(one.is_slower for one in found):
        return EXIT_WARNING
    return EXIT_CANNOT_TELL if before is not None and is_unclear(found) else EXIT_OK


def _chosen_parts(names: Sequence[str], *, cores_in_turn: bool = False) -> list[Measurement]:
    """Return the parts of a probe with some names, in the order of `PART_NAMES`."""
    from hpcpace.probe.hosts import Copies, Noise
    from hpcpace.probe.pairs import Pairs
    from hpcpace.probe.sweep import Sweep

    parts: tuple[Measurement, ...] = (Sweep(), Pairs(), Noise(one_at_a_time=cores_in_turn), Copies())
    known = {part.name: part for part in parts}
    return [known[name] for name in PART_NAMES if name in names]
