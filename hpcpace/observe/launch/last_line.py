"""The last line of a traced job: what was recorded and where, or why nothing was; above it, the card of the run.

A process of its own keeps what the ranks on its host tell and writes the line as soon as the job has ended, also where
that is a shell, was killed, or left by os._exit. It is no child of the job, has no terminal, and keeps no file open but
stderr.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcpace.core.environment import process_redaction
from hpcpace.core.text import listed, plural, printable, shell_word

_TIMEOUT_S = 2.0
_POLL_S = 0.2
_MAX_BYTES = _MAX_FILES = 1 << 16
_TELL = "tell"


def open_teller(problem: str, folder: str) -> str:
    """Start the process that writes the last line when this process, which may become another program, has ended.

    Args:
        problem: why the world of this process is unclear; empty if it is clear.
        folder: the working folder; paths in it are shortened.

    Returns:
        The address for `send`; empty if there is no such process.
    """
    address = f"hpcpace-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{address}")
        listener.listen(64)
        watched = os.getpid()
        child = os.fork()
    except OSError:
        return ""
    if child:
        listener.close()
        os.waitpid(child, 0)
        return address
    try:
        os.setsid()
        if os.fork() == 0:
            _keep_only(listener)
            _Teller(listener, watched, problem, folder).run()
    finally:
        os._exit(0)


def send(address: str, note: dict[str, Any]) -> bool:
    """Report something without waiting for anybody; return whether it was sent."""
    try:
        with socket.socket(socket.AF_UNIX) as client:
            _send(client, address, note)
    except OSError:
        return False
    return True


def tell_now(address: str) -> None:
    """Have the line written now rather than at the end of the process: a traceback is to come after it."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        _send(client, address, {"kind": _TELL})
        client.recv(1)  # until it has been written


def _send(client: socket.socket, address: str, note: dict[str, Any]) -> None:
    client.settimeout(_TIMEOUT_S)
    client.connect(f"\0{address}")
    client.sendall(json.dumps(note).encode())
    client.shutdown(socket.SHUT_WR)


def _keep_only(listener: socket.socket) -> None:
    """Close all files but stderr, and open nothing in their place that others wait for."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    kept = listener.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, min(os.sysconf("SC_OPEN_MAX"), _MAX_FILES))
    os.chdir("/")


class _Teller:
    """Listens until the job has ended, and writes one line."""

    def __init__(self, listener: socket.socket, watched: int, problem: str, folder: str) -> None:
        self._listener, self._watched, self._problem, self._folder = listener, watched, problem, folder
        self._notes: list[dict[str, Any]] = []
        self._is_told = False

    def run(self) -> None:
        """Listen, and write the line once."""
        try:
            ended: Any = os.pidfd_open(self._watched)
        except (OSError, AttributeError):  # Linux before 5.3, as on RHEL 8
            ended = None
        is_over = False
        while not is_over and not self._is_told:
            ready, _, _ = select.select([self._listener, *([] if ended is None else [ended])], [], [], _POLL_S)
            is_over = ended in ready if ended is not None else not _is_running(self._watched)
            if self._listener in ready:
                self._answer()
        while select.select([self._listener], [], [], 0)[0] and not self._is_told:
            self._answer()
        if not self._is_told:
            self._write()

    def _answer(self) -> None:
        with suppress(OSError, ValueError):
            client, _ = self._listener.accept()
            with client:
                client.settimeout(_TIMEOUT_S)
                credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
                if struct.unpack("3i", credentials)[1] != os.getuid():
                    return
                content = b""
                while len(content) <= _MAX_BYTES and (part := client.recv(_MAX_BYTES)):
                    content += part
                note = json.loads(content)
                if note.get("kind") == _TELL:
                    self._is_told = True
                    self._write()
                else:
                    self._notes.append(note)

    def _write(self) -> None:
        text = f"{last_card(self._notes)}{last_line(self._notes, self._problem, self._folder)}\n"
        with suppress(OSError, ValueError):
            os.write(2, text.encode(errors="replace"))


def last_card(notes: list[dict[str, Any]]) -> str:
    """Return the card of the last attempt of a job, as its first rank sent it; empty without one."""
    last = max((note["attempt"] for note in notes if note["kind"] == "began"), default=None)
    cards = [note["text"] for note in notes if note["kind"] == "card" and note["attempt"] == last]
    return str(cards[-1]) if cards else ""


def last_line(notes: list[dict[str, Any]], problem: str, folder: str) -> str:
    """Return the last line of a job.

    Args:
        notes: what ranks reported, in order: `began`, `ended`, `stopped` and `failed`.
        problem: why the world of the first process is unclear; empty if it is clear.
        folder: the working folder.
    """
    began = [note for note in notes if note["kind"] == "began"]
    if not began:
        failures = [note["why"] for note in notes if note["kind"] == "failed"]
        why = failures[-1] if failures else "no process group was made and no optimizer stepped"
        unclear = f"; {problem}" if problem else ""
        text = process_redaction().text(f"{why}{unclear}")
        return f"hpcpace: {'warning: ' if problem else ''}nothing was recorded: {printable(text)}"
    stopped = [note["verdict"] for note in notes if note["kind"] == "stopped"]
    if stopped:
        return f"hpcpace: {printable(stopped[-1])}"
    last = max(began, key=lambda note: (note["attempt"], -note["rank"]))
    ended = [n for n in notes if n["kind"] == "ended" and (n["attempt"], n["rank"]) == (last["attempt"], last["rank"])]
    run = os.path.relpath(last["run"], folder) if Path(last["run"]).is_relative_to(folder) else last["run"]
    attempt = f" in attempt {last['attempt']}" if last["attempt"] else ""
    what = [plural(last["world_size"], "rank")]
    if ended:
        phases = listed(ended[-1]["phases"])
        advice = "" if ended[-1]["steps"] else "; call session.step() where one ends"
        what.append(f"{plural(ended[-1]['steps'], 'step')} ({ended[-1]['steps_from']}{advice})")
        what.append(f"phases {phases}" if phases else "no phases")
        if last["world_size"] > 1:
            what.append(f"collectives by the {ended[-1]['collectives_by']} layer")
    else:
        what.append("cut off before the end")
    return f"hpcpace: recorded {printable(', '.join(what))}{attempt}: hpcpace report {shell_word(run)}"


def _is_running(pid: int) -> bool:
    """Return whether a process exists and is more than a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"
