"""Accounting: upper bounds on ε, and the noise multiplier that a budget allows."""
