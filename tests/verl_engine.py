"""One update of the single-process trainer and of verl's FSDP engine on the same rollouts, in one
process without Ray.

    python tests/verl_engine.py MODEL_FOLDER OUT_FOLDER

tests/test_verl_engine.py runs it and reads OUT_FOLDER/result.json.
"""

import json
import os
import socket
import sys
from pathlib import Path
from unittest import mock

CASES = [("full", "recomputed"), ("full", "cached"), ("lora", "recomputed"), ("lora", "cached")]
PROMPTS, GROUP, STEP = 3, 4, 2
ROWS = 16  # tokens whose logits verl's engine may have at once


def rl_config(trainable: str, latents: str):
    from alar.rl.config import RLConfig

    return RLConfig(
        steps=4,
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        learning_rate=0.5,
        schedule="linear",
        warmup_ratio=0.0,
        length_tolerance=100.0,
        kl_coefficient=0.3,
        mode_weight=3.0,
        mode_baseline=0.0,
        explore_fraction=1.0,
        norm_adv_by_std=True,
        trainable=trainable,
        latents=latents,
        train_projector=latents == "recomputed",
        gradient_accumulation=2,
        lora_rank=4,
        lora_alpha=8,
        validation_every=0,
    )


def single_process(model_folder: str, folder: Path, config):
    """(the trainer after its update, rollouts, token advantages, trained weights before it)."""
    import torch

    from alar.domains.search.environment import SearchEnvironment
    from alar.domains.search.questions import training_questions
    from alar.model import load
    from alar.rl.strategy import ar_grpo
    from alar.rl.summary import TrajectorySummary
    from alar.rl.trainer import ARGRPO

    model, tokenizer = load(model_folder)
    questions = training_questions(PROMPTS * 2, worlds=1, seed=0)
    strategy = ar_grpo(config)
    trainer = ARGRPO(
        model,
        tokenizer,
        SearchEnvironment(),
        questions,
        [],
        config,
        strategy,
        folder=folder,
        max_turns=2,
        max_new_tokens=20,
    )
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # away from the reference, so that the KL has a gradient
        for p in trained.values():
            p += 0.01 * torch.randn(p.shape, generator=generator)
    before = {name: p.detach().clone() for name, p in trained.items()}
    trainer.optimizer = torch.optim.SGD(trained.values(), lr=config.learning_rate)
    trainer.done = STEP - 1
    trajectories, groups = trainer.rollouts(STEP)
    rewards = [
        float((i * 7) % 5) for i in range(len(trajectories))
    ]  # a random model answers nothing
    summaries = [TrajectorySummary.of(t, trainer.engine.codec) for t in trajectories]
    lengths = [len(t.ids) for t in trajectories]
    advantages = strategy.credit.advantages(summaries, lengths, rewards, groups, STEP, config.steps)
    details = trainer._update(trajectories, advantages)
    return trainer, trajectories, advantages, before, details


def verl_worker(model_folder: str, folder: Path, config):
    """verl's worker with the actor engine that a job's settings ask for, but with plain SGD."""
    from alar.engines.verl.settings import Job, compose
    from alar.engines.verl.worker import LatentActorRolloutRefWorker
    from alar.rl.strategy import ar_grpo

    job = Job(
        model=model_folder,
        folder=str(folder),
        prompts="",
        validation="",
        rl=config,
        strategy=ar_grpo(config),
        max_turns=2,
        max_new_tokens=20,
        overrides={
            "actor_rollout_ref.actor.optim.optimizer": "SGD",
            "actor_rollout_ref.actor.optim.total_training_steps": 4,
        },
    )
    worker = LatentActorRolloutRefWorker(config=compose(job).actor_rollout_ref, role="actor")
    worker.init_model()
    return worker


def verl_batch(trajectories, advantages, codec, config):
    """The tensors that verl would take from its queue."""
    import torch
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack

    from alar.engines.verl.agent import to_output

    outputs = [
        to_output(t, codec, step=1, p_latent=(), cached=config.latents == "cached")
        for t in trajectories
    ]
    fields = [output.as_dict() for output in outputs]

    def nested(rows):
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    ids = [torch.cat([f["prompts"], f["responses"]]) for f in fields]
    tokens = [
        torch.tensor(row[len(f["prompts"]) :]) * f["response_mask"]
        for row, f in zip(advantages, fields)
    ]
    latents = [{} if output.latents is None else {"latents": output.latents} for output in outputs]
    return TensorDict(
        {
            "prompts": nested(f["prompts"] for f in fields),
            "responses": nested(f["responses"] for f in fields),
            "input_ids": nested(ids),
            "position_ids": nested(torch.arange(len(row)) for row in ids),
            "response_mask": nested(f["response_mask"] for f in fields),
            "loss_mask": nested(f["response_mask"] for f in fields),
            "old_log_probs": nested(f["rollout_log_probs"] for f in fields),
            "advantages": nested(tokens),
            "multi_modal_inputs": NonTensorStack(*latents),
        },
        batch_size=len(fields),
    )


def plain(name: str) -> str:
    return name.replace("_orig_mod.", "")


