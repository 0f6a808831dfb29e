"""Small tokenizers and chat templates of the usual families, each with what it should print, written down without Jinja.

`Family.pieces` is the reference: a conversation as a list of (text, learned). It shares nothing with the stack, which only
`maker` and what follows it know.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from stack.config.schema_data import DataConfig
from stack.data.chat.encode import ChatEncoder, Encoded

Turns = list[dict[str, Any]]
Pieces = list[tuple[str, bool]]

CORPUS = [
    "What is the answer to the question? The answer is here:\n\n- one\n- two\n\nAnd so on, and on.",
    "user assistant system tool model\n\n  def f(x):\n      return x\n",
    "한국어 문장입니다. 中文，没有空格。 emoji 👩\u200d💻",
]
ALPHABET = [
    "a", "b", "The", " ", "  ", "\n", "\n\n", "\t", ".", "?", "한국어", "中文", "👩\u200d💻", "é", "e\u0301",
    "\u2028", "<", ">", "|", "{{", "%}", "\ufdd0", "answer", " the",
]  # fmt: skip


def make_tokenizer(
    specials: list[str], eos: str, bos: str | None = None, post_bos: bool = False, pad: str | None = None
):
    """A byte-level BPE of 400 ids and the special tokens. post_bos: it puts BOS before a text by itself."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in specials])
    if post_bos and bos:
        backend.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
                ),
            ]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=eos,
        bos_token=bos,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Family:
    """A chat template as its models have it, and what it prints."""

    specials: list[str]
    eos: str
    template: str
    marked: str
    """The same template with generation marks."""

    pieces: Callable[[Turns], Pieces]
    bos: str | None = None
    alternates: bool = False
    """It refuses two turns of one role in a row, and roles other than system (first), user and assistant."""

    def save(self, folder: Path, marked: bool = False, **options: Any) -> str:
        """Folder of a tokenizer with the template."""
        tokenizer = make_tokenizer(self.specials, self.eos, self.bos, **options)
        tokenizer.chat_template = self.marked if marked else self.template
        tokenizer.save_pretrained(folder)
        return str(folder)


CHATML = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}BEGIN{{ message['content'] }}"
    "{{ '<|im_end|>' }}END{{ '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


def chatml_pieces(turns: Turns) -> Pieces:
    pieces = []
    for turn in turns:
        said = turn["role"] == "assistant"
        pieces += [
            (f"<|im_start|>{turn['role']}\n", False),
            (f"{turn['content']}<|im_end|>", said),
            ("\n", False),
        ]
    return pieces


