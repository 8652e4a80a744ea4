"""One of two processes that ask for the same text, one time after the other; prints how often it has tokenised."""

import datetime
import json
import sys
from pathlib import Path

import torch.distributed as dist

from tcal_components.data import hf_tokenizer, packed_text
from tcal_components.data.token_files import TokenFiles

tokenizer_folder, source, folder = map(Path, sys.argv[1:])
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
tokenizer = hf_tokenizer(tokenizer_folder)
section = {"_component_": "tcal_components.data.packed_text", "source": str(source), "seq_len": 8}
found = []
for component in ("tcal_components.data.packed_text", "elsewhere.packed_text"):
    for _ in range(2):
        calls = 0

        def make():
            global calls
            calls += 1
            return packed_text(tokenizer, source=str(source), seq_len=8)

        files = TokenFiles(folder, tokenizer, {"path": str(tokenizer_folder)})
        name = component.split(".")[0]
        text = files.get(name, {**section, "_component_": component}, make)
        who = files.once("who", [name], dist.get_rank)
        found.append([calls, text.sources["sha256"], who])
print(json.dumps(found))
dist.destroy_process_group()
