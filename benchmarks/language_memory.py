"""Memory of a private step of LoRA on a causal language model: calculated for any size, and measured for one that fits.

python benchmarks/language_memory.py                        # models of 1 and 8 billion parameters, calculated
python benchmarks/language_memory.py --measure --layers 8   # a smaller one: calculated, and the process's peak in a step
python benchmarks/language_memory.py --measure --model "8 B" --device cuda   # that one with random weights, and the GPU's peak

A step of `examples/language_texts.py`: a base in bfloat16 that is frozen, adapters in float32, AdamW, replayed noise.

    base            2·N bytes, N parameters (0.5·N in 4 bits)
    adapters        16·A: A numbers, their gradient, and two of AdamW's
    per text        4·A, its gradient by each adapter, of which a part of a batch has as many as it has texts
    sum             16·A: a float64 for each number, and another while it is rounded and noised
    noise kept      0: earlier noise is made again from the key
    logits          20 for each text, token and word of the vocabulary: the loss is computed in float32
    activations     what else autograd keeps for the backward pass, counted in the model itself on torch's meta device

Measured steps took 1.1 to 1.5 times the sum of the last four on a CPU and 0.7 times on an H200; the first step, which looks
whether examples are independent, takes two to three times what later ones take. The table is in docs/guides/trainers.md.
"""

import argparse
import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from fedcgd import NoiseKey
from fedcgd.opacus import CorrelatedPrivacyEngine, sequence_loss

ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {  # as Llama 3.2 1B and Llama 3.1 8B have them
    "1 B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8 B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
VOCABULARY = 128256  # of both
GIB = 2**30


def adapted(sizes: dict[str, int], vocabulary: int, tied: bool, device: str) -> nn.Module:
    config = LlamaConfig(vocab_size=vocabulary, num_key_value_heads=8, tie_word_embeddings=tied, **sizes)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        base = LlamaForCausalLM(config)
        model = get_peft_model(base, LoraConfig(r=8, target_modules=ADAPTED, task_type="CAUSAL_LM"))
    torch.set_default_dtype(torch.float32)
    return model.train()


def kept_for_backward(model: nn.Module, texts: int, length: int, vocabulary: int) -> int:
    """Bytes of the tensors that autograd keeps, without parameters and logits; on the meta device nothing is computed."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and tensor.numel() < texts * (length - 1) * vocabulary:
            kept[storage._cdata] = storage.nbytes(), tensor
        return tensor

    ids = torch.zeros(texts, length, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = sequence_loss(model(input_ids=ids), ids)
    del loss
    return sum(size for size, _ in kept.values())


def calculated(name: str, model: nn.Module, texts: int, length: int) -> float:
    """GiB in all; the parts are printed."""
    vocabulary = model.get_base_model().config.vocab_size
    base = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parts = {
        "base": 2 * base, "adapters": 16 * adapters, f"{texts} gradients": 4 * adapters * texts, "sum": 16 * adapters,
        "logits": 20 * texts * length * vocabulary,
        "activations": kept_for_backward(model, texts, length, vocabulary),
    }  # fmt: skip
    told = ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items())
    print(f"{name}: N = {base / 1e6:.0f} million, A = {adapters / 1e6:.1f} million; GiB: {told}; noise 0", flush=True)
    total = sum(parts.values()) / GIB
    print(f"  in all {total:.2f}, and {total - 1.5 * base / GIB:.2f} with the base in 4 bits")
    return total


def status(name: str) -> float:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 2**20


def held_and_peak(device: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """Two functions: GiB in use now, from where a peak is counted anew; and that peak, when all work is done."""
    if device == "cuda":

        def on_gpu() -> float:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / GIB

        def gpu_peak() -> float:
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() / GIB

        return on_gpu, gpu_peak

    def in_process() -> float:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return status("VmRSS")

    return in_process, lambda: status("VmHWM")


def measured(sizes: dict[str, int], vocabulary: int, tied: bool, texts: int, length: int, device: str) -> None:
    """Peak above what was held before the model, of this process or of the GPU, and the time of a step."""
    held, peak = held_and_peak(device)
    before = held()
    model = adapted(sizes, vocabulary, tied, device)
    ids = torch.randint(vocabulary, (5 * texts, length))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    _, optimizer, loader = CorrelatedPrivacyEngine(NoiseKey.simulation(0)).make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(ids), texts), wrap_model=False,
        mechanism="lambda-cgd", sampling="none", epochs=1, target_epsilon=8.0, target_delta=1e-3, max_grad_norm=1.0,
    )  # fmt: skip
    for (part,) in loader:
        now, begin = held(), time.perf_counter()
        texts_there = part.to(device)
        sequence_loss(model(input_ids=texts_there), texts_there).backward()
        optimizer.step()
        optimizer.zero_grad()
        more, seconds = peak() - now, time.perf_counter() - begin
        print(f"  measured: {now - before:.2f} GiB before the step, {more:.2f} more in it, {seconds:.2f} s", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--texts", type=int, default=4, help="in a part of a batch")
    options.add_argument("--length", type=int, default=512, help="tokens of a text")
    options.add_argument("--measure", action="store_true")
    options.add_argument("--model", choices=list(SIZES), help="to measure one of these, and not a smaller one")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="to measure on")
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument("--vocabulary", type=int, default=32000)
    args = options.parse_args()
    if args.measure and args.model:
        tied, vocabulary = args.model == "1 B", VOCABULARY
        calculated(args.model, adapted(SIZES[args.model], vocabulary, tied, "meta"), args.texts, args.length)
        measured(SIZES[args.model], vocabulary, tied, args.texts, args.length, args.device)
        return
    if args.measure:
        sizes = {
            "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "num_hidden_layers": args.layers,
            "num_attention_heads": 8,
        }  # fmt: skip
        calculated("small", adapted(sizes, args.vocabulary, True, "meta"), args.texts, args.length)
        measured(sizes, args.vocabulary, True, args.texts, args.length, args.device)
        return
    for name, sizes in SIZES.items():
        calculated(name, adapted(sizes, VOCABULARY, name == "1 B", "meta"), args.texts, args.length)


if __name__ == "__main__":
    main()
