"""Experiments: sweeps over mechanisms and budgets, comparisons, plots, running times."""
