"""A server learning rate that changes from round to round, for Flower's strategies. It costs no privacy."""

from collections.abc import Iterable

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg, FedAvgM

from fedcgd.mechanisms.schedule import Schedule, rate_factors


def scheduled(base: type[FedAvg], schedule: Schedule, *, rounds: int, warmup: int = 0) -> type[FedAvg]:
    """`base` with a server learning rate that follows `schedule`: `scheduled(FedAvgM, "linear", rounds=210)(…)`.

    In round t the rate that the strategy was given is multiplied with factor t of `rate_factors`; after the last planned round it
    stays what it was there. The strategy keeps the given rate as its setting, so that a ledger compares the same one.

    Args:
        base: a Flower strategy with a server learning rate: FedAvgM (also without momentum), FedAdam, FedYogi, FedAdagrad.
        schedule: `constant`, `linear` or `cosine`.
        rounds: n, the planned releases.
        warmup: the first so many rounds, in which the rate rises.

    Raises:
        ValueError: for an unknown schedule, a warm-up that is not shorter than the run, and a strategy without a server rate.
    """
    factors = rate_factors(schedule, rounds, warmup=warmup)
    if base is FedAvg:
        raise ValueError("FedAvg has no server learning rate to schedule; take FedAvgM, with server_momentum=0")
    if set(factors) == {1.0}:
        return base
    rate = "server_learning_rate" if issubclass(base, FedAvgM) else "eta"

    class Scheduled(base):  # type: ignore[misc, valid-type]
        rate_schedule = f"{schedule} over {rounds} rounds, warm-up {warmup}"
        training_settings = (*getattr(base, "training_settings", ()), "rate_schedule")

        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            first = getattr(self, rate)
            setattr(self, rate, first * factors[min(server_round, rounds) - 1])
            try:
                result: tuple[ArrayRecord | None, MetricRecord | None] = super().aggregate_train(server_round, replies)
            finally:
                setattr(self, rate, first)  # it is a setting of the run, which a ledger compares
            return result

    Scheduled.__name__ = f"Scheduled{base.__name__}"
    return Scheduled
