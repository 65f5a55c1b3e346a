"""LoRA on a causal language model, private for each *text*: this library, Opacus itself, and no privacy, in the same loop.

python examples/language_texts.py --engine fedcgd   # DP-SGD, each text in one secret round of each epoch
python examples/language_texts.py --engine opacus   # opacus.PrivacyEngine
python examples/language_texts.py --engine none
"""

import argparse
import time

import torch
from language_users import LENGTH, language_model, perplexity, users_texts
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

from fedcgd import NoiseKey
from fedcgd.opacus import CorrelatedPrivacyEngine, sequence_loss


def main() -> None:
    """Train, and print perplexity, time and what is promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["fedcgd", "opacus", "none"], default="fedcgd")
    parser.add_argument("--mechanism", default="dp-sgd", help="of fedcgd; lambda-cgd chooses λ for the run")
    parser.add_argument("--sampling", default="random-allocation", help="of fedcgd; none, if batches are no secret")
    parser.add_argument(
        "--model", help="a causal model of Transformers by its name or folder; tiny and random by default"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--texts", type=int, default=6400, help="so many of them; the others are the public test")
    parser.add_argument("--batch", type=int, default=640)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    texts = users_texts(options.model).view(-1, LENGTH)
    private, public = texts[: options.texts], texts[options.texts :].to(options.device)
    model = language_model(options.model).to(options.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=options.rate)
    loader = DataLoader(TensorDataset(private), batch_size=options.batch, shuffle=options.engine == "none")
    before = perplexity(model, public)
    model.train()
    delta = 1 / (10 * options.texts)
    common = {
        "module": model, "optimizer": optimizer, "data_loader": loader, "epochs": options.epochs,
        "target_epsilon": options.epsilon, "target_delta": delta, "max_grad_norm": 1.0,
    }  # fmt: skip
    engine: PrivacyEngine | CorrelatedPrivacyEngine
    module = model
    if options.engine == "fedcgd":
        engine = CorrelatedPrivacyEngine(NoiseKey.generate())
        module, optimizer, loader = engine.make_private_with_epsilon(
            **common, mechanism=options.mechanism, sampling=options.sampling
        )
    elif options.engine == "opacus":
        engine = PrivacyEngine()
        module, optimizer, loader = engine.make_private_with_epsilon(**common)  # Poisson sampling
    start = time.process_time()
    for _ in range(options.epochs):
        for (batch,) in loader:
            ids = batch.to(options.device)
            optimizer.zero_grad()
            sequence_loss(module(input_ids=ids), ids).backward()
            optimizer.step()
    seconds = time.process_time() - start
    print(
        f"{options.engine}: perplexity {before:.1f} → {perplexity(model, public):.1f} in {seconds:.0f} s of the processor"
    )
    promised = "∞" if options.engine == "none" else f"{engine.get_epsilon(delta):.2f} at δ = {delta:.3g}"
    print(f"ε = {promised}, for one text of {LENGTH} tokens")


if __name__ == "__main__":
    main()
