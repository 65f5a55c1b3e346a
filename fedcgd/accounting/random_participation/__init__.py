"""Users whose rounds are drawn in secret: σ, ε and δ by draws, for every law of the rounds that can be followed as a chain."""
