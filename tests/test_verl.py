"""Real verl on CPU processes: two AR-GRPO steps, killed and resumed jobs equal to uninterrupted
ones, one rollout for both trainers. New weights travel in buckets smaller than one matrix.

A job is a subprocess with a Ray cluster of its own and costs about 135 seconds of CPU time, nearly
all of it imports. So two run by default: one with recomputed latents to its end, held against the
single-process trainer, and one with LoRA and cached ones that is killed in its second step and
started again. The other combinations, and killed jobs against whole ones, are `full`;
tests/test_verl_engine.py has the mathematics of all four.
"""

import importlib.util
import json
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pyarrow.parquet as pq
import pytest
import torch

from alar.domains.search.environment import SearchEnvironment
from alar.domains.search.questions import training_questions, validation_questions
from alar.engines import verl as package
from alar.engines.verl import Job, VerlUnavailable
from alar.engines.verl.data import read_prompts, write_prompts
from alar.engines.verl.launch import JobFailed, run_job, verl_job
from alar.engines.verl.settings import hydra_values, refuse_wrong
from alar.files import read_jsonl
from alar.methods.logprob import LogProbReward
from alar.model import embedded, from_base, load, save
from alar.rl.config import RLConfig
from alar.rl.strategy import Sampler, ar_grpo
from alar.rl.trainer import ARGRPO

needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None,
    reason="verl is not installed: python run_all.py --install engines",
)

RL = RLConfig(
    steps=2,
    prompts_per_step=2,
    group_size=4,
    learning_rate=1e-3,
    warmup_ratio=0.5,
    schedule="linear",
    length_tolerance=40.0,
    kl_coefficient=0.1,
    mode_weight=2.0,
    mode_baseline=0.0,
    explore_fraction=0.5,
    alpha=0.3,
    norm_adv_by_std=True,
    validation_every=2,
    checkpoint_every=1,
    gradient_accumulation=2,
    lora_rank=4,
    lora_alpha=8,
)
LIMITS = {"max_turns": 4, "max_new_tokens": 64}
BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"


OURS = ar_grpo(RL)


def changed(**changes) -> RLConfig:
    return RLConfig(**RL.model_dump() | changes)


PAIRS = {
    "full-recomputed": dict(trainable="full", latents="recomputed", train_projector=True),
    "lora-cached": dict(trainable="lora", latents="cached"),
    "full-cached": dict(trainable="full", latents="cached"),
    "lora-recomputed": dict(trainable="lora", latents="recomputed", train_projector=True),
}
BY_DEFAULT = [("full-recomputed", "whole"), ("lora-cached", "killed")]
OTHERS = [(name, "whole") for name in PAIRS if (name, "whole") not in BY_DEFAULT]
CASES = BY_DEFAULT + [pytest.param(*case, marks=pytest.mark.full) for case in OTHERS]
BEHAVIOUR = (
    "reward",
    "accuracy",
    "well_formed",
    "generated_tokens",
    "latent_share",
    "zero_variance_share",
    "learning_rate",
)


