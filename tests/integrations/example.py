"""The example with LangGraph, for the nursery: `main(folder, *answers)`."""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "examples" / "langgraph_agent.py"

_spec = spec_from_file_location("langgraph_agent", PATH)
assert _spec is not None
assert _spec.loader is not None
EXAMPLE = module_from_spec(_spec)
sys.modules["langgraph_agent"] = EXAMPLE
_spec.loader.exec_module(EXAMPLE)


def main(folder: str, *answers: str) -> None:
    """Run it in a folder."""
    os.chdir(folder)
    os.environ.pop("EVERSTEP_URL", None)
    EXAMPLE.main(list(answers))
