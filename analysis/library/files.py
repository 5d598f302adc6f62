"""What the scripts of analysis/ share: examining runs one by one, and writing a table and a figure for all of them.

A script is a click command over run directories; its errors are those of hpcpace.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from hpcpace.core.errors import CannotTell, HpcpaceError, UsageError, check_package
from hpcpace.core.exposition import csv_bytes
from hpcpace.core.files import Folder
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import check_target
from hpcpace.core.text import folded_message, plural, printable
from hpcpace.diagnosis.finding import Panels
from hpcpace.diagnosis.measure import Measured
from hpcpace.frames.run import Run, load
from hpcpace.runs.load import Per
from hpcpace.runs.scaling.sizes import ScalingKind
from hpcpace.topology.switch_tree import read_topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 150
_OUT = Path("figures")


@dataclass(frozen=True, kw_only=True)
class ExaminedRun:
    """The last attempt of a run, without warm-up steps.

    Attributes:
        name: what tables call it: the name of its folder, or the path where two runs have one name.
        run: the run.
    """

    name: str
    run: Run

    @property
    def measured(self) -> Measured:
        """What the figures rest on."""
        return self.run.judged.measured

    @property
    def panels(self) -> Panels:
        """What the diagnosis judges."""
        return self.run.judged.panels

    @property
    def remarks(self) -> tuple[str, ...]:
        """Sentences that belong below any table of this run."""
        num_lost = len(self.run.problems)
        lost = (f"{plural(num_lost, 'problem')} with its traces: see hpcpace report",) if num_lost else ()
        return (*lost, *self.run.judged.placed.problems)


def figure_command(function: Callable[..., None]) -> click.Command:
    """Return a command that takes `RUN... [--out DIR]` and calls the function with `runs` and `out`."""
    runs = click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
    return click.command(context_settings={"help_option_names": ["-h", "--help"]})(runs(out_option(function)))


def out_option(function: Callable[..., None]) -> Callable[..., None]:
    """Add the option --out to a command: the folder that `write_files` writes to."""
    out_help = "Folder for the CSV, PNG and SVG; it is made."
    return click.option("--out", default=_OUT, show_default=True, type=click.Path(path_type=Path), help=out_help)(
        function
    )


def topology_option(function: Callable[..., None]) -> Callable[..., None]:
    """Add the option --topology to a command: the file that `examined` takes the places of hosts from."""
    topology_help = "File with the leaf switch of each host, as `hpcpace report --topology` takes it."
    return click.option("--topology", metavar="FILE", type=click.Path(path_type=Path), help=topology_help)(function)


def scaling_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add --scaling and --throughput to a command: how the work grows, and whose throughput a table has."""
    scaling_help = "Take the work as growing with the size (weak) or staying the same (strong)."
    throughput_help = "Take the throughput of a CSV file as that of all ranks, of one GPU or of one node."
    function = click.option("--throughput", type=click.Choice([per.value for per in Per]), help=throughput_help)(
        function
    )
    return click.option(
        "--scaling", type=click.Choice([ScalingKind.WEAK.value, ScalingKind.STRONG.value]), help=scaling_help
    )(function)


def run_script(command: click.Command) -> None:
    """Run a script's command; an error of hpcpace becomes a few lines on stderr and its exit code."""
    try:
        check_package("matplotlib", extra="analysis")
        command.main()
    except HpcpaceError as error:
        print(f"hpcpace: {folded_message(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)


def examined(paths: Sequence[Path], topology: Path | None = None) -> Iterator[ExaminedRun]:
    """Yield runs one after the other, so that the traces of one only need memory.

    Args:
        paths: run directories; the last attempt of each counts.
        topology: file with the leaf switches of their hosts; that which Slurm reported to the jobs if None.

    Raises:
        TopologyError: the file cannot be used.
        TraceError: a path is no run directory, or no trace of it can be read.
        CannotTell: a run has no step that all of its ranks have, or its phases are host times of ranks with a device.
    """
    runs = [load(path, topology=topology, warns=False) for path in paths]
    names = [run.path.resolve().name for run in runs]
    if topology is not None:
        read_topology(topology)  # before anything that takes long
    while runs:
        run, name = runs.pop(0), names[-len(runs) - 1]
        try:
            measured = run.judged.measured
        except CannotTell as error:  # which names the attempt
            reason = str(error).removeprefix(f"{run.path}/attempt-{run.attempt}: ")
            raise CannotTell(f"{run.path}: {reason}") from None
        if measured.host_timed:
            raise CannotTell(f"{run.path}: {measured.unknown}")
        yield ExaminedRun(name=name if names.count(name) == 1 else str(run.path), run=run)


def rows_from_the_top(shown: Table, *, left: Sequence[int] = ()) -> Table:
    """Return a table of `layout.table` whose cells begin on one line: some have an interval on a second one.

    Args:
        shown: the table.
        left: columns of names, which are set to the left.
    """
    for index, column in enumerate(shown.columns):
        column.vertical = "top"
        column.justify = "left" if index in (0, *left) else "right"
    return shown


def write_files(
    out: Path,
    name: str,
    *,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    figure: Figure,
    read: Sequence[Path | None] = (),
) -> str:
    """Write NAME.csv, NAME.png and NAME.svg into a folder, and return a line that says so.

    Args:
        out: the folder; it is made.
        name: of the files.
        columns: names of the table's columns.
        rows: of the table; None becomes an empty cell.
        figure: the plot.
        read: what the script has read; None counts for none.

    Raises:
        UsageError: a file cannot be written, or is one of those read.
    """
    import matplotlib

    for ending in ("csv", "png", "svg"):
        check_target(out / f"{name}.{ending}", read, "--out")
    png, svg = io.BytesIO(), io.BytesIO()
    # Without a date and random ids the same run gives the same file.
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(png, format="png", dpi=_DPI)
        figure.savefig(svg, format="svg", metadata={"Date": None})
    contents = {"csv": csv_bytes(columns, rows), "png": png.getvalue(), "svg": svg.getvalue()}
    try:
        # The user has not named the folder that is taken otherwise.
        with Folder.open(out, make=True, num_ours=out == _OUT) as folder:
            written = [folder.write(f"{name}.{ending}", content) for ending, content in contents.items()]
    except OSError as error:
        raise UsageError(f"cannot write to {out} ({error.strerror}): name another folder with --out") from None
    return f"\nwritten: {printable(' '.join(map(str, written)))}"
