"""Follows a process of a traced job, records it if it trains, and notices how it ends.

It becomes a rank when torch's default group is made, by whatever name that is called, and stops being one when the
group is destroyed or the process ends. A process that trains without any group is a world of one. All others, such as
those that only launch ranks, are left alone.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpace.core.environment import (
    RankInfo,
    change_environ,
    process_environ,
    process_redaction,
    rank_info,
    rank_info_of_group,
)
from hpcpace.core.errors import ConfigError, WorldError
from hpcpace.core.files import write_file
from hpcpace.core.settings import OPT_OUT, is_opted_out
from hpcpace.observe.guest import Warner, leave_out_own_frames, replace
from hpcpace.observe.launch.last_line import send, tell_now
from hpcpace.observe.launch.launch import Launch, Wishes, find_launch, run_place
from hpcpace.observe.settings import HangConfig, TraceConfig
from hpcpace.world.deadline import in_time

if TYPE_CHECKING:
    from hpcpace.observe.card import Card
    from hpcpace.observe.session import Session


_SEE_WARNING = "see the warning above"
_SWITCHED_OFF = "trace.enabled is off; `hpcpace config trace` says by whom"
_PLACE_TIMEOUT_S = 5.0
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_MAX_TRACEBACK = 1 << 16  # memory: characters of a traceback that torchrun gets; it may hold any text of the script
_REPLICA = "REPLICA_GROUP_ID"  # of torchft, whose replica groups are started one by one


def leave_error_to_torchrun(path: str) -> None:
    """Write the error that ends the script to where torchrun's summary takes it from, as torch's `record` does.

    That summary is headed by hpcpace, which torchrun started; so it has the script's traceback, without secrets.
    """
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception) or os.path.exists(path):
        return
    only, whole = (
        process_redaction().text("".join(of(error))[-_MAX_TRACEBACK:])
        for of in (traceback.format_exception_only, traceback.format_exception)
    )
    shown = {"py_callstack": whole, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        write_file(Path(path), json.dumps({"message": {"message": only.strip(), "extraInfo": shown}}))


class ProcessEnd:
    """Calls back once as the process ends: at its last line, by an exception, sys.exit, os._exit or os.execv.

    Of a child of multiprocessing, the end is that of the function which it runs.

    Args:
        ended: called with the exception that ends the process, if any; a SystemExit where the exit code is not 0, and
            where the process ends without waiting for anything.
    """

    def __init__(self, ended: Callable[[BaseException | None], None]) -> None:
        self._ended = ended
        self._pid = 0
        self._exit: BaseException | None = None
        self._cleanup = ExitStack()

    def watch(self) -> None:
        """Start to notice the end of this process; forked children have to call this again."""
        self._pid = os.getpid()
        atexit.register(self._at_exit)
        self._cleanup.callback(atexit.unregister, self._at_exit)
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None:
            from multiprocessing.util import Finalize

            # Called before multiprocessing takes the exception that is on its way, and makes an exit code of it.
            self._cleanup.callback(Finalize(None, self._child_ends, exitpriority=sys.maxsize).cancel)
        replace(self._cleanup, sys, "excepthook", self._around_excepthook)
        replace(self._cleanup, sys, "exit", self._around_exit)
        for name in ("_exit", "execv", "execve"):
            replace(self._cleanup, os, name, self._before)

    def forget(self) -> None:
        """Leave the process as it was."""
        self._cleanup.close()

    def _child_ends(self) -> None:
        error = sys.exception()
        if isinstance(error, SystemExit):  # torch's spawn raises it where a rank's function has failed
            error = self._exit or (error if error.code else None)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        # A forked child has these hooks as well, and nothing to end.
        if self._pid == os.getpid():
            self._pid = 0
            self._ended(error)

    def _at_exit(self) -> None:
        self._end(self._exit)

    def _around_excepthook(self, hook: Any) -> Any:
        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self._end(error)
            try:
                hook(kind, error, trace)
            except BaseException as of_hook:
                leave_out_own_frames(of_hook)
                raise

        return excepthook

    def _around_exit(self, exit_: Any) -> Any:
        def noted(*args: Any) -> None:
            # Not the end yet: who calls this may be caught. The exception that is being handled says more.
            handled = sys.exception()
            try:
                exit_(*args)
            except BaseException as error:
                leave_out_own_frames(error)
                if isinstance(error, SystemExit):
                    is_success = error.code is None or (isinstance(error.code, int) and error.code == 0)
                    self._exit = None if is_success else handled or error
                raise

        return noted

    def _before(self, call: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self._end(SystemExit(args[0] if call.__name__ == "_exit" and args else 0))
            return call(*args, **kwargs)

        return called


def find_follower() -> Follower | None:
    """Return a follower of this process; None if it belongs to no traced job, or is a command of hpcpace."""
    launch = find_launch(process_environ())
    if launch is None or "hpcpace.cli" in sys.modules:
        return None
    if is_opted_out(process_environ()):  # by a script inside the traced command
        if launch.teller:
            send(launch.teller, {"kind": "failed", "why": f"{OPT_OUT} is set"})
        return None
    return Follower(launch)


class Follower:
    """Follows this process, and those that are forked from it.

    Args:
        launch: how the job was started.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._session: Session | None = None
        self._card: Card | None = None
        self._pid = 0
        self._end = ProcessEnd(self._process_ends)
        self._stop_waiting: list[Callable[[], None]] = []
        if self._is_last:
            atexit.register(self._tell)
            if path := process_environ().get(_ERROR_FILE):
                atexit.register(leave_error_to_torchrun, path)

    def follow(self, module: Any) -> None:
        """Follow what a module does that has just been imported: torch's groups, torch as a whole, or a session."""
        if module.__name__ == "hpcpace.observe.session":
            module.Session.before_start = self._before_session
            return
        if module.__name__ != "torch":
            self._follow_groups(module)
            return
        # The first backward pass or step of an optimizer begins the training of a process without a group. torch calls
        # the second function within each step, while it goes through no hooks: recording adds some.
        for owner, name in ((module.autograd, "backward"), (module.optim.Optimizer, "_optimizer_step_code")):
            if hasattr(owner, name):
                self._wait_for_call(owner, name, module.compiler.is_compiling)

    def _follow_groups(self, module: Any) -> None:
        """Wrap the functions that make and destroy groups, before any other module has taken them by name."""
        initialise, destroy = module.init_process_group, module.destroy_process_group

        @wraps(initialise)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._watched_start(kwargs):
                    result = initialise(*args, **kwargs)
            except BaseException as error:
                leave_out_own_frames(error)
                raise
            self._safely(self._join, module)
            return result

        @wraps(destroy)
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            group = next(iter((*args, *kwargs.values())), None)
            if group is None or group == module.GroupMember.WORLD:
                self._safely(self._leave)
            try:
                return destroy(*args, **kwargs)
            except BaseException as error:
                leave_out_own_frames(error)
                raise

        module.init_process_group = init_process_group
        module.destroy_process_group = destroy_process_group

    def _watched_start(self, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Return what says so if torch's group is not made for a long time."""
        from hpcpace.core.settings import load_config
        from hpcpace.observe.alarm import Waiting, watched_start

        try:
            file = None if self._launch.config_file is None else Path(self._launch.config_file)
            config = load_config(file=file, environ=process_environ()).of(HangConfig)
            if config.on_hang == "off":
                return nullcontext()
            rank, world_size = arguments.get("rank", -1), arguments.get("world_size", -1)
            if rank < 0 or world_size < 0:
                world = rank_info(process_environ())
                rank, world_size = world.rank, world.world_size
            tell, run = Warner(process_environ()).tell, Path(self._launch.run_dir)
            place = Waiting(run=run, rank=rank, world_size=world_size, timeout_s=config.first_step_s, tell=tell)
            return watched_start(place)
        except Exception:  # the boundary to somebody else's job; the session says what is wrong with the settings
            return nullcontext()

    def _join(self, groups: Any) -> None:
        """Record this process as a rank of torch's default group. Collective: every rank gets here."""
        self._leave()  # a world of one, if it has trained before
        if groups.get_backend() == "fake":
            return
        self._begin(rank_info_of_group(groups.get_rank(), groups.get_world_size(), process_environ()))

    def _wait_for_call(self, owner: Any, name: str, is_compiling: Callable[[], bool]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def first(*args: Any, **kwargs: Any) -> Any:
            # A script may have put a function of its own on top of this one, which then stays below that for good.
            is_on_top = getattr(owner, name) is first
            if self._stop_waiting and not is_compiling():
                self._safely(self._train_alone)
            # After the first call, this is another function: the original, or one of the recording.
            call = getattr(owner, name) if is_on_top else original
            try:
                return (original if call is first else call)(*args, **kwargs)
            except BaseException as error:
                leave_out_own_frames(error)
                raise

        def restore() -> None:
            if getattr(owner, name) is first:
                setattr(owner, name, original)

        setattr(owner, name, first)
        self._stop_waiting.append(restore)

    def _train_alone(self) -> None:
        self._wait_no_more()
        try:
            world = rank_info(process_environ())
        except WorldError as error:
            self._note("failed", why=str(error))
            return
        if world.world_size > 1:
            self._note("failed", why=f"{world.world_size} ranks train, and torch connects none of them to another")
        else:
            self._begin(world)

    def _before_session(self) -> None:
        """Begin to record a process without a group before a session in its script would."""
        with suppress(WorldError):
            if self._stop_waiting and rank_info(process_environ()).world_size == 1:
                self._safely(self._train_alone)

    def _wait_no_more(self) -> None:
        stop_waiting, self._stop_waiting = self._stop_waiting, []
        for stop in stop_waiting:
            stop()

    def _begin(self, world: RankInfo) -> None:
        from hpcpace import session  # the public one, in which pacing is plugged in

        launch, self._pid = self._launch, os.getpid()
        self._wait_no_more()
        if not launch.is_requested and not self._is_wanted():
            return
        # What this rank starts does not train.
        change_environ(launch.changes_back(process_environ()))
        self._session = session(
            name=launch.name,
            run_dir=self._run_dir() if world.rank == 0 else launch.run_dir,
            world=world,
            record={"script": sys.argv[0], "arguments": sys.argv[1:], "launch": launch.identity},
            **{wish.name: getattr(launch, wish.name) for wish in fields(Wishes)},
        ).__enter__()
        self._session.show_card = partial(self._show_card, self._session)
        self._session.before_stop(lambda verdict: self._note("stopped", verdict=verdict))
        self._end.watch()
        attempt = self._session.attempt
        if self._session.is_recording and attempt is not None:
            run, size = str(attempt.path.parent), world.world_size
            self._note("began", run=run, attempt=attempt.number, rank=world.rank, world_size=size)
        else:
            self._note("failed", why=_SWITCHED_OFF if self._session.is_switched_off else _SEE_WARNING)

    def _is_wanted(self) -> bool:
        """Return whether site and user have this job traced, of which nobody has asked for a trace."""
        from hpcpace.core.settings import load_config

        try:
            return load_config(environ=process_environ()).of(TraceConfig).enabled
        except ConfigError:
            return True  # the session says what is wrong, once for all ranks

    def _run_dir(self) -> str:
        command, replica = process_redaction().command(sys.argv), process_environ().get(_REPLICA, "")
        find = partial(run_place, self._launch, command, replica)
        # A file system that hangs must not keep the job from training.
        return in_time(find, _PLACE_TIMEOUT_S, "its file system")

    def _leave(self, error: BaseException | None = None) -> None:
        """End the recording of this process. Collective if there is no error."""
        session, self._session = self._session, None
        if session is None or self._pid != os.getpid():
            return
        rank, attempt = session.rank, session.attempt
        session.__exit__(None if error is None else type(error), error, None)
        recorded = session.recorded
        if recorded is not None and attempt is not None:
            self._note("ended", attempt=attempt.number, rank=rank, **recorded)
        self._card = session.card
        self._end.forget()
        change_environ(self._launch.changes(process_environ()))

    def _show_card(self, session: Session, text: str) -> None:
        """Have the card written above the last line; here, if what writes that is gone, or on another host."""
        from hpcpace.observe.card import print_on_stderr

        assert session.attempt is not None
        if not self._note("card", attempt=session.attempt.number, text=text):
            print_on_stderr(text)

    def _process_ends(self, error: BaseException | None) -> None:
        self._safely(self._leave, error)
        if self._card is not None:
            self._safely(self._card.wait)
        if self._is_last and error is not None and not isinstance(error, SystemExit):
            self._tell()  # its traceback comes last

    def _safely(self, action: Callable[..., None], *args: Any) -> None:
        """Do something of ours inside a call of the job's: what fails is a warning."""
        try:
            action(*args)
        except Exception as error:  # the boundary to somebody else's job, which goes on without us
            Warner(process_environ()).warn(f"this process is not recorded: {error or type(error).__name__}")
            self._note("failed", why=_SEE_WARNING)

    @property
    def _is_last(self) -> bool:
        return self._launch.pid == os.getpid()

    def _tell(self) -> None:
        if self._is_last and self._launch.teller:
            tell_now(self._launch.teller)

    def _note(self, kind: str, **facts: Any) -> bool:
        return bool(self._launch.teller) and send(self._launch.teller, {"kind": kind, **facts})
