"""A Flower app that trains a small network on made-up examples, one a user, and notes where each round's time goes."""
