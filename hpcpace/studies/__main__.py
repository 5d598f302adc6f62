"""Starts `hpcpace.studies.command`."""

from hpcpace.search_path import leave_out_working_folder

if __name__ == "__main__":
    leave_out_working_folder()

    from hpcpace.studies.command import main

    main()
