"""The loops of others: the programs of the guide to them run, and what would leak in them is refused."""

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fedcgd import LambdaCGD, NoiseKey
from fedcgd.ledger.verification import verify
from fedcgd.opacus import CorrelatedPrivacyEngine, CrossExampleLeakError, check_independence, sequence_loss

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "trainers.md").read_text()
PROGRAMS = dict(re.findall(r'^```python title="with_(\w+).py"\n(.*?)^```$', GUIDE, re.MULTILINE | re.DOTALL))
EPOCHS = {"accelerate": 4, "trainer": 2, "lightning": 4}
KEY = 'NoiseKey.from_file("run/noise.key", create=True)'


def run(name: str, folder: Path, epochs: int, processes: int = 1) -> str:
    """What the program says in the end, under a key that makes the same noise each time."""
    (folder / "run").mkdir(parents=True, exist_ok=True)
    assert KEY in PROGRAMS[name]
    (folder / "program.py").write_text(PROGRAMS[name].replace(KEY, "NoiseKey.simulation(0)"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    several = processes > 1 and name != "lightning"  # which starts them itself
    command = [sys.executable, *(launch if several else []), "program.py", str(epochs), str(processes)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_of_the_guide_trains_privately(name: str, tmp_path: Path) -> None:
    assert "ε ≤ 4 at δ = 1e-05 (zero out one user; sampling: none; exact Gaussian" in run(name, tmp_path, EPOCHS[name])
    found = verify(tmp_path / "run" / "releases")
    assert found.released > 5
    assert not found.problems


@pytest.mark.slow
@pytest.mark.timeout(1200)  # five programs, each with its own limit
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_goes_on_from_its_checkpoint_on_two_processes_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    losses = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        # Trainer counts the steps of each process, and so goes on in as many.
        run(name, folder, EPOCHS[name] // 2, processes if name == "trainer" else 1)
        losses.append(run(name, folder, EPOCHS[name], processes))
    losses.append(run(name, tmp_path / "whole", EPOCHS[name]))
    if name == "trainer":  # up to rounding; without the checkpoint it is 1e-4 away
        found = [float(re.findall(r"loss (\S+);", line)[0]) for line in losses]
        assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-5)
    else:
        assert losses[0] == losses[1] == losses[2]


def examples() -> list[dict[str, torch.Tensor]]:
    """Texts of two lengths, padded."""
    tokens = torch.randint(1, 64, (24, 12), generator=torch.Generator().manual_seed(0))
    labels = torch.where((torch.arange(12) < 5) & (torch.arange(24) % 2 == 0)[:, None], tokens, -100)
    labels[1::2] = tokens[1::2]
    return [{"input_ids": t, "labels": own} for t, own in zip(tokens, labels, strict=True)]


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).train()


@pytest.fixture
def private():
    model = language_model()
    engine = CorrelatedPrivacyEngine(NoiseKey.simulation(0))
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(examples(), 6),
        mechanism=LambdaCGD(0.5), sampling="none", epochs=1, target_epsilon=8.0, target_delta=1e-5, max_grad_norm=1.0,
        wrap_model=False,
    )  # fmt: skip
    return engine, model, optimizer, loader


def hugging_face(private, folder: Path, loader: bool, **options) -> Trainer:
    _, model, optimizer, own = private
    arguments = TrainingArguments(
        str(folder), num_train_epochs=1, use_cpu=True, save_strategy="no", logging_strategy="no", max_grad_norm=0,
        remove_unused_columns=False, report_to=[], disable_tqdm=True, per_device_train_batch_size=6,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=examples(), optimizers=(optimizer, None), **options)
    if loader:
        trainer.get_train_dataloader = lambda: own
    return trainer


def test_the_loss_that_trainer_divides_by_the_tokens_of_all_examples_is_refused(private, tmp_path: Path) -> None:
    with pytest.raises(CrossExampleLeakError, match=r"compute_loss_func=fedcgd\.opacus\.sequence_loss"):
        hugging_face(private, tmp_path, loader=True).train()
    assert private[0].accountant.released == 0
    hugging_face(private, tmp_path, loader=True, compute_loss_func=sequence_loss).train()
    assert private[0].accountant.released == 4


def test_a_loader_that_trainer_makes_itself_is_refused(private, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="batch from"):
        hugging_face(private, tmp_path, loader=False, compute_loss_func=sequence_loss).train()


def test_a_loader_that_accelerate_prepared_is_refused(private) -> None:
    _, model, optimizer, loader = private
    model, optimizer, loader = Accelerator(cpu=True).prepare(model, optimizer, loader)

    def loop() -> None:
        for batch in loader:
            sequence_loss(model(batch["input_ids"]), batch["labels"]).backward()
            optimizer.step()

    with pytest.raises(RuntimeError, match="Accelerate's prepare"):
        loop()


def model_of_absolute_positions() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, **sizes)).train()


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [language_model, model_of_absolute_positions])
def test_texts_of_a_causal_model_are_padded_on_the_right_where_no_token_sees_it(make, side: str, masked: bool) -> None:
    """On the left a mask is enough where positions are relative, as Llama's: its outputs stay what they are."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 24, (32,), generator=generator).tolist()
    texts = [torch.randint(1, 64, (length,), generator=generator) for length in lengths]

    def padded(some: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_side=side)
        return {"input_ids": ids, "attention_mask": (ids > 0).long() if masked else torch.ones_like(ids)}

    def call(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> object:
        return module(**batch)

    with ExitStack() as expected:
        if side == "left" and not (masked and make is language_model):
            expected.enter_context(pytest.raises(CrossExampleLeakError, match="the longest"))
        check_independence(make(), texts, padded, call=call)
