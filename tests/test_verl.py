"""Real verl on CPU processes: two AR-GRPO steps, resumed jobs equal to uninterrupted ones, one
rollout for both trainers.

A job is a subprocess with a Ray cluster of its own and costs about 135 seconds of CPU time, nearly
all of it imports. So one combination of LoRA or full with cached or recomputed latents runs by
default, the others and a killed worker are `full`; tests/test_verl_engine.py has the mathematics of
all four.
"""

import importlib.util
import json
import os
import shutil
import signal
from dataclasses import replace

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
from alar.model import from_base, load, save
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
CASES = [
    pytest.param(name, marks=[pytest.mark.full] * (number > 0)) for number, name in enumerate(PAIRS)
]
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


@pytest.fixture(scope="module")
def uninterrupted(base, questions, tmp_path_factory):
    """name → (job, rows) of a job that ran through, computed once."""
    done = {}

    def run(name):
        if name not in done:
            rows = []
            job = a_job(base, tmp_path_factory.mktemp(name), questions, name)
            run_job(job, log=rows.append)
            done[name] = job, rows
        return done[name]

    return run


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
    uninterrupted, base, questions, tmp_path, name
):
    whole, expected = uninterrupted(name)
    job = a_job(base, tmp_path, questions, name)
    shutil.copytree(whole.state / "global_step_1", job.state / "global_step_1")
    (job.state / "latest_checkpointed_iteration.txt").write_text("1")
    shutil.copy(whole.metrics, job.metrics)  # with a row of step 2, which is done again
    rows = []
    run_job(job, log=rows.append)
    for one, other in zip(
        without_time(read_jsonl(job.metrics)), without_time(expected), strict=True
    ):
        assert one == pytest.approx(other, nan_ok=True)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["diversity_weight"] == 0 < rows[0]["diversity_weight"] < 1
    start, ours, theirs = weights(base), weights(job.checkpoint), weights(whole.checkpoint)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    moved = {key for key in theirs if not torch.equal(start[key], theirs[key])}
    assert any("q_proj" in key for key in moved)
    assert any("projector" in key for key in moved) == RLConfig(**PAIRS[name]).train_projector


@needs_verl
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", CASES)
def test_the_actor_gives_sampled_tokens_the_probability_they_were_sampled_with(uninterrupted, name):
    _, rows = uninterrupted(name)
    assert (
        rows[0]["ratio_error"] <= 1e-4
    )  # the largest; after z of an untrained projector come tokens of tiny probability


@needs_verl
@pytest.mark.timeout(1200)
def test_both_trainers_have_the_same_rollouts_and_make_the_same_updates(
    uninterrupted, base, questions, tmp_path
):
    job, rows = uninterrupted("full-recomputed")
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
    start, everywhere = (
        weights(base),
        {key: torch.ones_like(value, dtype=torch.bool) for key, value in after[0].items()},
    )
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
def test_a_killed_worker_ends_the_job_clearly_and_it_resumes(
    uninterrupted, base, questions, tmp_path
):
    whole, expected = uninterrupted("full-recomputed")
    job = a_job(base, tmp_path, questions, "full-recomputed")

    def kill_the_actor(row):
        for process in psutil.Process().children(recursive=True):
            if any("LatentActor" in part or "WorkerDict" in part for part in process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(JobFailed, match="died unexpectedly") as failure:
        run_job(job, log=kill_the_actor)
    assert "goes on from its last checkpoint" in str(failure.value)
    assert (job.state / "latest_checkpointed_iteration.txt").read_text() == "1"
    run_job(job, log=lambda row: None)
    ours, theirs = weights(job.checkpoint), weights(whole.checkpoint)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert not [p for p in psutil.Process().children(recursive=True) if "ray" in p.name()]


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
