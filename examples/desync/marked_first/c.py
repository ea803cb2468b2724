from a import fetch


def invoice(item):
    return f"{item}: {fetch(item)}"
