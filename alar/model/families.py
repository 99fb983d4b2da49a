"""The families of base models that have a latent version. Adding one is one line at the end.

Any decoder of transformers serves that has three properties: its base model is `.model`, its
attention goes through `AttentionInterface`, and all its layers have full attention. The line

    LatentNewConfig, LatentNewForCausalLM = family(NewConfig, NewForCausalLM)

makes the two classes, registers them with the Auto classes as `latent_<model type>` and lets
`alar.model.from_base` take such a checkpoint. Add the name of the family to the tests' axes
(`tests/test_latent_states.py`): they hold it against the plain algorithm. vLLM needs a class of its
own (`alar/engines/vllm/models.py`).

A tokenizer must bring two things. It is a byte-level BPE, because turns are read from its pieces;
those of Qwen and Llama-3 are, that of Llama-2 is not. And the embedding table has at least one row
that no token uses, for `<|latent|>`. Qwen's tables have spare rows; Llama-3's is full (128,256 rows
and tokens), and `from_base` says how to add one.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from alar.model.latent import LatentCausalLM


@dataclass(kw_only=True)
class LatentOptions:
    """What a latent config adds to that of its base: K, the reserved id and the projector."""

    num_latent: int = 4
    latent_token_id: int | None = None
    projector_kind: str = "mlp"
    projector_size: int = 0
    projector_dropout: float = 0.0
    projector_layer_norm: bool = True
    projector_residual: bool = False
    projector_scale: str = "one"


# Model type of the base → the latent config class and the latent model class.
FAMILIES: dict[str, tuple[type, type]] = {}


def family(base_config: type, base_model: type) -> tuple[type, type]:
    """Make the config class and the model class of a latent family, and register them."""
    name = base_model.__name__.removesuffix("ForCausalLM")
    defaults = {option: getattr(LatentOptions, option) for option in LatentOptions.__annotations__}
    config = type(
        f"Latent{name}Config",
        (base_config,),
        {
            "__module__": __name__,
            "__doc__": LatentOptions.__doc__,
            # transformers makes a dataclass of every config: fields are what has an annotation.
            "__annotations__": dict(LatentOptions.__annotations__),
            "model_type": f"latent_{base_config.model_type}",
            **defaults,
        },
    )
    model = type(
        f"Latent{name}ForCausalLM",
        (LatentCausalLM, base_model),
        {"__module__": __name__, "__doc__": LatentCausalLM.__doc__, "config_class": config},
    )
    AutoConfig.register(config.model_type, config)
    AutoModelForCausalLM.register(config, model)
    FAMILIES[base_config.model_type] = (config, model)
    return config, model


LatentQwen2Config, LatentQwen2ForCausalLM = family(Qwen2Config, Qwen2ForCausalLM)
LatentQwen3Config, LatentQwen3ForCausalLM = family(Qwen3Config, Qwen3ForCausalLM)
LatentLlamaConfig, LatentLlamaForCausalLM = family(LlamaConfig, LlamaForCausalLM)
