"""A workflow with plain pydantic models, which are registered nowhere, for crash tests and golden files."""

import asyncio
import uuid

from pydantic import BaseModel, Field

import everstep
from everstep import step, workflow
from everstep.testing import ledger


class Line(BaseModel):
    product: str
    count: int = Field(default=1, gt=0)


class Order(BaseModel):
    id: uuid.UUID = Field(default_factory=uuid.uuid4)
    lines: list[Line]


class Address(BaseModel):
    street: str
    label: uuid.UUID = Field(default_factory=uuid.uuid4)


class Approval(BaseModel):
    ok: bool


@step
def ship(order: Order, address: Address) -> str:
    return ledger.apply(ledger.offered(), "ship", everstep.key(), f"{order.lines[0].product} to {address.street}")


@workflow
async def ordering(order: Order) -> str:
    address = await everstep.receive("address", Address)
    approved = await everstep.approval("ship", {"to": address.street}, answer=Approval)
    return await asyncio.to_thread(ship, order, address) if approved.ok else "refused"
