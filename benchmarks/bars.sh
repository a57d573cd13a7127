#!/usr/bin/env bash
# Every figure that Outcore is held to on a GPU, of one build on one machine, in parts of less than
# ten minutes each on an H200:
#
#   benchmarks/bars.sh exact FOLDER DISK     the probe; state on disk; the same bits in every placement;
#                                            7B beside native
#   benchmarks/bars.sh plans FOLDER DISK     14B, 32B, the longest sequence within 24 GiB, 3B
#   benchmarks/bars.sh tiers FOLDER DISK     72B in three tiers; outcore train beside the engine
#   benchmarks/bars.sh command FOLDER DISK   loading; LoRA on 72B; steps while a checkpoint is written
#
# The parts after the first take what its probe has measured. Outcore is that of this checkout, whose
# kernels must be built (pip install -e .).
# Raw figures go to FOLDER, scratch files and checkpoints to DISK (64 GB). It goes on where something
# fails; the last lines say what took how long, and the exit status how many failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

part=${1:?which part} folder=${2:?where raw figures go} disk=${3:?where scratch files go}
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=passive PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$folder" "$disk"
python3 -c 'import sys; from outcore.kernels import has_library; sys.exit(not has_library())' || {
  echo "the kernels of this checkout are not built: pip install -e ."
  exit 2
}
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
}

outcore() { python3 -m outcore "$@"; }
plans() { python3 benchmarks/plans.py --json "$folder/plans-$1.json" --disk "$disk" --limit 400 --only "$2"; }
probe() { outcore probe --refresh --disk "$disk" --json "$folder/probe.json"; }
verify() {
  local name=$1
  shift
  outcore verify gemma-3-1b --seq-len 128 --steps 3 --disk "$disk" "$@" \
    --json "$folder/verify-1b-$name.json" >"$disk/verify-1b-$name.txt" 2>&1
}

# Nothing here is timed: every placement and the tests of the kernels, beside each other.
exactness() {
  local jobs=() job failed=0
  verify both --only both & jobs+=($!)
  verify disk --only disk & jobs+=($!)
  verify mixed --only streamed --only "state on host" --only mixed --only tiers & jobs+=($!)
  python3 -m pytest -q -m gpu tests/kernels tests/store tests/engine >"$disk/tests.txt" 2>&1 & jobs+=($!)
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  tail -n 22 "$disk"/verify-1b-*.txt
  tail -n 12 "$disk/tests.txt"
  return "$failed"
}

checkpoint() {
  rm -rf "$disk/checkpoint"
  python3 benchmarks/checkpoint.py --shape qwen2.5-1.5b --device cuda --sequences 16 --seq-len 2048 \
    --rounds 2 --folder "$disk" >"$folder/checkpoint.json"
}

case $part in
exact)
  run probe probe
  run state-on-disk plans disk 3b-disk-wait
  run exactness exactness
  run 7b plans 7b 7b,7b-native
  ;;
plans) run plans plans large 14b,32b-compact,8b-long-clip,3b ;;
tiers)
  run 72b plans 72b 72b-minimal-clip
  run train python3 benchmarks/train_command.py --checkpoint "$disk/checkpoint" --json "$folder/train-command.json"
  ;;
command)
  run loading python3 benchmarks/loading.py --shape qwen2.5-7b --directory "$disk/checkpoint" \
    --json "$folder/loading-7b.json"
  run lora python3 benchmarks/lora_72b.py --steps 5 --warmup-steps 3 --json "$folder/lora-72b.json"
  run checkpoint checkpoint
  ;;
*)
  echo "no part is called $part"
  exit 2
  ;;
esac

printf '%s\n' "${times[@]}"
exit "$num_failed"
