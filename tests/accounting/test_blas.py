"""A process that forks, as Ray does when it starts, while another thread of it finds a noise multiplier."""

import os
import subprocess
import sys

PROGRAM = """
import os, subprocess, sys, threading, time
from fedcgd import DPSGD, Participation, calibrate
from fedcgd.optimisation import catalogue

def work():
    for delta in (1e-5, 2e-5, 3e-5):
        calibrate(DPSGD(), Participation(rounds=210, sampling="poisson", sampling_rate=1 / 21), epsilon=4, delta=delta)
    catalogue.mechanism("band-mf:4", Participation(rounds=400, min_separation=40))

worker = threading.Thread(target=work, daemon=True)
worker.start()
end = time.monotonic() + 100
while worker.is_alive() and time.monotonic() < end:
    subprocess.Popen(["true"], preexec_fn=lambda: None).wait()
    time.sleep(0.02)
os._exit(3 if worker.is_alive() else 0)
"""


def test_a_fork_stops_no_calibration(tmp_path) -> None:
    """With as many threads of BLAS as there are cores; without `one_thread` it never ends where there are two."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    environment["FEDCGD_CACHE"] = str(tmp_path)
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, timeout=200, check=False)
    assert ran.returncode == 0
