"""Rates and sizes as people write and read them."""

from __future__ import annotations

import pytest
from cases import each_case

from hpcpace.core.text import format_rate, parse_rate, parse_size


@each_case(
    ("text", "rate_bps"),
    [
        ("1bit", 1),
        ("64kbit", 64_000),
        ("500mbit", 500_000_000),
        ("1gbit", 1_000_000_000),
        ("1.5gbit", 1_500_000_000),
        ("10Gbit", 10_000_000_000),
        (" 100 Mbit ", 100_000_000),
    ],
)
def test_reads_a_rate_in_bits_per_second(text, rate_bps):
    assert parse_rate(text) == rate_bps


@each_case(
    "text", ["", "fast", "500", "bit", "-1mbit", "0mbit", "0.1bit", "1tbit", "1gbps", "1mb", "1e3mbit", "nan", "1.mbit"]
)
def test_refuses_what_is_no_rate(text):
    with pytest.raises(ValueError) as caught:
        parse_rate(text)
    assert str(caught.value) == f"{text!r} is not a rate like 500mbit or 1gbit"


@each_case(
    ("text", "size_bytes"),
    [
        ("512", 512),
        ("512B", 512),
        ("64kB", 64_000),
        ("64KiB", 65_536),
        ("256MiB", 268_435_456),
        ("1.5MB", 1_500_000),
        ("1GB", 1_000_000_000),
        ("2 gib", 2_147_483_648),
    ],
)
def test_reads_a_size_in_bytes(text, size_bytes):
    assert parse_size(text) == size_bytes


@each_case("text", ["", "large", "-1MB", "0", "0.4B", "1TB", "1M", "1 Mbit", "inf"])
def test_refuses_what_is_no_size(text):
    with pytest.raises(ValueError) as caught:
        parse_size(text)
    assert str(caught.value) == f"{text!r} is not a size like 64kB or 256MiB"


@each_case(
    ("rate_bps", "text"),
    [
        (0, "0 b/s"),
        (999, "999 b/s"),
        (64_000, "64.0 kb/s"),
        (500_000_000, "500 Mb/s"),
        (999_600_000, "1.00 Gb/s"),
        (1_000_000_000, "1.00 Gb/s"),
        (12_340_000_000, "12.3 Gb/s"),
    ],
)
def test_writes_a_rate_with_three_digits(rate_bps, text):
    assert format_rate(rate_bps) == text
