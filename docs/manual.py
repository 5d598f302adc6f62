"""Write a manual page of each command, with its examples: `python docs/manual.py FOLDER`, or `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click_man.core import write_man_pages

from hpcpace import __version__
from hpcpace.cli import COMMANDS, cli
from hpcpace.cli.commands import examples


def main(folder: Path) -> None:
    """Write the pages; commands are loaded and named first, because click-man asks no group for its commands."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in COMMANDS.items():
        found = cli.get_command(click.Context(cli), name)
        assert found is not None
        found.short_help = words
        cli.commands[name] = found
    write_man_pages("hpcpace", cli, version=__version__, target_dir=str(folder))
    for path, lines in examples().items():
        page = folder / f"{'-'.join(['hpcpace', *path.split()])}.1"
        shown = "\n".join(line.replace("\\", r"\e").replace("-", r"\-") for line in lines)
        with page.open("a", encoding="utf-8") as file:
            file.write(f"\n.SH EXAMPLES\n.nf\n{shown}\n.fi\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
