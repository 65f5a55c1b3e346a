"""Balls-in-Bins: each user in one secret, uniform bin of b, taking part in every round of that bin's number modulo b."""
