#!/usr/bin/env bash
# All that needs a GPU, in about 30 minutes on one: whether it is right there, the noise's time and bandwidth, and its share of a step.
#
#     benchmarks/gpu.sh [RESULTS]             RESULTS: a folder, results/gpu if not given; what it holds is not measured again
#     TABLES=1 benchmarks/gpu.sh [RESULTS]    the whole Tables 1 and 2 of arXiv:2601.22334, which take hours
#     DRY=1 benchmarks/gpu.sh [RESULTS]       tiny sizes, on a CPU too: whether this script gets through
#     benchmarks/gpu.sh cifar DATA [RESULTS]  accuracies on CIFAR-10 and IMDB instead, in MINUTES (9): the figures of arXiv:2601.22334 and
#                                             the planner's exam. DATA: the folder of cifar-10-batches-bin and aclImdb; its sheet.json
#                                             has every σ and plan: made, on a CPU in ten minutes, if it is not there
#     benchmarks/gpu.sh pure [RESULTS]        time and memory of the pure step, the adapter and Opacus instead, in two minutes
#
# Needs: pip install -e '.[dev]', a CUDA GPU with 40 GB (PHYSICAL_BATCH=16 does with 20), no data and no network.
# Prints and writes: correct.txt (tests.txt, and exit code 1, if a test failed), noise-*.json and runtime.jsonl (for
# `python -m fedcgd_experiments plot`), each as soon as it is there.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
task="" data=""
if [ "${1:-}" = cifar ]; then
    task=cifar data="$(cd "$2" && pwd)"
    shift 2
elif [ "${1:-}" = pure ]; then
    task=pure
    shift
fi
results="${1:-$root/results/gpu}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
cd "$root"
export PYTHONPATH="$root:$root/strategies:$root/simulations${PYTHONPATH:+:$PYTHONPATH}"
device=cuda sizes="25000000 86000000 632000000" repeats=21 physical="${PHYSICAL_BATCH:-64}" turns="${TURNS:-3}"
models="cnn wideresnet-40 vit-b-16 bert-tiny bert-base" variants="--variant dp-sgd:1 --variant replay:2 --variant cpu-buffer:2"
if [ -n "${TABLES:-}" ]; then
    models="cnn wideresnet-40 vit-b-16 vit-l-16 vit-h-14 lstm bert-tiny bert-base bert-large" variants="" turns="${TURNS:-7}"
fi
if [ -n "${DRY:-}" ]; then
    sizes=5000 repeats=2 physical=2 models="cnn bert-tiny" variants="--variant replay:2" turns=2
    device="$(python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')"
elif ! python -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
    echo "there is no CUDA GPU that PyTorch can use ('torch.cuda.is_available()' is False); DRY=1 tries this script without one" >&2
    exit 2
fi

if [ "$task" = pure ]; then
    python benchmarks/pure_step.py --output "$results/pure_step.jsonl" ${DRY:+--tiny}
    exit
fi

if [ "$task" = cifar ]; then
    accuracies="python -m fedcgd_experiments.real_data"
    [ -s "$data/sheet.json" ] || $accuracies prepare "$data/sheet.json"
    [ ! -d "$data/aclImdb" ] || $accuracies texts --data-dir "$data" > "$results/texts.log" 2>&1 & # while networks are trained
    $accuracies run "$data/sheet.json" "$results/real_data.jsonl" --data-dir "$data" --device "$device" --minutes "${MINUTES:-9}" \
        ${DRY:+--examples 40 --rounds 2} | tee -a "$results/real_data.log"
    exit
fi

wrong=0
if [ ! -s "$results/correct.txt" ]; then
    if python -m pytest -q -rs -p no:cacheprovider tests/gpu/test_gpu.py tests/gpu/test_gpu_device.py tests/noise/test_noise_gpu.py -m "" \
        > "$results/tests.txt" 2>&1; then
        mv "$results/tests.txt" "$results/correct.txt"
    else
        wrong=1
        cat "$results/tests.txt"
        echo "some tests fail here: see $results/tests.txt; times follow" >&2
    fi
fi
[ "$wrong" = 1 ] || tail -n 3 "$results/correct.txt"

for size in $sizes; do
    [ -s "$results/noise-$size.json" ] || python benchmarks/noise.py --device "$device" --size "$size" --repeats "$repeats" \
        --json "$results/noise-$size.json"
done

for model in $models; do
    case "$model" in lstm | bert-*) batch=128 ;; *) batch=512 ;; esac
    case "$model" in vit-l-16 | vit-h-14 | bert-large) at_once=$((physical < 16 ? physical : 16)) ;; *) at_once=$physical ;; esac
    [ -z "${DRY:-}" ] || batch=4
    # shellcheck disable=SC2086  # several words
    python benchmarks/runtime.py --model "$model" --batch "$batch" --physical "$at_once" --turns "$turns" $variants \
        --output "$results/runtime.jsonl"
done
echo "all results are in $results"
exit "$wrong"
