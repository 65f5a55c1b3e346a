"""Optimisation: mechanisms whose numbers are found for a given participation and workload."""