LLAMA = """{{- bos_token }}
{%- for m in messages %}
    {%- set head = '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' %}
    {{- head }}BEGIN{{- m['content'] | trim + '<|eot_id|>' }}END
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""


def llama_pieces(turns: Turns) -> Pieces:
    pieces = [("<|begin|>", False)]
    for turn in turns:
        said = turn["role"] == "assistant"
        pieces.append((f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n", False))
        pieces.append((f"{turn['content'].strip()}<|eot_id|>", said))
    return pieces


MISTRAL = """{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] + '\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + '[/INST]' }}
    {%- else %}
        BEGIN{{- ' ' + message['content'] + eos_token }}END
    {%- endif %}
{%- endfor %}
"""


def mistral_pieces(turns: Turns) -> Pieces:
    pieces = [("<s>", False)]
    system = ""
    if turns[0]["role"] == "system":
        system, turns = turns[0]["content"] + "\n\n", turns[1:]
    for number, turn in enumerate(turns):
        if turn["role"] == "user":
            pieces.append((f"[INST] {'' if number else system}{turn['content']}[/INST]", False))
        else:
            pieces.append((f" {turn['content']}</s>", True))
    return pieces


GEMMA = """{{ bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content | trim + '\\n\\n' %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set first = '' %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}BEGIN
    {{- message.content | trim -}}
    {{ '<end_of_turn>' }}END{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""


def gemma_pieces(turns: Turns) -> Pieces:
    pieces, first = [("<bos>", False)], ""
    if turns[0]["role"] == "system":
        first, turns = turns[0]["content"].strip() + "\n\n", turns[1:]
    for number, turn in enumerate(turns):
        said = turn["role"] == "assistant"
        pieces.append(
            (f"<start_of_turn>{'model' if said else turn['role']}\n{'' if number else first}", False)
        )
        pieces += [(f"{turn['content'].strip()}<end_of_turn>", said), ("\n", False)]
    return pieces


THINKING = """{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == 'user' %}
        {%- set ns.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}BEGIN
        {%- if loop.index0 > ns.last and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}END{{ '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools %}{% set unused = tools | length %}{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


Make = Callable[..., ChatEncoder]
SAID = {"role": "assistant", "content": "The answer."}
ASKED = {"role": "user", "content": "What?"}


def maker(folder: Path) -> Make:
    """What makes an encoder of a family's tokenizer and template, in a folder of its own."""

    def made(
        family: Family, marked: bool = False, tokenizer: dict[str, Any] | None = None, **data: Any
    ) -> ChatEncoder:
        saved = family.save(folder / str(len(list(folder.iterdir()))), marked, **(tokenizer or {}))
        return ChatEncoder(saved, DataConfig(**{"format": "messages", **data}))

    return made


def encode(encoder: ChatEncoder, turns: Turns, **fields: Any) -> Encoded:
    made = encoder.encode({"messages": turns, **fields})
    assert isinstance(made, Encoded)
    assert made.ids.dtype == np.int64 and made.targets.dtype == bool and made.ids.shape == made.targets.shape
    return made


def learned(encoder: ChatEncoder, made: Encoded) -> list[str]:
    """Each run of targets as text."""
    runs = itertools.groupby(range(len(made.ids)), key=lambda place: bool(made.targets[place]))
    return [decoded(encoder, made.ids[list(run)]) for is_target, run in runs if is_target]


def decoded(encoder: ChatEncoder, ids: np.ndarray) -> str:
    return str(encoder.text.tokenizer.decode(ids.tolist()))


def _family(
    specials: list[str],
    eos: str,
    template: str,
    pieces: Callable[[Turns], Pieces],
    is_said: str = "",
    **more: Any,
) -> Family:
    """is_said: for a template with one expression for all roles, the condition under which the assistant speaks."""
    before, body, after = template.partition("BEGIN")[0], *template.partition("BEGIN")[2].split("END")
    block = "{%- generation -%}\n    " + body + "\n    {%- endgeneration -%}\n    "
    if is_said:
        block = "{%- if " + is_said + " %}" + block + "{%- else %}" + body + "{%- endif %}"
    return Family(specials, eos, before + body + after, before + block + after, pieces, **more)


FAMILIES = {
    "chatml": _family(["<|im_start|>", "<|im_end|>"], "<|im_end|>", CHATML, chatml_pieces, "message.role == 'assistant'"),
    "llama": _family(
        ["<|begin|>", "<|end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|end|>", LLAMA,
        llama_pieces, "m.role == 'assistant'", bos="<|begin|>",
    ),
    "mistral": _family(
        ["<s>", "</s>", "[INST]", "[/INST]"], "</s>", MISTRAL, mistral_pieces, bos="<s>", alternates=True
    ),
    "gemma": _family(
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<eos>", GEMMA, gemma_pieces,
        "message.role == 'assistant'", bos="<bos>"
    ),
}  # fmt: skip
THINKER = _family(["<|im_start|>", "<|im_end|>"], "<|im_end|>", THINKING, lambda _: [])
"""Takes the thinking out of turns before the last question, as Qwen3's own template does."""


def random_turns(source: random.Random, alternates: bool) -> Turns:
    """A conversation of 1 to 9 turns whose texts are full of edges: blanks, line feeds, Unicode, bits of Jinja, nothing."""

    def text() -> str:
        return "".join(source.choice(ALPHABET) for _ in range(source.choice([0, 1, 3, 12])))

    turns = [{"role": "system", "content": text()}] if source.random() < 0.4 else []
    for number in range(source.randint(1, 8)):
        roles = ["user", "assistant", "system"]
        role = roles[number % 2] if alternates else source.choices(roles, [4, 5, 1])[0] if number else "user"
        turns.append({"role": role, "content": text()})
    return turns
