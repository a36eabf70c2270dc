"""``python -m etha``: the ``etha`` command if no script is on the path."""

from etha.cli import main

if __name__ == "__main__":
    main()
