"""The law of random b-min-separation, as the accounting of secret rounds asks for it."""

from typing import ClassVar

from fedcgd.accounting.b_min_sep.coins import Coins
from fedcgd.accounting.b_min_sep.likelihood import BMinSepLikelihood
from fedcgd.accounting.b_min_sep.pairs import PairChain
from fedcgd.accounting.b_min_sep.tuples import Tuples
from fedcgd.accounting.random_participation.columns import Columns


class BMinSepLaw(Coins):
    """Coins, the ratio of densities that they make, and tuples of users who toss them."""

    orders: ClassVar[tuple[int, ...]] = (2, 4, 6, 8, 10, 12, 16)
    method: ClassVar[str] = (
        "Monte Carlo over the privacy loss, exact chain of pairs and Ehrhard's inequality, with upper confidence bounds"
    )

    @property
    def words(self) -> tuple[str, ...]:
        """All that the law follows from, for a seed."""
        return str(self.rounds), str(self.separation), float(self.rate).hex(), str(self.warm)

    def likelihood(self, columns: Columns, sigma: float) -> BMinSepLikelihood:
        """S of C = `columns` with noise `sigma`."""
        return BMinSepLikelihood.from_columns(columns, self, sigma)

    def tuples(self, columns: Columns, sigma: float, order: int) -> Tuples:
        """Tuples of `order` users. Raises ValueError if the tables of their pairs would be too large."""
        return Tuples(columns, sigma, order, PairChain.from_columns(columns, self, (order - 1) / sigma**2))
