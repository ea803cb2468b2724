from a import fetch


def total(items):
    return sum(fetch(item) for item in items)
