"""Trainers' names and layouts find their tensors in transformers' model, and what doesn't fit is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from composer_prime.errors import BadInput, ModelError
from composer_prime.export.bits import as_bits
from composer_prime.export.lora import LoraAdapter, is_lora
from composer_prime.export.model import HfModel, trained_tensors
from composer_prime.outer.fragments import Fragment, NamedShape, plan_fragments
from tests.sites.tiny_folder import save_random_tiny

BF16 = torch.bfloat16


def save_experts(folder: Path) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return model


def in_prime_rl_layout(model: PreTrainedModel, layout: str = "559b447") -> dict[str, torch.Tensor]:
    """The model's parameters as PRIME-RL's own class names and cuts them: at 559b447, later, or later and fused."""
    found = {}
    gate, up, down = ("w1", "w3", "w2") if layout == "559b447" else ("gate_proj", "up_proj", "down_proj")
    for name, value in model.named_parameters():
        value, stem = value.detach(), name.rpartition(".")[0]
        if layout == "fused" and name.endswith("q_proj.weight"):
            others = [model.get_parameter(name.replace("q_proj", one)).detach() for one in ("k_proj", "v_proj")]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat([value, *others])
        elif layout == "fused" and name.endswith(("k_proj.weight", "v_proj.weight", "experts.gate_up_proj")):
            found |= {name: value} if name.endswith("gate_up_proj") else {}
        elif name.endswith("gate_up_proj"):
            found[f"{stem}.{gate}"], found[f"{stem}.{up}"] = (half.contiguous() for half in value.chunk(2, dim=1))
        elif name.endswith("experts.down_proj"):
            found[f"{stem}.{down}"] = value
        else:
            found[name.replace("mlp.gate.weight", "mlp.router.gate.weight")] = value
    return found


def shapes_of(values: dict[str, torch.Tensor]) -> list[NamedShape]:
    return [(name, tuple(value.shape)) for name, value in values.items()]


def flat(values: dict[str, torch.Tensor], fragment: Fragment) -> torch.Tensor:
    return torch.cat([values[name].reshape(-1) for name in fragment.names]).to(BF16)


@pytest.mark.parametrize(
    ("layout", "its_own"),
    [
        ("559b447", "model.layers.1.mlp.experts.w3"),
        ("later", "model.layers.1.mlp.experts.up_proj"),
        ("fused", "model.layers.1.self_attn.qkv_proj.weight"),
    ],
)
def test_prime_rls_layouts_end_in_files_under_the_hubs_names_and_come_back(tmp_path, layout, its_own):
    source = save_experts(tmp_path / "base")
    with torch.no_grad():
        for parameter in source.parameters():
            parameter += 0.125 * torch.randn_like(parameter)
    prime = in_prime_rl_layout(source, layout)
    assert {its_own, "model.layers.0.mlp.router.gate.weight"} <= prime.keys()
    fragments = plan_fragments(shapes_of(prime), 2)
    model = HfModel(tmp_path / "base", BF16, fragments)
    for fragment in fragments:
        model.write(fragment.index, as_bits(flat(prime, fragment)))
    for fragment in fragments:
        assert (model.read(fragment.index) == as_bits(flat(prime, fragment))).all()
    (tmp_path / "out").mkdir()
    model.save(tmp_path / "out")
    (tmp_path / "wanted").mkdir()
    source.bfloat16().save_pretrained(tmp_path / "wanted")
    wanted, held = (load_file(tmp_path / name / "model.safetensors") for name in ("wanted", "out"))
    assert held.keys() == wanted.keys() and "model.layers.0.mlp.experts.3.gate_proj.weight" in held
    assert all(torch.equal(held[name], wanted[name]) for name in wanted)


def test_a_head_that_the_run_trains_apart_is_not_written_into_tied_embeddings(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_random_tiny(tmp_path / "tied"))
    shapes = [(name, tuple(value.shape)) for name, value in model.named_parameters(remove_duplicate=False)]
    assert "lm_head.weight" in dict(shapes)
    with pytest.raises(ModelError, match=r"trains lm_head\.weight apart from model\.embed_tokens\.weight"):
        trained_tensors(model, shapes)


# --- LoRA ------------------------------------------------------------------------------------------------------------

MODULE = "model.layers.{}.self_attn.q_proj"


def adapters(endings: tuple[str, str] = (".lora_A.0", ".lora_B.0"), rank: int = 4) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    found = {}
    for layer in range(2):
        found[MODULE.format(layer) + endings[0]] = torch.randn(rank, 128, generator=draws)
        found[MODULE.format(layer) + endings[1]] = torch.randn(128, rank, generator=draws)
    return found


@pytest.mark.parametrize(
    "endings",
    [(".lora_A.0", ".lora_B.0"), (".lora_A.default.weight", ".lora_B.default.weight"), (".lora_A", ".lora_B")],
)
def test_adapters_become_a_folder_whose_files_say_what_peft_and_vllm_look_for(tmp_path, endings):
    base, values = save_random_tiny(tmp_path / "base"), adapters(endings)
    fragments = plan_fragments(shapes_of(values), 2)
    assert is_lora(list(values)) and not is_lora(["model.layers.0.self_attn.q_proj.weight"])
    model = LoraAdapter(base, torch.float32, fragments, base_name="org/base", alpha=16.0)
    for fragment in fragments:
        whole = torch.cat([values[name].reshape(-1) for name in fragment.names])
        model.write(fragment.index, as_bits(whole))
        assert (model.read(fragment.index) == as_bits(whole)).all()
    (tmp_path / "out").mkdir()
    model.save(tmp_path / "out")
    held = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for layer in range(2):
        for half, ending in zip(("lora_A", "lora_B"), endings, strict=True):
            key = f"base_model.model.{MODULE.format(layer)}.{half}.weight"
            assert torch.equal(held.pop(key), values[MODULE.format(layer) + ending])
    assert not held
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 16.0)
    assert config["target_modules"] == [MODULE.format(0), MODULE.format(1)]
    assert config["base_model_name_or_path"] == "org/base"
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "config.json" not in names and "tokenizer.json" in names


@pytest.mark.parametrize(
    ("change", "alpha", "said"),
    [
        ({}, None, "add --lora-alpha"),
        ({"lm_head.weight": torch.zeros(4, 4)}, 1.0, "trains lm_head.weight beside its LoRA adapters"),
        (
            {"model.layers.3.mlp.lora_A.0": torch.zeros(8, 128)},
            1.0,
            "have ranks 4 .*, 8 .*, one adapter folder holds 1",
        ),
        ({"model.layers.3.mlp.lora_A.0": torch.zeros(3, 4, 8)}, 1.0, "2 sizes are the limit"),
    ],
)
def test_what_an_adapter_folder_cannot_say_is_refused(tmp_path, change, alpha, said):
    fragments = plan_fragments(shapes_of(adapters() | change), 1)
    with pytest.raises(BadInput, match=said):
        LoraAdapter(tmp_path, BF16, fragments, base_name="base", alpha=alpha)
