"""Users' ids as they come in: many texts, each once. One text in place of many would be one user for each of its letters."""

from collections.abc import Iterable

from fedcgd.support.numbers import plural


class NoUserIdsError(TypeError):
    """What is given as users are no ids of users. The text names none."""


def check_not_one_text(users: object) -> None:
    """Raise NoUserIdsError for a text or bytes where many ids are expected."""
    if isinstance(users, str | bytes | bytearray | memoryview) or not isinstance(users, Iterable):
        raise NoUserIdsError(
            f"users must be a list of ids, such as ['17'] for one user; got {type(users).__name__}, whose parts would each "
            "count as a user"
        )


def user_ids(users: Iterable[str]) -> tuple[str, ...]:
    """The ids of `users`, as a tuple.

    Args:
        users: texts that are not empty.

    Raises:
        NoUserIdsError: for one text in place of many, and for an id that is none.
        ValueError: if a user is named twice.
    """
    check_not_one_text(users)
    ids = tuple(users)
    for user in ids:
        if not isinstance(user, str) or not user:
            what = "an empty text" if isinstance(user, str) else type(user).__name__
            raise NoUserIdsError(
                f"ids of users must be texts and not empty, such as '17'; one is {what}. Of numbers make texts, [str(id) for id "
                "in …], and leave out rows without an id"
            )
    if twice := len(ids) - len(set(ids)):
        raise ValueError(f"{plural(twice, 'user is', 'users are')} named twice; a user has one id, and takes part once")
    return ids
