"""A deployment on this machine, with TLS and node keys: three silos are the keepers, one of them is killed and comes back."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from documented_deployment import left_after, started_by_the_page

from fedcgd.keepers.record import read, record_file
from fedcgd.keepers.verification import contradictions
from fedcgd.ledger import verify
from fedcgd_simulations.flower_runs import free_port

APP = Path(__file__).resolve().parents[2] / "examples" / "flower_keepers"
ROUNDS = 3
LIMIT = 1800.0

SCRIPT = r"""
set -euo pipefail
umask 077
export FLWR_HOME="$PWD/flower" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 KEEPERS="$PWD/keepers.toml"
mkdir -p "$FLWR_HOME"
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "/CN=example CA" -keyout ca.key -out ca.crt
openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=localhost" -keyout server.key -out server.csr
printf "subjectAltName=DNS:localhost,IP:127.0.0.1" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile server.ext -out server.crt
printf 'colluding = 1\n\n' > keepers.toml
for i in 0 1 2; do
    ssh-keygen -q -t ecdsa -b 384 -N "" -f "silo$i.key"
    fedcgd keeper new "keeper$i.key" --name "silo-$i" >> keepers.toml
done
flower-superlink --ssl-ca-certfile ca.crt --ssl-certfile server.crt --ssl-keyfile server.key \
    --enable-supernode-auth --database state.db --host 127.0.0.1 --port "$PORT" > superlink.log 2>&1 &
echo $! > superlink.pid
cat > "$FLWR_HOME/config.toml" <<TOML
[superlink]
default = "production"

[superlink.production]
address = "127.0.0.1:$PORT"
root-certificates = "$PWD/ca.crt"
TOML
until flwr ls production > ls.log 2>&1; do sleep 1; done
start_silo() {
    flower-supernode --root-certificates ca.crt --superlink "127.0.0.1:$PORT" --auth-supernode-private-key "silo$1.key" \
        --host 127.0.0.1 --port $((PORT + 1 + $1)) \
        --node-config "silo=$1 silos=3 keeper=\"$PWD/keeper$1.key\"" >> "silo$1.log" 2>&1 &
    echo $! > "silo$1.pid"
}
for i in 0 1 2; do
    flwr supernode register "silo$i.key.pub" production --name "silo$i"
    start_silo $i
done
flwr run "$APP" production --run-config "rounds=$ROUNDS keepers='$PWD/keepers.toml' key='$PWD/cohorts.key' \
    ledger='$PWD/run.db'" >> run.log 2>&1
released() {
    fedcgd ledger verify run.db --json 2> /dev/null | python -c 'import json, sys; print(json.load(sys.stdin)["released"])' \
        2> /dev/null || echo 0
}
until [ "$(released)" -ge 1 ]; do sleep 3; done
kill -9 "$(cat silo1.pid)"
sleep 5
# Until the link has noticed, it refuses a second node with this key.
until [ "$(released)" -ge "$ROUNDS" ]; do
    kill -0 "$(cat silo1.pid)" 2> /dev/null || start_silo 1
    sleep 5
done
fedcgd keeper verify silo-0=keeper0.key.record silo-1=keeper1.key.record silo-2=keeper2.key.record --ledger run.db
sleep 3
for one in silo0 silo1 silo2 superlink; do kill "$(cat $one.pid)" || true; done
"""


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.timeout(LIMIT + 60)
def test_three_silos_keep_the_noise_of_a_deployed_run(tmp_path: Path) -> None:
    root = APP.parents[1]
    sources = os.pathsep.join(map(str, (root, root / "strategies")))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{sources}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PORT": str(free_port()),
        "APP": str(APP),
        "ROUNDS": str(ROUNDS),
    }
    home = tmp_path / "flower"
    with (tmp_path / "output.log").open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", SCRIPT], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT)
            left_after(home, 20.0)
        finally:
            process.kill()
            while remaining := started_by_the_page(home):
                for pid in remaining:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.2)
    logs = {path.name: path.read_text(errors="replace")[-3000:] for path in tmp_path.glob("*.log")}
    assert code == 0, logs
    found = verify(tmp_path / "run.db")
    assert (found.released, found.problems, found.simulated) == (ROUNDS, (), False)
    assert found.keepers.names == ("silo-0", "silo-1", "silo-2")
    assert found.keepers.spent <= 1  # the one in which the silo was killed, if it was asked in that moment
    records = {f"silo-{i}": read(record_file(tmp_path / f"keeper{i}.key")) for i in range(3)}
    assert contradictions(records, tmp_path / "run.db") == []
    assert min(len(record.openings) for record in records.values()) >= ROUNDS - 1
