#!/usr/bin/env bash
# Everything that docs/results.md and the tables in benchmarks/reports show: the studies, the plots and the tables.
#
#     benchmarks/experiments.sh [RESULTS [STUDY…]]
#
# Without studies all of them. What is in the results already is not run again, so that a run that was ended goes on.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
results="${1:-$root/benchmarks/results}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
cd "$root/simulations"
export OMP_NUM_THREADS=1
python -m fedcgd_experiments run "${@:2}" --results "$results" --processes 0 --nice 19
python -m fedcgd_experiments plot --results "$results" --output "$results/plots"
for page in docs/results benchmarks/reports/results_data benchmarks/reports/results_federated; do
    python -m fedcgd_experiments page "$root/$page.md" --results "$results"
done
