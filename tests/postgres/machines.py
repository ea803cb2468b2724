"""A worker on a machine of its own, as far as names go: the kernel of another one says nothing about its process.

python machines.py URL HOST    drive what is there; a payment begins, waits for a file `go-HOST`, and is written down
"""

import asyncio
import os
import socket
import sys
from pathlib import Path

import everstep
from everstep import Done, NotDone, step, workflow
from everstep.stores import processes

PLACE = Path(os.environ.get("PLACE", "."))


def written() -> list[str]:
    """Return what was written down."""
    return (PLACE / "ledger").read_text().splitlines()


def write(line: str) -> None:
    """Write a line that no database knows of."""
    with (PLACE / "ledger").open("a") as stream:
        stream.write(f"{line}\n")


async def is_paid(key: str, name: str) -> Done | NotDone:
    """The probe: the ledger knows."""
    return Done("paid") if any(line.startswith(f"paid {name} ") for line in written()) else NotDone()


@step(effect="once", probe=is_paid)
async def pay(name: str) -> str:
    """Pay, when somebody lets this machine."""
    host = socket.gethostname()
    write(f"began {name} {host}")
    while not (PLACE / f"go-{host}").exists():
        await asyncio.sleep(0.01)
    write(f"paid {name} {host}")
    return "paid"


@workflow
async def order(name: str) -> str:
    """Pay once."""
    return await pay(name)


def move_to(host: str) -> None:
    """Let this process be on another machine."""
    socket.gethostname = lambda: host
    processes.machine = lambda: f"{host} since {os.getpid()}"  # type: ignore[assignment]
    processes.machine_code.cache_clear()


async def drive(url: str) -> None:
    """Drive whatever is there, until somebody kills this."""
    gone_after = float(os.environ["GONE_AFTER"]) if "GONE_AFTER" in os.environ else None
    async with everstep.open(url, recover=True, lease=2.0, gone_after=gone_after):
        print("driving", flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    move_to(sys.argv[2])
    asyncio.run(drive(sys.argv[1]))
