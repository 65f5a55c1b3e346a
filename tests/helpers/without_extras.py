"""Run as a program: what the base and Flower do where torch, matplotlib, Opacus, Ray and scikit-learn are not installed.

With WINDOWS in the environment: and where the system has none of what Windows lacks.
"""

import contextlib
import importlib
import os
import pkgutil
import signal
import sys
from importlib import metadata
from pathlib import Path

EXTRAS = ("torch", "matplotlib", "triton", "opacus", "ray", "sklearn", "transformers")
OF_POSIX = ("fcntl", "resource", "pwd", "grp", "termios", "syslog")
# What os and signal of Windows do not have, under any Python from 3.11 on.
NOT_IN_OS = (
    "O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "fchmod", "fchown", "chown", "lchown", "fork", "forkpty", "getuid", "geteuid",
    "getgid", "getegid", "getgroups", "setuid", "setgid", "sched_getaffinity", "sched_setaffinity", "sync", "nice", "killpg",
    "getpgid", "setpgid", "setsid", "getsid", "uname", "statvfs", "fstatvfs", "mkfifo", "mknod", "pread", "pwrite",
    "register_at_fork", "fdatasync", "lockf", "posix_fallocate", "posix_fadvise", "memfd_create", "getxattr", "setxattr",
)  # fmt: skip
NOT_IN_SIGNAL = (
    "SIGALRM",
    "setitimer",
    "alarm",
    "ITIMER_REAL",
    "SIGKILL",
    "SIGHUP",
    "SIGUSR1",
    "SIGUSR2",
    "pthread_sigmask",
)


class Missing:
    """A finder that finds none of the packages, nor what is installed of them."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages
        found = metadata.Distribution.from_name

        def from_name(name: str) -> metadata.Distribution:
            if name.lower() in packages:
                raise metadata.PackageNotFoundError(name)
            return found(name)

        metadata.Distribution.from_name = from_name  # type: ignore[method-assign,assignment]

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def as_on_windows() -> None:
    """Take away what Windows lacks, from here on: the standard library and other packages are loaded before."""
    import asyncio
    import sqlite3
    import subprocess
    import tempfile

    import flwr.serverapp.strategy
    import numpy as np
    import scipy.stats

    del asyncio, sqlite3, subprocess, tempfile, flwr, np, scipy
    for name in EXTRAS:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    sys.meta_path.insert(0, Missing(*OF_POSIX))  # type: ignore[arg-type]
    for name in OF_POSIX:
        sys.modules.pop(name, None)
    for module, names in ((os, NOT_IN_OS), (signal, NOT_IN_SIGNAL)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)


def modules_that_need_them() -> set[str]:
    """The modules of the library that cannot be imported."""
    needy = set()
    for package in ("fedcgd", "fedcgd_flower"):
        for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError:
                needy.add(found.name)
    return needy


def federated_run(path: Path) -> None:
    """Four rounds of a server and a node whose model is NumPy, recorded in the ledger at `path`."""
    import numpy as np
    from fake_grid import FakeGrid, FakeNode
    from flwr.app import Array, ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    from fedcgd import LambdaCGD, NoiseKey, Participation, Plan
    from fedcgd_flower import CorrelatedNoise, host_users, sequential_training

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    client = ClientApp()

    def train(model, user, config, context):
        return ArrayRecord({"w": Array(model["w"].numpy() + np.random.standard_normal(6).astype(np.float32))})

    host_users(client, lambda context: [f"u{i}" for i in range(8)], sequential_training(train))
    participation = Participation(rounds=4, min_separation=2)
    plan = Plan.calibrated(LambdaCGD(0.5), participation, clip_norm=0.5, epsilon=8, delta=1e-5)
    inner = FedAvg(min_available_nodes=1, min_train_nodes=1, fraction_evaluate=0.0)
    strategy = CorrelatedNoise(
        inner, plan, key=NoiseKey.generate(), ledger=path, cohort_size=4, patience=0.0, trusted_nodes=True
    )
    strategy.start(FakeGrid({1: FakeNode(client)}), ArrayRecord({"w": Array(np.zeros(6, np.float32))}), num_rounds=4)
    assert strategy.releases == 4


if __name__ == "__main__":
    hidden = os.environ.get("HIDDEN", " ".join(EXTRAS)).split()
    sys.meta_path.insert(0, Missing(*hidden))  # type: ignore[arg-type]
    if "WINDOWS" in os.environ:
        as_on_windows()
    if sys.argv[1] == "modules":
        print("\n".join(sorted(modules_that_need_them())))
    elif sys.argv[1] == "run":
        federated_run(Path(sys.argv[2]))
    elif sys.argv[1] == "block":
        exec(compile(sys.stdin.read(), "block", "exec"), {"__name__": "example"})
    elif sys.argv[1] == "name":
        getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
    else:
        from fedcgd.cli import app

        app(sys.argv[2:])
