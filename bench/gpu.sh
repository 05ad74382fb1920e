#!/usr/bin/env bash
# What a GPU box shows in under 8 minutes: correctness first, then times. Run it from the root of a checkout, in the environment that has
# Eyeline and the test tools (`make .venv/ready` makes .venv).
#
#   bench/gpu.sh                    every part, in this order
#   bench/gpu.sh correct parallel   these alone
#   bench/gpu.sh graphs             a part that is not among them: steps of 1,024 tokens with CUDA graphs and without, up to 120 s
#
#   correct    `make test-gpu`: kernels, families, recipes, resume on this GPU against the CPU          up to 170 s
#   parallel   what several ranks need of one GPU: NCCL, empty ranks, a rank of eight with fake peers    up to 60 s
#   machine    rates of matrix products, and which kernels the models will use                            up to 30 s
#   steps      real steps of Qwen3-VL 2B: LoRA, compiled blocks, all weights; each with its roofline      up to 220 s
#
# It needs no network: weights and data are made up. Each part has its own limit and its own log; one that fails does not stop the next, and
# the exit code says whether all were well. OUT is the folder of the results (bench/results/gpu), DEVICE=cpu tries the script itself.
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-bench/results/gpu}
DEVICE=${DEVICE:-cuda}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
SIZE=${SIZE:-qwen3-vl-2b}
GPU=${GPU:-h100-80} # whose roofline is written for the measured steps
TOKENS=${TOKENS:-8192}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
if [ "$DEVICE" = cuda ] && ! "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
  echo "torch sees no CUDA device here: every part would be skipped. DEVICE=cpu tries the script itself" >&2
  exit 2
fi
mkdir -p "$OUT"
failed=()

# part NAME SECONDS COMMAND...
part() {
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  echo "== $name (up to ${limit} s): $*"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$OUT/$name.log"
  local code=${PIPESTATUS[0]}
  echo "== $name: exit code $code after $((SECONDS - start)) s"
  [ "$code" -eq 0 ] || failed+=("$name")
}

# step NAME RECIPE SETTING...: real steps
step() {
  local name=$1 recipe=$2
  shift 2
  part "step-$name" 60 "$PYTHON" -m eyeline bench step "$recipe" "device=$DEVICE" "$@" "${sizes[@]}" --steps 10 --out "$OUT/step-$name.json"
}

# modelled NAME RECIPE: the roofline of the same steps, with a column of what a compiler would fuse
modelled() {
  part "roofline-$1" 20 "$PYTHON" -m eyeline bench roofline "$2" "${sizes[@]}" --gpu "$GPU" --out "$OUT/roofline-$1.json"
}

correct() { part correct 170 "$PYTHON" -m pytest -q -m gpu tests/test_gpu.py; }
parallel() { part parallel 60 "$PYTHON" -m pytest -q -m gpu tests/parallel/test_one_gpu.py; }
machine() { part machine 30 "$PYTHON" -m eyeline bench machine; }
steps() {
  local sizes=(--size "$SIZE" --tokens "$TOKENS" --packs 1)
  step lora qwen3-vl-lora
  step lora-compiled qwen3-vl-lora compile=blocks
  step full qwen3-vl-full
  modelled lora qwen3-vl-lora
  modelled full qwen3-vl-full
}
graphs() {
  local sizes=(--size "$SIZE" --tokens 1024 --packs 1)
  step small qwen3-vl-lora
  step small-graphed qwen3-vl-lora cuda_graph=true
}

for name in "${@:-correct parallel machine steps}"; do
  for one in $name; do
    case $one in
    correct | parallel | machine | steps | graphs) "$one" ;;
    *) echo "no part $one: correct, parallel, machine, steps, graphs" >&2 && exit 2 ;;
    esac
  done
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]} (logs in $OUT)"
  exit 1
fi
echo "all well; results in $OUT"
