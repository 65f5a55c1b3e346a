"""The law of random b-min-separation, as the accounting of secret rounds asks for it."""

from fedcgd.accounting.b_min_sep.coins import Coins
from fedcgd.accounting.b_min_sep.likelihood import BMinSepLikelihood
from fedcgd.accounting.b_min_sep.pairs import PairChain
from fedcgd.accounting.random_participation.columns import Columns
from fedcgd.accounting.random_participation.tuples import PairedLaw


class BMinSepLaw(Coins, PairedLaw):
    """Coins, the ratio of densities that they make, and pairs of users who toss them."""

    @property
    def words(self) -> tuple[str, ...]:
        """All that the law follows from, for a seed."""
        return str(self.rounds), str(self.separation), float(self.rate).hex(), str(self.warm)

    def likelihood(self, columns: Columns, sigma: float) -> BMinSepLikelihood:
        """S of C = `columns` with noise `sigma`."""
        return BMinSepLikelihood.from_columns(columns, self, sigma)

    def pairs(self, columns: Columns, scale: float) -> PairChain:
        """Pairs for θ/σ² = `scale`. Raises ValueError if their tables would be too large."""
        return PairChain.from_columns(columns, self, scale)
