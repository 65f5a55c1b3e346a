"""LoRA on a causal language model in Flower: adapters travel, the frozen base does not, and ε is for a *person*.

flwr run examples/flower_language --stream --federation-config "num-supernodes=2 client-resources-num-cpus=1"
"""

import math
import time
from functools import cache
from pydoc_data.topics import topics

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fedcgd import NoiseKey, Participation, Plan
from fedcgd.opacus import sequence_loss
from fedcgd_flower import CorrelatedNoise, arrays_of, host_users, load_arrays, sequential_training

TEXTS, LENGTH = 8, 64  # of a person; tokens of a text
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROUNDS_BETWEEN = 10  # a tenth of the people in each round
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

client = ClientApp()
server = ServerApp()


@cache
def peoples_texts(name: str) -> Tensor:
    """Shape (people, TEXTS, LENGTH): tokens (bytes, for the tiny model) of Python's manual, each stretch as if a person's."""
    manual = "\n".join(topics.values())
    tokens = torch.tensor(AutoTokenizer.from_pretrained(name)(manual)["input_ids"] if name else list(manual.encode()))
    people = len(tokens) // (TEXTS * LENGTH)
    return tokens[: people * TEXTS * LENGTH].view(people, TEXTS, LENGTH)


@cache
def language_model(name: str) -> nn.Module:
    """The model with its adapters, the same at each start; once a process, as each training writes all that is trained."""
    torch.manual_seed(0)
    if name:
        base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        base = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **sizes))
    # Without dropout; PEFT keeps adapters of a bfloat16 model in float32.
    lora = LoraConfig(r=8, target_modules=ADAPTED, task_type="CAUSAL_LM", init_lora_weights="gaussian")
    return get_peft_model(base, lora).to(DEVICE)


def train(adapters: ArrayRecord, person: str, config: ConfigRecord, context: Context) -> ArrayRecord:
    """The adapters after some steps on all texts of a person."""
    name = str(context.run_config["model"])
    model, texts = language_model(name), peoples_texts(name)[int(person)].to(DEVICE)
    load_arrays(model, adapters)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=float(config["rate"]))
    for _ in range(int(config["steps"])):
        optimizer.zero_grad()
        sequence_loss(model(input_ids=texts), texts).backward()
        optimizer.step()
    return arrays_of(model)


def people(context: Context) -> list[str]:
    """In a simulation each node can stand for everybody; a node with people of its own names those."""
    return [str(person) for person in range(int(context.run_config["people"]))]


host_users(client, people, sequential_training(train), shared=True)


def perplexity(model: nn.Module, texts: Tensor) -> float:
    """Of public texts: that of a person's texts would need noise of its own."""
    with torch.no_grad():
        losses = [float(sequence_loss(model(input_ids=part), part)) * len(part) for part in texts.split(64)]
    return math.exp(sum(losses) / len(texts))


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print perplexity, a line that the model writes, and what is promised."""
    options = context.run_config
    name, count = str(options["model"]), int(options["people"])
    model, public = language_model(name), peoples_texts(name)[count:].flatten(0, 1).to(DEVICE)
    participation = Participation(rounds=int(options["turns"]) * ROUNDS_BETWEEN, min_separation=ROUNDS_BETWEEN)
    plan = Plan.calibrated(
        "lambda-cgd:0.7", participation, clip_norm=1.0, epsilon=float(options["epsilon"]), delta=1 / (10 * count)
    )
    cohort = count // ROUNDS_BETWEEN
    inner = FedAdam(min_train_nodes=cohort, eta=float(options["server-rate"]), beta_1=0.9, beta_2=0.99)
    strategy = CorrelatedNoise(inner, plan, key=NoiseKey.from_file("noise.key", create=True), ledger="run.db")

    def evaluate(release: int, adapters: ArrayRecord) -> MetricRecord | None:
        if release % ROUNDS_BETWEEN:
            return None
        load_arrays(model, adapters)
        return MetricRecord({"perplexity": perplexity(model, public)})

    start = time.perf_counter()
    result = strategy.start(
        grid, arrays_of(model), evaluate_fn=evaluate,
        train_config=ConfigRecord({"steps": int(options["local-steps"]), "rate": float(options["local-rate"])}),
    )  # fmt: skip
    seconds = time.perf_counter() - start
    measured = result.evaluate_metrics_serverapp
    load_arrays(model, result.arrays)
    written = model.generate(input_ids=public[:1, :16], max_new_tokens=48, do_sample=False, pad_token_id=0)[0].tolist()
    text = AutoTokenizer.from_pretrained(name).decode(written) if name else bytes(written).decode(errors="replace")
    print(f"{sum(a.numpy().size for a in result.arrays.values())} numbers in a message")
    print(
        f"perplexity {measured[0]['perplexity']:.1f} → {measured[max(measured)]['perplexity']:.1f} in {seconds:.0f} s"
    )
    print(f"it writes: {text!r}")
    print(f"for a person with at most {TEXTS} texts: {plan.guarantee()}")
