"""Wrong: one step pays and sends the receipt. Killed between the two, its probe finds the payment and the mail is lost.

    everstep crashtest two_effects.py '"ann"' 5

Right: a step for each effect.
"""

from pathlib import Path

import everstep
from everstep import Done, NotDone, step, workflow
from everstep.testing import ledger


def find_payment(key: str, customer: str, amount: int) -> Done | NotDone:
    return Done("paid") if Path(f"payment-{key}").exists() else NotDone()


@step(effect="once", probe=find_payment)
def pay(customer: str, amount: int) -> str:
    ledger.apply(ledger.offered(), "payment", everstep.key(), [customer, amount])
    Path(f"payment-{everstep.key()}").touch()
    ledger.apply(ledger.offered(), "receipt", everstep.key(), [customer, amount])  # the mistake
    return "paid"


@workflow
def buy(customer: str, amount: int) -> str:
    return pay(customer, amount)
