"""What every tiny policy is: a Qwen3 of two layers with random weights, and a tokenizer of bytes.

No download, 0.43 M parameters, and Qwen's own special tokens and chat layout, so that renderers, verifiers and vLLM
treat it as the real family. Imports neither torch nor transformers before it makes something.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
NUM_BYTES = 256
MAX_POSITIONS = 2048
INIT_STD = 0.05
"""Of fresh weights: at the usual 0.02 training takes half as long again."""

ARCHITECTURE: dict[str, Any] = {
    "vocab_size": NUM_BYTES + len(SPECIAL_TOKENS) + len(MARKUP_TOKENS),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": True,
    "pad_token_id": NUM_BYTES + SPECIAL_TOKENS.index("<|endoftext|>"),
    "eos_token_id": NUM_BYTES + SPECIAL_TOKENS.index("<|im_end|>"),
    "bos_token_id": None,
    "architectures": ["Qwen3ForCausalLM"],
}
"""Hidden 128, 2 layers, 4 heads on 2 key-value heads, inter 384, tied embeddings, 265 ids."""

SMALL_ARCHITECTURE = ARCHITECTURE | {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""The same family at 32 M parameters, for a GPU: hidden 512, 10 layers, 8 heads on 4, inter 1536."""

QUIET = "<think>\n\n</think>\n\n"
"""The thinking that is off."""
TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
"""Qwen's own words before and after a list of tools."""

CHAT_TEMPLATE = """\
{%- set quiet = '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + quiet + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' + quiet }}
{%- endif %}
"""


def tiny_config(architecture: dict[str, Any] = ARCHITECTURE) -> Qwen3Config:
    """One of the architectures, as transformers spells it."""
    from transformers import Qwen3Config

    return Qwen3Config(**architecture)


def tiny_tokenizer(phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token a byte (ids 0 to 255 in the order of the byte-level alphabet), then Qwen's special tokens, its markup
    and the phrases."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return qwen_tokenizer(backend, phrases)


def qwen_tokenizer(backend: Tokenizer, phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level backend with Qwen's special tokens, its markup, and phrases that are tokens wherever they stand; of
    several that begin at one place the longest counts."""
    from tokenizers import AddedToken, decoders
    from transformers import PreTrainedTokenizerFast

    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in (*MARKUP_TOKENS, *phrases)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def fresh_model(config: Qwen3Config, seed: int, *, num_threads: int = 1, device: str = "cpu") -> PreTrainedModel:
    """A model with random weights of that seed, fp32 on the device. Sets torch's seed and its number of threads, by
    which sums round."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(num_threads)
    torch.manual_seed(seed)
    config.initializer_range = INIT_STD
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").to(device)
