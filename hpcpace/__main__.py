"""`python -m hpcpace`: the same as the `hpcpace` command, for launchers that start modules."""

from hpcpace.search_path import leave_out_working_folder

if __name__ == "__main__":
    leave_out_working_folder()

    from hpcpace.cli import main

    main()
