#!/usr/bin/env bash
# The experiments of docs/results.md. What is in the results already is not run again. About four hours of one core.
set -euo pipefail
results="${1:-results}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
cd "$(dirname "$0")/../simulations"
export OMP_NUM_THREADS=1
budgets=(--epsilon 1 --epsilon 2 --epsilon 4 --epsilon 8)
lambdas=(--lam 0.3 --lam 0.5 --lam 0.7 --lam 0.8 --lam 0.9 --lam 0.95)
digits=(--task digits --batch 60 --learning-rate 0.5 --learning-rate 1 --learning-rate 2 --learning-rate 4 --learning-rate 8)
fashion=(--task fashion-mnist --batch 500 --tuning-seeds 1 --learning-rate 2 --learning-rate 8 --learning-rate 32)
tweets=(--task tweets --batch 500 --learning-rate 2 --learning-rate 8 --learning-rate 32)
others=(--mechanism bisr:p=4 --mechanism band-inv-mf:p=4 --mechanism blt:d=4 --mechanism banded-toeplitz:p=8)
amplified=(--sampling balls-in-bins --mechanism dp-sgd --mechanism lambda-cgd --lam 0.5 --lam 0.8)

sweep() { python -m fedcgd_simulations sweep "${budgets[@]}" "$@"; }

sweep --output "$results/digits.jsonl" "${digits[@]}" "${lambdas[@]}"
sweep --output "$results/digits-balls-in-bins.jsonl" "${digits[@]}" "${amplified[@]}"
sweep --output "$results/fashion-mnist.jsonl" "${fashion[@]}" --lam 0.5 --lam 0.8 --lam 0.9
sweep --output "$results/fashion-mnist-balls-in-bins.jsonl" "${fashion[@]}" "${amplified[@]}"
sweep --output "$results/tweets.jsonl" "${tweets[@]}" "${lambdas[@]}"
for task in digits fashion tweets; do
    declare -n options="$task"
    sweep --output "$results/$task-mechanisms.jsonl" "${options[@]}" "${others[@]}" --mechanism dp-sgd
done
python -m fedcgd_simulations compare "$results"/*.jsonl
python -m fedcgd_simulations plot "$results"/*.jsonl --output "$results/plots"
