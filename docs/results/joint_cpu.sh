#!/usr/bin/env bash
# What the joint part adds to a short alignment of SmolLM2-135M, without a GPU: the same run with it, without it, and from the plain copy.
#
#   docs/results/joint_cpu.sh TEACHER TEXT RUNS [RUN...]        RUN: joint | layers | naive; TEXT: what own_text.py made
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,4p' "$0"; exit 2; }
teacher=$1 text=$2 runs=$3
shift 3
[ $# -gt 0 ] || set -- joint layers naive
from() { echo "$1.source=$text/$2.jsonl $1.subset=null $1.streaming=false $1.skip_tokens=0"; }
for name in "$@"; do
  changes=(align.joint.steps=160 align.joint.batch_size=1 align.joint.seq_len=256 align.joint.eval_every=40)
  [ "$name" = layers ] && changes=()
  [ "$name" = naive ] && changes+=(initialize.strategy=naive)
  # shellcheck disable=SC2046
  tune run recipes/taylor_calibrate_kd --config configs/smollm2_135m.yaml $(from calibration_dataset calib) \
    $(from dataset train) $(from validation_dataset own) teacher_checkpointer.checkpoint_dir="$teacher" device=cpu dtype=fp32 \
    calibration_dataset.max_tokens=8192 dataset.seq_len=1024 dataset.max_tokens=262144 validation_dataset.max_tokens=16384 \
    validation_batch_size=2 "retain.layers=[0,1,8,17,18,20,23,24]" align.steps=480 align.batch_size=1 align.seq_len=128 \
    align.lr=7.0e-3 align.refit_tokens=0 align.eval_every=160 align.heldout_batches=64 "stages=[measure,initialize,align]" \
    generation=null output_dir="$runs/$name" "${changes[@]}"
done
