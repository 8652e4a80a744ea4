"""Torchtune's checkpointer protocol: weights and recipe state of one epoch belong together, whatever ended the process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tcal_components
from tcal_components.export.checkpointer import HybridCheckpointer
from tcal_components.export.folder import export_hybrid

# Runs in a process of its own: it forks one child for every file operation, and the child ends at it without a word, as
# a killed process does. Epoch e of run r has weights of 100 r + e in the embedding, and so has its state.
KILLS = '''
import json, os, shutil, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from tcal_components.export.checkpointer import HybridCheckpointer
from tcal_components.export.import_hybrid import import_hybrid

start, output = Path(sys.argv[1]), Path(sys.argv[2])
before, after = json.loads(sys.argv[3]), json.loads(sys.argv[4])  # saves [run, epoch, intermediate]
weights = import_hybrid(start).state_dict
WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink", "os.truncate"}

def save(run, epoch, intermediate):
    value = float(100 * run + epoch)
    state = {"model": weights | {"tok_embeddings.weight": torch.full_like(weights["tok_embeddings.weight"], value)}}
    if intermediate:
        state |= {"epochs_run": epoch + 1, "value": value, "optimizer": {"state": {0: torch.full((3,), value)}}}
    HybridCheckpointer(start, output_dir=output).save_checkpoint(state, epoch, intermediate_checkpoint=intermediate)

def resumed():
    try:
        found = HybridCheckpointer(start, output_dir=output, should_load_recipe_state=True).load_checkpoint()
    except FileNotFoundError as error:
        assert "nothing to resume from" in str(error), error
        return None
    values = {float(found["model"]["tok_embeddings.weight"][0, 0]), found["value"], *found["optimizer"]["state"][0].tolist()}
    return [*sorted(values), found["epochs_run"]]

def killed_at(count):
    """Saves once more in a child that ends at its operation number ``count``; False if it had less of them."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = [count]
    def audit(event, arguments):
        write = event in WRITES or (event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"))
        if write and str(output) in str(arguments[0]):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
    sys.addaudithook(audit)
    torch_save = torch.save
    def cut(value, path, *args, **kwargs):  # opens its file in C++, which no audit hook sees
        left[0] -= 1
        if left[0] < 0:
            Path(path).write_bytes(b"half")
            os._exit(9)
        torch_save(value, path, *args, **kwargs)
    torch.save = cut
    for arguments in after:
        save(*arguments)
    os._exit(0)

results, count = [], 0
while True:
    shutil.rmtree(output, ignore_errors=True)
    for arguments in before:
        save(*arguments)
    expected = resumed()
    finished = not killed_at(count)
    left = resumed()
    for arguments in after:  # what a new start does: nothing stays in its way, and nothing of the dead one stays
        save(*arguments)
    results.append([left, resumed(), sorted(path.name for path in output.iterdir())])
    count += 1
    if finished:
        break
print(json.dumps([expected, results]))
'''


@pytest.fixture
def start(tiny_spec, random_hybrid, teacher_folder, tmp_path):
    student = random_hybrid(tiny_spec("qwen3", num_layers=2), (1,))
    export_hybrid(
        student.state_dict(),
        spec=student.spec,
        gdn=student.gdn,
        retained_layers=(1,),
        teacher_dir=teacher_folder,
        output_dir=tmp_path / "start",
        dtype=torch.float32,
    )
    return tmp_path / "start"


@pytest.fixture
def kills(start, tmp_path):
    def run(before, after):
        source = str(Path(tcal_components.__file__).parents[1])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": source}
        arguments = [str(start), str(tmp_path / "run"), json.dumps(before), json.dumps(after)]
        done = subprocess.run(
            [sys.executable, "-c", KILLS, *arguments], env=environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def pair(run, epoch):
    """What a right resume gives: one value in weights and state, and the number of epochs."""
    return [100.0 * run + epoch, epoch + 1]


def test_killed_at_any_write_of_an_epoch(kills):
    """The pair is that of the last epoch or of the one before; it changes once, at the last moment."""
    expected, results = kills([[1, 0, True]], [[1, 1, True]])
    assert expected == pair(1, 0) and len(results) > 15
    left = [found for found, _, _ in results]
    committed = left.index(pair(1, 1))
    assert left[:committed] == [pair(1, 0)] * committed and committed > 10
    assert left[committed:] == [pair(1, 1)] * (len(left) - committed)
    for _, after, names in results:
        assert after == pair(1, 1) and names == ["epoch_0", "epoch_1"]


def test_killed_at_any_write_of_the_last_epoch(kills):
    """It has no state, so a resume does it again."""
    _, results = kills([[1, 0, True], [1, 1, True]], [[1, 2, False]])
    assert len(results) > 10
    for found, after, names in results:
        assert found == after == pair(1, 1) and names == ["epoch_0", "epoch_1", "epoch_2"]


def test_killed_at_any_write_of_a_new_run_in_an_old_folder(kills):
    """A pair of the new run, of the old one, or none; and once the new run has one, never that of the old."""
    expected, results = kills([[1, 0, True], [1, 1, True], [1, 2, True], [1, 3, False]], [[2, 0, True]])
    assert expected == pair(1, 2)
    left = [found for found, _, _ in results]
    assert all(found in (pair(1, 2), None, pair(2, 0)) for found in left) and pair(2, 0) in left
    assert left[left.index(pair(2, 0)) :] == [pair(2, 0)] * (len(left) - left.index(pair(2, 0)))
    for _, after, names in results:
        assert after == pair(2, 0) and names == ["epoch_0", "epoch_1", "epoch_2", "epoch_3"]


@pytest.fixture
def two_epochs(start, tmp_path):
    """An output folder after two intermediate epochs, whose weights and states count from 0."""
    checkpointer = HybridCheckpointer(start, output_dir=tmp_path / "run")
    weights = checkpointer.load_checkpoint()["model"]
    for epoch in range(2):
        model = weights | {"norm.scale": torch.full_like(weights["norm.scale"], 1.0 + epoch)}
        checkpointer.save_checkpoint({"model": model, "epochs_run": epoch + 1}, epoch, intermediate_checkpoint=True)
    return tmp_path / "run"


def load(start, run, **options):
    return HybridCheckpointer(start, output_dir=run, should_load_recipe_state=True, **options).load_checkpoint()


def test_a_state_of_ones_choice_comes_with_its_weights(start, two_epochs, tmp_path):
    assert load(start, two_epochs)["model"]["norm.scale"][0] == 2.0
    state = next((two_epochs / "epoch_1").glob("*.pt"))
    kept = tmp_path / "run" / "epoch_7"
    (two_epochs / "epoch_1").rename(kept)
    for given in (kept / state.name, f"epoch_7/{state.name}"):  # as torchtune's checkpointers: below output_dir
        found = load(start, two_epochs, recipe_checkpoint=given)
        assert found["epochs_run"] == 2 and found["model"]["norm.scale"][0] == 2.0
    alone = tmp_path / "elsewhere.pt"
    alone.write_bytes((kept / state.name).read_bytes())
    with pytest.raises(FileNotFoundError, match="an exported hybrid is needed"):
        load(start, two_epochs, recipe_checkpoint=alone)
    with pytest.raises(FileNotFoundError, match="nothing to resume from: .*nowhere.pt"):
        load(start, two_epochs, recipe_checkpoint="nowhere.pt")


def test_a_damaged_state_is_one_line(start, two_epochs):
    state = next((two_epochs / "epoch_1").glob("*.pt"))
    content = state.read_bytes()
    for cut in (0, 5, len(content) // 2):
        state.write_bytes(content[:cut])
        with pytest.raises(ValueError, match=f"{state} is damaged") as error:
            load(start, two_epochs)
        assert "\n" not in str(error.value)


def test_only_the_last_epoch_keeps_its_state(two_epochs):
    """It is three times as large as bfloat16 weights, and nothing resumes from an earlier one."""
    assert [path.parent.name for path in two_epochs.rglob("*.pt")] == ["epoch_1"]
