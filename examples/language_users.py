"""LoRA on a causal language model, private for each *user* (all texts of one person): two ways, and without privacy.

python examples/language_users.py --way users   # a user's texts are averaged, and the average is clipped
python examples/language_users.py --way texts   # each text is clipped, and the noise is that for all texts of a user
python examples/language_users.py --way public  # no privacy
"""

import argparse
import math
import time
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
from fedcgd.opacus import CorrelatedPrivacyEngine, sequence_loss

TEXTS, LENGTH = 8, 64  # of a user at most; tokens of a text
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def users_texts(name: str | None) -> Tensor:
    """Shape (users, TEXTS, LENGTH): tokens (bytes, for the tiny model) of Python's manual, each stretch as if a person's."""
    manual = "\n".join(topics.values())
    tokens = torch.tensor(AutoTokenizer.from_pretrained(name)(manual)["input_ids"] if name else list(manual.encode()))
    users = len(tokens) // (TEXTS * LENGTH)
    return tokens[: users * TEXTS * LENGTH].view(users, TEXTS, LENGTH)


def language_model(name: str | None) -> nn.Module:
    """A model of Transformers by its name, in bfloat16, or a tiny one with random weights, with adapters and a frozen base."""
    torch.manual_seed(0)
    if name:
        base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes))
    lora = LoraConfig(r=8, target_modules=ADAPTED, task_type="CAUSAL_LM", init_lora_weights="gaussian")
    return get_peft_model(base, lora).train()


def perplexity(model: nn.Module, texts: Tensor) -> float:
    """Of public texts: that of a user's texts would need noise of its own."""
    model.eval()
    with torch.no_grad():
        losses = [float(sequence_loss(model(input_ids=part), part)) * len(part) for part in texts.split(64)]
    return math.exp(sum(losses) / len(texts))


def main() -> None:
    """Train, and print perplexity, time and what is promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=["users", "texts", "public"], default="users")
    parser.add_argument(
        "--model", help="a causal model of Transformers by its name or folder; tiny and random by default"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--users", type=int, default=800, help="so many of them; the others' texts are the public test")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    texts = users_texts(options.model)
    private, public = texts[: options.users], texts[options.users :].flatten(0, 1).to(options.device)
    model = language_model(options.model).to(options.device)
    # An example of the engine is a user with all texts, or one text. ε is for a user either way.
    data: Any = (
        [[(text,) for text in of_user] for of_user in private]
        if options.way == "users"
        else TensorDataset(private.flatten(0, 1))
    )
    steps = 10
    # A fixed split of everybody: each user is in one round of an epoch, or each text of a user is.
    participation = Participation(rounds=options.epochs * steps, min_separation=steps)
    delta = 1 / (10 * options.users)
    needed = Plan.calibrated(LambdaCGD(0.7), participation, clip_norm=1.0, epsilon=options.epsilon, delta=delta)
    # G texts of a user, wherever the split puts them, move the sum by at most G times what one text does (the triangle
    # inequality), so that G times the noise keeps the user's ε. Only without sampling: no amplification is claimed here.
    group = TEXTS if options.way == "texts" else 1
    plan = Plan(
        mechanism=needed.mechanism, participation=participation, clip_norm=1.0, delta=delta,
        noise_multiplier=0.0 if options.way == "public" else group * needed.noise_multiplier,
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.rate)
    loader = DataLoader(data, batch_size=len(data) // steps)
    before = perplexity(model, public)
    model.train()
    if options.way != "public":
        _, optimizer, loader = CorrelatedPrivacyEngine(NoiseKey.generate()).make_private(
            module=model, optimizer=optimizer, data_loader=loader, plan=plan, wrap_model=False,
            augmentation_multiplicity=TEXTS if options.way == "users" else 1,
        )  # fmt: skip
    start = time.perf_counter()
    for _ in range(options.epochs):
        for (batch,) in loader:
            ids = batch.to(options.device)  # a user's texts follow one another
            optimizer.zero_grad()
            sequence_loss(model(input_ids=ids), ids).backward()
            optimizer.step()
    seconds = time.perf_counter() - start
    print(f"{options.way}: perplexity {before:.1f} → {perplexity(model, public):.1f} in {seconds:.0f} s")
    if options.way == "public":
        print("no privacy: ε = ∞")
    else:
        print(f"for a user with at most {TEXTS} texts: {needed.guarantee()}")


if __name__ == "__main__":
    main()
