"""`hpcpace audit`: the faults of nodes and bindings, the line that fixes each, and a picture."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from hpcpace.audit.findings import AuditFinding, Severity
from hpcpace.audit.job import AuditedJob, read_topo
from hpcpace.audit.nccl_log import read_nccl_log
from hpcpace.audit.rulebook import BY_ID, AuditResult, audit, check_ids, exposition
from hpcpace.audit.settings import AuditConfig
from hpcpace.audit.snapshot import (
    NUM_OURS_OF_STEP,
    Gathered,
    gather_by_files,
    gather_by_mpi,
    join_parts,
    mpi_communicator,
    own_part,
    snapshot_folder,
    take_tree,
)
from hpcpace.audit.snapshot_files import differences, load_snapshots, save_snapshots
from hpcpace.cli.commands import Group
from hpcpace.cli.options import PATH, Real, Whole, headed, option, text_console, verbose, warn
from hpcpace.core.environment import RankInfo, process_environ, process_redaction, rank_info
from hpcpace.core.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    EXIT_WARNING,
    CannotTell,
    SnapshotError,
    UsageError,
    check_all,
)
from hpcpace.core.files import write_file
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import check_target
from hpcpace.core.settings import load_config
from hpcpace.core.text import first_few, printable

TERMINAL = "terminal"
"""What `--show` means without a file."""

_KINDS = (".svg", ".html")


def check_show(show: str | None, *, has_one_object: bool) -> None:
    """Refuse a file of another kind, and a picture among output that a program reads.

    Raises:
        UsageError: either of them.
    """
    if show == TERMINAL and has_one_object:
        raise UsageError(
            "--show draws in the terminal: with --json, --prometheus or --prolog give it FILE.svg or .html"
        )
    if show is not None and show != TERMINAL and Path(show).suffix.lower() not in _KINDS:
        raise UsageError(f"--show {printable(show)}: the name of the file must end in {' or '.join(_KINDS)}")


def write_picture(path: Path, job: AuditedJob, result: AuditResult) -> None:
    """Write the pictures into a file, as SVG or HTML by its name.

    Raises:
        UsageError: the file cannot be written.
    """
    # What draws and writes pages takes longer to load than an audit without them.
    from hpcpace.audit.picture import pictures
    from hpcpace.audit.picture_text import svg
    from hpcpace.report.audit_report import audit_document, picture_sections
    from hpcpace.report.html import html_page

    if path.suffix.lower() == ".html":
        text = html_page(audit_document(result, list(picture_sections(job, result))))
    else:
        text = svg(pictures(job)[0])
    try:
        write_file(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UsageError(f"--show {path}: {error.strerror}") from None
    click.echo(f"hpcpace: the picture is in {printable(str(path))}", err=True)


MAX_TASKS = 4096
"""Ranks of one node for which a binding is printed: more than any node has threads."""


class AuditGroup(Group):
    """A group that, with --prolog, turns its own failures into one line and exit 0.

    Slurm drains a node whose prolog fails, and neither a wrong option nor a bug in hpcpace is the node's fault.
    """

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the options."""
        for name in ("--nccl-log", "--topo"):
            args = _repeated(args, name, self.commands)
        is_prolog = "--prolog" in args
        made: click.Context = self._kept_quiet(
            lambda: super(AuditGroup, self).make_context(info_name, args, parent, **extra), is_prolog
        )
        return made

    def invoke(self, ctx: click.Context) -> Any:
        """Run the audit."""
        return self._kept_quiet(lambda: super(AuditGroup, self).invoke(ctx), bool(ctx.params.get("prolog")))

    def _kept_quiet(self, run: Callable[[], Any], is_prolog: bool) -> Any:
        if not is_prolog:
            return run()
        try:
            return run()
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:  # the boundary that keeps a prolog from draining nodes
            text = error.format_message() if isinstance(error, click.ClickException) else str(error)
            line = " ".join(printable(process_redaction().text(text).replace("\n", " ")).split())
            click.echo(f"hpcpace audit: not done ({type(error).__name__}: {line[:200]})", err=True)
            raise click.exceptions.Exit(EXIT_OK) from None


def _repeated(args: Sequence[str], name: str, commands: Collection[str]) -> list[str]:
    """Return arguments with an option repeated before each of its values, as a shell's pattern lists them."""
    made: list[str] = []
    is_value = is_open = False
    for arg in args:
        if arg == name:
            is_value, is_open = True, True
        elif is_value:
            is_value = False
        elif is_open and not arg.startswith("-") and arg not in commands:
            made.append(name)
        else:
            is_open = False
        made.append(arg)
    return made


