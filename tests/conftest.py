"""Fixtures that several test modules share. Other helpers live in the module that uses them."""

import os
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # so that this checkout is tested, whatever is installed


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(
                    pytest.mark.skip(reason="needs a CUDA device, this machine has none")
                )


@pytest.fixture(scope="session")
def repository() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def installed_path(repository, tmp_path_factory) -> str:
    """PYTHONPATH under which this checkout counts as installed, so that vLLM's processes find its
    plugin."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = tmp_path_factory.mktemp("installed")
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = project["entry-points"].items()
    lines = [
        line
        for group, names in points
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.pathsep.join([str(folder), str(repository)])


@pytest.fixture
def write_notebook():
    """write_notebook(path, "parameters source", "cell", "cell", …) → path of a notebook made of
    these cells."""

    def write(path: Path, parameters: str, *cells: str) -> Path:
        notebook = nbformat.v4.new_notebook()
        notebook.metadata = {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
        }
        notebook.cells = [nbformat.v4.new_markdown_cell(f"# {path.stem}")]
        if parameters:
            notebook.cells.append(
                nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
            )
        notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in cells]
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, path)
        return path

    return write


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded base model's tokenizer, without the latent token."""
    from transformers import AutoTokenizer

    from alar.model import embedded

    return AutoTokenizer.from_pretrained(embedded("search"))


@pytest.fixture(scope="session")
def random_model(tmp_path_factory, tokenizer):
    """random_model(family, num_latent=4, **projector options) → (latent model, tokenizer), small,
    random, float32.

    The weights are scaled up from their usual initialisation, so that hidden states, and with them
    z and greedy choices, differ from token to token.
    """
    import torch
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    from alar.model import from_base

    classes = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    bases = {}  # family → folder

    def make(family="qwen2", num_latent=4, **options):
        if family not in bases:
            config_class, model_class = classes[family]
            config = config_class(
                vocab_size=len(tokenizer) + 16,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                tie_word_embeddings=True,
                max_position_embeddings=2048,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            torch.manual_seed(1)
            base = model_class(config)
            for parameter in base.parameters():
                if parameter.ndim == 2:
                    torch.nn.init.normal_(parameter, std=0.1)
            bases[family] = tmp_path_factory.mktemp(family)
            base.save_pretrained(bases[family])
            tokenizer.save_pretrained(bases[family])
        return from_base(bases[family], num_latent=num_latent, seed=3, **options)

    return make
