"""The first process of a lab: it holds the lab's namespaces, and nothing of the lab outlives it.

It runs as a plain file, without the package, because it lives as long as the lab and should cost next to nothing. As
the first process of a PID namespace it inherits every orphan; ignoring SIGCHLD lets the kernel remove them.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        signal.pause()
