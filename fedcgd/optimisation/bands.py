"""How many bands: more of them cancel more noise, fewer of them leave more privacy to amplification by sampling.

After McKenna, "Scaling up the Banded Matrix Factorization Mechanism for Differentially Private ML", 2024, arXiv:2405.15913.
"""


def power_bandwidths(longest: int) -> tuple[int, ...]:
    """1, 2, 4, … and `longest`, which has no amplification left: the error changes slowly between them."""
    return tuple(sorted({2**i for i in range(longest.bit_length())} | {longest}))