@pytest.fixture(scope="module")
def questions():
    return training_questions(6, worlds=1, seed=0), validation_questions(4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(*from_base("embedded"), tmp_path_factory.mktemp("base") / "model")


def a_job(base, folder, questions, name) -> Job:
    asked, validation = questions
    rl = changed(**PAIRS[name])
    strategy = ar_grpo(rl)
    job = verl_job(base, folder, asked, validation, rl, strategy, environment={}, **LIMITS)
    return replace(job, overrides={BUCKET: 1})  # MiB; the embeddings alone take 1.5


def whole(job):
    rows = []
    run_job(job, log=rows.append)
    return job, rows


def kill_the_raylet():
    """Kill the first raylet that a job of this process starts."""
    for _ in range(1200):  # two minutes
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.name() == "raylet":
                    return process.kill()
        time.sleep(0.1)


def killed(job):
    """A job whose Ray dies as it starts and whose actor is killed in its second step, started
    again."""

    def kill_the_actor(row):
        processes = psutil.Process().children(recursive=True)
        drivers = [p for p in processes if any(job.folder in part for part in p.cmdline())]
        for driver in drivers:
            for process in driver.children(recursive=True):
                if any("LatentActor" in part or "WorkerDict" in part for part in process.cmdline()):
                    os.kill(process.pid, signal.SIGKILL)

    threading.Thread(target=kill_the_raylet).start()
    with pytest.raises(JobFailed, match="died unexpectedly") as failure:
        run_job(job, log=kill_the_actor, poll=0.1)
    # The dead raylet did not end it: it was started once more by itself.
    assert "raylet has died" in (Path(job.folder) / "job.log").read_text()
    assert "goes on from its last checkpoint" in str(failure.value)
    assert (job.state / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert not job.checkpoint.exists()
    return whole(job)


@pytest.fixture(scope="module")
def finished(base, questions, tmp_path_factory):
    """finished(name, how) → (job, rows) of a job that was done `how`, computed once."""
    done = {}

    def result(name, how):
        # One after another: of two Ray clusters that start at once, one may lose its port.
        if (name, how) not in done:
            job = a_job(base, tmp_path_factory.mktemp(f"{name}-{how}"), questions, name)
            done[name, how] = {"whole": whole, "killed": killed}[how](job)
        return done[name, how]

    return result


def weights(folder):
    return dict(load(folder)[0].named_parameters())


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@needs_verl
# a second start of Ray and of all workers: minutes; test_verl_engine.py resumes without them by
# default
@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PAIRS)
def test_a_job_resumed_from_step_1_equals_an_uninterrupted_one(
    finished, base, questions, tmp_path, name
):
    through, expected = finished(name, "whole")
    job = a_job(base, tmp_path, questions, name)
    shutil.copytree(through.state / "global_step_1", job.state / "global_step_1")
    (job.state / "latest_checkpointed_iteration.txt").write_text("1")
    shutil.copy(through.metrics, job.metrics)  # with a row of step 2, which is done again
    rows = []
    run_job(job, log=rows.append)
    for one, other in zip(
        without_time(read_jsonl(job.metrics)), without_time(expected), strict=True
    ):
        assert one == pytest.approx(other, nan_ok=True)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["diversity_weight"] == 0 < rows[0]["diversity_weight"] < 1
    start, ours, theirs = weights(base), weights(job.checkpoint), weights(through.checkpoint)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    moved = {key for key in theirs if not torch.equal(start[key], theirs[key])}
    assert any("q_proj" in key for key in moved)
    assert any("projector" in key for key in moved) == RLConfig(**PAIRS[name]).train_projector


@needs_verl
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name, how", CASES)
def test_the_actor_gives_sampled_tokens_the_probability_they_were_sampled_with(finished, name, how):
    """In the second step too: all of the new weights have reached the rollout server."""
    job, rows = finished(name, how)
    assert max(p.nbytes for p in weights(job.checkpoint).values()) > 2**20 * job.overrides[BUCKET]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        # The largest; after z of an untrained projector come tokens of tiny probability.
        assert row["ratio_error"] <= 1e-4


@needs_verl
@pytest.mark.timeout(1200)
def test_both_trainers_have_the_same_rollouts_and_make_the_same_updates(
    finished, base, questions, tmp_path
):
    job, rows = finished("full-recomputed", "whole")
    expected = []
    model, tokenizer = load(base)
    trainer = ARGRPO(
        model,
        tokenizer,
        SearchEnvironment(),
        *questions,
        job.rl,
        job.strategy,
        folder=tmp_path,
        **LIMITS,
    )
    after = []  # each step, the weights

    def keep(row):
        expected.append(row)
        after.append(
            {key: value.detach().clone() for key, value in trainer.model.named_parameters()}
        )

    trainer.fit(log=keep)
    assert set(expected[0]) - {"loss"} <= set(rows[0])
    for one, other in zip(rows, expected, strict=True):
        assert {key: one[key] for key in BEHAVIOUR} == pytest.approx(
            {key: other[key] for key in BEHAVIOUR}, nan_ok=True
        )
    assert rows[0]["loss"] == pytest.approx(expected[0]["loss"], abs=1e-5)
    assert rows[1]["kl"] == pytest.approx(expected[1]["kl"], rel=1e-2)
    checked = [key for key in expected[1] if key.startswith("validation_")]
    assert len(checked) == 4 and {k: rows[1][k] for k in checked} == pytest.approx(
        {k: expected[1][k] for k in checked}
    )
    start = weights(base)
    everywhere = {key: torch.ones_like(value, dtype=torch.bool) for key, value in after[0].items()}
    assert (
        apart(after[0], actor_weights(job.state / "global_step_1"), start, everywhere) <= 0.005
    )  # 0.001 seen
    determined = {
        key: well_determined(trainer.optimizer, value)
        for key, value in trainer.model.named_parameters()
    }
    assert sum(where.sum() for where in determined.values()) > 0.5 * sum(
        where.numel() for where in determined.values()
    )
    assert apart(after[1], weights(job.checkpoint), start, determined) <= 0.02


def actor_weights(checkpoint):
    """Those that verl saved after a step, of its one process."""
    saved = torch.load(checkpoint / "actor" / "model_world_size_1_rank_0.pt", weights_only=False)
    return {
        key: value.full_tensor() if hasattr(value, "full_tensor") else value
        for key, value in saved.items()
    }


def well_determined(optimizer, parameter):
    """Where gradients are far above AdamW's eps. Elsewhere a step of full size follows the sign of
    rounding errors."""
    (decay,), state = (
        {group["betas"][1] for group in optimizer.param_groups},
        optimizer.state[parameter],
    )
    if not state:
        return torch.ones_like(parameter, dtype=torch.bool)
    return (
        state["exp_avg_sq"] / (1 - decay ** state["step"].item())
    ).sqrt() > 100 * optimizer.defaults["eps"]


def apart(ours, theirs, start, where):
    """Length of the difference of two updates, over the length of ours."""
    update = torch.cat([(ours[key] - start[key])[where[key]] for key in ours])
    difference = torch.cat([(ours[key] - theirs[key])[where[key]] for key in ours])
    assert update.norm() > 0
    return (difference.norm() / update.norm()).item()


@needs_verl
@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["full-recomputed", "lora-cached"])
def test_a_killed_job_ends_with_the_numbers_of_an_uninterrupted_one(finished, name):
    through, expected = finished(name, "whole")
    job, rows = finished(name, "killed")
    for one, other in zip(without_time(rows), without_time(expected), strict=True):
        assert one == pytest.approx(other, nan_ok=True)
    ours, theirs = weights(job.checkpoint), weights(through.checkpoint)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert not [p for p in psutil.Process().children(recursive=True) if "ray" in p.name()]


