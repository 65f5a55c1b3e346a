"""Handwritten digits on ten nodes, trained together."""
