#!/usr/bin/env bash
# Everything that docs/results.md shows: the sweeps, the rules for λ, the plots, and the tables in the page itself.
#
#     benchmarks/experiments.sh [RESULTS [STAGE…]]
#
# Without stages all of them, the most important first; what is in the results already is not run again, so that a run that was
# ended goes on. The hours of each stage are in the page.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
results="${1:-$root/benchmarks/results}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
stages=("${@:2}")
cd "$root/simulations"
export OMP_NUM_THREADS=1

# Five numbers for each mechanism that has one.
tuned=(lambda-cgd:{0.3,0.5,0.7,0.8,0.9} bisr:{2,3,4,8,16} band-inv-mf:{2,3,4,8,16} blt:{1,2,3,4,5} banded-toeplitz:{2,4,8,16,32})
more=(bsr:{2,4,8,16,32} band-mf:{2,4,8,16,32} tree diagonal dense)
slow=(nu-dp-ftrl:{0.001,0.003,0.01,0.03,0.1} toeplitz) # every round's noise needs that of all rounds before
digits=(--task digits --batch 60 --tuning-seeds 5)
tweets=(--task tweets --batch 500 --tuning-seeds 3)
fashion=(--task fashion-mnist --batch 500 --tuning-seeds 1)

# sweep FILE "RATE RATE …" "MECHANISM …" OPTION…
sweep() {
    local words=(--epsilon 1 --epsilon 2 --epsilon 4 --epsilon 8 --address here)
    for rate in $2; do words+=(--learning-rate "$rate"); done
    for mechanism in $3; do words+=(--mechanism "$mechanism"); done
    python -m fedcgd_experiments sweep --output "$results/$1.jsonl" "${words[@]}" "${@:4}"
}

plain() { sweep "$1" "$2" "dp-sgd ${tuned[*]} ${*:3:1}" "${@:4}"; }
amplified() {
    sweep "$1" "$2" "dp-sgd" --sampling poisson "${@:3}"
    sweep "$1" "$2" "dp-sgd ${tuned[*]:0:5}" --sampling balls-in-bins "${@:3}"
}

stage() {
    case "$1" in
        digits) plain digits "0.25 0.5 1 2 4 8 16" "${more[*]}" "${digits[@]}" ;;
        digits-slow) sweep digits "0.25 0.5 1 2 4 8 16" "${slow[*]}" "${digits[@]}" ;;
        digits-amplified) amplified digits "0.25 0.5 1 2 4 8 16 32" "${digits[@]}" ;;
        tweets) plain tweets "0.5 1 2 4 8 16 32" "${more[*]}" "${tweets[@]}" ;;
        tweets-amplified) amplified tweets "0.5 1 2 4 8 16 32 64" "${tweets[@]}" ;;
        fashion-mnist) plain fashion-mnist "0.5 1 2 4 8 16 32" "" "${fashion[@]}" ;;
        fashion-mnist-amplified) amplified fashion-mnist "0.5 1 2 4 8 16 32" "${fashion[@]}" ;;
        *) echo "unknown stage $1" >&2; return 2 ;;
    esac
}

for name in "${stages[@]:-digits}"; do stage "$name"; done
