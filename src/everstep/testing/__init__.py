"""For testing durable programs: a clock that stands still, a ledger, a checker, golden histories, crash tests.

Import from the modules: `everstep.testing.clock`, `everstep.testing.ledger`, `everstep.testing.checker`,
`everstep.testing.golden`, `everstep.testing.skipping`, and `crash_everywhere` from here; with pytest there are fixtures
(`everstep.testing.plugin`).
"""

from typing import Any, Final

_LATER: Final = {
    **dict.fromkeys(("GoldenDiffers", "replay_golden", "save_history"), "everstep.testing.golden"),
    "crash_everywhere": "everstep.testing.crashtest",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for, and only then the engine that it needs."""
    from importlib import import_module

    if name not in _LATER:
        raise AttributeError(f"module 'everstep.testing' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