@needs_verl
def test_weights_reach_the_rollout_server_in_buckets_smaller_than_one_matrix(base, monkeypatch):
    import asyncio

    from alar.engines.verl import rollout as module

    server, sent = module.HFServer(str(base)), []
    before = {key: value.clone() for key, value in server.engine.model.state_dict().items()}

    async def receive(bucket, last):
        sent.append([data.nbytes for _, data in bucket])
        server.receive(bucket, last)

    handle = SimpleNamespace(receive=SimpleNamespace(remote=receive))
    monkeypatch.setattr(module.ray, "get_actor", lambda name: handle)
    monkeypatch.setattr(module.torch.distributed, "get_rank", lambda: 0)
    actor = object.__new__(module.HFRollout)
    sizes = SimpleNamespace(update_weights_bucket_megabytes=1)
    actor.config = SimpleNamespace(checkpoint_engine=sizes)
    new = {key: value + 1 for key, value in before.items()}
    asyncio.run(actor.update_weights(iter(new.items())))
    assert len(sent) > 4 and all(sum(sizes) <= 2**20 for sizes in sent)
    after = server.engine.model.state_dict()
    assert all(torch.equal(after[key], new[key]) for key in new) and not server.arrived
    new.pop("model.projector.down.weight")
    with pytest.raises(RuntimeError, match="missing .'model.projector.down.weight'"):
        asyncio.run(actor.update_weights(iter(new.items())))


