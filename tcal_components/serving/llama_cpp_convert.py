"""Runs llama.cpp's converter: a script of its own process.

    python llama_cpp_convert.py LLAMA_CPP PRE_TOKENIZER ARGUMENT...

The converter knows tokenizers by a checksum and refuses others. ``PRE_TOKENIZER`` is the name that such a tokenizer gets,
or ``-`` to leave it refused.
"""

import runpy
import sys


def main():
    source, name, *arguments = sys.argv[1:]
    sys.path.insert(0, source)
    if name != "-":
        try:
            from conversion.base import TextModel  # older checkouts have all of it in one file, and no such fallback
        except ImportError:
            TextModel = None
        if TextModel is not None:
            known = TextModel.get_vocab_base_pre

            def get_vocab_base_pre(self, tokenizer):
                try:
                    return known(self, tokenizer)
                except NotImplementedError:
                    return name

            TextModel.get_vocab_base_pre = get_vocab_base_pre
    sys.argv = [f"{source}/convert_hf_to_gguf.py", *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
