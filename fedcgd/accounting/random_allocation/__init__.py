"""Random allocation: in each epoch each user takes part in one round, secret, uniform and drawn anew."""

from fedcgd.accounting.random_allocation.accountant import BandsAccountant
from fedcgd.accounting.random_allocation.one_band import OneBandAccountant

__all__ = ["BandsAccountant", "OneBandAccountant"]
