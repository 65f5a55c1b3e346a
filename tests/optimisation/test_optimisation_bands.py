"""How many bands are tried."""

from fedcgd.optimisation.bands import power_bandwidths


def test_numbers_of_bands_are_powers_of_two_and_the_rounds_of_an_epoch() -> None:
    assert power_bandwidths(1) == (1,)
    assert power_bandwidths(390)[-2:] == (256, 390)
