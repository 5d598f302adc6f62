"""Runs as each Python of a traced job starts, being first on PYTHONPATH, and observes it.

It takes its folder off the search path again and hands over to the `sitecustomize` that the Python has anyway. It is
written for Pythons of any age: one in which hpcpace cannot run goes on as ever.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [_entry for _entry in sys.path if os.path.abspath(_entry) != _here]
if sys.version_info >= (3, 11):  # noqa: UP036 - any Python of the job may run this
    # The hpcpace that has started the job, also where this Python has another one or none.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(_here)))))
    try:
        from hpcpace.observe.launch.import_hook import arm
    except Exception:  # somebody else's process, which never asked for us
        del sys.path[0]
    else:
        del sys.path[0]
        arm()

# Importing the next one puts it in our place in sys.modules; if there is none, this is the error that Python expects.
del sys.modules["sitecustomize"]
__import__("sitecustomize")