@dataclass(frozen=True, kw_only=True)
class Views:
    """What to print in addition to the verdict or in its place."""

    as_json: bool
    as_prometheus: bool
    with_matrix: bool
    with_map: bool
    show: str | None


def _ids(_: click.Context, __: click.Parameter, value: Sequence[str]) -> tuple[str, ...]:
    return tuple(rule_id for text in value for rule_id in text.upper().split(",") if rule_id)


@click.group(cls=AuditGroup, invoke_without_command=True)
@headed(
    "What to audit",
    option(
        "--from",
        "source",
        type=PATH,
        help="Audit the snapshots in this folder, run or file.",
        show_default="this machine",
    ),
    option(
        "--sysfs-root",
        type=PATH,
        help="Audit a copied tree: a folder with sys and proc in it.",
        show_default="this machine",
    ),
    option(
        "--nccl-log",
        "nccl_logs",
        type=PATH,
        multiple=True,
        metavar="PATH...",
        help="Check these logs of NCCL_DEBUG=INFO, files or folders (C02 to C07); alone, no node is audited.",
        show_default="none",
    ),
    option(
        "--topo",
        "topo_files",
        type=PATH,
        multiple=True,
        metavar="FILE...",
        help="Check these outputs of nvidia-smi topo -m (P09); alone, no node is audited.",
        show_default="none",
    ),
    option("--probe", type=Real(0, 60), default=0.0, metavar="S", help="Watch counters for S seconds (N08, P04)."),
)
@headed(
    "Ranks of a job",
    option("--mpi", "with_mpi", is_flag=True, help="Gather over MPI, and check MPI itself (A01)."),
    option("--timeout-s", type=Real(0.1), default=30.0, help="Wait this long for the other ranks, in seconds."),
    option(
        "--tasks-per-node",
        type=Whole(1, MAX_TASKS),
        help="Print the binding for this many ranks per node.",
        show_default="the job's, or one per GPU",
    ),
)
@headed(
    "Rules",
    option(
        "--rules",
        multiple=True,
        metavar="IDS",
        callback=_ids,
        help="Run only these rules, like A02,N01.",
        show_default="all",
    ),
    option("--ignore", multiple=True, metavar="IDS", callback=_ids, help="Leave these rules out.", show_default="none"),
    option(
        "--config",
        "config_file",
        type=PATH,
        help="Read thresholds and the site's expectations from the table [audit] of this TOML file.",
        show_default="none",
    ),
)
@headed(
    "Output",
    option(
        "--show",
        is_flag=False,
        flag_value=TERMINAL,
        metavar="[FILE]",
        help="Draw the machine and the cores and GPU of each rank, here or in FILE.svg or FILE.html.",
        show_default="not drawn",
    ),
    option("--matrix", "with_matrix", is_flag=True, help="Show the paths between GPUs and adapters."),
    option("--map", "with_map", is_flag=True, help="Show which cores each rank may run on."),
    option("--json", "as_json", is_flag=True, help="Print one JSON object."),
    option("--prometheus", "as_prometheus", is_flag=True, help="Print metrics for node_exporter."),
    option("--save", type=PATH, help="Write each host's snapshot to this folder.", show_default="not written"),
)
@headed(
    "In a prolog",
    option("--prolog", is_flag=True, help="Print one line, and fail only on the rules of --fail-on."),
    option(
        "--fail-on",
        multiple=True,
        metavar="IDS",
        callback=_ids,
        help="Fail if one of these rules finds something; needs --prolog.",
        show_default="none",
    ),
)
@click.pass_context
def command(
    ctx: click.Context,
    source: Path | None,
    sysfs_root: Path | None,
    save: Path | None,
    with_mpi: bool,
    timeout_s: float,
    probe: float,
    nccl_logs: tuple[Path, ...],
    topo_files: tuple[Path, ...],
    tasks_per_node: int | None,
    show: str | None,
    with_matrix: bool,
    with_map: bool,
    as_json: bool,
    as_prometheus: bool,
    rules: tuple[str, ...],
    ignore: tuple[str, ...],
    prolog: bool,
    fail_on: tuple[str, ...],
    config_file: Path | None,
) -> None:
    """Check affinity, PCIe, GPUs, NICs and settings of a node or a job, and print the fix for each fault.

    `hpcpace audit` checks this machine, `srun hpcpace audit` all ranks of a job. It needs no root and changes
    nothing. Exit codes: 0 fine, 1 a warning, 2 bad input, 3 a rule cannot tell, 4 a failure (F).
    """
    if ctx.invoked_subcommand is not None:
        return
    check_all(
        (
            partial(_check_source, source, sysfs_root, with_mpi),
            partial(_check_output, as_json, as_prometheus, prolog, fail_on),
            partial(check_show, show, has_one_object=as_json or as_prometheus or prolog),
            partial(
                check_target,
                None if show in (None, TERMINAL) else Path(show),
                (source, *nccl_logs, *topo_files),
                "--show",
            ),
            partial(check_ids, [*rules, *ignore, *fail_on]),
            partial(_settings, config_file, ()),
        )
    )
    settings = _settings(config_file, ignore)
    log = read_nccl_log(*nccl_logs) if nccl_logs else None
    topo = read_topo(*topo_files)
    gathered: Gathered | None = Gathered(snapshots=(), missing=())
    problems: list[str] = []
    if (log is None and not topo) or _has_nodes(source, sysfs_root, save, with_mpi=with_mpi):
        gathered, problems = _facts(source, sysfs_root, save, with_mpi=with_mpi, timeout_s=timeout_s, window_s=probe)
    if gathered is None:
        return
    if save is not None:
        problems += _save(save, gathered)
    problems += log.problems if log is not None else ()
    job = AuditedJob(gathered.snapshots, settings, log, topo)
    result = audit(job, ids=rules or None, num_tasks=tasks_per_node, missing=gathered.missing, problems=problems)
    if show not in (None, TERMINAL):
        write_picture(Path(show or ""), job, result)
    if prolog:
        click.echo(prolog_line(result, fail_on))
        raise SystemExit(_prolog_exit(result, fail_on))
    views = Views(as_json=as_json, as_prometheus=as_prometheus, with_matrix=with_matrix, with_map=with_map, show=show)
    _print(job, result, views)
    raise SystemExit(result.exit_code)


