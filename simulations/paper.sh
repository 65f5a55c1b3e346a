#!/usr/bin/env bash
# All tables and figures of arXiv:2601.22334 (DP-λCGD), for whoever has CIFAR-10, IMDB and a GPU.
#
#     simulations/paper.sh DATA [RESULTS [STAGE…]]        DATA: the folder of cifar-10-batches-py and aclImdb
#
# What RESULTS holds is not run again. MINUTES=10 stops the trainings after ten minutes: `seconds` in the results say what the rest will take.
# A training goes on from its last epoch. PROCESSES=2 runs two trainings at once. PHYSICAL_BATCH (128; 64 for the times): per-example
# gradients at a time; less needs less memory. Stages: table-4, runtime, table-3 (Figure 4 at the paper's own values: 126 trainings,
# nothing to tune), figure-2, figure-3, figure-4, figure-5 (with 6), figure-7, figure-8, or all of them.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2; }
root="$(cd "$(dirname "$0")/.." && pwd)"
data="$(cd "$1" && pwd)"
results="${2:-results/paper}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
stages=("${@:3}")
export PYTHONPATH="$root/simulations${PYTHONPATH:+:$PYTHONPATH}"

wanted() { [ ${#stages[@]} = 0 ] || [[ " ${stages[*]} " == *" $1"* ]]; }

trainings=()
[ ${#stages[@]} -gt 0 ] || trainings=(table-3 figure-2 figure-3 figure-4 figure-7 figure-8)
for name in ${stages[@]+"${stages[@]}"}; do
    case "$name" in table-4 | runtime | figure-5) ;; *) trainings+=("$name") ;; esac
done
options=(--data-dir "$data" --results "$results" --physical-batch "${PHYSICAL_BATCH:-128}" --processes "${PROCESSES:-1}" ${MINUTES:+--minutes "$MINUTES"})
if wanted figure-5; then
    python -m fedcgd_experiments.paper_figures --numbers "$results/figures.json" --output "$results/plots" --only correlation --only normalisation
fi
if wanted table-4; then python "$root/benchmarks/optimisation.py" | tee "$results/table-4.txt"; fi
if wanted runtime; then
    for model in ${MODELS:-cnn wideresnet-40 vit-b-16 vit-l-16 vit-h-14 lstm bert-tiny bert-base bert-large}; do
        grep -qs "\"model\": \"$model\"" "$results/runtime.jsonl" && continue
        case "$model" in lstm | bert-*) batch=128 ;; *) batch=512 ;; esac
        python "$root/benchmarks/runtime.py" --model "$model" --batch "${RUNTIME_BATCH:-$batch}" --physical "${PHYSICAL_BATCH:-64}" \
            --turns "${TURNS:-7}" --output "$results/runtime.jsonl"
    done
    python -m fedcgd_experiments plot --results "$results" --output "$results/plots"
fi
if [ ${#trainings[@]} -gt 0 ]; then python -m fedcgd_experiments run "${trainings[@]}" "${options[@]}"; fi

