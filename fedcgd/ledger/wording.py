"""Counts in sentences: "1 user has", "2 users have"."""


def so_many(number: int, one: str, many: str) -> str:
    """`number` with the words that belong to it."""
    return f"{number} {one if number == 1 else many}"
