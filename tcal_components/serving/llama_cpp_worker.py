"""Runs GGUF files in llama.cpp: a script for the Python that has the engine, which needs numpy and llama-cpp-py-sync alone.

    python llama_cpp_worker.py                   prints the engine's version, or why it cannot be used (exit status 3)
    python llama_cpp_worker.py REQUEST.json      quantizes and evaluates (llama_cpp.py writes the request)

A process of its own, because the engine ends the process where a file breaks one of its assertions.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

FILE_TYPES = {"f16": 1, "q8_0": 7, "q4_k_m": 15}  # enum llama_ftype


def engine():
    """The bindings, or exit with the reason."""
    try:
        import llama_cpp_py_sync
        from llama_cpp_py_sync._cffi_bindings import ffi, get_lib

        lib = get_lib()
    except (ImportError, OSError, RuntimeError) as error:
        print(" ".join(f"{type(error).__name__}: {error}".split()))
        sys.exit(3)
    quiet = ffi.callback("void(enum ggml_log_level, const char *, void *)", lambda *_: None)
    lib.llama_log_set(quiet, ffi.NULL)
    lib.llama_backend_init()
    return ffi, lib, quiet, llama_cpp_py_sync.__version__


def quantize(ffi, lib, source, target, kind):
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = FILE_TYPES[kind]
    parameters.nthread = os.cpu_count() or 1
    if lib.llama_model_quantize(source.encode(), target.encode(), ffi.addressof(parameters)):
        sys.exit(f"llama.cpp cannot write {kind}")


class Model:
    """A GGUF file with room for ``size`` tokens of one sequence.

    Args:
        exact: keep keys and values in float32 (the engine's default is float16).
    """

    def __init__(self, ffi, lib, path, size, *, exact):
        self.ffi, self.lib = ffi, lib
        parameters = lib.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(path.encode(), parameters)
        if self.model == ffi.NULL:
            sys.exit(f"llama.cpp cannot load {os.path.basename(path)}")
        context = lib.llama_context_default_params()
        context.n_ctx = context.n_batch = size
        context.n_threads = context.n_threads_batch = len(os.sched_getaffinity(0))
        if exact:
            context.type_k = context.type_v = lib.GGML_TYPE_F32
            context.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = lib.llama_init_from_model(self.model, context)
        if self.context == ffi.NULL:
            sys.exit(f"llama.cpp has no context for {os.path.basename(path)}")
        self.vocabulary = lib.llama_model_get_vocab(self.model)
        self.num_logits = lib.llama_vocab_n_tokens(self.vocabulary)

    def clear(self):
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def logits(self, tokens, start=0):
        """Logits [T, V] of tokens [T] that follow ``start`` earlier ones."""
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), start + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        status = self.lib.llama_decode(self.context, batch)
        if status:
            sys.exit(f"llama.cpp cannot evaluate {len(tokens)} tokens (status {status})")
        size = len(tokens) * self.num_logits
        buffer = self.ffi.buffer(self.lib.llama_get_logits(self.context), 4 * size)
        found = np.frombuffer(buffer, dtype=np.float32).reshape(len(tokens), -1).copy()
        self.lib.llama_batch_free(batch)
        return found

    def tokenize(self, text):
        data, room = text.encode(), self.ffi.new("llama_token[]", 4 * len(text) + 16)
        count = self.lib.llama_tokenize(self.vocabulary, data, len(data), room, len(room), False, False)
        return [room[i] for i in range(count)]

    def close(self):
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


def negative_log_likelihood(logits, tokens):
    logits, targets = logits[:-1].astype(np.float64), tokens[1:]
    largest = logits.max(axis=-1)
    total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
    return float((total - logits[np.arange(len(targets)), targets]).sum())


def main():
    ffi, lib, _quiet, version = engine()
    if len(sys.argv) < 2:
        print(json.dumps({"version": version}))
        return
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    folder, scratch = request["folder"], request["scratch"]
    tokens, windows = np.load(request["tokens"]), np.load(request["windows"])
    result = {"version": version}
    for kind in request["kinds"]:
        path = os.path.join(folder, f"{kind}.gguf")
        if kind in FILE_TYPES:
            quantize(ffi, lib, os.path.join(folder, "f32.gguf"), path, kind)
        model = Model(ffi, lib, path, max(len(tokens), windows.shape[1]), exact=kind == "f32")
        half = len(tokens) // 2
        prefilled = model.logits(tokens[:half])
        steps = [model.logits(tokens[i : i + 1], start=i) for i in range(half, len(tokens))]
        np.save(os.path.join(scratch, f"{kind}.npy"), np.concatenate([prefilled, *steps]))
        total = 0.0
        for window in windows:
            model.clear()
            total += negative_log_likelihood(model.logits(window), window)
        result[kind] = {
            "perplexity": float(np.exp(total / (windows.shape[0] * (windows.shape[1] - 1)))),
            "bytes": os.path.getsize(path),
            "probe": model.tokenize(request["probe"]),
        }
        model.close()
        if not request["keep"] and kind != "f32":  # the others are made from it
            os.remove(path)
    with open(os.path.join(scratch, "result.json"), "w", encoding="utf-8") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
