"""A program that asks for approvals. It is copied into the folders of the tests that run it."""

import everstep
from everstep import workflow

HOSTILE = "\x1b[31mred\x1b]0;title\x07 \x9b2J [bold]markup[/bold] \u202eevil"
WORD = "abracadabra"


@workflow
async def paying(usd: int) -> list[object]:
    first = await everstep.approval("pay", {"usd": usd, "to": HOSTILE}, answer=bool, timeout=86400)
    second = await everstep.approval("tell", {"word": WORD}, secret=True)
    return [first, second]
