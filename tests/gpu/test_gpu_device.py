"""What only a real GPU can tell: bits of its kernels, more numbers than an int32 counts, streams, other devices, low precision.

`benchmarks/gpu.sh` runs these where there is one.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gpu_runs import Reader, private, tf32, train_in_a_group
from plans import make_plan
from torch import nn
from torch.utils.data import TensorDataset

from fedcgd import BSR, LambdaCGD, NoiseKey, Participation
from fedcgd.central import PrivateGradient
from fedcgd.central.releases import Releases
from fedcgd.clipping import per_sample_gradients
from fedcgd.noise import NoiseStream, tensors
from fedcgd.noise.quantisation import Lattice
from fedcgd.noise.stream import key_words
from fedcgd.noise.tensors import GpuKernels, TensorNormals, gpu_kernels, sum_digest
from fedcgd.release.run_noise import LatticeNormals

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: benchmarks/gpu.sh runs it on one"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
]

CUDA = torch.device("cuda", 0)
STREAM, GRID = NoiseStream(bytes(range(32))), Lattice(2.0**-18)


@pytest.fixture
def kernels() -> GpuKernels:
    found = gpu_kernels(CUDA)
    assert found is not None, "Triton does not work on this GPU, or gives other bits"
    return found


@pytest.fixture
def room(request: pytest.FixtureRequest) -> None:
    """Skips a test unless the GPU has as many free bytes as its parameter says."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(CUDA)[0]
    if free < request.param:
        pytest.skip(f"needs {request.param / 2**30:.0f} GiB of GPU memory, and {free / 2**30:.0f} are free")


@pytest.mark.parametrize("start", [0, 5, 2**31 - 700, 2**32 * 12 - 700, 2**40 - 100_001])
@pytest.mark.parametrize("size", [1, 127, 1535, 1536, 1537, 100_001])
def test_numbers_have_the_bits_of_a_cpu(size: int, start: int, kernels: GpuKernels) -> None:
    out = torch.zeros(size, device=CUDA)
    kernels.fill_normals(out, start, key_words(STREAM.key_of(3, 2**100)))
    expected = STREAM.normal(3, 2**100, start, start + size)
    assert out.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("terms", [1, 2, 3, 16, 17])
def test_sums_have_the_whole_numbers_of_a_cpu(terms: int, kernels: GpuKernels) -> None:
    size = 300_001
    made = [(i, 7, (-0.9) ** i) for i in range(terms)]
    total, expected = torch.arange(size, device=CUDA), np.arange(size)
    TensorNormals(STREAM, GRID).add(total, made, 3.0)
    LatticeNormals(STREAM, GRID).add(expected, made, 3.0)
    np.testing.assert_array_equal(total.cpu().numpy(), expected)
    row = torch.randn(size, device=CUDA)
    TensorNormals(STREAM, GRID).add_row(total, row, made[0], 3.0)
    LatticeNormals(STREAM, GRID).add_row(expected, row.cpu().numpy(), made[0], 3.0)
    np.testing.assert_array_equal(total.cpu().numpy(), expected)


@pytest.mark.parametrize("room", [10 * 2**30], indirect=True)
def test_more_numbers_than_an_int32_counts(kernels: GpuKernels, room: None) -> None:
    size = 2**31 + 1000
    out = torch.zeros(size, device=CUDA)
    kernels.fill_normals(out, 0, key_words(STREAM.key_of(3, 0)))
    for start in (2**31 - 1000, size - 1000):
        expected = STREAM.normal(3, 0, start, start + 1000)
        assert out[start : start + 1000].cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("room", [17 * 2**30], indirect=True)
def test_more_numbers_in_rows_than_an_int32_counts(room: None) -> None:
    columns = 2**30 + 3
    rows, total = torch.zeros(3, columns, dtype=torch.float16, device=CUDA), torch.zeros(columns, device=CUDA).long()
    rows[:, -1] = torch.tensor([1.0, 2.0, 4.0])
    per_sample_gradients.add_rows(total, rows, torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64, device=CUDA))
    assert total[-1] == 421.0
    assert not total[:-1].any()


def test_the_digest_of_a_sum_is_that_of_numpy(kernels: GpuKernels) -> None:
    steps = torch.arange(30_000_000, device=CUDA)  # hashed twice
    hashes, key = steps.cpu().numpy(), bytes(32)
    found = sum_digest(steps, key)
    for _ in range(2):
        key = tensors.hashlib.sha256(b"fedcgd fingerprint" + key).digest()
        coefficients = tensors._coefficients(key, torch.device("cpu")).numpy()
        tiles = np.pad(hashes, (0, -len(hashes) % coefficients.shape[1])).reshape(-1, coefficients.shape[1])
        hashes = np.stack([(tiles * row).sum(1) for row in coefficients], axis=1).reshape(-1)
    np.testing.assert_array_equal(found, hashes)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("columns", [10, 70_001])
