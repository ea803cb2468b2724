"""What tests of misbehaving errors and values share."""

import asyncio
from collections.abc import Callable
from typing import Any

RAISED: list[type[BaseException]] = [ValueError, SystemExit, KeyboardInterrupt, RecursionError, asyncio.CancelledError]


def raising(kind: type[BaseException]) -> Callable[..., Any]:
    def raise_it(*args: Any, **kwargs: Any) -> Any:
        raise kind("misbehaves")

    return raise_it


class Liar(str):
    """A text that lies about itself."""

    __slots__ = ()
    __len__ = __getitem__ = __iter__ = encode = __str__ = __eq__ = __hash__ = raising(SystemExit)
