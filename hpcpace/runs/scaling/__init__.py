"""How a job scales: runs of several sizes, the law behind them, and what it says of larger ones."""
