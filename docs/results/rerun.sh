#!/usr/bin/env bash
# Makes the README's tables of SmolLM2 and Qwen3-8B anew with the configs of today, on one GPU of 141 GB; what is done is not run again.
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
parts=(uniform select policies long alignments float8 ablation steps recovery evaluate ruler speed speed8b benchmark)
[ $# -gt 0 ] && parts=("$@")

part_of_text() { echo "$1.source=$text/$2.npy $1.subset=null $1.streaming=false $1.skip_tokens=0"; }
data="$(part_of_text dataset train) $(part_of_text validation_dataset heldout)
  calibration_dataset.source=$text/calib.npy calibration_dataset.subset=null calibration_dataset.streaming=false"
run() { # RECIPE CONFIG CHANGE...
  tune run "recipes/$1" --config "configs/$2.yaml" "${@:3}"
}
pipeline() { # NAME CHANGE...: 2 M tokens of distillation on sequences of 1024
  # shellcheck disable=SC2086
  run taylor_calibrate_kd smollm2_135m $data teacher_checkpointer.checkpoint_dir="$teacher" distill.tokens=2_000_000 \
    distill.eval_every_steps=31 dataset.seq_len=1024 distill.batch_size=16 distill.micro_batch_size=8 \
    output_dir="runs/smollm2_135m_$1" "${@:2}"
}
ablate() { # CONFIG CHANGE...
  # shellcheck disable=SC2086
  run ablate_initialization "$1" $data teacher_checkpointer.checkpoint_dir="$teacher" "${@:2}"
}
set_of() { echo "{policy: file, path: runs/select_smollm2/$1.json, num_layers: 8}"; }
evaluate() { # NAME CHANGE...: of the students of kl_guided
  # shellcheck disable=SC2046
  run evaluate_hybrid evaluate_smollm2 $(part_of_text validation_dataset heldout) teacher.checkpoint_dir="$teacher" \
    students.aligned.weights=runs/smollm2_135m_kl_guided/align/mixers.safetensors \
    "students.distilled_1024={checkpoint_dir: $teacher, weights: runs/smollm2_135m_kl_guided/distill/student.safetensors}" \
    students.distilled.weights=runs/smollm2_135m_4096/distill/student.safetensors \
    students.exported.folder=runs/smollm2_135m_kl_guided/export output_dir="runs/evaluate_$1" "${@:2}"
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
        pipeline $policy retain.layers=null "retain=$(set_of $policy)"
      done
      python -m tcal_components.reporting.compare runs/smollm2_135m_{uniform,ablation,single_keep,kl_guided,alignment_error} \
        --output runs/policies --baseline smollm2_135m_uniform
      ;;
    long)
      pipeline 4096 retain.layers=null "retain=$(set_of kl_guided)" dataset.seq_len=4096 distill.batch_size=4 distill.micro_batch_size=4
      ;;
    alignments) # steps, sequences a step, their length, learning rates, tokens of polish and calibration
      runs=()
      while read -r steps batch len lr projection polish calibration; do
        runs+=("runs/smollm2_135m_${batch}x${len}x${steps}")
        pipeline "${batch}x${len}x${steps}" retain.layers=null "retain=$(set_of kl_guided)" "stages=[measure,initialize,align,distill]" \
          align.steps="$steps" align.batch_size="$batch" align.seq_len="$len" align.lr="$lr" align.projection_lr="$projection" \
          align.heldout_batches=$((16384 / batch / len)) align.polish_tokens="$polish" calibration_dataset.max_tokens="$calibration" < /dev/null
      done <<< "212 8 512 6e-3 2e-3 131072 262144
920 2 512 6e-3 1.4e-3 32768 16384
920 4 256 7e-3 1.6e-3 32768 16384
1850 2 256 6e-3 1.2e-3 32768 16384
3700 1 256 6e-3 1.0e-3 32768 16384
1850 4 128 6e-3 1.2e-3 32768 16384"
      python -m tcal_components.reporting.compare "${runs[@]}" --output runs/alignments
      ;;
    float8)
      pipeline float8 precision.student=float8 retain.layers=null "retain=$(set_of kl_guided)"
      python -m tcal_components.reporting.compare runs/smollm2_135m_{kl_guided,float8} \
        --output runs/float8 --baseline smollm2_135m_kl_guided --force
      ;;
    ablation) ablate ablate_smollm2 ;;
    steps) ablate steps_smollm2 ;;
    recovery) # first what the config's grid was found with; those runs count in the table too
      for grid in "tokens: [1_000_000], lr: [2.0e-3, 8.0e-3]" "tokens: [1_000_000], base_lr: [1.0e-3]" \
        "tokens: [1_000_000], batch_size: [2]" "tokens: [2_000_000], lr: [3.0e-3]"; do
        ablate recover_smollm2 "recovery.starts=[naive/none]" "recovery.grids={naive/none: {$grid}}"
      done
      ablate recover_smollm2 "recovery.starts=[naive/none, taylor/short_320]" \
        "recovery.grids={taylor/short_320: {tokens: [524_288], lr: [5.0e-4]}}"
      for grid in "{taylor/short_320: {tokens: [2_000_000], batch_size: [4], lr: [5.0e-4]}}" \
        "{taylor/mid_1200: {tokens: [500_000, 1_000_000], batch_size: [4], lr: [5.0e-4]}}" "{taylor/mid_1200: {tokens: [1_000_000]}}"; do
        start=${grid#\{}
        ablate recover_smollm2 "recovery.starts=[naive/none, ${start%%:*}]" "recovery.grids=$grid"
      done
      ablate recover_smollm2
      ablate recover_smollm2 "retain.layers=[0,1,2,8,17,20,23,24]" output_dir=runs/recover_smollm2_single_keep
      ablate recover_smollm2 "retain.layers=[0,4,8,12,16,20,24,28]" output_dir=runs/recover_smollm2_uniform
      ;;
    evaluate) evaluate quality students.exported=null ;;
    ruler)
      evaluate ruler "evaluate=[lm_eval]" students.aligned=null students.distilled=null \
        students.distilled_1024=null lm_eval.limit=16 \
        "lm_eval.max_seq_lengths=[2048]" lm_eval.batch_size=16
      ;;
    speed)
      run evaluate_hybrid speed_qwen3_8b teacher._component_=tcal_components.models.smollm2_135m output_dir=runs/speed_smollm2 \
        students.hybrid._component_=tcal_components.models.smollm2_135m_hybrid students.hybrid.gdn.key_head_dim=128 \
        "students.hybrid.retained_layers=[0,1,8,17,18,20,23,24]"
      ;;
    speed8b) run evaluate_hybrid speed_qwen3_8b ;;
    benchmark) run benchmark_training benchmark_qwen3_8b ;;
    *) echo "no part $part; parts: uniform select policies long alignments float8 ablation steps recovery evaluate ruler speed speed8b benchmark"; exit 2 ;;
  esac
done
