"""Tokenizers in the form of well-known model families, one token a byte, each with a chat template of its family.

Templates are TRL's, from its wheel on PyPI; a family that TRL doesn't ship has one that was written here after the
published format, and says so.
"""

import json
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedTokenizerFast

TRL = "trl==1.16.0"
OWN: dict[str, str] = {
    "mistral": """\
{{- bos_token }}
{%- set users = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set users.last = loop.index0 %}{% endif %}{% endfor %}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set is_last = loop.index0 == users.last %}
        {%- if tools and is_last %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + (system + '\\n\\n' if system and is_last else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('an id has nine characters') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ']' + eos_token if loop.last else ', ' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}""",
    "plain": """\
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') %}{{- raise_exception('no such role') }}{% endif %}
    {{- '### ' + message.role + ':\\n' + message.content }}
    {{- (eos_token if message.role == 'assistant' else '') + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '### assistant:\\n' }}{% endif %}""",
}
"""Not the publishers' files."""
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
DEEPSEEK = tuple(
    f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")
    for name in (
        "begin of sentence", "end of sentence", "User", "Assistant", "tool calls begin", "tool calls end",
        "tool call begin", "tool call end", "tool sep", "tool outputs begin", "tool outputs end", "tool output begin",
        "tool output end",
    )
)  # fmt: skip
HARMONY = (
    "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
    "<|message|>", "<|call|>",
)  # fmt: skip
LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>", "<|finetune_right_pad_id|>",
)  # fmt: skip
GLM = (
    "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "/nothink",
)  # fmt: skip
MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A tokenizer's form.

    special  tokens, those that end a turn first; markup: those that aren't special
    calls    whether its template writes a tool's calls; system: and a system message
    """

    template: str
    special: tuple[str, ...]
    eos: str
    markup: tuple[str, ...] = ()
    bos: str | None = None
    pad: str | None = None
    stops: tuple[str, ...] = ()
    calls: bool = True
    system: bool = True


FAMILIES = {
    "qwen3": Family("qwen3", CHATML, "<|im_end|>", QWEN, pad="<|endoftext|>"),
    "qwen3-instruct": Family("qwen3_instruct_2507", CHATML, "<|im_end|>", QWEN[:4], pad="<|endoftext|>"),
    "qwen3.5": Family("qwen3_5_nothink", CHATML, "<|im_end|>", QWEN, pad="<|endoftext|>"),
    "llama-3.1": Family(
        "llama3_1", LLAMA, "<|eot_id|>", bos="<|begin_of_text|>", stops=("<|end_of_text|>", "<|eom_id|>")
    ),
    "mistral": Family("mistral", MISTRAL, "</s>", bos="<s>", pad="</s>"),
    "gemma-3": Family(
        "gemma3",
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        "<eos>",
        bos="<bos>",
        pad="<pad>",
        calls=False,
    ),
    "phi-3.5": Family(
        "phi3_5",
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|endoftext|>",
        bos="<s>",
        pad="<|endoftext|>",
        calls=False,
    ),
    "deepseek-v3": Family(
        "deepseekv3", DEEPSEEK, DEEPSEEK[1], ("<think>", "</think>"), bos=DEEPSEEK[0], pad=DEEPSEEK[1]
    ),
    "gpt-oss": Family("gptoss", HARMONY, "<|return|>", bos="<|startoftext|>", pad="<|endoftext|>", stops=("<|call|>",)),
    "glm-4.5": Family(
        "glm4moe",
        GLM,
        "<|endoftext|>",
        (*QWEN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        pad="<|endoftext|>",
        stops=("<|user|>", "<|observation|>"),
    ),
    "command-r": Family(
        "cohere2",
        (
            "<PAD>",
            "<BOS_TOKEN>",
            "<|START_OF_TURN_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
        ),
        "<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
        pad="<PAD>",
        calls=False,
    ),
    "plain": Family("plain", ("<|endoftext|>",), "<|endoftext|>", pad="<|endoftext|>", calls=False, system=False),
}


@cache
def _published() -> dict[str, str]:
    """TRL's chat templates, by name."""
    with TemporaryDirectory() as folder:
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, TRL]
        subprocess.run(fetch, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".jinja")]
            return {Path(name).stem: archive.read(name).decode() for name in names}


def template_of(family: Family) -> str:
    return OWN.get(family.template) or _published()[family.template]


def save_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer, which a folder holds then, with an empty model beside it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.markup])
    if family.bos:  # as the publishers' do: beside a template that writes it, it would be there twice
        single = f"{family.bos} $A"
        backend.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[(family.bos, backend.token_to_id(family.bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.eos,
        bos_token=family.bos,
        pad_token=family.pad,
        clean_up_tokenization_spaces=False,
        chat_template=template_of(family),
    )
    tokenizer.save_pretrained(folder)
    stops = [tokenizer.convert_tokens_to_ids(token) for token in (family.eos, *family.stops)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(tokenizer)}))
    return tokenizer
