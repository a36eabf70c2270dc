"""What an operator sees of Etha: records of how transfers ended, and where they are kept."""
