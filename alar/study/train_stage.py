"""Trains notebooks 03 and 04 on several GPUs, with the same parameters, inputs and outputs.

    torchrun --nproc-per-node 8 -m alar.study.train_stage 03_aasd -f
    runs/paper/search/executed/03_aasd.params.yaml

The file is the flat one that papermill takes. Parameters that it leaves out have the notebook's
defaults. Instead of -f, `--params FILE` takes the parameter file of `run_all.py` and works in the
run folder of its first domain. `batch_size` is that of one process. The folder of the stage gets
the checkpoint and loss.jsonl; the notebooks evaluate and draw the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from alar.domains import catalogue
from alar.model import load, save
from alar.model.outline import outline
from alar.records import read_trajectories
from alar.rollout.codec import Codec
from alar.study import params
from alar.study.params.notebooks import declared_parameters
from alar.study.stage import in_repository, open_stage, repository
from alar.train.config import Aasd, Supervised, Warmup
from alar.train.distributed import leave, num_processes, rank
from alar.train.examples import Example, aasd_examples, at_most, warmup_examples
from alar.train.supervised import train

# stage → (stage, folder) of the model that the training starts from
INITIAL = {"03_aasd": ("01_latent_model", "latent"), "04_mode_warmup": ("03_aasd", "checkpoint")}
CONFIGS: dict[str, type[Supervised]] = {"03_aasd": Aasd, "04_mode_warmup": Warmup}


def parameters(stage: str, file: str | None) -> dict[str, Any]:
    """Name → value: the notebook's defaults, replaced by the values of `file`.

    Raises ValueError for names that the notebook does not have.
    """
    # name → default of the notebook
    values = declared_parameters(repository() / "notebooks" / f"{stage}.ipynb")
    given = {}
    if file:
        given = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    unknown = sorted(given.keys() - values.keys())  # papermill itself would only warn
    if unknown:
        raise ValueError(
            f"{file}: {', '.join(unknown)}: notebook {stage} has no such parameter; is it another"
            " stage's file?"
        )
    return values | given


def parameters_of_study(stage: str, file: str) -> dict[str, Any]:
    """Name → value, as `run_all.py --params FILE` gives them to the notebook. Raises
    ParameterError."""
    root = repository()
    return params.flatten(
        params.load_experiment(file, root=root), root / "notebooks" / f"{stage}.ipynb"
    )


def examples_of(stage: str, values: dict[str, Any], traces: Path, codec: Codec) -> list[Example]:
    trajectories = read_trajectories(traces)
    supervision = values["supervision" if stage == "03_aasd" else "aasd_supervision"]
    conclusions = None
    if supervision == "labels":
        conclusions = catalogue.of(values["domain"]).conclusions
    if stage == "03_aasd":  # every chain of thought becomes a latent block
        examples = aasd_examples(trajectories, codec, conclusions)
    else:
        # Each turn draws between a latent block and the teacher's text.
        probability, seed = values["latent_probability"], values["seed"]
        examples = warmup_examples(trajectories, codec, probability, seed, conclusions)
    return at_most(examples, values["max_examples"], values["seed"])


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m alar.study.train_stage", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("stage", choices=INITIAL)
    given = parser.add_mutually_exclusive_group()
    given.add_argument("-f", "--parameters", metavar="FILE", help="flat YAML, as for papermill -f")
    given.add_argument(
        "--params", metavar="FILE", help="parameter file, as for run_all.py --params"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    name = options.stage
    if options.params:
        values = parameters_of_study(name, options.params)
    else:
        values = parameters(name, options.parameters)
    first = rank() == 0  # only this process writes files
    if first:  # checks that the inputs are there, and notes them
        stage = open_stage(name, values["run_dir"], report_to=values["report_to"])
        stage.input(*INITIAL[name])
        stage.input("02_teacher_traces", "traces.jsonl")
    run_dir = in_repository(values["run_dir"])  # every process reads the inputs itself
    folder, num_latent = run_dir.joinpath(*INITIAL[name]), values.get("model_num_latent")
    if num_processes() > 1:  # each then reads the part of the weights that it trains
        model, tokenizer, weights = outline(folder, num_latent=num_latent)
    else:
        model, tokenizer = load(folder, num_latent=num_latent, device="cpu")
        weights = None
    codec = Codec.of(model, tokenizer, catalogue.of(values["domain"]).form)
    traces = run_dir / "02_teacher_traces" / "traces.jsonl"
    examples = examples_of(name, values, traces, codec)
    config = CONFIGS[name].of(values)  # checked types and ranges
    fit = partial(
        train, model, examples, tokenizer.pad_token_id, config, seed=values["seed"], weights=weights
    )
    if first:
        steps = config.optimiser_steps(len(examples), num_processes())  # the length of the bar
        with stage.training(name, steps) as report:
            model = fit(log=report)
        save(model, tokenizer, stage.folder / "checkpoint")
    else:
        fit()  # same steps, nothing logged or saved
    if dist.is_initialized():
        dist.barrier()  # until the checkpoint is written
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    if num_processes() > 1:
        leave(code)  # all is written, and every process has arrived
    sys.exit(code)
