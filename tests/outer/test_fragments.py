"""Fragment plans: what is in which block, that nothing is lost or doubled, and that plans are stable."""

import random
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from composer_prime.errors import ConfigError
from composer_prime.outer.fragments import model_fingerprint, plan_fragments, trainable


def decoder(num_layers: int = 4, head: bool = True) -> list[tuple[str, tuple[int, ...]]]:
    names: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (11, 4))]
    for layer in range(num_layers):
        names += [
            (f"model.layers.{layer}.self_attn.q_proj.weight", (4, 4)),
            (f"model.layers.{layer}.norm.weight", (4,)),
        ]
    names.append(("model.norm.weight", (4,)))
    return [*names, ("lm_head.weight", (11, 4))] if head else names


def tiny(config_class=Qwen3Config, tie: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = config_class(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tie,
    )
    return AutoModelForCausalLM.from_config(config)


def shapes_of(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in trainable(model.named_parameters())]


def test_blocks_are_dealt_in_strides_with_a_home_for_embeddings_and_head():
    plan = plan_fragments(decoder(4), 3)
    assert [fragment.index for fragment in plan] == [0, 1, 2]
    blocks = [sorted({name.split(".")[2] if ".layers." in name else name for name in f.names}) for f in plan]
    assert blocks == [
        ["2", "model.embed_tokens.weight"],  # blocks 0 and 3: the embeddings and layer 2
        ["0", "3"],
        ["1", "lm_head.weight", "model.norm.weight"],
    ]


def test_layers_go_by_number_and_not_by_text():
    plan = plan_fragments(decoder(12), 14)
    assert [f.names[0] for f in plan[1:13]] == [f"model.layers.{n}.norm.weight" for n in range(12)]


def test_a_tied_head_leaves_the_final_norm_alone_in_its_block():
    model = tiny(tie=True)
    plan = plan_fragments(shapes_of(model), 14)
    assert plan[0].names == ("model.embed_tokens.weight",)
    assert plan[-1].names == ("model.norm.weight",)
    assert not any("lm_head" in name for fragment in plan for name in fragment.names)


@pytest.mark.parametrize("config_class", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("num_fragments", [1, 3, 14])
def test_every_parameter_is_in_exactly_one_fragment(config_class, tie, num_fragments):
    model = tiny(config_class, tie)
    plan = plan_fragments(shapes_of(model), num_fragments)
    planned = [name for fragment in plan for name in fragment.names]
    assert sorted(planned) == sorted(name for name, _ in model.named_parameters())
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert sum(fragment.numel for fragment in plan) == numel
    assert sum(fragment.nbytes for fragment in plan) == 4 * numel
    assert all(len(fragment.names) == len(fragment.shapes) for fragment in plan)


def test_experts_stay_with_their_layer():
    names = [(f"model.layers.{layer}.mlp.experts.{e}.weight", (2, 2)) for layer in range(2) for e in range(3)]
    plan = plan_fragments(names, 2)
    assert [len(fragment.names) for fragment in plan] == [3, 3]


def test_a_model_without_numbered_layers_has_a_block_per_top_level_module():
    names = [("embed.weight", (3, 2)), ("body.a.weight", (2, 2)), ("body.b.weight", (2, 2)), ("scale", (2,))]
    plan = plan_fragments(names, 3)
    assert [fragment.names for fragment in plan] == [("embed.weight",), ("body.a.weight", "body.b.weight"), ("scale",)]


def test_the_order_of_names_does_not_change_the_plan():
    first, *middle, norm, head = decoder(5)
    expected = plan_fragments(decoder(5), 3)
    for seed in range(20):
        random.Random(seed).shuffle(middle)
        assert plan_fragments([first, *middle, head, norm], 3) == expected, f"seed {seed}"
        assert model_fingerprint([first, *middle, head, norm]) == model_fingerprint(decoder(5))


def test_a_plan_is_the_same_in_another_process_and_needs_no_torch():
    code = (
        "import sys; from composer_prime.outer.fragments import plan_fragments, model_fingerprint;"
        f"names = {decoder(5)!r};"
        "print(plan_fragments(names, 3)); print(model_fingerprint(names)); assert 'torch' not in sys.modules"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    ]
    expected = f"{plan_fragments(decoder(5), 3)}\n{model_fingerprint(decoder(5))}\n"
    assert [run.stdout for run in runs] == [expected, expected], runs[0].stderr


@pytest.mark.parametrize("num_fragments", [0, -1, 7, 1000])
def test_a_count_out_of_bounds_names_value_limit_and_remedy(num_fragments):
    with pytest.raises(ConfigError, match=rf"outer.fragments \({num_fragments}\).*\(6\): set outer.fragments to [16]$"):
        plan_fragments(decoder(4), num_fragments)


def test_a_model_with_nothing_to_train_is_refused():
    model = tiny().requires_grad_(False)
    with pytest.raises(ConfigError, match="0 trainable parameters"):
        plan_fragments(shapes_of(model), 1)


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ConfigError, match=r"lm_head.weight comes 2 times"):
        plan_fragments([*decoder(4), ("lm_head.weight", (11, 4))], 1)


def test_frozen_parameters_are_left_out():
    model = tiny()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1." in name)
    names = [name for name, _ in trainable(model.named_parameters())]
    assert names and all(name.startswith("model.layers.1.") for name in names)


def test_tied_parameters_count_once_however_they_are_listed():
    model = tiny(tie=True)
    everything = list(model.named_parameters(remove_duplicate=False))
    assert "lm_head.weight" in dict(everything)
    assert "lm_head.weight" not in dict(trainable(everything))
    shared = nn.Parameter(torch.zeros(4))
    alias = nn.Parameter(shared.data)  # another object, the same memory
    assert [name for name, _ in trainable([("a", shared), ("b", alias), ("c", nn.Parameter(torch.zeros(4)))])] == [
        "a",
        "c",
    ]


def test_views_of_one_buffer_and_parameters_without_memory_are_not_taken_for_tied():
    buffer = torch.zeros(8)
    views = [("a", nn.Parameter(buffer[:4])), ("b", nn.Parameter(buffer[4:]))]
    meta = [(f"m{n}", nn.Parameter(torch.empty(4, device="meta"))) for n in range(2)]
    empty = [(f"e{n}", nn.Parameter(torch.empty(0))) for n in range(2)]
    assert [name for name, _ in trainable([*views, *meta, *empty])] == ["a", "b", "m0", "m1", "e0", "e1"]


def test_wrappers_do_not_change_names_or_fingerprint():
    model = tiny()
    expected = shapes_of(model)
    layers = model.get_submodule("model.layers")
    for number in ("0", "5", "11"):
        layers.register_module(number, checkpoint_wrapper(layers.get_submodule(number)))
    wrapped = nn.Module()
    wrapped._orig_mod = model  # what torch.compile makes of a model, without loading the compiler
    assert any("_checkpoint_wrapped_module" in name for name, _ in wrapped.named_parameters())
    assert all(name.startswith("_orig_mod.") for name, _ in wrapped.named_parameters())
    assert shapes_of(wrapped) == expected
    assert model_fingerprint(shapes_of(wrapped)) == model_fingerprint(expected)


def test_the_fingerprint_tells_names_shapes_and_blocks_apart():
    base = decoder(4)
    renamed = [(name.replace("q_proj", "k_proj"), shape) for name, shape in base]
    transposed = [(name, shape[::-1]) for name, shape in base]
    moved = [base[-1], *base[:-1]]  # the head before the layers: another block, so another plan
    prints = {model_fingerprint(names) for names in (base, renamed, transposed, moved, base[:-1])}
    assert len(prints) == 5
    assert all(len(value) == 64 and set(value) <= set("0123456789abcdef") for value in prints)
