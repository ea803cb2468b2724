"""A program that takes requests and writes a stream. It is copied into the folders of the tests that run it."""

import everstep
from everstep import step, workflow

HOSTILE = "\x1b[31mred\x1b]0;title\x07 \x9b2J [bold]markup[/bold] \u202eevil"


@step(effect="read")
async def talk() -> None:
    everstep.stream("tokens").append("one ")
    everstep.stream("tokens").append(HOSTILE)


@workflow
async def helping() -> str:
    everstep.stream("tokens").append("begin")
    await talk()
    async for request in everstep.requests("rename", str, answer=str):
        if not request.value:
            request.refuse("a name is not empty")
            continue
        request.answer(request.value.upper())
        if request.value == "end":
            break
    everstep.stream("tokens").append("end")
    return "helped"
