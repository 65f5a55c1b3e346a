"""A clock in the place of the `time` of a module: it passes by sleeping alone, however slow the machine."""


class Clock:
    """Put in with `monkeypatch.setattr("fedcgd_flower.users.time", clock)`."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds
