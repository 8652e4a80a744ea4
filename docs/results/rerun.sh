#!/usr/bin/env bash
# Makes the SmolLM2 and Qwen3-8B numbers of the README anew, on one GPU of 141 GB; parts that are done are not run again.
#
#   docs/results/rerun.sh TEACHER TEXT [PART...]
#
# TEACHER: folder of SmolLM2-135M-Instruct. TEXT: folder with train.npy (14 M token ids of its tokenizer, documents ended by the
# end-of-sequence id), calib.npy (420 000) and heldout.npy (300 000). PART: what of the list below, in this order; all of it
# takes some hours. Writes to runs/.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,8p' "$0"; exit 2; }
teacher=$(realpath "$1") text=$(realpath "$2")
shift 2
parts=(uniform select policies float8 seeds recovery evaluate ruler speed speed8b benchmark)
[ $# -gt 0 ] && parts=("$@")

part_of_text() { echo "$1.source=$text/$2.npy $1.subset=null $1.streaming=false $1.skip_tokens=0"; }
data="$(part_of_text dataset train) $(part_of_text validation_dataset heldout)
  calibration_dataset.source=$text/calib.npy calibration_dataset.subset=null calibration_dataset.streaming=false"
run() { # RECIPE CONFIG CHANGE...
  tune run "recipes/$1" --config "configs/$2.yaml" "${@:3}"
}
pipeline() { # NAME CHANGE...: 2 M tokens of distillation
  # shellcheck disable=SC2086
  run taylor_calibrate_kd smollm2_135m $data teacher_checkpointer.checkpoint_dir="$teacher" distill.tokens=2_000_000 \
    distill.eval_every_steps=31 output_dir="runs/smollm2_135m_$1" "${@:2}"
}
evaluate() { # NAME CHANGE...: of the uniform student
  # shellcheck disable=SC2046
  run evaluate_hybrid evaluate_smollm2 $(part_of_text validation_dataset heldout) teacher.checkpoint_dir="$teacher" \
    students.aligned.weights=runs/smollm2_135m_uniform/align/mixers.safetensors \
    students.distilled.weights=runs/smollm2_135m_uniform/distill/student.safetensors \
    students.exported.folder=runs/smollm2_135m_uniform/export output_dir="runs/evaluate_$1" "${@:2}"
}

for part in "${parts[@]}"; do
  echo "== $part"
  # shellcheck disable=SC2086
  case $part in
    uniform) pipeline uniform ;;
    select)
      run select_layers select_smollm2 $data teacher_checkpointer.checkpoint_dir="$teacher"
      ;;
    policies)
      for policy in ablation single_keep kl_guided alignment_error; do
        pipeline $policy retain.layers=null \
          "retain={policy: file, path: runs/select_smollm2/$policy.json, num_layers: 8}"
      done
      python -m tcal_components.reporting.compare runs/smollm2_135m_{uniform,ablation,single_keep,kl_guided,alignment_error} \
        --output runs/policies --baseline smollm2_135m_uniform
      ;;
    float8)
      pipeline float8 precision.student=float8
      pipeline float8_both precision.student=float8 precision.teacher=float8
      python -m tcal_components.reporting.compare runs/smollm2_135m_{uniform,float8,float8_both} \
        --output runs/float8 --baseline smollm2_135m_uniform --force
      ;;
    seeds)
      run ablate_initialization ablate_smollm2 $data teacher_checkpointer.checkpoint_dir="$teacher" recovery=null
      ;;
    recovery)
      run ablate_initialization ablate_smollm2 $data teacher_checkpointer.checkpoint_dir="$teacher" "ablate.seeds=[0]"
      ;;
    evaluate) evaluate quality ;;
    ruler) evaluate ruler "evaluate=[lm_eval]" students.aligned=null students.distilled=null ;;
    speed) evaluate speed "evaluate=[speed]" students.aligned=null students.exported=null ;;
    speed8b) run evaluate_hybrid speed_qwen3_8b ;;
    benchmark) run benchmark_training benchmark_qwen3_8b ;;
    *) echo "no part $part; parts: uniform select policies float8 seeds recovery evaluate ruler speed speed8b benchmark"; exit 2 ;;
  esac
done
