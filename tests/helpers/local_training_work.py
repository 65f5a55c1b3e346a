"""A user's local training: examples, who has which, and what a round asks for."""

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from torch import nn

from fedcgd.noise.quantisation import Lattice
from fedcgd_flower import LocalTask, arrays_of
from fedcgd_flower.clipping import Clipping
from fedcgd_flower.layout import flatten, layout_of
from fedcgd_simulations.models.small_cnn import tanh_cnn
from fedcgd_simulations.models.softmax import softmax_regression
from fedcgd_simulations.task import Examples

GENERATOR = torch.Generator().manual_seed(1)
EXAMPLES = Examples(torch.randn(60, 1, 28, 28, generator=GENERATOR), torch.arange(60) % 10)
PARTS = {
    str(i): np.arange(start, stop) for i, (start, stop) in enumerate([(0, 1), (1, 8), (8, 20), (20, 55), (55, 60)])
}
MODELS = {"softmax": lambda: softmax_regression(784, 10), "tanh-cnn": tanh_cnn}
CONTEXT = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})


def work_of(model: nn.Module, clip_norm: float) -> LocalTask:
    arrays = arrays_of(model)
    layout = layout_of(arrays)
    return LocalTask(
        model=flatten(arrays, layout), layout=layout, users=tuple(PARTS), clipping=Clipping(
            clip_norm=clip_norm, grid=Lattice.fitting(clip_norm=clip_norm, size=layout.size, stddev=1e-6)
        ), config=ConfigRecord(),
    )  # fmt: skip
