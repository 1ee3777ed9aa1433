"""``python -m adasim``."""

from adasim.cli import main

if __name__ == "__main__":  # worker processes import this module again
    main()
