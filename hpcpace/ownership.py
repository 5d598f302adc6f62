"""Who owns a file or folder, and who else can write to it: a job relies only on what its user or root has written."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat


def other_writers(facts: os.stat_result) -> str:
    """Return who else than this user and root can have written to a file or folder, as what it does; empty if nobody.

    A group counts also if it is named after the user: who else is in it cannot be found out for certain. Where a file
    has an access list, the mode of its group is the most that the list gives to anybody (acl(5)).

    Args:
        facts: of fstat(2) of what is open, so that nothing else can be put in its place.
    """
    if facts.st_uid not in (os.geteuid(), 0):
        return f"belongs to {user_name(facts.st_uid)}, not to you"
    mode = stat.S_IMODE(facts.st_mode)
    if mode & stat.S_IWOTH:
        return f"can be written to by everybody (mode {mode:04o})"
    if mode & stat.S_IWGRP:
        return f"can be written to by the group {_group_name(facts.st_gid)} (mode {mode:04o})"
    return ""


def user_name(number: int) -> str:
    """Return a user's name and number; the number alone where the name is not known."""
    with contextlib.suppress(KeyError):
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    return f"uid {number}"


def _group_name(number: int) -> str:
    with contextlib.suppress(KeyError):
        return f"{grp.getgrgid(number).gr_name} (gid {number})"
    return f"gid {number}"
