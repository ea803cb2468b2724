"""For testing durable programs: a clock that stands still, a ledger, a checker, golden histories, crash tests.

Import from the modules: `everstep.testing.clock`, `everstep.testing.ledger`, `everstep.testing.checker`,
`everstep.testing.golden`, `everstep.testing.skipping`, and `crash_everywhere` and `replaced` from here; with pytest
there are fixtures (`everstep.testing.plugin`).
"""

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # start-up: the pytest plugin is in this package, and loads no engine
    from everstep.testing.crashtest import crash_everywhere
    from everstep.testing.fakes import replaced
    from everstep.testing.golden import GoldenDiffers, replay_golden, save_history

__all__ = ["GoldenDiffers", "crash_everywhere", "replaced", "replay_golden", "save_history"]

_LATER: Final = {
    **dict.fromkeys(("GoldenDiffers", "replay_golden", "save_history"), "everstep.testing.golden"),
    "crash_everywhere": "everstep.testing.crashtest",
    "replaced": "everstep.testing.fakes",
}


if not TYPE_CHECKING:  # a type checker would accept any name, and know nothing about its type

    def __getattr__(name: str) -> Any:
        """Load a name when it is used, and only then the engine that it needs."""
        from importlib import import_module

        if name not in _LATER:
            raise AttributeError(f"module 'everstep.testing' has no attribute {name!r}")
        return getattr(import_module(_LATER[name]), name)
