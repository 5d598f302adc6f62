"""The card at the end of a run: rank 0 prints the head of its report, made by a process of its own.

The job never waits for it while it runs. When rank 0 is about to end, it waits for the rest of a bounded time. The
process has little priority and memory, ends with rank 0, and reads only files that all ranks have closed. Where it
cannot make a card, one line says why.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from hpcpace.core.codec import FOREIGN_ERRORS, convert, parse_json, plain
from hpcpace.core.environment import process_environ
from hpcpace.core.records import dataclass
from hpcpace.core.rundir import Attempt
from hpcpace.core.text import printable, shell_word
from hpcpace.world.deadline import Deadline

_MAX_LETTERS = 1 << 13
"""memory: 12 lines of 80 letters take a tenth of it, also with colours."""
_SEPARATOR = "\0"
_PROGRAM = "hpcpace.cli.run_card"


def no_card_line(attempt: Attempt, why: str) -> str:
    """Return the line that takes the place of a card."""
    return f"hpcpace: no summary here ({printable(why)}): hpcpace report {shell_word(shown_run(attempt))}\n"


def shown_run(attempt: Attempt) -> str:
    """Return the run of an attempt as a user names it: relative to the working folder where that holds it."""
    run = attempt.path.parent
    try:
        return str(run.relative_to(os.getcwd()))
    except (OSError, ValueError):
        return str(run)


def print_on_stderr(text: str) -> None:
    """Print a card in one piece; a closed stderr takes none."""
    with suppress(Exception):  # the boundary to somebody else's job, whose stderr may be any object
        sys.stderr.write(text)
        sys.stderr.flush()


@dataclass(frozen=True, kw_only=True)
class CardVerdict:
    """What a card says first.

    Attributes:
        headline, mode, loss_share, confidence: as of `hpcpace.diagnosis.summary.Verdict`.
    """

    headline: str
    mode: str
    loss_share: float
    confidence: float

    def behind(self, card: str) -> str:
        """Return a card with this behind it, as the process that makes cards prints it."""
        return f"{card}{_SEPARATOR}{json.dumps(plain(self))}"


class Card:
    """The card of one attempt, on rank 0.

    Args:
        attempt: whose traces all ranks have closed, or are about to.
        world_size: its number of ranks.
        timeout_s: from now on, how long making and waiting may take.
        show: takes the card, or the line in its place, in another thread unless Python is ending; never raises.

    Attributes:
        verdict: what it says first; None until it has been made, and where it cannot be.
    """

    def __init__(self, attempt: Attempt, *, world_size: int, timeout_s: float, show: Callable[[str], None]) -> None:
        self._attempt, self._world_size, self._show = attempt, world_size, show
        self._deadline = Deadline(timeout_s)
        self._is_over = threading.Event()
        self._shows = threading.Lock()  # held for good by whoever says the last word
        self._pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self.verdict: CardVerdict | None = None

    def start(self) -> None:
        """Have it made, and shown as soon as it is."""
        atexit.register(self.wait)
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            from multiprocessing.util import Finalize

            Finalize(None, self.wait, exitpriority=sys.maxsize)  # such a process may end without atexit
        try:
            threading.Thread(target=self._make, name="hpcpace-card", daemon=True).start()
        except RuntimeError:  # Python is ending, and takes no thread any more
            with suppress(KeyboardInterrupt), self._given_up_at_sigterm():
                self._make()

    def wait(self) -> None:
        """Wait until it has been shown, or its time is over, or SIGTERM or Ctrl-C arrives."""
        if self._pid != os.getpid() or self._is_over.is_set():  # a forked child has no card to wait for
            return
        with suppress(KeyboardInterrupt), self._given_up_at_sigterm():
            if not self._is_over.wait(self._deadline.left_s):
                self._end(no_card_line(self._attempt, str(self._too_late())))
        self._give_up()

    def verdict_in_time(self) -> CardVerdict | None:
        """Wait like `wait`, in a job that goes on after it, and return the verdict; None if there is no card."""
        with self._given_up_at_sigterm():
            self._is_over.wait(self._deadline.left_s)
        return self.verdict

    def _too_late(self) -> TimeoutError:
        return TimeoutError(f"it takes longer than {self._deadline.timeout_s:g} s")

    def _end(self, text: str) -> None:
        """Show a text unless another one was shown, or nobody waits any more."""
        if self._shows.acquire(blocking=False):
            with suppress(Exception):  # the boundary to somebody else's job
                self._show(text)
            self._is_over.set()

    def _give_up(self) -> None:
        self._shows.acquire(blocking=False)
        self._is_over.set()
        if self._process is not None and self._process.returncode is None:
            with suppress(OSError):
                self._process.kill()

    @contextmanager
    def _given_up_at_sigterm(self) -> Iterator[None]:
        """Let SIGTERM, for which the job has a handler, and Ctrl-C end the waiting; without a handler it ends all."""
        before = signal.getsignal(signal.SIGTERM)
        is_handled = callable(before) and threading.current_thread() is threading.main_thread()

        def give_up(number: int, frame: FrameType | None) -> None:
            self._give_up()
            if callable(before):
                before(number, frame)

        if is_handled:
            signal.signal(signal.SIGTERM, give_up)
        try:
            yield
        except KeyboardInterrupt:
            self._give_up()
            raise
        finally:
            if is_handled:
                signal.signal(signal.SIGTERM, before)

    def _make(self) -> None:
        try:
            text = self._made()
        except Exception as error:  # the boundary to somebody else's job
            text = no_card_line(self._attempt, str(error) or type(error).__name__)
        self._end(text)

    def _made(self) -> str:
        """Return what the process prints.

        Raises:
            OSError: it cannot be started.
            TimeoutError: it takes too long.
            RuntimeError: it fails.
        """
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        words = [str(self._attempt.path), str(self._world_size), f"{self._deadline.left_s:g}", str(os.getpid())]
        one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, *words, shown_run(self._attempt), *["color"] * _has_colors()],
            env={**process_environ(), **one_thread, "PYTHONIOENCODING": f"{encoding}:backslashreplace"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what a launcher or a terminal sends to the group of the rank is not for it
        )
        try:
            content, _ = self._process.communicate(timeout=self._deadline.left_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise self._too_late() from None
        code = self._process.returncode
        if code == -signal.SIGALRM:
            raise self._too_late()
        if code or not content:
            raise RuntimeError(f"what makes it ended with exit code {code}")
        text, _, verdict = content[:_MAX_LETTERS].decode(encoding, errors="replace").partition(_SEPARATOR)
        with suppress(*FOREIGN_ERRORS):
            self.verdict = convert(parse_json(verdict), CardVerdict)
        return text


def _has_colors() -> bool:
    """Return whether stderr is a terminal that shows colours."""
    with suppress(Exception):  # stderr may be any object
        return sys.stderr.isatty() and not process_environ().get("NO_COLOR")
    return False
