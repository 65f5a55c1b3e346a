#!/usr/bin/env bash
# Everything that docs/results.md shows of mechanisms and λ: the sweeps, the rules for λ, the plots, and the tables in the page itself.
#
#     benchmarks/experiments.sh [RESULTS [STAGE…]]
#
# Without stages all of them, the most important first; what is in the results already is not run again, so that a run that was
# ended goes on. The page says the processor minutes of each. Stages that are left out unless they are named: the models that are not linear
# (digits-cnn, fashion-mnist-cnn, tweets-lstm, tweets-block, and what follows each of them), ten to fifty minutes of one core each.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
results="${1:-$root/benchmarks/results}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
stages=("${@:2}")
cd "$root/simulations"
export OMP_NUM_THREADS=1

# Five numbers for each mechanism that has one; bands up to the separation of a user's rounds, where more do not pay.
tuned=(lambda-cgd:{0.3,0.5,0.7,0.8,0.9} bisr:{2,3,4,8,16} band-inv-mf:{2,3,4,8,16} blt:{1,2,3,4,5})
amplified=(lambda-cgd:{0.3,0.5,0.7,0.8,0.9} bisr:{2,3,4,8,16} blt:{1,2,3,4,5})
more=(nu-dp-ftrl:{0.001,0.003,0.01,0.03,0.1} toeplitz tree diagonal)
on_digits=("${more[@]}" {banded-toeplitz,bsr,band-mf}:{2,4,8,16,21} dense)
on_tweets=(banded-toeplitz:{4,8,16,32,56})
on_fashion=(banded-toeplitz:{4,8,16,32,64})
few=(--tuning-seeds 5 --seeds 20) # where a run takes a tenth of a second
digits=(--task digits --batch 60 --tuning-seeds 5 --seeds 20)
tweets=(--task tweets --batch 500 --tuning-seeds 10 --seeds 20) # of three none saw a rate that fails in every fifth run
fashion=(--task fashion-mnist --batch 500 --tuning-seeds 1 --seeds 10)

# sweep FILE "RATE RATE …" "MECHANISM …" OPTION…, at the budgets in $epsilons
epsilons="1 2 4 8"
sweep() {
    local words=(--address here)
    for epsilon in $epsilons; do words+=(--epsilon "$epsilon"); done
    for rate in $2; do words+=(--learning-rate "$rate"); done
    for mechanism in $3; do words+=(--mechanism "$mechanism"); done
    python -m fedcgd_experiments sweep --output "$results/$1.jsonl" "${words[@]}" "${@:4}"
}

# amplify FILE "RATE RATE …" "MECHANISM …" OPTION…
amplify() {
    sweep "$1" "$2" dp-sgd --sampling poisson "${@:4}"
    sweep "$1" "$2" "dp-sgd $3" --sampling balls-in-bins "${@:4}"
}

# cyclic FILE "RATE RATE …" OPTION…: as many groups of examples, sampled in turn, as bands
cyclic() { sweep "$1" "$2" "$(echo band-mf:{2,3,4,6,8})" --sampling cyclic-poisson "${@:3}"; }

# small FILE MODEL "RATE RATE …" OPTION…: few examples and twenty rounds an epoch, where the rules for λ differ most
small() {
    sweep "$1" "$3" "dp-sgd ${tuned[*]:0:5}" --task "$1" --model "$2" "${few[@]}" "${@:4}"
    amplify "$1" "$3" "${tuned[*]:0:5}" --task "$1" --model "$2" "${few[@]}" "${@:4}"
    judge "$1" "$1" "$2" --seeds 20
}

# judge FILE TASK MODEL OPTION…: the rules for λ, with that which is fitted to the curvature on the validation examples
judge() {
    local spectrum="$results/spectrum-$2-$3.json"
    [ -e "$spectrum" ] || fedcgd curve --task "$2" --model "$3" --clip-norm 1 --output "$spectrum"
    python -m fedcgd_experiments rules "$results/$1.jsonl" --output "$results/$1-rules.jsonl" --spectrum "$spectrum" --address here "${@:4}"
}

# federate FILE OPTION…: tuned points of a sweep trained by the app as well
federate() { python -m fedcgd_experiments federate "$results/$1.jsonl" --output "$results/$1-federated.jsonl" "${@:2}"; }

# deep, as sweep: models whose every run goes through the engine, and so at two budgets
deep() { epsilons="2 8" sweep "$1" "$2" "$3" --seeds 10 "${@:4}"; }
digits_cnn=(--task digits --model tanh-cnn --batch 60 --tuning-seeds 2)
fashion_cnn=(--task fashion-mnist-6000 --model tanh-cnn --batch 500 --tuning-seeds 1)

