#!/usr/bin/env bash
# What is tested and measured on a GPU, in parts that fit a lease of ten minutes each:
#
#     benchmarks/h200.sh PART OUT      # tests, kernels, steps, engine, memory, qwen3, llama, smollm2
#
# Results lie in OUT/<model> as they do in benchmarks/results/current/h200/<model>; what was printed
# lies beside them. Runs from source. WHEELS: a folder of peers' wheels for `bench kernels`. COMMIT: what
# to record where git does not know it.
set -uo pipefail
cd "$(dirname "$0")/.."
part=$1 out=$2
export PYTHONPATH=src PYTHONUNBUFFERED=1
mkdir -p "$out"

ask() { # ask MODEL SECONDS QUESTION OPTION...: a question, about a model, begun within so many seconds
    local model=$1 seconds=$2 question=$3 began=$SECONDS
    shift 3
    local options=("$@" --seconds "$seconds" --out "$out/$model" ${COMMIT:+--commit "$COMMIT"})
    case $question in kernels | allocator) ;; *) options+=(--model "$model") ;; esac
    mkdir -p "$out/$model"
    timeout $((seconds + 120)) python -m pageforge.cli bench "$question" "${options[@]}" \
        >"$out/$model-$question.txt" 2>&1
    echo "$model $question: exit code $?, $((SECONDS - began)) s"
}

run_tests() { # run_tests NAME PYTEST-ARGUMENT...
    local name=$1
    shift
    timeout 300 python -m pytest -o addopts= --import-mode=importlib -p no:cacheprovider -q "$@" \
        >"$out/test-$name.txt" 2>&1
    echo "tests $name: exit code $?, $(tail -n 1 "$out/test-$name.txt")"
}

case $part in
tests) # a process a file, all at once; what looks at the device's free memory comes alone
    for file in tests/gpu/test_*_cuda.py; do
        name=$(basename "$file" _cuda.py)
        [ "$name" = test_pool ] || run_tests "$name" "$file" -k "not memory_is_back" &
    done
    wait
    run_tests pool tests/gpu/test_pool_cuda.py
    run_tests memory tests/gpu/test_engine_cuda.py -k memory_is_back
    ;;
kernels) ask gpt2 290 kernels ${WHEELS:+--peer-wheels "$WHEELS"} ;;
steps) ask gpt2 480 latency ;;
engine)
    ask gpt2 240 throughput
    out=$out/again ask gpt2 30 throughput --only first-token # a new process, warm Triton cache
    out=$out/fp32 ask gpt2 60 throughput --only squeezed --dtype float32
    ;;
memory)
    ask gpt2 100 vram
    ask gpt2 30 lifecycle
    ask gpt2 60 allocator
    ask gpt2 60 sharing
    ask gpt2 100 parity
    ask gpt2 120 sweep
    ;;
qwen3)
    ask qwen3-0.6b 200 throughput --only uniform --only shared-prefix \
        --way engine --way "engine compiled" --way generate
    ask qwen3-0.6b 240 latency --only steps --batch 1 --batch 32 --prompt 448 --steps 252
    ask qwen3-0.6b 60 vram
    ask qwen3-0.6b 60 parity
    ;;
llama)
    ask llama-8b 240 throughput --only sharegpt --way engine --way "engine compiled" --repeats 2
    ask llama-8b 120 latency --only steps --batch 1 --batch 32 --prompt 448 --steps 120
    ask llama-8b 60 vram
    ask llama-8b 60 parity
    ;;
smollm2)
    ask smollm2 100 throughput --only uniform
    ask smollm2 240 latency --only steps --batch 1 --batch 32 --prompt 448 --steps 252
    ask smollm2 60 vram
    ask smollm2 100 sharing
    ask smollm2 100 parity
    ;;
*)
    echo "part: expected one of those above, got $part" >&2
    exit 2
    ;;
esac
