"""Deployments on this machine, with TLS and node keys: silos are the keepers, or processes are that know nothing of Flower.

One keeper is killed and comes back.
"""

import os
from pathlib import Path

import pytest
from documented_deployment import followed
from sql import rows

from fedcgd.keepers import EVALUATION
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
self_signed() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "/CN=$1" \
        -addext "subjectAltName=IP:127.0.0.1" -keyout "certificates/$1.key" -out "certificates/$1.crt"
}
printf 'colluding = 1\nepsilon = 8.0\ndelta = 1e-5\n\n' > keepers.toml
for i in 0 1 2; do
    ssh-keygen -q -t ecdsa -b 384 -N "" -f "silo$i.key"
    if [ "$CERTIFICATES" ]; then
        mkdir -p certificates
        self_signed "keeper$i"
        fedcgd keeper new "keeper$i.key" --name "keeper-$i" --address "127.0.0.1:$((PORT + 11 + i))" >> keepers.toml
    else
        fedcgd keeper new "keeper$i.key" --name "keeper-$i" >> keepers.toml
    fi
done
if [ "$CERTIFICATES" ]; then
    self_signed server
    cat certificates/keeper?.crt > certificates/keepers.crt
fi
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
        --node-config "silo=$1 silos=3 participations=\"$PWD/participations$1.db\" ${2:-}" >> "silo$1.log" 2>&1 &
    echo $! > "silo$1.pid"
}
start_keeper() {
    if [ "$CERTIFICATES" ]; then
        fedcgd keeper serve "keeper$1.key" --keepers keepers.toml --certificate "certificates/keeper$1.crt" \
            --private-key "certificates/keeper$1.key" --server certificates/server.crt >> "keeper$1.log" 2>&1 &
        echo $! > "keeper$1.pid"
    else
        start_silo "$1" "keeper=\"$PWD/keeper$1.key\""
        cp "silo$1.pid" "keeper$1.pid"
    fi
}
for i in 0 1 2; do
    flwr supernode register "silo$i.key.pub" production --name "silo$i"
    start_keeper $i
    [ -z "$CERTIFICATES" ] || start_silo $i
done
flwr run "$APP" production --run-config "rounds=$ROUNDS keepers='$PWD/keepers.toml' key='$PWD/cohorts.key' \
    ledger='$PWD/run.db' certificates='$CERTIFICATES'" >> run.log 2>&1
released() {
    fedcgd ledger verify "${1:-run.db}" --json 2> /dev/null \
        | python -c 'import json, sys; print(json.load(sys.stdin)["released"])' 2> /dev/null || echo 0
}
until [ "$(released)" -ge 1 ]; do sleep 3; done
kill -9 "$(cat keeper1.pid)"
sleep 5
# Until the link has noticed, it refuses a second node with this key.
until [ "$(released)" -ge "$ROUNDS" ]; do
    kill -0 "$(cat keeper1.pid)" 2> /dev/null || start_keeper 1
    sleep 5
done
until [ "$(released run.db.evaluation)" -ge 1 ]; do sleep 3; done
fedcgd keeper verify keeper-0=keeper0.key.record keeper-1=keeper1.key.record keeper-2=keeper2.key.record --ledger run.db
sleep 3
for one in silo0 silo1 silo2 keeper0 keeper1 keeper2 superlink; do kill "$(cat $one.pid)" || true; done
"""


@pytest.mark.slow
@pytest.mark.flower
@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("services", [False, True], ids=["silos", "services"])
def test_three_keepers_make_the_noise_of_a_deployed_run(services: bool, tmp_path: Path) -> None:
    root = APP.parents[1]
    sources = os.pathsep.join(map(str, (root, root / "strategies")))
    variables = {
        "PYTHONPATH": f"{sources}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "PORT": str(free_port()),
        "APP": str(APP),
        "ROUNDS": str(ROUNDS),
        "CERTIFICATES": str(tmp_path / "certificates") if services else "",
    }
    code, *_ = followed(SCRIPT, tmp_path, variables, LIMIT)
    logs = {path.name: path.read_text(errors="replace")[-3000:] for path in tmp_path.glob("*.log")}
    assert code == 0, logs
    found = verify(tmp_path / "run.db")
    assert (found.released, found.problems, found.run.simulated) == (ROUNDS, (), False)
    assert found.keepers.names == ("keeper-0", "keeper-1", "keeper-2")
    assert found.keepers.spent <= 1  # the one in which the silo was killed, if it was asked in that moment
    records = {f"keeper-{i}": read(record_file(tmp_path / f"keeper{i}.key")) for i in range(3)}
    assert contradictions(records, tmp_path / "run.db") == []
    assert min(len(record.openings) for record in records.values()) >= ROUNDS - 1
    measured = verify(tmp_path / "run.db.evaluation")
    assert (measured.released, measured.problems, measured.keepers.spent) == (1, (), 0)
    assert all([one.round for one in record.openings if one.kind == EVALUATION] == [0] for record in records.values())
    assert found.keepers.with_evaluations[1] < 8.0 < found.keepers.with_evaluations[2]
    asked = dict(rows(tmp_path / "run.db", "SELECT user, participations FROM users"))
    assert len(asked) >= 20 * ROUNDS  # others take the places of those whose silo is away when a round is tried again
    assert set(asked.values()) == {1}  # and nobody is in two of three rounds
    for silo in range(3):
        counts = rows(tmp_path / f"participations{silo}.db", "SELECT user FROM users WHERE user LIKE 'training %'")
        counted = {user.removeprefix("training ") for (user,) in counts}
        hosted = {user for user in asked if int(user.split()[1]) % 3 == silo}
        if silo == 1 and not services:  # it may have been killed while its users were asked, and the others went on
            assert counted <= hosted
        else:
            assert counted == hosted
    if services:
        assert "3 opened" in logs["keeper1.log"]
        assert "keeper-1" not in logs["silo1.log"]
