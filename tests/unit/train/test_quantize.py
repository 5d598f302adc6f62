from __future__ import annotations

import pytest
from cases import each_case

from library.volume import INT8_BLOCK, int8_message_bytes

torch = pytest.importorskip("torch")

from hpcpace.train.data_parallel import dequantize, quantize  # noqa: E402


def _values(rows: int, blocks: int, dtype=torch.float32):
    return torch.randn(rows, blocks * INT8_BLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)


@each_case("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_value_is_off_by_half_a_step_of_its_block_at_most(dtype):
    values = _values(3, 5, dtype).float()
    # Blocks of very different sizes keep their own precision.
    values = (values.view(3, 5, -1) * torch.logspace(-20, 3, 5).view(1, 5, 1)).flatten(1).to(dtype)
    off = (dequantize(quantize(values)) - values.float()).view(3, 5, -1).abs()
    step = values.float().view(3, 5, -1).abs().amax(2, keepdim=True) / 127
    assert (off <= 0.5001 * step).all()


def test_the_largest_value_of_a_block_is_kept():
    values = _values(1, 4).view(4, -1)
    largest = values.abs().amax(1)
    kept = dequantize(quantize(values.view(1, -1))).view(4, -1).abs().amax(1)
    torch.testing.assert_close(kept, largest)


def test_zeros_stay_zeros():
    assert (dequantize(quantize(torch.zeros(2, INT8_BLOCK))) == 0).all()


@each_case(("rows", "blocks"), [(1, 1), (2, 3), (4, 7)])
def test_the_message_has_the_planned_size(rows, blocks):
    message = quantize(_values(rows, blocks))
    assert message.dtype == torch.int8
    assert message.numel() == int8_message_bytes(rows * blocks * INT8_BLOCK, rows)


def test_a_bucket_is_filled_up_to_equal_shares_of_whole_blocks():
    assert int8_message_bytes(1, 3) == 3 * (INT8_BLOCK + 4)
    assert int8_message_bytes(6 * INT8_BLOCK + 1, 3) == 9 * (INT8_BLOCK + 4)
