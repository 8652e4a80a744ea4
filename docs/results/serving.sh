#!/usr/bin/env bash
# Makes docs/results/serving_llama_cpp.json anew: exports of every family, in llama.cpp against transformers. CPU, hours.
#
#   docs/results/serving.sh SMOLLM2 QWEN2_5 TEXT LLAMA_CPP [PYTHON]
#
# SMOLLM2, QWEN2_5: folders of SmolLM2-135M-Instruct and Qwen2.5-Coder-0.5B-Instruct. TEXT: folder with train.jsonl, calib.jsonl
# and heldout.jsonl. LLAMA_CPP: a checkout of llama.cpp. PYTHON: one with llama-cpp-py-sync (docs/serving.md). Writes to runs/.
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,8p' "$0"; exit 2; }
smollm2=$(realpath "$1") qwen=$(realpath "$2") text=$(realpath "$3") llama_cpp=$(realpath "$4") python=${5:-python}
runs=runs/serving

data=""
for part in dataset.train validation_dataset.heldout calibration_dataset.calib; do
  data+=" ${part%.*}.source=$text/${part#*.}.jsonl ${part%.*}.subset=null ${part%.*}.streaming=false"
done
data+=" dataset.skip_tokens=0 validation_dataset.skip_tokens=0 dataset.max_tokens=400000 validation_dataset.max_tokens=8192
  calibration_dataset.max_tokens=8192 device=cpu dtype=fp32 dataset.seq_len=512 validation_dataset.seq_len=512
  validation_batch_size=4 align.batch_size=1 align.seq_len=128 align.refit_tokens=0 align.heldout_batches=8"
student() { # NAME CONFIG CHANGE...: a short alignment, then the export
  # shellcheck disable=SC2086
  tune run recipes/taylor_calibrate_kd --config "configs/$2.yaml" $data "stages=[measure,initialize,align,export]" \
    output_dir="$runs/$1" "${@:3}"
}
small="align.steps=160 align.lr=7e-3 align.projection_lr=1.2e-3 align.eval_every=160"
folder() { # TEACHER: models of a folder's own numbers
  echo "teacher_checkpointer.checkpoint_dir=$1 teacher_model._component_=tcal_components.models.teacher
    teacher_model.checkpoint_dir=$1 model._component_=tcal_components.models.hybrid model.checkpoint_dir=$1"
}

# Qwen3: the embedded teacher, whole pipeline.
tune run recipes/taylor_calibrate_kd --config configs/quickstart.yaml output_dir=$runs/qwen3
# SmolLM2: keys of 128 beside values of 64; every fourth layer kept, and the irregular set of kl_guided.
# shellcheck disable=SC2086
student smollm2 smollm2_135m $small teacher_checkpointer.checkpoint_dir="$smollm2"
# shellcheck disable=SC2086
student smollm2_kl_guided smollm2_135m $small teacher_checkpointer.checkpoint_dir="$smollm2" \
  "retain.layers=[0,1,8,17,18,20,23,24]"
# Llama-3.2's RoPE scaling on SmolLM2's weights, which are of that family.
mkdir -p $runs/scaled_teacher
cp "$smollm2"/* $runs/scaled_teacher
python - "$runs/scaled_teacher/config.json" <<'PYTHON'
import json, sys
config = json.load(open(sys.argv[1]))
scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
scaling["original_max_position_embeddings"] = 8192
config |= {"rope_scaling": scaling, "max_position_embeddings": 131072}
config["rope_parameters"] = scaling | {"rope_theta": config["rope_theta"]}
json.dump(config, open(sys.argv[1], "w"))
PYTHON
# shellcheck disable=SC2086,SC2046
student llama3_2 smollm2_135m $small $(folder "$(realpath $runs/scaled_teacher)")
# Qwen2.5: biases, heads of 64 made 128.
# shellcheck disable=SC2046
student qwen2_5 qwen2_5_1_5b $(folder "$qwen") retain.policy=null "retain.layers=[0,2,7,9,16,22]" retain.num_layers=null \
  calibration_dataset.seq_len=512 measure.batch_size=2 align.steps=80 align.lr=5e-3 align.projection_lr=8e-4 align.eval_every=80
# Random weights with Qwen3-8B's and Llama-3.2-3B's heads.
for family in qwen3 llama3_2; do
  python -m tcal_components.serving.random_export --family $family --tokenizer "$smollm2" --output "$runs/random_$family"
done

exports=(qwen3_random=$runs/random_qwen3 llama3_2_random=$runs/random_llama3_2)
for name in qwen3 smollm2 smollm2_kl_guided llama3_2 qwen2_5; do exports+=("$name=$runs/$name/export"); done
python -m tcal_components.serving.llama_cpp --source "$llama_cpp" --python "$python" --text "$text/heldout.jsonl" \
  --tokens 256 --windows 8 --window 512 --output docs/results/serving_llama_cpp.json --export "${exports[@]}"
