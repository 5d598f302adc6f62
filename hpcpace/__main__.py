"""`python -m hpcpace`: the same as the `hpcpace` command, for launchers that start modules."""

from hpcpace.cli import main

if __name__ == "__main__":
    main()
