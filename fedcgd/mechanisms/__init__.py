"""Mechanisms: the matrix C of each, its inverse, its sensitivity and its errors."""

from fedcgd.mechanisms.dp_sgd import DPSGD
from fedcgd.mechanisms.lambda_cgd import LambdaCGD
from fedcgd.mechanisms.mechanism import Mechanism, Toeplitz, inverse_matrix, matrix
from fedcgd.mechanisms.normalized import Normalized

__all__ = ["DPSGD", "LambdaCGD", "Mechanism", "Normalized", "Toeplitz", "inverse_matrix", "matrix"]
