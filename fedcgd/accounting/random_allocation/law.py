"""The law of random allocation, as the accounting of secret rounds asks for it."""

from fedcgd.accounting.random_allocation.epochs import Epochs
from fedcgd.accounting.random_allocation.likelihood import EpochsLikelihood
from fedcgd.accounting.random_allocation.pairs import EpochPairs
from fedcgd.accounting.random_participation.columns import Columns
from fedcgd.accounting.random_participation.tuples import PairedLaw


class RandomAllocationLaw(Epochs, PairedLaw):
    """Epochs, the ratio of densities that they make, and pairs of users."""

    @property
    def words(self) -> tuple[str, ...]:
        """All that the law follows from, for a seed."""
        return "random-allocation", str(self.rounds), str(self.length)

    def likelihood(self, columns: Columns, sigma: float) -> EpochsLikelihood:
        """S of C = `columns` with noise `sigma`."""
        return EpochsLikelihood.from_columns(columns, self, sigma)

    def pairs(self, columns: Columns, scale: float) -> EpochPairs:
        """Pairs for θ/σ² = `scale`. Raises ValueError if their tables would be too large."""
        return EpochPairs.from_columns(columns, self, scale)