def compare(model_folder: str, folder: Path, trainable: str, latents: str) -> dict:
    import torch
    from test_scoring import MostRows
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    from alar.model import load, scoring
    from alar.train.supervised import merged

    config = rl_config(trainable, latents)
    trainer, trajectories, advantages, before, details = single_process(
        model_folder, folder, config
    )
    worker = verl_worker(model_folder, folder, config)
    size = trainer.reference.config
    scoring.LOGITS_AT_ONCE = ROWS * size.latent_token_id
    made = MostRows(size.vocab_size, size.latent_token_id, hidden_size=size.hidden_size)
    engine, batch = (
        worker.actor.engine,
        verl_batch(trajectories, advantages, trainer.engine.codec, config),
    )

    def scores(name, **options):
        """Log-probs or entropies of the responses, nested (B, response)."""
        td = batch.clone()
        tu.assign_non_tensor(
            td, temperature=1.0, calculate_entropy=name == "entropy", compute_loss=False, **options
        )
        with made:
            found = worker.actor.infer_batch(td)[name]
        return response_from_nested(found, batch["response_mask"])

    batch["ref_log_prob"] = scores("log_probs", no_lora_adapter=trainable == "lora")
    theirs = {plain(name): p for name, p in engine.module.named_parameters()}
    trained = sorted(name for name, p in theirs.items() if p.requires_grad)
    with torch.no_grad():
        for name in trained:
            theirs[name].to_local().copy_(before[name])
    current, mask = scores("log_probs"), batch["response_mask"].values().bool()
    entropies = scores("entropy").values()
    ratios = (current.values() - batch["old_log_probs"].values())[mask].exp()
    for _ in range(STEP - 1):
        engine.lr_scheduler_step()
    td = batch.clone()
    tu.assign_non_tensor(
        td,
        temperature=1.0,
        calculate_entropy=False,
        global_batch_size=len(trajectories),
        mini_batch_size=len(trajectories),
        epochs=1,
        seed=1,
        dataloader_kwargs={"shuffle": False},
    )
    gradients = {}
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.update(
            {name: theirs[name].grad.to_local().clone() for name in trained}
        )
    )
    with made:
        metrics = tu.get(worker.actor.train_mini_batch(td), "metrics")
    ours = dict(trainer.model.named_parameters())
    worker.save_checkpoint(str(folder / "state"), None, 1)
    # On a GPU machine this names the device that actor and vLLM fill.
    with mock.patch(
        "alar.model.checkpoints.usual_device", return_value=torch.device("cpu")
    ) as usual:
        worker.export_checkpoint(str(folder / "checkpoint"))
    resumed = verl_worker(model_folder, folder, config)
    resumed.load_checkpoint(str(folder / "state"))
    again = {plain(name): p for name, p in resumed.actor.engine.module.named_parameters()}
    exported, whole = load(folder / "checkpoint")[0], merged(trainer.model)

    def distance(pairs) -> float:
        pairs = [(a.detach().double().flatten(), b.detach().double().flatten()) for a, b in pairs]
        a, b = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
        return float((a - b).norm() / b.norm())

    return {
        "exported_on_the_usual_device": usual.called,
        "same_weights_train": trained == sorted(before),
        "latent_positions": sum(len(t.latents) for t in trajectories),
        "tokens": sum(len(t.ids) for t in trajectories),
        "scored": int(mask.sum()),
        "most_logits": made.rows,
        "entropy_where_scored": [float(entropies[mask].min()), float(entropies[mask].max())],
        "entropy_elsewhere": float(entropies[~mask].abs().max()),
        "ratio_error": float((ratios - 1).abs().max()),
        "gradient": distance((gradients[n], ours[n].grad) for n in trained),
        "update": distance(
            (theirs[n].to_local() - before[n], ours[n] - before[n]) for n in trained
        ),
        "weights": distance((theirs[n].to_local(), ours[n]) for n in trained),
        "resumed_equal": all(
            torch.equal(p.to_local(), again[name].to_local()) for name, p in theirs.items()
        ),
        "resumed_rate": (
            resumed.actor.engine.lr_scheduler.get_last_lr() == engine.lr_scheduler.get_last_lr()
        ),
        "exported": distance(zip(exported.parameters(), whole.parameters(), strict=True)),
        "single": details,
        "verl": {key: float(torch.as_tensor(_number(value))) for key, value in metrics.items()},
        "projector_trains": any("projector" in name for name in trained),
    }


def _number(value):
    value = value.aggregate() if hasattr(value, "aggregate") else value
    return sum(value) / len(value) if isinstance(value, list) else value


def main(model_folder: str, out: str) -> None:
    from alar.engines.verl.settings import Job, environment_variables
    from alar.rl.config import RLConfig
    from alar.rl.strategy import ar_grpo

    rl = RLConfig()
    nobody = Job(model="", folder="", prompts="", validation="", rl=rl, strategy=ar_grpo(rl))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= environment_variables(nobody) | {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "RAY_LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DIST_INIT_METHOD": f"tcp://127.0.0.1:{port}",
    }
    import torch

    torch.set_num_threads(1)
    results = {
        f"{trainable}-{latents}": compare(
            model_folder, Path(out) / f"{trainable}-{latents}", trainable, latents
        )
        for trainable, latents in CASES
    }
    (Path(out) / "result.json").write_text(json.dumps(results, indent=1))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
