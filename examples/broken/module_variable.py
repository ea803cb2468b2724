"""Wrong: steps share a variable of the module. A new process begins with an empty one.

    everstep crashtest module_variable.py '[3, 4, 5]'

Right: return the value from a step and hand it on as an argument.
"""

from everstep import step, workflow

total = 0


@step(effect="read")
def add(number: int) -> int:
    global total
    total += number  # the mistake
    return number


@step(effect="read")
def report() -> str:
    return f"the sum is {total}"


@workflow
def sum_up(numbers: list[int]) -> str:
    for number in numbers:
        add(number)
    return report()