@command.command()
@click.argument("rule_id", metavar="ID")
def explain(rule_id: str) -> None:
    """Print what rule ID checks, why, and the fix.

    Also prints from which facts it judges. `all` prints every rule.
    """
    from hpcpace.report.audit_report import rule_section
    from hpcpace.report.terminal import print_section

    ids = tuple(BY_ID) if rule_id.lower() == "all" else (rule_id.upper(),)
    check_ids(ids)
    console = text_console()
    for one in ids:
        print_section(console, rule_section(BY_ID[one]))


@command.command()
@click.argument("before", type=PATH)
@click.argument("after", type=PATH)
@option(
    "--counters", is_flag=True, help="Compare counters, GPU load, link speed, boot id, and memory to the byte, too."
)
@option("--json", "as_json", is_flag=True, help="Print one JSON list.")
@verbose
def diff(before: Path, after: Path, counters: bool, as_json: bool, is_verbose: bool) -> None:
    """Show what changed in the configuration between two snapshots.

    BEFORE and AFTER are files or folders. Sizes of memory count as equal up to 1 %.

    Exit codes: 0 nothing changed, 1 something changed, 2 bad input, 3 no host is in both.
    """
    old, old_problems = load_snapshots(before)
    new, new_problems = load_snapshots(after)
    warn([*old_problems, *new_problems], is_verbose=is_verbose)
    if len(old) == len(new) == 1:
        pairs = [(old[0], new[0])]
    else:
        by_host = {snapshot.host: snapshot for snapshot in old}
        pairs = [(by_host[snapshot.host], snapshot) for snapshot in new if snapshot.host in by_host]
    if not pairs:
        raise CannotTell(f"{before} and {after} have no host in common")
    found = [difference for one, other in pairs for difference in differences(one, other, with_counters=counters)]
    if as_json:
        rows = [{"host": d.kind, "fact": d.name, "before": d.before, "after": d.after} for d in found]
        click.echo(json.dumps(rows, indent=2))
    else:
        for d in found:
            click.echo(printable(f"{d.kind} {d}"))
    raise SystemExit(EXIT_WARNING if found else EXIT_OK)


def _check_source(source: Path | None, sysfs_root: Path | None, with_mpi: bool) -> None:
    if source is not None and sysfs_root is not None:
        raise UsageError("--from and --sysfs-root exclude each other: give one of them")
    if with_mpi and (source is not None or sysfs_root is not None):
        raise UsageError("--mpi gathers the ranks of a running job: leave out --from and --sysfs-root")


def _check_output(as_json: bool, as_prometheus: bool, prolog: bool, fail_on: Sequence[str]) -> None:
    if as_json + as_prometheus + prolog > 1:
        raise UsageError("--json, --prometheus and --prolog exclude each other: give one of them")
    if fail_on and not prolog:
        raise UsageError("--fail-on needs --prolog: without it the exit code is that of the worst finding")


def _settings(file: Path | None, ignore: Sequence[str]) -> AuditConfig:
    config = load_config(file=file, environ=process_environ())
    if ignore:
        options = {"audit": {"ignore": (*config.of(AuditConfig).ignore, *ignore)}}
        config = load_config(file=file, environ=process_environ(), options=options)
    check_ids(config.of(AuditConfig).ignore)
    return config.of(AuditConfig)


