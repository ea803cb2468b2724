"""A shop behind FastAPI: an order is a run. It is paid once, waits for an address, and tells how far it is.

Try it in an empty folder (`pip install fastapi uvicorn` beside Everstep):

    uvicorn --app-dir path/to/examples/fastapi_app shop:api
    curl -X PUT localhost:8000/orders/7 --json '{"customer": "ann", "items": {"lamp": 2}}'
    curl localhost:8000/orders/7
    curl -N localhost:8000/orders/7/progress               # server-sent events, from the first one on
    curl -X PUT localhost:8000/orders/7/address --json '{"street": "Main Street 1", "city": "Oslo"}'
    sqlite3 shop.db 'select * from charges'                # each order once

Kill the server at any moment and start it again: orders go on, and `curl -N` with `-H 'Last-Event-ID: …'` as well.
"""

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

import everstep
from everstep import Done, NotDone, step, workflow


class Order(BaseModel):
    customer: str
    items: dict[str, Annotated[int, Field(gt=0)]]
    gift: bool = False


class Address(BaseModel):
    street: str
    city: str


class Receipt(BaseModel):
    payment: str
    parcel: str
    cents: int


# -- the work ----------------------------------------------------------------------------------------------------------
def bank() -> sqlite3.Connection:
    """The other side, for this example."""
    found = sqlite3.connect("shop.db", timeout=30)
    found.execute("create table if not exists charges (key, customer, cents)")
    return found


def find_charge(key: str, customer: str, cents: int) -> Done | NotDone:
    with bank() as charges:
        found = charges.execute("select rowid from charges where key = ?", (key,)).fetchone()
    return Done(f"payment-{found[0]}") if found else NotDone()


# `async`, because the workflow is. A `def` step would be called as `await asyncio.to_thread(charge, …)`.
@step(effect="once", probe=find_charge)
async def charge(customer: str, cents: int) -> str:
    with bank() as charges:
        done = charges.execute("insert into charges values (?, ?, ?)", (everstep.key(), customer, cents))
    return f"payment-{done.lastrowid}"


@step(effect="read")
async def price(order: Order) -> int:
    await asyncio.sleep(0.1)
    return sum(1200 * count for count in order.items.values()) + (300 if order.gift else 0)


@step
async def pack(order: Order, address: Address) -> str:
    for item, count in order.items.items():
        everstep.stream("progress").append(f"packed {count} × {item}")
        await asyncio.sleep(0.1)
    return f"parcel-{everstep.key()[:6]} to {address.city}"


@workflow
async def fulfil(order: Order) -> Receipt:
    progress = everstep.stream("progress")
    cents = await price(order)
    payment = await charge(order.customer, cents)
    progress.append(f"paid {cents} cents")
    address = await everstep.receive("address", Address, timeout=30 * 86400)
    progress.append(f"on its way to {address.city}")
    return Receipt(payment=payment, parcel=await pack(order, address), cents=cents)


# -- the service -------------------------------------------------------------------------------------------------------
@asynccontextmanager
async def lifespan(api: FastAPI) -> AsyncIterator[None]:
    async with everstep.open(recover=True) as app:  # also continues what a killed server left behind
        api.state.app = app
        yield


api = FastAPI(title="Shop", lifespan=lifespan)

STATUS = {
    "everstep.run.unknown": 404,  # UnknownRun: there is no such order
    "everstep.run.id_conflict": 409,  # IdConflict: this order, or this address, exists with other contents
    "everstep.run.ended": 422,  # RunEnded: too late
    "everstep.wrong_type": 422,  # WrongType: not what the workflow asks for
}


@api.exception_handler(everstep.Error)
async def refuse(request: Request, error: everstep.Error) -> JSONResponse:
    """Errors of Everstep have stable codes. What the sender can mend is a 4xx with its message; the rest is ours."""
    if error.code not in STATUS:
        raise error
    return JSONResponse({"code": error.code, "detail": str(error)}, STATUS[error.code])


def run_of(request: Request, order: str) -> everstep.Run[Receipt]:
    app: everstep.App = request.app.state.app
    return app.get(f"order-{order}")


@api.put("/orders/{id}", status_code=202)
async def put_order(request: Request, id: str, order: Order) -> dict[str, str]:
    """Start the run. It is durable when this answers; the same order again is the same run."""
    run = await request.app.state.app.start(fulfil, order, id=f"order-{id}")
    return {"run": run.id, "see": f"/orders/{id}"}


@api.get("/orders/{id}")
async def get_order(request: Request, id: str) -> dict[str, Any]:
    run = run_of(request, id)
    status = await run.status()
    return {"status": status, "receipt": await run.result() if status == "completed" else None}


@api.put("/orders/{id}/address", status_code=202)
async def put_address(request: Request, id: str, address: Address) -> dict[str, bool]:
    """Send a signal. With an id it counts once, however often it is sent; another address is a conflict."""
    return {"new": await run_of(request, id).signal("address", address, id="address")}


@api.get("/orders/{id}/progress")
async def get_progress(request: Request, id: str, last_event_id: Annotated[int, Header()] = 0) -> StreamingResponse:
    """Server-sent events. The browser sends the position of the last one when it connects again."""
    run = run_of(request, id)
    await run.status()  # an unknown order is a 404, not an empty stream

    async def events() -> AsyncIterator[str]:
        async for entry in run.stream("progress", after=last_event_id):
            yield f"id: {entry.position}\ndata: {json.dumps(entry.value)}\n\n"
        yield f"event: end\ndata: {await run.status()}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
