"""The command line: `everstep …`. One module for each command group; click and rich are imported nowhere else."""

from everstep.cli.group import main

__all__ = ["main"]
