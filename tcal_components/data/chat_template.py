"""The chat template of a Hugging Face folder, as transformers renders it, and what of a dialogue is learned."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

from torchtune.data import Message

from tcal_components.data.sources import first_line

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]  # of characters


class ChatTemplate:
    """Dialogues as the template of a folder writes them.

    Args:
        folder (Path): of a tokenizer; one without a template gives prompts as plain lines.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prompt(self, messages: list[Message]) -> str:
        """A prompt as text: it ends where the assistant's answer begins, or in the middle of one that is not empty.

        Raises:
            ValueError: if the template refuses the dialogue.
        """
        turns = _turns(messages)
        if turns and turns[-1] == {"role": "assistant", "content": ""}:  # torchtune's sign for "answer here"
            turns = turns[:-1]
        if self._tokenizer.chat_template is None:
            return "\n".join(turn["content"] for turn in turns)
        answering = bool(turns) and turns[-1]["role"] == "assistant"
        return self._render(turns, add_generation_prompt=not answering, continue_final_message=answering)[0]

    def dialogue(self, messages: list[Message]) -> tuple[str, list[Span]]:
        """A dialogue as text, and which characters of it are to be learned.

        Raises:
            ValueError: if the folder has no chat template, the template refuses the dialogue, or it has no marks and
                rewrites earlier turns.
        """
        turns = _turns(messages)
        rendered, marked = self._render(turns)
        spans = self._learned(messages, marked) if marked else None
        return rendered, self._spans_turn_by_turn(messages, turns) if spans is None else spans

    @staticmethod
    def _learned(messages: list[Message], marked: list[Span]) -> list[Span] | None:
        """The marked parts of the template that unmasked messages wrote; None where marks cannot tell."""
        answers = [message for message in messages if message.role == "assistant"]
        if any(not message.masked for message in messages if message.role != "assistant"):
            return None
        if len(marked) == len(answers):
            return [span for span, message in zip(marked, answers) if not message.masked]
        return None if any(message.masked for message in answers) else marked

    def _spans_turn_by_turn(self, messages: list[Message], turns: list[dict[str, str]]) -> list[Span]:
        spans: list[Span] = []
        rendered = ""
        for index, message in enumerate(messages):
            stages = [self._render(turns[: index + 1])[0]]
            if not message.masked and index:
                # The role header belongs to the prompt: the model is to learn what follows it.
                stages.insert(0, self._render(turns[:index], add_generation_prompt=True)[0])
            for text in stages:
                if not text.startswith(rendered):
                    raise ValueError(
                        f"the chat template of {self.folder} rewrites earlier turns and has no generation tags, so prompts "
                        "cannot be masked turn by turn; use a torchtune tokenizer of the family for this data"
                    )
                begin, rendered = len(rendered), text
            if not message.masked:
                spans.append((begin, len(rendered)))
        return spans

    @cached_property
    def _tokenizer(self) -> Any:
        """transformers' tokenizer of the folder: it finds the template among all places and forms that there are."""
        from transformers import PreTrainedTokenizerFast

        try:
            return PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # it expects well-formed files and raises many kinds
            raise ValueError(f"transformers cannot read the tokenizer of {self.folder}: {first_line(error)}") from error

    def _render(self, turns: list[dict[str, str]], **options: Any) -> tuple[str, list[Span]]:
        """The dialogue as text, and which characters of it the template marks as the assistant's."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"{self.folder} has no chat template (chat_template.jinja or chat_template in tokenizer_config.json)"
            )
        try:
            template = self._tokenizer.get_chat_template()
            rendered: Any = render_jinja_template(
                conversations=[turns],
                chat_template=template,
                return_assistant_tokens_mask=_GENERATION_TAG.search(template) is not None and not options,
                **options,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # whatever the program in the folder raises
            raise ValueError(f"chat template of {self.folder}: {first_line(error)}") from error
        (text,), spans = rendered
        return _text(text, f"the dialogue that the chat template of {self.folder} renders"), spans[0] if spans else []


def _turns(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.text_content} for message in messages]


def _text(value: str, where: str) -> str:
    """Refuses what JSON can spell and no UTF-8 text can hold."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} holds half a surrogate pair at character {error.start}, which is no text") from error
    return value
