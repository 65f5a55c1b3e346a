"""Random b-min-separation: each user tosses a secret coin in each round in which it may take part again."""
