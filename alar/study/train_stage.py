"""Trains notebooks 03 and 04 on several GPUs, with the same parameters, inputs and outputs.

    torchrun --nproc-per-node 8 -m alar.study.train_stage 03_aasd -f
    runs/paper/search/executed/03_aasd.params.yaml

The file is the flat one that papermill takes. Parameters that it leaves out have the notebook's
defaults. Instead of -f, `--params FILE` (with `--variant NAME`) takes the parameter file of
`run_all.py` and works in the run folder of its first domain. A step takes `batch_size` ·
`gradient_accumulation` examples as in the notebook: the processes share the accumulated batches.
The folder of the stage gets the checkpoint and loss.jsonl; the notebooks evaluate and draw the
figures.
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
from alar.records import iterate_trajectories
from alar.rollout.codec import Codec
from alar.study import params
from alar.study.params.notebooks import declared_parameters
from alar.study.stage import in_repository, open_stage, repository
from alar.train.config import Aasd, Supervised, Warmup
from alar.train.distributed import leave, num_processes, rank
from alar.train.examples import Example, aasd_examples, at_most, warmup_examples, with_prompt
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


def parameters_of_study(stage: str, file: str, variant: str | None = None) -> dict[str, Any]:
    """Name → value, as `run_all.py --params FILE` gives them to the notebook, for the first domain.

    Raises ParameterError, also where the file has variants and none is named.
    """
    root = repository()
    known = params.load_variants(file, root=root, absent=[])
    if variant is None and "" not in known:
        raise params.ParameterError(f"{file}: name one of its variants, {', '.join(known)}")
    experiment = params.load_experiment(file, variant=variant, root=root)
    run = experiment.run
    folder = Path("runs", run.name, variant or "", run.domains[0])
    notebook = root / "notebooks" / f"{stage}.ipynb"
    return params.flatten(experiment, notebook, run_dir=folder.as_posix())


def examples_of(stage: str, values: dict[str, Any], traces: Path, codec: Codec) -> list[Example]:
    trajectories = [with_prompt(trace, codec) for trace in iterate_trajectories(traces)]
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


def of_one_process(config: Supervised, processes: int) -> Supervised:
    """The settings of one of `processes`, which together take the batch of one.

    Raises ValueError if the accumulated batches do not divide over them.
    """
    batches, rest = divmod(config.gradient_accumulation, processes)
    if rest:
        raise ValueError(
            f"gradient_accumulation is {config.gradient_accumulation}, which does not divide over"
            f" {processes} processes: give it a multiple of {processes} and a smaller batch_size"
            f" (a step takes {config.batch_size * config.gradient_accumulation} examples)"
        )
    return config.model_copy(update={"gradient_accumulation": batches})


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
    parser.add_argument("--variant", help="a variant of the parameter file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    name = options.stage
    if options.params:
        values = parameters_of_study(name, options.params, options.variant)
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
    world = catalogue.of(values["domain"])
    form = world.prompted(values["rollout_student_prompt"], tokenizer)
    codec = Codec.of(model, tokenizer, form)
    traces = run_dir / "02_teacher_traces" / "traces.jsonl"
    examples = examples_of(name, values, traces, codec)
    config = of_one_process(CONFIGS[name].of(values), num_processes())  # checked types and ranges
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
