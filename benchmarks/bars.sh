#!/usr/bin/env bash
# Every figure that Outcore is held to on a GPU, of one build on one machine, in parts of less than
# ten minutes each on an H200:
#
#   benchmarks/bars.sh exact  FOLDER DISK    the probe; the same bits in every placement; 7B, native
#   benchmarks/bars.sh plans  FOLDER DISK    the probe again; state on disk, 14B, 32B
#   benchmarks/bars.sh tiers  FOLDER DISK    72B in three tiers; the longest sequence within 24 GiB
#   benchmarks/bars.sh command FOLDER DISK   outcore train beside the engine; LoRA on 72B
#
# Raw figures go to FOLDER, scratch files and checkpoints to DISK (64 GB). It goes on where something
# fails; the last lines say what took how long, and the exit status how many failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

part=${1:?which part} folder=${2:?where raw figures go} disk=${3:?where scratch files go}
export PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=passive
mkdir -p "$folder" "$disk"
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
plans() { python3 benchmarks/plans.py --json "$folder/plans-$part.json" --disk "$disk" --limit 400 --only "$1"; }
probe() { outcore probe --refresh --disk "$disk" --json "$folder/probe-$part.json"; }

case $part in
exact)
  run probe probe
  run barrier python3 -m pytest -q -m gpu tests/engine/test_read_back_barrier.py
  run verify outcore verify gemma-3-1b --seq-len 128 --steps 3 --disk "$disk" --json "$folder/verify-1b.json"
  run 7b plans 7b,7b-native
  ;;
plans)
  run probe probe
  run plans plans 3b-disk-wait,14b,32b-compact
  ;;
tiers)
  run probe probe
  run tiers plans 72b-minimal-clip,8b-long-clip
  ;;
command)
  run train python3 benchmarks/train_command.py --checkpoint "$disk/checkpoint" --json "$folder/train-command.json"
  run lora python3 benchmarks/lora_72b.py --steps 5 --warmup-steps 3 --json "$folder/lora-72b.json"
  ;;
*)
  echo "no part is called $part"
  exit 2
  ;;
esac

printf '%s\n' "${times[@]}"
exit "$num_failed"
