"""Computation that takes a given time, by waiting: for more ranks than cores.

Tensors, gradients and messages are those of the model, which may be a scaled-down one, and only the time that its
computation takes is set. Each piece of the model waits for what its share of that time leaves behind the work that it
did. Ranks of a lab then compute equally fast in every layout, as GPUs do, as long as the machine has cores enough for
what is really computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpace.core.text import NS_PER_MS, NS_PER_S
from hpcpace.train.settings import GPT2Shape, Mesh, ModelShape

_FORWARD_SHARE = 1 / 3
"""Of forward and backward: a matrix product has two of its size in its backward pass."""


def block_share(shape: ModelShape) -> float:
    """Return the share of a model's computation that one block has: between 0 and 1.

    Of GPT-2 by the parameters that take part in matrix products, 12 w^2 in a block and w V in the head; the blocks of
    ResNet-18 have equal shares, for a stage that doubles the channels halves the image.
    """
    if isinstance(shape, GPT2Shape):
        block = 12 * shape.width**2
        return block / (shape.num_layers * block + shape.width * shape.vocabulary)
    return 1 / (len(shape.widths) * shape.blocks_per_stage)


class Emulation:
    """Lets the pieces of a rank's model take their time.

    Args:
        compute_ms: milliseconds that forward and backward of one sequence or image take on the whole model.
        shape: the whole model's shape.
        mesh: of the run; tensor parallelism cuts each piece.
        zero: what is sharded across replicas.
        sleep: waits for a number of seconds.
        wall_clock, processor_clock: nanoseconds; replaced in tests, as is `sleep`.
    """

    def __init__(
        self,
        compute_ms: float,
        shape: ModelShape,
        mesh: Mesh,
        *,
        zero: int = 0,
        sleep: Callable[[float], None] = time.sleep,
        wall_clock: Callable[[], int] = time.monotonic_ns,
        processor_clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._sample_ns = compute_ms * NS_PER_MS / mesh.tp
        self._block_share = block_share(shape)
        self._head_share = 1 - self._block_share * shape.num_layers if isinstance(shape, GPT2Shape) else 0.0
        # Pieces that wait for other ranks are measured without these waits, at the price of those for a core.
        self._has_messages = mesh.tp > 1 or zero > 1
        self._sleep, self._wall_clock, self._processor_clock = sleep, wall_clock, processor_clock
        self._waited_ns = 0
        self._debt_ns = 0.0
        self._target_ns, self._overrun_ns = 0.0, 0.0

    @property
    def overrun(self) -> float:
        """By what share of the time that it was given the computation took longer; 0 if it did not."""
        return self._overrun_ns / self._target_ns if self._target_ns else 0.0

    def forget(self) -> None:
        """Begin to count overruns anew, behind a warm-up in which things are compiled and allocated."""
        self._target_ns, self._overrun_ns = 0.0, 0.0

    def clock(self) -> int:
        """Return the time of the work done so far, nanoseconds, what was waited for it included."""
        return self._processor_clock() + self._waited_ns if self._has_messages else self._wall_clock()

    def wait(self, duration_s: float) -> None:
        """Let `clock` advance by a duration, in seconds."""
        begin_ns = self._wall_clock()
        self._sleep(duration_s)
        self._waited_ns += self._wall_clock() - begin_ns

    def attach(self, piece: Any, *, is_head: bool) -> None:
        """Let forward and backward of a torch module take their time; both have samples in the first dimension."""
        whole_ns = self._sample_ns * (self._head_share if is_head else self._block_share)
        num_samples, begin_ns = 0, 0

        def before_forward(_: Any, arguments: tuple[Any, ...]) -> None:
            nonlocal num_samples, begin_ns
            num_samples, begin_ns = len(arguments[0]), self.clock()

        def before_backward(*_: Any) -> None:
            nonlocal begin_ns
            begin_ns = self.clock()

        def after_forward(*_: Any) -> None:
            self._fill(begin_ns, whole_ns * num_samples * _FORWARD_SHARE)

        def after_backward(*_: Any) -> None:
            self._fill(begin_ns, whole_ns * num_samples * (1 - _FORWARD_SHARE))

        linears: list[Any] = [module for module in piece.modules() if isinstance(module, nn.Linear)]
        for linear in linears:
            linear.forward = partial(_wide_product, linear)
        piece.register_forward_pre_hook(before_forward)
        piece.register_forward_hook(after_forward)
        piece.register_full_backward_pre_hook(before_backward)
        piece.register_full_backward_hook(after_backward)

    def _fill(self, begin_ns: int, target_ns: float) -> None:
        """Wait for what the work since a time leaves of its target.

        What a piece or a wait takes too long, the next ones lack, unless it is more than they have.
        """
        self._target_ns += target_ns
        self._debt_ns += target_ns - (self.clock() - begin_ns)
        if self._debt_ns > 0:
            before_ns = self.clock()
            self.wait(self._debt_ns / NS_PER_S)
            self._debt_ns -= self.clock() - before_ns
        if self._debt_ns < -target_ns:
            self._overrun_ns += -target_ns - self._debt_ns
            self._debt_ns = -target_ns


def _wide_product(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """Compute a linear layer in float32 where autocast rounds what it takes and returns.

    That is what hardware for such types does, and torch takes 2.5 times as long without this on CPUs that lack it.
    """
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return functional.linear(hidden, linear.weight, linear.bias)
    narrow = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        rounded = (
            None if given is None else given.to(narrow).float() for given in (hidden, linear.weight, linear.bias)
        )
        return functional.linear(*rounded).to(narrow)
