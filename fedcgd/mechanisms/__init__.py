"""Mechanisms: the matrix C of each, its inverse, its sensitivity and its errors."""

from fedcgd.mechanisms.banded import BandedToeplitz, BandInvMF
from fedcgd.mechanisms.bifr import BIFR
from fedcgd.mechanisms.binary_tree import BinaryTree
from fedcgd.mechanisms.blt import BLT
from fedcgd.mechanisms.dense import Dense, Diagonal
from fedcgd.mechanisms.dp_sgd import DPSGD
from fedcgd.mechanisms.lambda_cgd import LambdaCGD
from fedcgd.mechanisms.lambda_mu import LambdaMuCGD
from fedcgd.mechanisms.mechanism import Mechanism, inverse_matrix, matrix
from fedcgd.mechanisms.normalized import Normalized
from fedcgd.mechanisms.square_root import BISR, BSR, NuDPFTRL, SquareRootToeplitz
from fedcgd.mechanisms.toeplitz import Toeplitz

__all__ = [
    "BIFR",
    "BISR",
    "BLT",
    "BSR",
    "DPSGD",
    "BandInvMF",
    "BandedToeplitz",
    "BinaryTree",
    "Dense",
    "Diagonal",
    "LambdaCGD",
    "LambdaMuCGD",
    "Mechanism",
    "Normalized",
    "NuDPFTRL",
    "SquareRootToeplitz",
    "Toeplitz",
    "inverse_matrix",
    "matrix",
]
