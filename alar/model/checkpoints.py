"""Checkpoints: a folder with the weights (the projector among them), the config, the tokenizer.

- `from_base` makes a latent model from a checkpoint of a known family: a hub id, a local folder, or
  "embedded", a base model that is shipped with the package.
- `save` and `load` move it to and from the disk. Every tensor keeps its dtype. LoRA adapters are
  merged.

Missing weights are an error; they are never filled in at random.
"""

from __future__ import annotations

import copy
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from alar import protocol
from alar.model.dtype import resolved_dtype
from alar.model.families import FAMILIES, LatentOptions


def embedded(domain: str = "search") -> Path:
    """The folder of the shipped base model of a domain. FileNotFoundError if there is none."""
    models = Path(__file__).parent / "embedded"
    if not (models / domain / "model.safetensors").exists():
        shipped = sorted(path.parent.name for path in models.glob("*/model.safetensors"))
        raise FileNotFoundError(
            f"no embedded base model for domain {domain!r}: shipped are"
            f" {', '.join(shipped) or 'none'}; pretrain one with params/laptop-from-scratch.yaml,"
            " or name a hub id or folder as model.base"
        )
    return models / domain


@contextmanager
def _quiet():
    """Silence transformers' loading report and bars. They would call a new projector missing."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def resolve(base: str | Path, domain: str = "search") -> str:
    """The hub id or folder that `base` means; "embedded" is the shipped model of the domain."""
    return str(embedded(domain)) if str(base) == "embedded" else str(base)


def _asked(dtype: torch.dtype | str | None) -> torch.dtype | str:
    """`dtype` in transformers' words: None is "auto" there, as stored."""
    if dtype is None:
        return "auto"
    return resolved_dtype(dtype) if isinstance(dtype, str) else dtype


def load_base(base: str | Path, domain: str = "search", *, dtype: torch.dtype | str | None = None):
    """(model, tokenizer) of an ordinary causal LM on the CPU. `dtype`: see `from_base`."""
    source = resolve(base, domain)
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=_asked(dtype))
    return model.eval(), AutoTokenizer.from_pretrained(source)


def base_config(source: str):
    """The config of a folder or hub id. If neither can be reached, OSError says what to do."""
    if Path(source).is_dir() and not (Path(source) / "config.json").exists():
        raise FileNotFoundError(
            f"model.base {source!r} is a folder without config.json: no checkpoint is here"
        )
    try:
        return AutoConfig.from_pretrained(source)
    except OSError as error:
        raise OSError(
            f"model.base {source!r} is neither a folder nor a hub id within reach: check the name;"
            " without a connection, download the model first and give its folder, or use the"
            f" shipped model: embedded ({error})"
        ) from error


def from_base(
    base: str | Path,
    *,
    num_latent: int = 4,
    seed: int = 0,
    domain: str = "search",
    dtype: torch.dtype | str | None = None,
    **projector_options,
) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """(latent model, tokenizer) from an ordinary model, whose weights stay as they are.

    The projector is new and drawn with `seed`. `<|latent|>` takes the first spare row of the
    embedding table. `dtype` is that of the trunk: None as stored, or a value of `model.dtype`. The
    projector is always float32. `projector_options` are fields of `LatentOptions`.

    Raises ValueError for K outside 0 to 16, for an architecture without a latent version, and for
    an embedding table without a spare row.
    """
    if not 0 <= num_latent <= 16:
        raise ValueError(f"num_latent is {num_latent}: expected 0 to 16")
    source = resolve(base, domain)
    origin = base_config(source)
    if origin.model_type not in FAMILIES:
        raise ValueError(
            f"{source}: architecture {origin.model_type!r} has no latent version; supported: "
            f"{', '.join(FAMILIES)} (alar/model/families.py says how to add one)"
        )
    tokenizer = AutoTokenizer.from_pretrained(source)
    latent_token_id = len(tokenizer)  # the first id that no token has
    if latent_token_id >= origin.vocab_size:
        raise ValueError(
            f"{source}: the embedding table has {origin.vocab_size} rows and the tokenizer uses all"
            " of them; <|latent|> needs a spare row. Add some with"
            f" model.resize_token_embeddings({latent_token_id + 64}), save model and tokenizer in a"
            " folder, and name that folder as model.base"
        )
    tokenizer.add_special_tokens({"additional_special_tokens": [protocol.LATENT_TOKEN]})
    if tokenizer.convert_tokens_to_ids(protocol.LATENT_TOKEN) != latent_token_id:
        raise ValueError(
            f"{source}: the tokenizer gave {protocol.LATENT_TOKEN} another id than"
            f" {latent_token_id}"
        )
    unknown = set(projector_options) - set(LatentOptions.__annotations__)
    if unknown:
        raise TypeError(f"unknown projector option {', '.join(sorted(unknown))}")
    config_class, model_class = FAMILIES[origin.model_type]  # the latent classes
    settings = origin.to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        settings.pop(name, None)  # they name the base's classes and the version that wrote it
    settings |= {"num_latent": num_latent, "latent_token_id": latent_token_id}
    config = config_class(**settings | projector_options)
    torch.manual_seed(seed)
    with _quiet():
        model, info = model_class.from_pretrained(
            source, config=config, dtype=_asked(dtype), output_loading_info=True
        )
    # A base has no projector, so only the projector's weights may be missing.
    stray = [key for key in info["missing_keys"] if ".projector." not in key]
    if stray:
        raise ValueError(
            f"{source}: weights are missing from the checkpoint: {', '.join(sorted(stray)[:5])}"
        )
    _reset_projector(model, seed)
    return model.eval(), tokenizer


