"""Communication operations of all ranks: one table, matched, with waits and transfers."""
