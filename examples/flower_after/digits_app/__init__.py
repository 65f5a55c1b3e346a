"""Handwritten digits on a hundred nodes, trained together."""
