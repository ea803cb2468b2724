"""Starting runs of `queued_app.py` from a process that drives none of them."""

import sys

from tests import forked
from tests.cli.conftest import Folder


def start_charges(folder: Folder, counts: dict[str, int]) -> None:
    """Start runs that charge so many times each, one after the other."""
    code = f"""
import everstep, queued_app
with everstep.open("everstep.db", queues=["default"], durability="process") as app:
    for run, count in {counts!r}.items():
        app.start(queued_app.charges, run, count, id=run)
"""
    forked.run([sys.executable, "-c", code], cwd=folder.path, check=True, env=folder.environment())
