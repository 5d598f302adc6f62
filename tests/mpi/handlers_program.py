"""Sets handlers, hooks and functions before, during and after a session, prints what it finds, and ends in some way."""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGABRT)
found: dict[str, Any] = {"arrived": [], "lines": 0, "calls": {}, "in threads": []}


def note(number: int, _: FrameType | None) -> None:
    found["arrived"].append(number)


def trace_lines(frame: FrameType, event: str, _: object) -> Any:
    if frame.f_code.co_filename == __file__:
        found["lines"] += event == "line"
        return trace_lines
    return None


def counted(owner: Any, name: str) -> None:
    """Count the calls of a function, as a script that wraps one of torch's does."""
    function: Callable[..., Any] = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found["calls"][name] = found["calls"].get(name, 0) + 1
        return function(*args, **kwargs)

    setattr(owner, name, wrapper)


def raising_hook(kind: type[BaseException], error: BaseException, _: object) -> None:
    print(f"the script's hook: {kind.__name__} {error}", flush=True)
    raise LookupError("of the hook")


def handlers() -> list[str]:
    return [str(getattr(signal.getsignal(number), "__name__", signal.getsignal(number))) for number in SIGNALS]


def train(num_steps: int) -> None:
    for _ in range(num_steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(2))


warnings.simplefilter("error")
faulthandler.enable()  # it takes SIGABRT, and the script takes that from it
signal.signal(signal.SIGUSR1, note)
signal.signal(signal.SIGABRT, note)
threading.excepthook = lambda raised: found["in threads"].append(str(raised.exc_value))
sys.excepthook = raising_hook
atexit.register(print, "the script's first exit handler")
import torch  # noqa: E402  what the script has set is there before torch and the session
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(2)
found["handlers before"] = handlers()
before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR2)}
for owner, name in ((torch.autograd, "backward"), (torch.optim.SGD, "step"), (dist, "all_reduce")):
    counted(owner, name)
wrapped = (torch.autograd.backward, torch.optim.SGD.step, dist.all_reduce)
for number in SIGNALS:
    os.kill(os.getpid(), number)
sys.settrace(trace_lines)
train(2)
sys.settrace(None)
failing = threading.Thread(target=lambda: int("of a thread"))
failing.start()
failing.join()
atexit.register(print, "the script's last exit handler")
try:
    sys.exit(SystemExit(3))
except SystemExit as error:
    frames = traceback.extract_tb(error.__traceback__)
    found["exit"] = [str(error.code), *(frame.name for frame in frames)]
dist.destroy_process_group()
found["handlers after"] = handlers()
found["is left"] = [
    (torch.autograd.backward, torch.optim.SGD.step, dist.all_reduce) == wrapped,
    sys.excepthook is raising_hook,
    sys.exit.__module__,
    os._exit.__module__,
    faulthandler.is_enabled(),
]
print(json.dumps(found), flush=True)
for number, handler in before.items():
    signal.signal(number, handler)
if sys.argv[1] == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit("SIGTERM did not end the script")
if sys.argv[1] == "exit":
    sys.exit(SystemExit(3))
raise RuntimeError("the script's own error")
