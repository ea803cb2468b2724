"""A stand-in for a model. Like a real one it does not answer twice in the same words; `model.log` is its bill."""

FOLDERS = ["invoices", "bills", "to-pay"]


def ask_model_where(names: list[str]) -> dict[str, str]:
    with open("model.log", "a+") as log:
        log.seek(0)
        asked = len(log.readlines())
        log.write(f"asked about {len(names)} letters\n")
    return dict.fromkeys(names, FOLDERS[asked % len(FOLDERS)])