def test_prompts_come_back_from_the_parquet_file_in_the_order_of_the_steps(questions, tmp_path):
    asked, _ = questions
    ordered = [q for step in (1, 2, 3, 4) for q in Sampler(2, 4).prompts(asked, step)]
    path = write_prompts(tmp_path / "prompts.parquet", ordered)
    assert read_prompts(path) == ordered and {q.id for q in ordered[:6]} == {q.id for q in asked}
    row = pq.read_table(path).to_pylist()[3]
    assert (
        row["prompt"][0]["role"] == "user"
        and ordered[3].text.rstrip("?") in row["prompt"][0]["content"]
    )
    assert json.loads(row["reward_model"]["ground_truth"]) == list(ordered[3].answers)
    with pytest.raises(ValueError, match="no questions"):
        write_prompts(path, [])


def test_a_job_survives_its_file_and_reaches_verl_whole(base, questions, tmp_path):
    job = a_job(base, tmp_path, questions, "lora-cached")
    assert Job.read(job.save()) == job
    values = hydra_values(job)
    assert Job.from_json(values["alar"]) == job
    assert values["actor_rollout_ref.model.override_config"]["alar"]["rl"] == job.rl.model_dump()
    assert (
        values["actor_rollout_ref.model.lora_rank"] == 4
        and values["actor_rollout_ref.actor.kl_loss_coef"] == 0.1
    )


@needs_verl
def test_group_size_clip_high_and_weight_decay_reach_verl_and_its_loss():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    import alar.engines.verl.loss  # noqa: F401  registers it

    rl = changed(group_size=16, clip_low=0.1, clip_high=0.28, weight_decay=0.01)
    model = str(embedded("search"))
    job = Job(model=model, folder="x", prompts="", validation="", rl=rl, strategy=ar_grpo(rl))
    values = {
        key.removeprefix("actor_rollout_ref."): value for key, value in hydra_values(job).items()
    }
    assert values["rollout.n"] == 16 and values["data.train_batch_size"] == rl.prompts_per_step
    assert values["actor.optim.weight_decay"] == 0.01
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    actor = ActorConfig(
        **{name: values[f"actor.{name}"] for name in names},
        strategy="fsdp2",
        rollout_n=values["rollout.n"],
        ppo_micro_batch_size_per_gpu=1,
    )
    torch.manual_seed(0)
    old, advantages = -torch.rand(1, 200), torch.randn(1, 200)
    new = old + 0.3 * torch.randn(1, 200)
    theirs, metrics = get_policy_loss_fn(values["actor.policy_loss.loss_mode"])(
        old, new, advantages, torch.ones(1, 200), values["actor.loss_agg_mode"], actor
    )
    ours, clipped = job.strategy.loss(new[0], old[0], advantages[0])
    assert theirs.item() == pytest.approx(ours.item(), rel=1e-5)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(clipped) and clipped > 0.1
    symmetric = ar_grpo(changed(clip_low=0.1, clip_high=0.1)).loss(new[0], old[0], advantages[0])
    assert theirs.item() != pytest.approx(symmetric[0].item(), rel=1e-3)