def _reset_projector(model, seed: int) -> None:
    """Give the model a new float32 projector. It depends on `seed` alone, not on earlier draws."""
    size = model.config.projector_scale
    if size not in ("one", "embedding_rms"):
        raise ValueError(f"projector_scale {size!r}: expected 'one' or 'embedding_rms'")
    torch.manual_seed(seed)  # again: loading has drawn numbers since
    fresh = type(model.model.projector)(model.config)
    if size == "embedding_rms" and hasattr(fresh, "scale"):
        weight = model.get_input_embeddings().weight.detach().float()  # (V, H)
        # The RMS of the table: z then has the size of the embeddings that the trunk knows.
        fresh.scale.fill_(weight.pow(2).mean().sqrt())
    # Float32 beside a trunk of any dtype: in bfloat16 the LayerNorm gain never moves at lr 1e-4.
    model.model.projector = fresh


def save(model, tokenizer, folder: str | Path) -> Path:
    """Write one checkpoint folder, which replaces whatever stands there.

    The folder is written under another name first, so that nobody takes a half-written one for a
    whole one. If peft wraps the model, the adapters are merged in the folder, and the model in
    memory stays as it is. Raises ValueError if a model holds adapters without their wrapper,
    because their weights could not be told from the model's own.
    """
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    _remove(partial)  # what an interrupted save has left
    folder.parent.mkdir(parents=True, exist_ok=True)
    plain = _merged(model)
    # peft's names for a wrapped weight and for its adapters.
    if any(".base_layer." in name or "lora_" in name for name in plain.state_dict()):
        raise ValueError(
            f"{folder}: the model holds peft adapters; save the wrapped model or merge_and_unload()"
            " it first"
        )
    with _quiet():
        plain.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    _remove(folder)
    return partial.rename(folder)  # one step on one file system


def _merged(model):
    """The model without peft. Adapters are merged into a copy of its weights."""
    return copy.deepcopy(model).merge_and_unload() if isinstance(model, PeftModel) else model


def _remove(folder: Path) -> None:
    """Delete a folder and all that it holds. Of a link, only the link itself is deleted."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def usual_device() -> torch.device:
    """The device on which one process computes: the first GPU that it sees, else the CPU.

    CUDA_VISIBLE_DEVICES="" hides the GPUs.
    """
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_folder(folder: str | Path) -> Path:
    """The folder as a path. FileNotFoundError if it holds no checkpoint."""
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"{folder}: no checkpoint here (no config.json); run the stage that writes it first"
        )
    return folder


def missing_weights(folder: Path, names: list[str]) -> ValueError:
    only_projector = all("projector" in name for name in names)
    what = "the projector" if only_projector else f"weights ({names[0]}, …)"
    return ValueError(f"{folder}: {what} missing from the checkpoint; save the model again")


def check_num_latent(model: torch.nn.Module, num_latent: int | None, folder: Path) -> None:
    """ValueError if `num_latent` is given and not the K of the model."""
    found = getattr(model.config, "num_latent", None)  # None for an ordinary model
    if num_latent is not None and found != num_latent:
        raise ValueError(
            f"{folder}: the checkpoint has K = {found}, but K = {num_latent} was asked for"
        )


def load(
    folder: str | Path,
    *,
    num_latent: int | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """(model, tokenizer) of a checkpoint folder, latent or ordinary, ready for inference.

    `device` is `usual_device()` by default. `dtype` is that of the trunk: None as stored, or a
    value of `model.dtype`. The projector is always float32. `num_latent`, if given, must be the K
    of the checkpoint. Raises FileNotFoundError if there is no checkpoint, and ValueError for
    another K or missing weights.
    """
    folder = check_folder(folder)
    with _quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_asked(dtype), output_loading_info=True
        )
    missing = sorted(info["missing_keys"])  # transformers has filled these in at random
    if missing:
        raise missing_weights(folder, missing)
    check_num_latent(model, num_latent, folder)
    return model.eval().to(device or usual_device()), AutoTokenizer.from_pretrained(folder)
