"""`check_independence` on models whose examples are independent: false alarms, and its time in steps of training.

python benchmarks/independence.py [--turns 5]

A step is a forward and a backward pass without privacy; the check runs on the 1st, 10th, 100th, … batch. Processor time on one
core of a shared 2-core virtual machine (x86-64, torch 2.14), of 16 examples:

    softmax regression                        0.3 ms a step       5.8 ms a check   17.3 steps
    CNN, GroupNorm                           61.3 ms a step     713.1 ms a check   11.6 steps
    WideResNet-16-1                          47.5 ms a step     641.1 ms a check   13.5 steps
    LSTM of words                            16.8 ms a step     188.6 ms a check   11.2 steps
    BERT-tiny, padding masked, dropout       29.0 ms a step     310.1 ms a check   10.7 steps
    0 false alarms of 30; a check takes 14 steps (25 at most)
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fedcgd.opacus import CrossExampleLeakError, check_independence
from fedcgd_simulations.models.bert import SHAPES, VOCABULARY, TokenClassifier
from fedcgd_simulations.models.cnn import cnn
from fedcgd_simulations.models.lstm import lstm
from fedcgd_simulations.models.wideresnet import wideresnet


@dataclass
class Program:
    """A model, a batch of inputs for it, and nothing that would let examples meet."""

    name: str
    model: nn.Module
    inputs: Tensor | tuple[Tensor, ...]
    found: str = ""
    seconds: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)


class Lambda(nn.Module):
    """Layers, and a forward pass that is a function of them and the inputs."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward(self, *inputs)


def bert_tiny() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    layers, heads, hidden, intermediate = SHAPES["bert-tiny"]
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=intermediate, attn_implementation="eager",
    )  # fmt: skip
    return TokenClassifier(BertForSequenceClassification(config))


def frozen_batch_norm() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).eval().requires_grad_(False), nn.Flatten(), nn.Linear(7200, 10)
    )
    model.train()
    model[1].eval()
    return model


def variational(self: Lambda, x: Tensor) -> Tensor:
    mean, spread = self.encoder(x).chunk(2, -1)
    return self.decoder(mean + torch.randn_like(spread) * functional.softplus(spread))


def attention(self: Lambda, tokens: Tensor) -> Tensor:
    x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]).expand_as(tokens))
    return self.out(self.attention(x, x, x)[0])


def masked_mean(self: Lambda, tokens: Tensor) -> Tensor:
    mask = (tokens != 0).float()[..., None]
    return self.out((self.embedding(tokens) * mask).sum(1) / mask.sum(1))


