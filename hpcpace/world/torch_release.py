"""Which release of torch a command needs, said before any rank starts: else each would end with a traceback."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from hpcpace.core.errors import WorldError


def check_torch(command: str, least: tuple[int, int]) -> None:
    """Raise unless this Python has a torch that is new enough; a torch without a known release passes.

    Args:
        command: what needs it, such as "hpcpace train".
        least: the first release that will do.

    Raises:
        WorldError: it has none, or an older one.
    """
    needed = f"{command} needs torch {least[0]}.{least[1]} or newer"
    if find_spec("torch") is None:
        raise WorldError(f"{needed}, and this Python has none: pip install 'hpcpace[train]'")
    try:
        found = version("torch")
    except PackageNotFoundError:
        return
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < least:
        raise WorldError(
            f"{needed}, and this Python has {found}: pip install --upgrade 'torch>={least[0]}.{least[1]}' in an "
            "environment of its own; hpcpace trace records with torch 2.4 and newer"
        )
