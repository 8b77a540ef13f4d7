"""The command line: parse, call, print. One module a kind of command."""

from mlakit.cli import judge, look, run  # noqa: F401  (each adds its commands to the app)
from mlakit.cli.base import main

__all__ = ["main"]
