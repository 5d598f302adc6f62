"""The communication operations of all ranks: in one table, matched across ranks, with waits and transfers."""
