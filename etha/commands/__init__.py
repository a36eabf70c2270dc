"""The commands of the ``etha`` command line, one file per theme; ``etha/cli.py`` lists them."""
