"""``python -m mlakit.cli``."""

from mlakit.cli import main

main()
