"""What an operator sees of Etha: logs, metrics, and records of how transfers ended and where they are kept."""
