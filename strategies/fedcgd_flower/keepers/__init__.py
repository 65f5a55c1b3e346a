"""Keepers in a Flower run: how they are reached, what is said to them, and how they open a sum once."""