def programs() -> list[Program]:
    """Thirty of them."""
    torch.manual_seed(0)
    rows, images = torch.randn(16, 20), torch.randn(16, 3, 32, 32)
    words = torch.randint(1, 50, (16, 30)) * (torch.arange(30) < torch.arange(8, 24)[:, None])
    series = torch.randn(16, 12, 20)
    linear, relu = nn.Linear, nn.ReLU
    made = [
        ("softmax regression", linear(20, 10), rows),
        ("perceptron, dropout", nn.Sequential(linear(20, 64), relu(), nn.Dropout(0.5), linear(64, 10)), rows),
        ("perceptron, bfloat16", nn.Sequential(linear(20, 64), nn.GELU(), linear(64, 10)).bfloat16(), rows.bfloat16()),
        ("perceptron, float64", nn.Sequential(linear(20, 64), nn.SiLU(), linear(64, 10)).double(), rows.double()),
        ("as many classes as examples", linear(20, 16), rows),
        ("as many features as examples", linear(16, 16), torch.randn(16, 16)),
        ("LayerNorm", nn.Sequential(linear(20, 64), nn.LayerNorm(64), linear(64, 10)), rows),
        ("autoencoder", nn.Sequential(linear(20, 4), nn.Tanh(), linear(4, 20)), rows),
        ("variational autoencoder", Lambda(variational, encoder=linear(20, 8), decoder=linear(4, 20)), rows),
        ("two towers", Lambda(lambda m, a, b: (m.one(a) * m.two(b)).sum(-1), one=linear(20, 8), two=linear(20, 8)),
         (rows, rows.flip(1), torch.zeros(16))),
        ("one layer twice", Lambda(lambda m, x: m.out(m.one(torch.tanh(m.one(x)))), one=linear(20, 20), out=linear(20, 3)),
         rows),
        ("experts", Lambda(lambda m, x: (m.gate(x).softmax(-1)[..., None] * torch.stack([m.a(x), m.b(x)], 1)).sum(1),
                           gate=linear(20, 2), a=linear(20, 5), b=linear(20, 5)), rows),
        ("regression, one output", nn.Sequential(linear(20, 8), relu(), linear(8, 1), nn.Flatten(0)), rows),
        ("small CNN", nn.Sequential(nn.Conv2d(3, 8, 3), relu(), nn.AvgPool2d(2), nn.Flatten(), linear(1800, 10)), images),
        ("CNN, GroupNorm", cnn(), images),
        ("CNN, InstanceNorm", nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Flatten(), linear(7200, 10)), images),
        ("CNN, frozen BatchNorm", frozen_batch_norm(), images),
        ("segmentation", nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), relu(), nn.Conv2d(8, 2, 1)), images),
        ("checkpointed", Lambda(lambda m, x: m.out(checkpoint(m.inner, x, use_reentrant=False)),
                                inner=nn.Sequential(linear(20, 32), nn.Tanh()), out=linear(32, 3)), rows),
        ("WideResNet-16-1", wideresnet(16, 1), images),
        ("LSTM of words", lstm(50), words.clamp(min=1)),
        ("LSTM", Lambda(lambda m, x: m.out(m.cell(x)[0][:, -1]), cell=DPLSTM(20, 16, batch_first=True), out=linear(16, 3)),
         series),
        ("GRU, both directions", Lambda(lambda m, x: m.out(m.cell(x)[0].mean(1)),
                                        cell=DPGRU(20, 8, batch_first=True, bidirectional=True), out=linear(16, 3)), series),
        ("sequence as long as the batch", Lambda(lambda m, x: m.out(m.cell(x)[0].mean(1)),
                                                 cell=DPGRU(20, 8, batch_first=True), out=linear(8, 3)), torch.randn(16, 16, 20)),
        ("bag of words, masked", Lambda(masked_mean, embedding=nn.Embedding(50, 16), out=linear(16, 3)), words),
        ("attention", Lambda(attention, embedding=nn.Embedding(50, 16), places=nn.Embedding(30, 16),
                                    attention=DPMultiheadAttention(16, 2, batch_first=True), out=linear(16, 50)), words),
        ("BERT-tiny, padding masked, dropout", bert_tiny(), words),
        ("convolution over time", Lambda(lambda m, x: m.out(torch.relu(m.inner(x.mT)).amax(-1)),
                                         inner=nn.Conv1d(20, 8, 3), out=linear(8, 3)), series),
        ("equal examples", linear(20, 3), torch.ones(16, 20)),
        ("two examples", nn.Sequential(linear(20, 5), relu(), linear(5, 3)), rows[:2]),
    ]  # fmt: skip
    return [Program(*parts) for parts in made]


def _timed(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _step(program: Program) -> None:
    inputs = program.inputs if isinstance(program.inputs, Tensor) else program.inputs[:-1]
    outputs = program.model(inputs) if isinstance(inputs, Tensor) else program.model(*inputs)
    outputs.float().square().mean().backward()
    program.model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    made = programs()
    for turn in range(turns + 1):
        for program in made:
            try:
                seconds = _timed(lambda program=program: check_independence(program.model, program.inputs))
            except CrossExampleLeakError as leak:
                program.found = str(leak)[:100]
                continue
            step = _timed(lambda program=program: _step(program))
            if turn:  # the first one makes torch ready
                program.seconds.append(seconds)
                program.step.append(step)
    ratios = []
    for program in made:
        if program.found:
            print(f"{program.name:36} FALSE ALARM: {program.found}")
            continue
        check, step = statistics.median(program.seconds), statistics.median(program.step)
        ratios.append(check / step)
        print(f"{program.name:36} {1e3 * step:8.1f} ms a step {1e3 * check:9.1f} ms a check {check / step:6.1f} steps")
    alarms = sum(bool(program.found) for program in made)
    print(
        f"{alarms} false alarms of {len(made)}; a check takes {statistics.median(ratios):.0f} steps ({max(ratios):.0f} at most)"
    )


if __name__ == "__main__":
    main()
