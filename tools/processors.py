"""The numeric tests as on other processors: `python tools/processors.py`, or with what pytest is to run instead.

NumPy's and SciPy's OpenBLAS, NumPy's own loops, PyTorch's and oneDNN each choose code by the instructions that a processor has,
and so the last digits of most numbers. Each configuration switches off some of them; one that needs instructions which this
processor lacks is left out.
Ends with 1 if a test fails in one of them.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "accounting",
    "clipping",
    "curvature",
    "mechanisms",
    "noise",
    "optimisation",
    "participation",
    "planning",
    "quadratic",
    "release",
)
# What the processor needs, in the words of Linux; OpenBLAS' kernel; NumPy's loops that stay on; PyTorch's; oneDNN's; threads.
CONFIGURATIONS = (
    (set(), "Prescott", (), "default", "SSE41", 2),
    ({"avx2", "fma"}, "Haswell", ("X86_V3",), "avx2", "AVX2", 1),
    ({"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "SkylakeX", ("X86_V3", "X86_V4"), "avx512", "AVX512_CORE", 2),
)
LOOPS = "import numpy._core._multiarray_umath as m; print(*(n for n in m.__cpu_dispatch__ if m.__cpu_features__[n]))"
IN_FORCE = """
import numpy, scipy.linalg, threadpoolctl, torch
blas = {(one["internal_api"], one.get("architecture"), one["num_threads"]) for one in threadpoolctl.threadpool_info()}
print("==", *(f"{name} {kernel} with {threads} threads," for name, kernel, threads in sorted(blas, key=str)),
      "PyTorch", torch.backends.cpu.get_cpu_capability(), flush=True)
"""


def main() -> int:
    if platform.machine() not in ("x86_64", "AMD64"):
        print(
            f"{platform.machine()}: only x86-64 has kernels to choose among; `make test` ran with those of this processor"
        )
        return 0
    features = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    # NumPy refuses to switch off what the processor has not.
    loops = subprocess.run([sys.executable, "-c", LOOPS], capture_output=True, text=True, check=True).stdout.split()
    tests = sys.argv[1:] or ["-m", "not slow and not long", *(f"tests/{folder}" for folder in FOLDERS)]
    failed = []
    for needed, kernel, kept, capability, isa, threads in CONFIGURATIONS:
        if not needed <= features:
            print(f"== {kernel}: left out, this processor has no {', '.join(sorted(needed - features))}", flush=True)
            continue
        settings = os.environ | {
            "OPENBLAS_CORETYPE": kernel,
            "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in loops if name not in kept),
            "ATEN_CPU_CAPABILITY": capability,
            "ONEDNN_MAX_CPU_ISA": isa,
            "OMP_NUM_THREADS": str(threads),
            "OPENBLAS_NUM_THREADS": str(threads),
        }
        subprocess.run([sys.executable, "-c", IN_FORCE], env=settings, check=True)
        if subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], env=settings, cwd=ROOT).returncode:
            failed.append(kernel)
    print(f"== failed with {', '.join(failed)}" if failed else "== no test failed in any configuration")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
