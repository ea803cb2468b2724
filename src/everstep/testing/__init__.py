"""For testing durable programs: a clock that stands still, an independent ledger of effects, a checker, crash tests.

Import from the modules: `everstep.testing.clock`, `everstep.testing.ledger`, `everstep.testing.checker`; and
`crash_everywhere` from here.
"""

from typing import Any

__all__ = ["crash_everywhere"]


def __getattr__(name: str) -> Any:
    """Load what is asked for: crash tests need the whole engine, and the other modules do not."""
    if name == "crash_everywhere":
        from everstep.testing.crashtest import crash_everywhere

        return crash_everywhere
    raise AttributeError(f"module 'everstep.testing' has no attribute {name!r}")
