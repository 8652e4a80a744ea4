#!/usr/bin/env bash
# One set of rules on any teacher, its controls beside it: minutes a run on one GPU.
#
#   docs/results/two_teachers.sh TEACHER NUM_LAYERS TEXT RUNS PART...
#
# TEACHER: Hugging Face folder. NUM_LAYERS: layers that keep attention. TEXT: folder that own_text.py made. RUNS: where runs go.
# PART, in this order:
#   select              which layers, by gates: 0.34 M tokens
#   STRATEGY SEED       measure, initialize and align from taylor | naive | taylor_published | zero_gate: 0.65 M tokens
#   distill SEED        the taylor run of that seed, 9 M tokens, and its export
#   evaluate RUN        teacher and students of a run on own text and on text of another kind, such as: evaluate taylor_0
# Further changes of the config follow behind `--`.
set -euo pipefail
[ $# -ge 5 ] || { sed -n '2,13p' "$0"; exit 2; }
teacher=$1 layers=$2 text=$3 runs=$4
shift 4
part=("$@") changes=()
for ((i = 0; i < ${#part[@]}; i++)); do
  if [ "${part[i]}" = -- ]; then
    changes=("${part[@]:i+1}")
    part=("${part[@]:0:i}")
    break
  fi
done

from() { echo "$1.source=$text/$2.jsonl $1.subset=null $1.streaming=false $1.skip_tokens=0"; }
# shellcheck disable=SC2046
run() { # RECIPE CONFIG CHANGE...
  tune run "recipes/$1" --config "configs/$2.yaml" teacher_dir="$teacher" "${@:3}" "${changes[@]}"
}
data="$(from calibration_dataset calib) $(from dataset train) $(from validation_dataset own)"
pipeline() { # RUN STRATEGY SEED CHANGE...
  # shellcheck disable=SC2086
  run taylor_calibrate_kd any_teacher $data num_layers="$layers" layers="$runs/select/gates.json" output_dir="$runs/$1" \
    initialize.strategy="$2" seed="$3" "${@:4}"
}
case ${part[0]} in
  select)
    # shellcheck disable=SC2086
    run select_layers select_any_teacher $data num_layers="$layers" output_dir="$runs/select"
    ;;
  distill)
    pipeline "taylor_${part[1]}" taylor "${part[1]}" "stages=[distill,export]" resume_from_checkpoint=true
    ;;
  evaluate)
    students=()
    [ -e "$runs/${part[1]}/distill/student.safetensors" ] || students=(students.distilled=null)
    for kind in own other; do
      # shellcheck disable=SC2046
      run evaluate_hybrid evaluate_any_teacher $(from validation_dataset "$kind") run_dir="$runs/${part[1]}" \
        output_dir="$runs/${part[1]}/evaluate_$kind" "${students[@]}"
    done
    ;;
  *)
    pipeline "${part[0]}_${part[1]}" "${part[0]}" "${part[1]}" "stages=[measure,initialize,align]" resume_from_checkpoint=true
    ;;
esac
