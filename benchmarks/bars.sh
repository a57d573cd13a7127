#!/usr/bin/env bash
# Every figure that Outcore is held to on a GPU, of one build on one machine, in parts of less than
# ten minutes each on an H200:
#
#   benchmarks/bars.sh disk FOLDER DISK      3B with its state on disk
#   benchmarks/bars.sh train FOLDER DISK     7B beside native, and by outcore train; 14B; the longest
#                                            sequence within 24 GiB
#   benchmarks/bars.sh loading FOLDER DISK   a 7B checkpoint into its homes
#   benchmarks/bars.sh exact FOLDER DISK     the same bits in every placement; a pretrained model
#                                            beside plain PyTorch, where DISK has smollm2.gguf
#   benchmarks/bars.sh tiers FOLDER DISK     32B; 72B in three tiers
#   benchmarks/bars.sh lora FOLDER DISK      LoRA on 72B; steps while a checkpoint is written
#   benchmarks/bars.sh others FOLDER DISK    3B, and 7B within 24 GiB: predictions of more settings
#
# Several parts, with commas between them, run one after the other (all of them: a bit more than
# half an hour) by one probe, before the first figure; the disk is probed again just before each plan that
# rests on it.
# Outcore is that of this checkout; its kernels are built where they are not.
# Raw figures go to FOLDER, scratch files and checkpoints to DISK (64 GB). It goes on where something
# fails; the last lines say what took how long, and have each figure beside its bar (bars_table.py).
# The exit status is how many failed or were missed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

parts=${1:?which parts} folder=${2:?where raw figures go} disk=${3:?where scratch files go}
for part in ${parts//,/ }; do
  case $part in disk | train | loading | exact | lora | tiers | others) ;; *) echo "no part is called $part"; exit 2 ;; esac
done
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=passive PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$folder" "$disk"
disk=$(cd "$disk" && pwd) # Python takes no relative name for its bytecode
# Each of some thirty processes imports torch and transformers: 7 s, or 19 where nothing of a
# machine's packages is compiled to bytecode.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$disk/bytecode"
has_kernels() {
  python3 -W ignore -c 'import sys; from outcore.kernels import has_library; sys.exit(not has_library())'
}
has_kernels || python3 -m pip install --quiet --no-build-isolation --no-deps -e .
has_kernels || { echo "the kernels of this checkout could not be built"; exit 2; }
times=()
num_failed=0

run() {
  local name=$1 start=$SECONDS result=done
  shift
  echo "== $name"
  if ! "$@"; then
    result=FAILED
    num_failed=$((num_failed + 1))
  fi
  times+=("$(printf '%-16s %-6s %4d s' "$name" "$result" $((SECONDS - start)))")
  echo "${times[-1]}"
}

# What hangs is to cost its own figure, not those of the parts behind it.
within() { timeout -k 10 "$@"; }
plans() { python3 benchmarks/plans.py --json "$folder/plans-$1.json" --disk "$disk" --limit 400 --only "$2"; }
probe() { within 120 python3 -m outcore probe --disk "$disk" --json "$folder/probe-${parts//,/-}.json"; }
verify() {
  local name=$1
  shift
  within 420 python3 -m outcore verify gemma-3-1b --seq-len 128 --steps 3 --disk "$disk" "$@" \
    --json "$folder/verify-1b-$name.json" >"$disk/verify-1b-$name.txt" 2>&1
}

gpu_tests() {
  local name=$1
  shift
  within 420 python3 -m pytest -q -m gpu "$@" >"$disk/tests-$name.txt" 2>&1
}

# Nothing here is timed: placements, tests that need a GPU, what a model learns, beside each other.
exactness() {
  local jobs=() job failed=0
  verify kept --only recomputed --only kept --only inputs --only visiting & jobs+=($!)
  verify slots --only slot --only "both, random" & jobs+=($!)
  verify disk --only disk & jobs+=($!)
  verify mixed --only streamed --only "state on host" --only mixed --only tiers & jobs+=($!)
  gpu_tests kernels tests/kernels & jobs+=($!)
  gpu_tests store tests/store & jobs+=($!)
  # passes has one test, and with torch 2.11 a process that ends as it begins to compile waits five
  # minutes.
  gpu_tests engine tests/passes tests/engine & jobs+=($!)
  if [ -f "$disk/smollm2.gguf" ]; then
    within 540 python3 benchmarks/smollm2.py --gguf "$disk/smollm2.gguf" --json "$folder/smollm2.json" \
      >"$disk/tests-smollm2.txt" 2>&1 & jobs+=($!)
  fi
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  tail -n 22 "$disk"/verify-1b-*.txt
  tail -n 3 "$disk"/tests-*.txt
  return "$failed"
}

checkpoint() {
  rm -rf "$disk/checkpoint"
  within 240 python3 benchmarks/checkpoint.py --shape qwen2.5-1.5b --device cuda --sequences 16 --seq-len 2048 \
    --rounds 2 --folder "$disk" >"$folder/checkpoint.json"
}

# What an earlier call has left in FOLDER would stand for what fails now.
forget() { (cd "$folder" && rm -f "$@"); }

run_part() {
  case $1 in
  disk)
    forget plans-disk.json
    run state-on-disk plans disk 3b-disk-wait
    ;;
  train)
    forget plans-7b.json train-command.json plans-large.json
    run 7b plans 7b 7b,7b-native
    run train within 300 python3 benchmarks/train_command.py --checkpoint "$disk/checkpoint" \
      --engine "$folder/plans-7b.json" --json "$folder/train-command.json"
    run plans plans large 14b,8b-long-clip
    ;;
  loading)
    forget loading-7b.json
    run loading within 240 python3 benchmarks/loading.py --shape qwen2.5-7b --directory "$disk/checkpoint" \
      --device cuda --device-blocks 9 --repeats 2 --json "$folder/loading-7b.json"
    ;;
  exact)
    forget verify-1b-{kept,slots,disk,mixed}.json smollm2.json
    run exactness exactness
    ;;
  tiers)
    forget plans-32b.json plans-72b.json
    run 32b plans 32b 32b-compact
    rm -rf "$disk/checkpoint" # 72B takes all the room that there is
    run 72b plans 72b 72b-minimal-clip
    ;;
  lora)
    forget lora-72b.json checkpoint.json
    run lora within 400 python3 benchmarks/lora_72b.py --steps 5 --warmup-steps 3 --json "$folder/lora-72b.json"
    run checkpoint checkpoint
    ;;
  others)
    forget plans-others.json
    run others plans others 3b,7b-24g
    ;;
  esac
}

forget "probe-${parts//,/-}.json"
run probe probe
for part in ${parts//,/ }; do run_part "$part"; done

printf '%s\n' "${times[@]}"
python3 benchmarks/bars_table.py "$folder" || num_failed=$((num_failed + $?))
exit "$num_failed"
