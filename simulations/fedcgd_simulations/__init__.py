"""Experiments with fedcgd: a Flower app, the same training without Flower, sweeps and plots."""
