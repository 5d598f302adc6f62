"""What the scripts of analysis/ share: a command over runs, a table as CSV, and figures."""