@needs_verl
@pytest.mark.parametrize("returned, step", [("best", 1), ("last", 3)])
def test_a_job_ends_with_the_weights_that_were_asked_for(tmp_path, monkeypatch, returned, step):
    """The trainer's own part of three steps and their validation, without Ray."""
    from alar.engines.verl import trainer as module

    rl = changed(returned_weights=returned, validation_every=1)
    job = Job(model="", folder=str(tmp_path), prompts="", validation="", rl=rl, strategy=OURS)
    job.state.mkdir()
    rewards = iter([0.9, 0.2, 0.4])
    monkeypatch.setattr(module, "summary_of", lambda note: note)
    monkeypatch.setattr(type(OURS.reward), "validation", lambda self, summaries, total: [])
    monkeypatch.setattr(
        module, "validation_metrics", lambda *_: {"validation_reward": next(rewards)}
    )
    monkeypatch.setattr(
        module.PPOTrainerSync, "_val_metrics_update", lambda *_, **__: {}, raising=True
    )
    trainer = object.__new__(module.VerlARGRPO)
    trainer.job, trainer.row = job, {}

    def export(folder):  # the step whose weights these are
        os.makedirs(folder)
        (module.Path(folder) / "step").write_text(str(trainer.global_steps))

    trainer.actor_rollout_wg = SimpleNamespace(export_checkpoint=export)
    for trainer.global_steps in (1, 2, 3):
        trainer._val_metrics_update([], [], {"alar": []}, [])
    trainer.finish()
    assert (job.checkpoint / "step").read_text() == str(step)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rollout": "vllm"}, "rollout 'vllm'"),
        ({"rollout": "alar_hf", "rl": changed(tensor_parallel=2)}, "tensor_parallel to 1"),
        ({"strategy": replace(OURS, reward=LogProbReward())}, "rl.trainer to single"),
        ({"strategy": replace(OURS, sampler=Sampler(2, 4, writer="reference"))}, "rl.trainer"),
        ({"rollout": "alar_vllm"}, "needs GPUs"),
    ],
)
def test_jobs_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Job(
            **{
                "model": "",
                "folder": "",
                "prompts": "",
                "validation": "",
                "rl": RL,
                "strategy": OURS,
            }
            | changes
        )


@needs_verl
@pytest.mark.parametrize(
    "key, value, remedy",
    [
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            2,
            "ulysses_sequence_parallel_size to 1",
        ),
        ("actor_rollout_ref.actor.strategy", "fsdp", "set it to fsdp2"),
        ("algorithm.use_kl_in_reward", True, "actor.use_kl_loss"),
        ("trainer.v1.trainer_mode", "colocate_async", "set it to sync"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 1, "one update per step"),
        (BUCKET, 0, "is 0: .* a whole number of at least 1"),
        (BUCKET, 0.5, "is 0.5: .* a whole number of at least 1"),
    ],
)
def test_what_verl_would_compute_wrongly_is_refused_with_the_remedy(base, key, value, remedy):
    omegaconf = pytest.importorskip("omegaconf")
    job = Job(model=str(base), folder="x", prompts="", validation="", rl=RL, strategy=OURS)
    config = omegaconf.OmegaConf.create()
    for name, given in (hydra_values(job) | {key: value}).items():
        omegaconf.OmegaConf.update(config, name, given, force_add=True)
    with pytest.raises(ValueError, match=remedy):
        refuse_wrong(config)


def test_a_folder_of_another_job_is_refused(base, questions, tmp_path, monkeypatch):
    monkeypatch.setattr("alar.engines.verl.launch.require_verl", lambda: None)
    job = a_job(base, tmp_path, questions, "lora-cached")
    job.save()
    job.state.mkdir()
    with pytest.raises(ValueError, match="another rl"):
        run_job(replace(job, rl=changed(**PAIRS["lora-cached"], learning_rate=0.5)))
    with pytest.raises(ValueError, match="another strategy"):
        run_job(replace(job, strategy=ar_grpo(job.rl, seed=1)))


def test_without_verl_the_error_names_the_command_that_installs_it(
    base, questions, tmp_path, monkeypatch
):
    def missing(name):
        raise package.settings.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(package.settings.importlib.metadata, "version", missing)
    with pytest.raises(VerlUnavailable, match="run_all.py --install engines"):
        run_job(a_job(base, tmp_path, questions, "lora-cached"))