stage() {
    case "$1" in
        digits) sweep digits "0.25 0.5 1 2 4 8 16" "dp-sgd ${tuned[*]} ${on_digits[*]}" "${digits[@]}" ;;
        digits-amplified) amplify digits "0.5 1 2 4 8 16 32" "${amplified[*]}" "${digits[@]}" ;;
        digits-cyclic) cyclic digits "0.5 1 2 4 8 16 32" "${digits[@]}" ;;
        digits-rules) judge digits digits softmax --seeds 20 ;;
        tweets) sweep tweets "0.5 1 2 4 8 16 32" "dp-sgd ${tuned[*]} ${on_tweets[*]}" "${tweets[@]}" ;;
        tweets-amplified) amplify tweets "1 2 4 8 16 32" "${amplified[*]}" "${tweets[@]}" ;;
        tweets-cyclic) cyclic tweets "1 2 4 8 16 32" "${tweets[@]}" ;;
        tweets-more) sweep tweets "0.5 1 2 4 8 16 32" "${more[*]} $(echo {bsr,band-mf}:{4,8,16,32,56})" "${tweets[@]}" ;;
        tweets-rules) judge tweets tweets minilm --seeds 20 ;;
        fashion-mnist) sweep fashion-mnist "1 2 4 8 16" "dp-sgd ${tuned[*]:0:5}" "${fashion[@]}" ;;
        fashion-mnist-more) sweep fashion-mnist "1 2 4 8 16" "${tuned[*]:5} ${on_fashion[*]}" "${fashion[@]}" ;;
        fashion-mnist-rest) sweep fashion-mnist "1 2 4 8 16" "${more[*]} $(echo {bsr,band-mf}:{4,8,16,32,64})" "${fashion[@]}" ;;
        fashion-mnist-amplified) amplify fashion-mnist "2 4 8 16" "${amplified[*]}" "${fashion[@]}" ;;
        fashion-mnist-cyclic) cyclic fashion-mnist "2 4 8 16" "${fashion[@]}" ;;
        fashion-mnist-rules) judge fashion-mnist fashion-mnist softmax --seeds 10 ;;
        tweets-3000) small tweets-3000 minilm "0.5 1 2 4 8 16 32" --batch 150 ;;
        fashion-mnist-6000) small fashion-mnist-6000 softmax "0.25 0.5 1 2 4 8" --batch 300 ;;
        digits-cnn)
            deep digits-cnn "0.0625 0.125 0.25 0.5 1" "dp-sgd $(echo lambda-cgd:{0.5,0.7,0.8,0.9}) bisr:8 blt:2 band-mf:16" "${digits_cnn[@]}" ;;
        digits-cnn-amplified)
            epsilons="2 8" amplify digits-cnn "0.25 0.5 1" "$(echo lambda-cgd:{0.3,0.5,0.7})" --seeds 10 "${digits_cnn[@]}"
            ;;
        digits-cnn-federated) federate digits-cnn --seeds 3 --family dp-sgd --family lambda-cgd ;;
        digits-cnn-rules) judge digits-cnn digits tanh-cnn --seeds 10 ;;
        fashion-mnist-cnn)
            deep fashion-mnist-cnn "0.25 0.5 1" "dp-sgd $(echo lambda-cgd:{0.5,0.8,0.9}) band-mf:12" "${fashion_cnn[@]}" ;;
        fashion-mnist-cnn-amplified)
            epsilons="2 8" amplify fashion-mnist-cnn "1 2 4" "$(echo lambda-cgd:{0.3,0.5,0.7})" --seeds 10 "${fashion_cnn[@]}"
            ;;
        fashion-mnist-cnn-federated) federate fashion-mnist-cnn --family dp-sgd --family lambda-cgd ;;
        fashion-mnist-cnn-rules) judge fashion-mnist-cnn fashion-mnist-6000 tanh-cnn --seeds 10 --rule practical ;;
        tweets-lstm)
            deep tweets-lstm "4 8 16" "dp-sgd lambda-cgd:0.5 lambda-cgd:0.8" --task tweets --model lstm --batch 500 --epochs 2 --tuning-seeds 1
            ;;
        tweets-block)
            deep tweets-block "2 4 8" "dp-sgd lambda-cgd:0.5 lambda-cgd:0.8" --task tweets-3000 --model minilm-block --batch 150 \
                --epochs 1 --tuning-seeds 1 --physical-batch 50
            ;;
        tweets-lstm-federated) federate tweets-lstm --seeds 3 --epsilon 2 ;;
        tweets-block-federated) federate tweets-block --seeds 3 ;;
        plots)
            local files=("$results"/{{digits,tweets,fashion-mnist,tweets-3000,fashion-mnist-6000,digits-cnn}{,-rules},fashion-mnist-cnn}.jsonl)
            if [ -e "$results/runtime.jsonl" ]; then files+=("$results/runtime.jsonl"); fi
            python -m fedcgd_experiments plot "${files[@]}" --output "$results/plots"
            ;;
        page) python -m fedcgd_experiments page "$root/docs/results.md" --results "$results" ;;
        *) echo "unknown stage $1" >&2; return 2 ;;
    esac
}

all=({digits,tweets,fashion-mnist}{,-amplified,-cyclic,-rules} tweets-more fashion-mnist-{more,rest} tweets-3000 fashion-mnist-6000 plots page)
for name in "${stages[@]:-${all[@]}}"; do stage "$name"; done
