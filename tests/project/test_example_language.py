"""The language examples: their ways run, texts of a user are bounded together, and of a large model adapters alone travel."""

import importlib
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data import topics
from types import ModuleType

import pytest
import torch
from fake_grid import FakeGrid, FakeNode, is_training
from flwr.app import Context, RecordDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fedcgd.ledger import verify
from fedcgd_flower.messages import read_train_message

pytestmark = pytest.mark.filterwarnings("default")  # of PEFT and Opacus, as a user of the programs sees them
EXAMPLES = Path(__file__).parents[2] / "examples"
APP = EXAMPLES / "flower_language"
SETTINGS = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
ADAPTERS = 2 * (4 * 2 * 64 * 8 + 3 * (64 + 128) * 8)  # of two layers: four maps of 64 to 64, three of 64 to 128 or back


@pytest.fixture(autouse=True)
def short_manual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of 120 people are enough, and perplexity is of those that are left."""
    manual = "\n".join(topics.topics.values())
    monkeypatch.setattr(topics, "topics", {"manual": manual.encode()[: 120 * 8 * 64].decode(errors="replace")})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs a program here, where Transformers is imported already; the last two lines that it prints."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def lines(program: str, *options: str) -> list[str]:
        monkeypatch.delitem(sys.modules, "language_users", raising=False)
        monkeypatch.setattr(sys, "argv", [program, *options, "--epochs", "1", "--device", "cpu"])
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        return capsys.readouterr().out.splitlines()[-2:]

    return lines


def perplexities(line: str) -> tuple[float, ...]:
    """Before and after."""
    return tuple(map(float, line.split("perplexity ")[1].split(" in ")[0].split(" → ")))


@pytest.mark.parametrize("way", ["users", "texts", "public"])
def test_it_learns_and_says_what_it_promises(run: Callable[..., list[str]], way: str) -> None:
    first, last = run("language_users.py", "--way", way, "--users", "100")
    before, after = perplexities(first)
    assert after < before
    promise = "ε ≤ 8 at δ = 0.001 (zero out one user; sampling: none; exact Gaussian mechanism)"
    assert last == ("no privacy: ε = ∞" if way == "public" else f"for a user with at most 8 texts: {promise}")


@pytest.mark.parametrize(
    "engine", ["fedcgd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("opacus", "none"))]
)
def test_the_loop_of_opacus_with_either_engine_and_with_none(run: Callable[..., list[str]], engine: str) -> None:
    first, last = run("language_texts.py", "--engine", engine, "--texts", "800", "--batch", "80")
    before, after = perplexities(first)
    assert after < before
    epsilon = last.removeprefix("ε = ").split()[0].rstrip(",")
    assert epsilon == "∞" if engine == "none" else 7.8 < float(epsilon) <= 8


def saved_model(folder: Path) -> str:
    """The tiny model of the examples in bfloat16, and bytes as its tokens, as Transformers saves them."""
    letters = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes)).bfloat16().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(APP)
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module("language_app")
    del sys.modules["language_app"]


@pytest.mark.parametrize("half", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_in_flower_the_adapters_travel_alone(
    app: ModuleType, half: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SETTINGS | {
        "people": 60,
        "turns": 1,
        "local-steps": 1,
        "model": saved_model(tmp_path / "model") if half else "",
    }
    grid = FakeGrid({node: FakeNode(app.client) for node in (1, 2)}, settings)
    app.server(grid, Context(1, 0, {}, RecordDict(), dict(settings)))
    numbers, learned, written, promised = capsys.readouterr().out.splitlines()
    before, after = perplexities(learned)
    assert after < before
    assert promised.startswith("for a person with at most 8 texts: ε ≤ 8 at δ = 0.00166")
    assert numbers.split()[0] == str(ADAPTERS)
    assert len(written) > len("it writes: ''") + 16  # so many bytes were given to it
    sent = [read_train_message(message)[0] for message in grid.sent if is_training(message)]
    assert {model.shape for model in sent} == {(ADAPTERS,)}
    assert {p.dtype for p in app.language_model(settings["model"]).parameters() if not p.requires_grad} == {
        torch.bfloat16 if half else torch.float32
    }
    found = verify(tmp_path / "run.db")
    assert (found.problems, found.released) == ((), 10)
