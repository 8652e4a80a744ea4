"""A stock torchtune recipe fine-tunes an exported hybrid and writes exports again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import yaml

import tcal_components
from tcal_components.export.folder import export_hybrid
from tcal_components.export.import_hybrid import hybrid_from_export, import_hybrid
from tcal_components.export.verify import verify_export


def test_full_finetune_recipe_and_resume(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("llama3_2", vocab_size=256, num_layers=2), (1,))
    export_hybrid(
        student.state_dict(),
        spec=student.spec,
        gdn=student.gdn,
        retained_layers=(1,),
        teacher_dir=teacher_folder,
        output_dir=tmp_path / "export",
        dtype=torch.float32,
    )
    text = tmp_path / "text.json"
    text.write_text("\n".join(json.dumps({"text": f"line {n} of a short text"}) for n in range(4)))
    config = {
        "output_dir": str(tmp_path / "run"),
        "model": {
            "_component_": "tcal_components.export.import_hybrid.hybrid_from_export",
            "checkpoint_dir": str(tmp_path / "export"),
        },
        "checkpointer": {
            "_component_": "tcal_components.export.checkpointer.HybridCheckpointer",
            "checkpoint_dir": str(tmp_path / "export"),
            "output_dir": "${output_dir}",
            "model_type": "HYBRID",
        },
        "tokenizer": {"_component_": "tcal_components.data.hf_tokenizer", "path": str(tmp_path / "export")},
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": str(text),
            "column": "text",
            "split": "train",
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "loss": {"_component_": "torch.nn.CrossEntropyLoss", "ignore_index": -100},
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": "${output_dir}/logs",
        },
        "seed": 0,
        "shuffle": False,
        "batch_size": 2,
        "epochs": 2,
        "max_steps_per_epoch": 2,
        "gradient_accumulation_steps": 1,
        "clip_grad_norm": 1.0,
        "resume_from_checkpoint": False,
        "optimizer_in_bwd": False,
        "enable_activation_checkpointing": True,
        "enable_activation_offloading": False,
        "compile": False,
        "device": "cpu",
        "dtype": "fp32",
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    tune = [sys.executable, "-m", "torchtune._cli.tune", "run", "full_finetune_single_device"]
    source = str(Path(tcal_components.__file__).parents[1])  # for a checkout that is not installed
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": source}

    def run(*changes):
        command = [*tune, "--config", str(tmp_path / "config.yaml"), *changes]
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return (folder / "model.safetensors").read_bytes()

    folder = tmp_path / "run" / "epoch_1"
    weights = run()
    assert [path.parent.name for path in (tmp_path / "run").rglob("recipe_state.pt")] == ["epoch_0"]
    trained = hybrid_from_export(checkpoint_dir=folder)
    trained.load_state_dict(import_hybrid(folder).state_dict)
    assert not torch.equal(trained.layers[0].attn.q_proj.weight, student.layers[0].attn.q_proj.weight)
    assert verify_export(folder, trained, torch.randint(0, 256, (2, 40)))["ok"]
    # The last epoch has no state: resumed, it is trained again from the end of the one before, to the same weights.
    shutil.copy(tmp_path / "export" / "model.safetensors", folder)
    assert run("resume_from_checkpoint=true") == weights