def _has_nodes(source: Path | None, sysfs_root: Path | None, save: Path | None, *, with_mpi: bool) -> bool:
    """Return whether nodes are audited besides a log: if they are named, or the ranks of a job run this."""
    return bool(source or sysfs_root or save or with_mpi) or rank_info(process_environ()).world_size > 1


def _facts(
    source: Path | None,
    sysfs_root: Path | None,
    save: Path | None,
    *,
    with_mpi: bool,
    timeout_s: float,
    window_s: float,
) -> tuple[Gathered | None, list[str]]:
    """Return the snapshots to look at, and what could not be read; None on ranks that only hand in their own."""
    if source is not None:
        snapshots, problems = load_snapshots(source)
        return Gathered(snapshots=tuple(snapshots), missing=()), problems
    if sysfs_root is not None:
        return Gathered(snapshots=(take_tree(sysfs_root),), missing=()), []
    environ = process_environ()
    info = rank_info(environ)
    return _of_job(info, save, with_mpi=with_mpi, timeout_s=timeout_s, window_s=window_s)


def _of_job(
    info: RankInfo, save: Path | None, *, with_mpi: bool, timeout_s: float, window_s: float
) -> tuple[Gathered | None, list[str]]:
    environ = process_environ()
    comm, mpi_size = mpi_communicator(info) if with_mpi else (None, None)
    if info.world_size > 1 and comm is None and save is None and info.launcher != "slurm":
        if info.rank:  # all ranks come here: the first one speaks
            raise SystemExit(EXIT_USAGE)
        raise UsageError(
            f"{info.world_size} ranks started by {info.launcher} have no shared folder to gather in: name one with "
            "--save, or gather with --mpi"
        )
    part = own_part(info, environ, window_s=window_s, mpi_size=mpi_size)
    if comm is not None:
        return gather_by_mpi(info, comm, part, environ), []
    if info.world_size == 1:
        return join_parts([json.loads(json.dumps(part))], 1, environ), []
    folder, num_ours = (save, 0) if save is not None else (snapshot_folder(environ), NUM_OURS_OF_STEP)
    gathered = gather_by_files(info, environ, folder, part, timeout_s=timeout_s + window_s, num_ours=num_ours)
    if gathered is None or save is not None:
        return gathered, []
    return gathered, _save(folder, gathered, num_ours=num_ours)


def _save(folder: Path, gathered: Gathered, *, num_ours: int = 0) -> list[str]:
    """Save snapshots, and return what could not be saved: the audit itself does not need them."""
    try:
        save_snapshots(folder, gathered.snapshots, num_ours=num_ours)
    except SnapshotError as error:
        return [str(error)]
    return []


def prolog_line(result: AuditResult, fail_on: Sequence[str]) -> str:
    """Return the one line of a prolog: what the rules of `fail_on` found, or that they found nothing."""
    found = _bad(result, fail_on)
    if not found:
        nothing = f"no findings of {','.join(fail_on)}" if fail_on else "--fail-on names no rules"
        return f"hpcpace audit: {nothing}"
    texts = [" ".join(filter(None, (finding.rule, finding.place, finding.seen))) for finding in found]
    return printable(f"hpcpace audit: {'; '.join(first_few(texts, 3, before='and '))}")


def _prolog_exit(result: AuditResult, fail_on: Sequence[str]) -> int:
    severities = {finding.severity for finding in _bad(result, fail_on)}
    return EXIT_FAILED if Severity.FAIL in severities else EXIT_WARNING if severities else EXIT_OK


def _bad(result: AuditResult, fail_on: Sequence[str]) -> list[AuditFinding]:
    bad = (Severity.FAIL, Severity.WARNING)
    return [finding for finding in result.findings if finding.rule in fail_on and finding.severity in bad]


def _print(job: AuditedJob, result: AuditResult, views: Views) -> None:
    if views.as_json or views.as_prometheus:
        if isinstance(sys.stdout, io.TextIOWrapper):  # a job's locale may be ASCII, and names more
            sys.stdout.reconfigure(errors="backslashreplace")
        click.echo(
            exposition(result) if views.as_prometheus else json.dumps(result.to_json(), indent=2) + "\n", nl=False
        )
        return
    from hpcpace.report.audit_report import audit_document, map_section, matrix_section, picture_sections
    from hpcpace.report.terminal import print_document

    console = text_console()
    sections = [
        *([matrix_section(result)] if views.with_matrix else []),
        *([map_section(job)] if views.with_map else []),
        *(picture_sections(job, result) if views.show == TERMINAL else []),
    ]
    print_document(console, audit_document(result, sections, width=console.width))
