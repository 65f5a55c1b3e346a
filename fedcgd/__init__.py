"""Differentially private training with noise that is correlated across rounds and regenerated from a key."""
