"""The command line: `everstep …`. One module a command group; click and rich are imported nowhere else."""

from everstep.cli.group import main

__all__ = ["main"]