def test_clipped_rows_have_the_whole_numbers_of_a_cpu(columns: int, kind: torch.dtype) -> None:
    assert per_sample_gradients._on_gpu(CUDA) is not per_sample_gradients._BY_TORCH
    rows = torch.randn(200, columns).to(kind)
    rows[5, 7] = torch.nan
    wanted, sums = torch.arange(200) % 9 > 0, []
    for device in ("cpu", "cuda"):
        total = torch.zeros(columns, dtype=torch.int64, device=device)
        parts = [rows[:, :3].to(device), rows[:, 3:].to(device)]
        factors = per_sample_gradients.add_clipped_rows(total, parts, wanted.to(device), 0.7, Lattice(2.0**-30))
        assert ((factors > 0).cpu() == wanted & (torch.arange(200) != 5)).all()
        sums.append(total.cpu())
    assert (sums[0] - sums[1]).abs().max() <= 200  # norms add up in another order: a step of each row


class Own(nn.Module):
    """No model of known layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 3), Own])
@pytest.mark.parametrize("mechanism", [LambdaCGD(0.9), BSR(3)])
def test_a_pure_step_is_that_of_a_cpu(make, mechanism, tmp_path: Path) -> None:
    plan = make_plan(mechanism, Participation(rounds=6, min_separation=3), noise_multiplier=1.0)
    data = torch.randn(12, 6), torch.arange(12) % 3
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = make().to(device)
        examples = TensorDataset(*(part.to(device) for part in data))
        record = tmp_path / f"{device}.db"
        step = PrivateGradient(
            model, nn.functional.cross_entropy, examples, plan, key=NoiseKey.simulation(1), record=record
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            step()
            optimizer.step()
        found.append(torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-4)


def test_another_stream() -> None:
    total, expected = torch.zeros(10_000_000, dtype=torch.int64, device=CUDA), np.zeros(10_000_000, np.int64)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for i in range(3):
            total.add_(1)
            TensorNormals(STREAM, GRID).add(total, [(i, 0, 1.0)], 3.0)
    torch.cuda.synchronize()
    for i in range(3):
        expected += 1
        LatticeNormals(STREAM, GRID).add(expected, [(i, 0, 1.0)], 3.0)
    np.testing.assert_array_equal(total.cpu().numpy(), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one() -> None:
    other = torch.device("cuda", 1)
    assert gpu_kernels(other) is not None
    assert per_sample_gradients._on_gpu(other) is not per_sample_gradients._BY_TORCH
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_no_example_exceeds_the_clip_norm(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In TF32, and in bfloat16 and float16 by autocast: one example a batch, so that the round's sum is its clipped gradient."""
    sums, release = [], Releases.release

    def listening(releases: Releases, total: torch.Tensor, round: int, rows: np.ndarray) -> torch.Tensor | None:
        sums.append(float(total.double().norm()) * releases.step)
        return release(releases, total, round, rows)

    monkeypatch.setattr(Releases, "release", listening)
    kinds = [None, torch.bfloat16, torch.float16]
    data = TensorDataset(torch.randint(0, 20, (12, 5)), torch.randint(0, 3, (12,)))
    plan = make_plan(LambdaCGD(0.9), Participation(rounds=24, min_separation=12), clip_norm=0.01, noise_multiplier=1.0)
    for kind in kinds:
        module, optimizer, loss, loader = private(Reader().to(CUDA), data, plan, grad_sample_mode=mode)
        for tokens, targets in loader:
            with tf32(True), torch.autocast("cuda", kind, enabled=kind is not None):
                loss(module(tokens.to(CUDA)), targets.to(CUDA)).backward()
                optimizer.step()
    assert len(sums) == 12 * len(kinds)
    assert all(0.0099 < norm <= 0.01 for norm in sums)


def test_deep_models_with_attention_are_not_taken_for_mixed() -> None:
    """Attention's slopes are summed in any order on a GPU; in bfloat16 that is a lot of rounding."""
    from fedcgd_simulations.models.vit import vit

    torch.manual_seed(0)
    model = vit("vit-b-16").to(CUDA)
    data = TensorDataset(torch.randn(16, 3, 32, 32), torch.randint(0, 2, (16,)))
    plan = make_plan(BSR(2), Participation(rounds=2, min_separation=2), noise_multiplier=1.0)
    module, optimizer, loss, loader = private(model, data, plan, batch=8)
    for inputs, targets in loader:
        with torch.autocast("cuda", torch.bfloat16):
            wrong = loss(module(inputs.to(CUDA)), targets.to(CUDA))
        wrong.backward()
        optimizer.step()


@pytest.fixture
def group() -> Iterator[None]:
    torch.cuda.set_device(CUDA)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # each version of torch of others
def test_a_process_in_a_group_of_nccl_trains_as_one_without(group: None, tmp_path: Path) -> None:
    found = train_in_a_group("cuda", "ddp", tmp_path)
    assert torch.equal(found, train_in_a_group("cuda", "", tmp_path))
    assert len((tmp_path / "releases of ddp").read_text().splitlines()) == 1 + 6
