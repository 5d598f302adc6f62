"""How often `make demo` is judged right: both of its runs, again and again, alone and beside other work."""
