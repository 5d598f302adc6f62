"""The job scripts of sbatch/, which an installed package carries: what each does, and its text."""

from __future__ import annotations

import shlex
from pathlib import Path

from hpcpace.core.errors import UsageError
from hpcpace.core.text import shown

_FOLDER = Path(__file__).with_name("scripts")
# This line of a script is filled in with where hpcpace is.
_PLACE = "\nhpcpace=\n"


def job_scripts() -> dict[str, str]:
    """Return the first sentence of each script that runs from any folder, by its name."""
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.sh"))}
    return {name: _sentence(text) for name, text in found.items() if _PLACE in text and "\nsource " not in text}


def job_script(name: str) -> str:
    """Return the text of a script, whose name may have its ending.

    Raises:
        UsageError: there is no such script.
    """
    scripts = job_scripts()
    stem = name.removesuffix(".sh")
    if stem not in scripts:
        raise UsageError(f"there is no job script {shown(name)}: choose from {', '.join(scripts)}")
    return (_FOLDER / f"{stem}.sh").read_text(encoding="utf-8")


def filled_in(text: str, program: str) -> str:
    """Return the text of a script that takes hpcpace from a path where PATH has none."""
    return text.replace(_PLACE, f"\nhpcpace={shlex.quote(program)}\n", 1)


def _sentence(text: str) -> str:
    """Return the first sentence of a script's comment."""
    comment = (line.removeprefix("#").strip() for line in text.splitlines()[1:])
    words: list[str] = []
    for line in comment:
        words += line.split()
        if line.endswith(".") or not line:
            break
    return " ".join(words)
