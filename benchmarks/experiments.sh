#!/usr/bin/env bash
# The experiments of docs/results.md, with the same or more seeds and learning rates for each point. What is in the results already is not
# run again. From nothing about five hours of one core.
set -euo pipefail
results="${1:-results}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
cd "$(dirname "$0")/../simulations"
export OMP_NUM_THREADS=1
budgets=(--epsilon 1 --epsilon 2 --epsilon 4 --epsilon 8)
mechanisms() { for spelling in "$@"; do echo "--mechanism $spelling"; done; }
plain=($(mechanisms dp-sgd))
lambdas=($(mechanisms lambda-cgd:{0.5,0.7,0.8,0.9,0.95}))
others=($(mechanisms bisr:4 band-inv-mf:4 blt:4 banded-toeplitz:8))
digits=(--task digits --batch 60)
fashion=(--task fashion-mnist --batch 500 --tuning-seeds 1)
tweets=(--task tweets --batch 500 --tuning-seeds 3 --seeds 10)

# sweep FILE "RATE RATE …" OPTION…
sweep() {
    local rates=()
    for rate in $2; do rates+=(--learning-rate "$rate"); done
    python -m fedcgd_experiments sweep --output "$results/$1.jsonl" "${budgets[@]}" "${rates[@]}" "${@:3}"
}

sweep digits "0.5 1 2 4 8" "${digits[@]}" "${plain[@]}" --mechanism lambda-cgd:0.3 "${lambdas[@]}"
sweep fashion-mnist "1 2 4 8 16 32" "${fashion[@]}" "${plain[@]}" "${lambdas[@]}" "${others[@]}"
sweep tweets "0.5 1 2 4 8 16" "${tweets[@]}" "${plain[@]}" "${lambdas[@]}" "${others[@]}"

amplified=(--sampling balls-in-bins "${plain[@]}" --mechanism lambda-cgd:0.5 --mechanism lambda-cgd:0.8)
sweep digits-balls-in-bins "1 2 4 8" "${digits[@]}" "${amplified[@]}"
sweep fashion-mnist-balls-in-bins "2 4 8 16" "${fashion[@]}" "${amplified[@]}"
sweep tweets-amplified "2 4 8 16" "${tweets[@]}" "${amplified[@]}"
sweep tweets-amplified "2 4 8 16" "${tweets[@]}" --sampling poisson --mechanism dp-sgd

python -m fedcgd_experiments compare "$results"/*.jsonl
python -m fedcgd_experiments compare --baseline lambda-cgd "$results"/*.jsonl
python -m fedcgd_experiments plot "$results"/*.jsonl --output "$results/plots"
