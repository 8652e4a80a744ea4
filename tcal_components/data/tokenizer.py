"""A torchtune tokenizer read from the ``tokenizer.json`` of a Hugging Face folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtune.data import Message
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

from tcal_components.assets import resolve


class HFTokenizer(HuggingFaceBaseTokenizer):
    """torchtune's :class:`HuggingFaceBaseTokenizer` for any teacher folder, with batches and chat.

    It differs from its base class in four points: a null ``bos_token`` is allowed (Qwen has none), special tokens are
    added only on request (never by the tokenizer's own post-processor), :meth:`encode_batch` tokenises many documents
    in parallel, and :meth:`tokenize_messages` renders the folder's own chat template.

    Args:
        folder (Path): folder with ``tokenizer.json`` and at least one of ``tokenizer_config.json``,
            ``generation_config.json``, ``config.json`` that names the end-of-sequence token.
        max_seq_len (int | None): chat samples are cut to this many tokens. None keeps them whole.

    Raises:
        ValueError: if a file is not JSON or no file names an end-of-sequence token.
    """

    bos_id: int | None
    eos_id: int
    pad_id: int

    def __init__(self, folder: Path, *, max_seq_len: int | None = None) -> None:
        self.folder = folder
        self.max_seq_len = max_seq_len
        # The base class reads the special tokens in its constructor through the two methods overridden below.
        super().__init__(str(folder / "tokenizer.json"), tokenizer_config_json_path=_optional(folder))
        pad_id = self._named_id("pad")
        self.pad_id = self.eos_id if pad_id is None else pad_id
        self._template: Any = None

    def _infer_bos_eos_tokens(self) -> None:
        eos_id = self._named_id("eos")
        if eos_id is None:
            raise ValueError(
                f"no end-of-sequence token for {self.folder}/tokenizer.json: expected eos_token in tokenizer_config.json "
                "or eos_token_id in generation_config.json or config.json"
            )
        self.eos_id = eos_id
        self.bos_id = self._named_id("bos")

    def _infer_should_add_bos_eos(self) -> None:
        # encode() never lets the post-processor add special tokens, so nothing has to be compensated for.
        self.hf_adds_bos, self.hf_adds_eos = False, False

    def _named_id(self, kind: str) -> int | None:
        token = (self.config or {}).get(f"{kind}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return self.tokenizer.token_to_id(token)
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self.folder / name).get(f"{kind}_token_id")
            if isinstance(value, list) and value:
                value = value[0]
            if isinstance(value, int):
                return value
        return None

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer can emit (a model's embedding may be larger, padded)."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Token ids of ``text``; begin and end tokens only where asked for (and where the tokenizer has them)."""
        return self._with_ends(self.tokenizer.encode(text, add_special_tokens=False).ids, add_bos, add_eos)

    def encode_batch(self, texts: Sequence[str], add_bos: bool = False, add_eos: bool = False) -> list[list[int]]:
        """Token ids of each text, tokenised in parallel."""
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._with_ends(item.ids, add_bos, add_eos) for item in encoded]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _with_ends(self, ids: list[int], add_bos: bool, add_eos: bool) -> list[int]:
        head = [self.bos_id] if add_bos and self.bos_id is not None else []
        return [*head, *ids, self.eos_id] if add_eos else [*head, *ids]

    # ------------------------------------------------------------------------------------------------------- chat
    def tokenize_messages(
        self, messages: list[Message], *, add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Renders a dialogue with the folder's chat template.

        Args:
            messages (list[Message]): the dialogue; ``message.masked`` messages are prompts.
            add_end_tokens (bool): accepted for torchtune's interface; the template decides about end tokens.

        Returns:
            tuple[list[int], list[bool]]: token ids, and for each whether it is masked (a prompt or a role header).

        Raises:
            ValueError: if the folder has no chat template, or the template rewrites earlier turns.
        """
        ids: list[int] = []
        mask: list[bool] = []
        rendered = ""
        turns = [{"role": m.role, "content": m.text_content} for m in messages]
        for index, message in enumerate(messages):
            if not message.masked:
                # The role header belongs to the prompt: the model is to learn what follows it.
                header = self._render(turns[:index], add_generation_prompt=True)
                rendered = self._extend(ids, mask, rendered, header, masked=True)
            rendered = self._extend(ids, mask, rendered, self._render(turns[: index + 1]), masked=message.masked)
        return ids[: self.max_seq_len], mask[: self.max_seq_len]

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        """torchtune's model transform: pops ``messages``, adds ``tokens`` and ``mask``."""
        tokens, mask = self.tokenize_messages(sample.pop("messages"), add_end_tokens=not inference)
        return {**sample, "tokens": tokens, "mask": mask}

    def _extend(self, ids: list[int], mask: list[bool], old: str, new: str, *, masked: bool) -> str:
        if not new.startswith(old):
            raise ValueError(
                f"the chat template of {self.folder} rewrites earlier turns, so prompts cannot be masked turn by turn; "
                "use a torchtune tokenizer of the family for this data"
            )
        piece = self.tokenizer.encode(new[len(old) :], add_special_tokens=False).ids
        ids.extend(piece)
        mask.extend([masked] * len(piece))
        return new

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        if not turns:
            return ""
        if self._template is None:
            self._template = _compile_template(self.folder, self.config or {})
        special = {
            name: self.tokenizer.id_to_token(value)
            for name, value in (("bos_token", self.bos_id), ("eos_token", self.eos_id), ("pad_token", self.pad_id))
            if value is not None
        }
        return self._template.render(messages=turns, add_generation_prompt=add_generation_prompt, **special)


def hf_tokenizer(path: str | Path, *, max_seq_len: int | None = None) -> HFTokenizer:
    """Tokenizer component of a Hugging Face folder.

    Args:
        path (str | Path): checkpoint folder with ``tokenizer.json``, or the path of that file. The prefix ``asset:``
            means a folder inside this package's assets.
        max_seq_len (int | None): cut chat samples to this many tokens. Text is never cut here.

    Returns:
        HFTokenizer: with ``encode``, ``encode_batch``, ``decode``, ``bos_id``, ``eos_id``, ``pad_id``, ``vocab_size``.

    Raises:
        FileNotFoundError: if there is no ``tokenizer.json``.
        ValueError: if it cannot be read, or names no end-of-sequence token.
    """
    given = resolve(path)
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise FileNotFoundError(
            f"no tokenizer: expected a folder with tokenizer.json or the path of that file, got {path}"
        )
    if file.name != "tokenizer.json":
        raise ValueError(f"tokenizer file must be called tokenizer.json (fast tokenizers only), got {path}")
    try:
        return HFTokenizer(file.parent, max_seq_len=max_seq_len)
    except ValueError:
        raise
    except Exception as error:  # the tokenizers library raises plain Exception for a malformed file
        raise ValueError(f"cannot read {file} as a tokenizer: {error}") from error


def _optional(folder: Path) -> str | None:
    # The base class insists on one of its two config paths; an empty dict stands for "no file" further down.
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        if (folder / name).is_file():
            _read_json(folder / name)
            return str(folder / name)
    raise ValueError(
        f"{folder} has tokenizer.json but none of tokenizer_config.json, generation_config.json, config.json beside it"
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def _compile_template(folder: Path, config: dict[str, Any]) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    file = folder / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if not isinstance(source, str):
        raise ValueError(
            f"{folder} has no chat template (chat_template.jinja or chat_template in tokenizer_config.json)"
        )

    def raise_exception(message: str) -> None:
        raise ValueError(f"chat template of {folder}: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)
