"""Clocks of a host that are stepped: what processes read that have preloaded the library."""

from __future__ import annotations

from pathlib import Path

from hpcpace.core.compat import load_compiled
from hpcpace.lab import emulated
from hpcpace.lab.emulated import install_library, preloading


def test_the_library_is_built():
    assert load_compiled(Path(emulated.__file__).with_name("host_clock.cpp")), "run `setup.py build_ext --inplace`"


def test_a_lab_preloads_it_once_and_keeps_what_is_preloaded_already(files):
    assert preloading(files, {}) == {}
    install_library(files)
    ours = str(files.clock_library)
    assert preloading(files, {}) == {"LD_PRELOAD": ours}
    assert preloading(files, {"LD_PRELOAD": "/lib/other.so"}) == {"LD_PRELOAD": f"{ours} /lib/other.so"}
    assert preloading(files, {"LD_PRELOAD": f"{ours} /lib/other.so"}) == {"LD_PRELOAD": f"{ours} /lib/other.so"}


def test_without_the_compiled_library_nothing_is_installed(files, monkeypatch):
    monkeypatch.setattr(emulated, "load_compiled", lambda source: None)
    install_library(files)
    assert not files.clock_library.exists()
