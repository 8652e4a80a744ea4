"""Keys of torchtune's own recipes that these recipes do not have: what each is called here, or why there is none."""

from __future__ import annotations

_ONE_BATCH = (
    "distill.batch_size counts the sequences of one optimizer step over all processes, distill.micro_batch_size"
)
_ALL_TRAINED = (
    "the student is trained whole, there is no LoRA; distill.base_lr sets the rate of what the teacher had before"
)
_FROM_FOLDER = "it is read from the folder that checkpoint_dir names"
_NOT_SAVED_THERE = "a teacher is only read; what a run writes goes below the top-level output_dir"
_TOKENIZER_FOLDER = "tcal_components.data.hf_tokenizer reads the whole tokenizer from the folder that path names"
_TEXT_ONLY = "teachers read text only, there are no images"
_NO_TENSOR_PARALLEL = "there is no tensor parallelism; weights are sharded (FSDP2), see the section parallel"

# Top-level keys by their name, others as section.key.
TORCHTUNE_KEYS: dict[str, str] = {
    "batch_size": f"{_ONE_BATCH} those of one forward pass; alignment has align.batch_size",
    "checkpointer": "the student is made from the teacher, so there is only teacher_checkpointer; stages write to output_dir",
    "clip_grad_norm": "it is called distill.clip_grad_norm; alignment has align.max_grad_norm",
    "collate_fn": "batches are packed already, nothing is left to collate",
    "custom_sharded_layers": "embedding and head are sharded anyway; see the section parallel",
    "epochs": "a run is as long as distill.tokens says, and goes through the text again where that is shorter",
    "fsdp_cpu_offload": "it is called parallel.cpu_offload",
    "gradient_accumulation_steps": f"{_ONE_BATCH} those of one forward pass, and the rest is accumulated",
    "kd_ratio": "it is called kd_loss.kd_ratio",
    "log_every_n_steps": "it is called distill.log_every_steps",
    "log_peak_memory_stats": "the report always has the peak memory of each stage",
    "loss": "the loss is kd_loss, which weighs cross-entropy by its kd_ratio",
    "max_steps_per_epoch": "a run is as long as distill.tokens says: tokens // (batch_size x seq_len) steps",
    "optimizer_in_bwd": "the optimizer steps after the backward pass, because the gradient is clipped as a whole",
    "profiler": "there is none; recipes/benchmark_training measures time and memory of a step",
    "save_adapter_weights_only": _ALL_TRAINED,
    "shuffle": "sequences are always drawn in random order, which follows from seed; documents by dataset.shuffle_documents",
    "tensor_parallel_dim": _NO_TENSOR_PARALLEL,
    "tensor_parallel_plan": _NO_TENSOR_PARALLEL,
    "dataset.packed": "text is always packed; documents do not see each other",
    "model.apply_lora_to_mlp": _ALL_TRAINED,
    "model.apply_lora_to_output": _ALL_TRAINED,
    "model.decoder_trainable": _TEXT_ONLY,
    "model.encoder_trainable": _TEXT_ONLY,
    "model.fusion_trainable": _TEXT_ONLY,
    "model.image_size": _TEXT_ONLY,
    "model.lora_alpha": _ALL_TRAINED,
    "model.lora_attn_modules": _ALL_TRAINED,
    "model.lora_dropout": _ALL_TRAINED,
    "model.lora_rank": _ALL_TRAINED,
    "teacher_checkpointer.checkpoint_files": f"{_FROM_FOLDER} (all of its safetensors, by the index where there is one)",
    "teacher_checkpointer.model_type": f"{_FROM_FOLDER} (config.json)",
    "teacher_checkpointer.output_dir": _NOT_SAVED_THERE,
    "teacher_checkpointer.recipe_checkpoint": f"{_NOT_SAVED_THERE}; resume_from_checkpoint=true goes on from there",
    "tokenizer.image_size": _TEXT_ONLY,
    "tokenizer.merges_file": _TOKENIZER_FOLDER,
    "tokenizer.merges_path": _TOKENIZER_FOLDER,
    "tokenizer.vocab_path": _TOKENIZER_FOLDER,
}
