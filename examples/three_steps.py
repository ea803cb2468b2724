"""Three steps: load, summarize, report. The second one fails at first, and the program goes on from there.

Try it in an empty folder:

    python three_steps.py        # `summarize` fails: the summary service is down
    python three_steps.py        # `load_data` is not done again; `summarize` and `write_report` are

Then a third time: the run has ended, so its result comes straight from the store and no step runs at all.
"""

from pathlib import Path

import everstep
from everstep import step, workflow


# A step is a function whose outcome is recorded once. `effect` says what may happen when nobody knows whether it was
# done: a "read" changes nothing outside, so it may always be done again.
@step(effect="read")
def load_data(source: str) -> list[int]:
    print("load_data runs")
    return [3, 1, 4, 1, 5]


@step(effect="read")
def summarize(numbers: list[int]) -> str:
    print("summarize runs")
    service = Path("summary-service-is-up")
    if not service.exists():
        service.touch()  # somebody repairs the service while we are away
        raise ConnectionError("the summary service is down")
    return f"{len(numbers)} numbers, their sum is {sum(numbers)}"


# Without `effect` a step is "repeat": safe to do again. Writing the same text to the same file is.
@step
def write_report(text: str) -> str:
    print("write_report runs")
    Path("report.txt").write_text(text + "\n")
    return "report.txt"


# A workflow calls steps. It is plain code: loops, conditions and try work as ever. It may not touch the outside itself,
# because after a crash it is run again, with the recorded outcomes of its steps.
@workflow
def report(source: str) -> str:
    numbers = load_data(source)
    text = summarize(numbers)
    return write_report(text)


if __name__ == "__main__":
    # The id makes the two runs of this script one run of the workflow. "retry" lets a failed one go on.
    try:
        print("done:", everstep.run(report, "numbers.csv", id="report-1", on_existing="retry"))
    except ConnectionError as error:
        print(f"failed: {error}. Run me again.")
    # What was recorded, in order.
    with everstep.open() as app:
        for event in app.get("report-1").history():
            print(f"{event.seq:3} {event.kind:15} {event.step}")
