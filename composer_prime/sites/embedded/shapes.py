"""A model's trainable parameters by name and shape, without its weights: what `plan` needs to cut fragments.

The model is built on the meta device, so that a plan of a large model takes seconds and no memory.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from composer_prime.config.model_folder import loading, weight_files
from composer_prime.config.recipe import TINY_MODELS
from composer_prime.errors import ModelError
from composer_prime.outer.fragments import NamedShape, trainable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def named_shapes(name: str) -> list[NamedShape]:
    """(name, shape) of every trainable parameter, tied ones once, in the model's own order.

    name  one of TINY_MODELS, a local folder, or a Hugging Face id, of which only the configuration is downloaded.

    Raises ModelError when there is no such model, and without torch and transformers.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ModelError(f"the size of {name} isn't known without {error.name}: pip install {error.name}") from None

    config = _config(name)
    with loading(f"model.name ({name})", "name a causal language model"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return [(parameter, tuple(values.shape)) for parameter, values in trainable(model.named_parameters())]


def _config(name: str) -> "PreTrainedConfig":
    from transformers import AutoConfig

    from composer_prime.sites.embedded.model import tiny_models

    if name in TINY_MODELS:
        return tiny_models(name).BUILT_IN[name].config()
    folder = Path(name).expanduser()
    is_folder = folder.exists() or name.startswith(("/", ".", "~"))
    if is_folder and not (folder / "config.json").is_file():
        raise ModelError(f"model.name ({name}) is no model folder, it has no config.json: give a folder that has one")
    if is_folder:
        weight_files(folder)
    with loading(f"model.name ({name})", "give a model folder or a hub id"):
        return AutoConfig.from_pretrained(folder if is_folder else name, trust_remote_code=False)
