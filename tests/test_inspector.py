"""The inspector's readings and interventions against slow direct computations with hooks."""

import copy
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from alar.inspector import LatentReadings, inspect
from alar.inspector.effects import (
    INTACT,
    Replay,
    _script,
    donors,
    list_interventions,
    mean_effects,
    measure_effects,
    step_effects,
)
from alar.inspector.interventions import KINDS, Effect, Intervention, InterventionLab, replaced
from alar.model.attention import attention_of
from alar.protocol import SEARCH
from alar.records import Observation, Origin, Question
from alar.rollout.engine import Sampling
from alar.rollout.hf import HFEngine
from alar.rollout.loop import run

FAMILIES = ("qwen2", "qwen3")
QUESTIONS = [
    Question(name, f"Which currency is used in {name}?", ("x",), "single")
    for name in ("Peru", "Chad", "Mali")
]
NEW_TOKENS = (
    14  # behind the block; a whole turn has the block's and the separator's tokens in addition
)


class Silent:
    """An environment that answers every action alike and finds answers of even length correct."""

    form, final, stop = SEARCH, ("answer",), ("</search>", "</answer>")

    def observe(self, steps):
        return [Observation("\n\n<information>nothing</information>\n\n")] * len(steps)

    def correct(self, trajectory):
        return len(trajectory.prediction) % 2 == 0


@pytest.fixture(scope="module")
def written(random_model):
    """written(family, K, temperature) → model, tokenizer, trajectories of two always-latent turns,
    a bench and its sites."""
    made = {}

    def make(family="qwen2", num_latent=4, temperature=1.0):
        if (family, num_latent, temperature) not in made:
            model, tokenizer = random_model(family, num_latent)
            engine = HFEngine(model, tokenizer)
            head = len(engine.codec.latent_open) + num_latent + len(engine.codec.latent_close)
            sampling = Sampling(head + NEW_TOKENS, temperature)
            trajectories = run(QUESTIONS, engine, Silent(), sampling, modes="latent", max_turns=2)
            mean = np.mean([t.latents[:num_latent] for t in trajectories], axis=0)
            lab = InterventionLab(engine, mean=mean, max_new_tokens=NEW_TOKENS)
            made[family, num_latent, temperature] = SimpleNamespace(
                model=model, trajectories=trajectories, lab=lab, sites=lab.sites(trajectories)
            )
        return made[family, num_latent, temperature]

    return make


@contextmanager
def fed(model, ids, z):
    """Hooks: the embedding layer gives z at the latent positions; `states` collects the output of
    every layer, then the norm's."""
    states, places = [], [i for i, token in enumerate(ids) if token == model.config.latent_token_id]

    def place(module, arguments, output):
        output = output.clone()
        output[0, places] = torch.as_tensor(np.asarray(z))
        states.append(output[0])
        return output

    def keep(module, arguments, output):
        states.append((output[0] if isinstance(output, tuple) else output)[0])

    def rename(module, arguments, output):
        states[-1] = output[0]

    hooks = [
        model.model.embed_tokens.register_forward_hook(place),
        model.model.norm.register_forward_hook(rename),
    ]
    hooks += [layer.register_forward_hook(keep) for layer in model.model.layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def slow(model, ids, z):
    """Hidden states by layer of one plain forward pass, the last one after the norm: (T, H) each;
    and the attentions."""
    with fed(model, ids, z) as states, attention_of(model.config, "eager"):
        out = model.model(input_ids=torch.tensor([ids]), use_cache=False, output_attentions=True)
        return list(states), [attention[0] for attention in out.attentions]


@torch.no_grad()
def slow_logprobs(model, ids, z):
    head = model.lm_head.weight[: model.config.latent_token_id].double()
    return torch.log_softmax(slow(model, ids, z)[0][-1].double() @ head.T, -1)


def test_a_turn_with_a_second_block_is_no_place_for_an_intervention(written):
    made = written()
    spoilt = copy.deepcopy(made.trajectories[0])
    block = made.sites[0].block
    again = slice(block.action + 2, block.action + 6)
    spoilt.ids[again] = [made.model.config.latent_token_id] * 4
    spoilt.origins[again], spoilt.logprobs[again] = [Origin.LATENT] * 4, [float("nan")] * 4
    spoilt.latents = np.insert(
        spoilt.latents, [block.row + 4] * 4, spoilt.latents[block.rows], axis=0
    )
    spoilt.check()
    assert [site.block.turn for site in made.lab.sites([made.trajectories[0]])] == [0, 1]
    (left,) = made.lab.sites([spoilt])
    assert left.block.turn == 1 and np.array_equal(left.z, made.sites[1].z)


@pytest.mark.parametrize("family", FAMILIES)
def test_lens_and_attention_equal_hooks_and_eager_attention(written, family):
    made = written(family)
    trajectory = made.trajectories[0]
    readings = inspect(trajectory, made.model, made.lab.codec, top_k=5)
    states, attentions = slow(made.model, trajectory.ids, trajectory.latents)
    head = made.model.lm_head.weight.detach()[: made.model.config.latent_token_id]
    assert len(readings) == 8 and readings.num_layers == 2 and readings.latent_turns == [0, 1]
    for layer, state in enumerate(states):
        state = state[readings.position]
        if layer < len(states) - 1:
            state = made.model.model.norm(state).detach()
        probabilities = torch.softmax(state.double() @ head.double().T, -1).numpy()
        top = np.sort(probabilities, axis=1)[:, ::-1][:, :5]
        np.testing.assert_allclose(readings.lens_probabilities[:, layer], top, atol=1e-5)
        chosen = np.take_along_axis(probabilities, readings.lens_ids[:, layer].astype(int), 1)
        np.testing.assert_allclose(chosen, top, atol=1e-5)
        np.testing.assert_allclose(
            readings.lens_entropy[:, layer],
            -(probabilities * np.log(probabilities)).sum(1),
            atol=1e-4,
        )
    weights = torch.stack(attentions).mean(1).numpy()  # (L, T, T): mean over heads
    np.testing.assert_allclose(
        readings.latent_attention, weights[:, readings.position].transpose(1, 0, 2), atol=1e-5
    )
    np.testing.assert_allclose(readings.segment_attention().sum(-1), 1, atol=1e-5)
    for row, (position, turn) in enumerate(zip(readings.position, readings.turn)):
        site = made.sites[turn]
        assert made.lab.codec.text(trajectory.ids[: site.block.action]).endswith("</latent>")
        own = weights[:, site.block.action : site.block.end, position].mean(1)
        np.testing.assert_allclose(readings.action_attention[row], own, atol=1e-5)


def test_segments_partition_the_conversation(written):
    made = written()
    readings = inspect(made.trajectories[0], made.model, made.lab.codec)
    assert readings.segments == [
        "prompt",
        "turn 1",
        "latent 1",
        "observation 1",
        "turn 2",
        "latent 2",
    ]
    text = made.lab.codec.text
    by_name = {
        name: text(readings.ids[readings.segment == number].tolist())
        for number, name in enumerate(readings.segments)
    }
    assert by_name["latent 1"] == by_name["latent 2"] == "••••"
    assert (
        "Question: Which currency" in by_name["prompt"] and "<latent></latent>" in by_name["turn 1"]
    )
    assert "".join(readings.pieces[token] for token in readings.ids.tolist()).replace(
        "<|latent|>", "•"
    ) == text(readings.ids.tolist())


def test_cosines_norms_and_nearest_tokens_equal_a_direct_computation(written):
    made = written()
    readings = inspect(made.trajectories[1], made.model, made.lab.codec, top_k=3)
    z = made.trajectories[1].latents.astype(float)
    table = (
        made.model.get_input_embeddings()
        .weight.detach()
        .double()
        .numpy()[: made.model.config.latent_token_id]
    )
    norms, lengths = np.sqrt((z**2).sum(1)), np.sqrt((table**2).sum(1))
    np.testing.assert_array_equal(readings.z, made.trajectories[1].latents)
    np.testing.assert_allclose(readings.cosines, z @ z.T / np.outer(norms, norms), atol=1e-5)
    np.testing.assert_allclose(readings.block_cosines(1), readings.cosines[4:, 4:])
    cosines = z @ table.T / np.outer(norms, lengths)
    np.testing.assert_allclose(
        readings.nearest_cosines, np.sort(cosines, 1)[:, ::-1][:, :3], atol=1e-5
    )
    np.testing.assert_allclose(
        np.take_along_axis(cosines, readings.nearest_ids.astype(int), 1),
        readings.nearest_cosines,
        atol=1e-5,
    )
    np.testing.assert_allclose(readings.norm, norms, rtol=1e-5)
    np.testing.assert_allclose(readings.norm_ratio, norms / np.median(lengths), rtol=1e-3)
    np.testing.assert_allclose(
        readings.norm_quantile, (lengths[None] <= norms[:, None]).mean(1), atol=1e-3
    )
    assert (
        list(readings.step) == [0, 1, 2, 3] * 2 and list(readings.table()["k"]) == [1, 2, 3, 4] * 2
    )


def test_readings_survive_their_file_bit_by_bit(written, tmp_path):
    made = written()
    readings = inspect(made.trajectories[0], made.model, made.lab.codec)
    again = LatentReadings.load(readings.save(tmp_path / "new" / "q0.latent.npz"))
    for field in fields(readings):
        one, other = getattr(readings, field.name), getattr(again, field.name)
        if isinstance(one, np.ndarray):
            assert (
                one.dtype == other.dtype
                and one.shape == other.shape
                and one.tobytes() == other.tobytes()
            ), field.name
        else:
            assert one == other, field.name
    np.savez(tmp_path / "other.npz", z=readings.z)
    with pytest.raises(ValueError, match="inspect again"):
        LatentReadings.load(tmp_path / "other.npz")


def test_inspect_refuses_what_does_not_belong_to_the_model(written, random_model):
    made = written()
    trajectory, model = made.trajectories[0], made.model
    cases = {
        "8 latent positions": replace(trajectory, latents=trajectory.latents[:-1]),
        "width 32": replace(trajectory, latents=trajectory.latents[:, :32]),
        "NaN": replace(trajectory, latents=np.full_like(trajectory.latents, np.nan)),
        "another model": replace(
            trajectory, ids=[9 if i == model.config.latent_token_id else i for i in trajectory.ids]
        ),
        "belongs to no turn": replace(trajectory, turns=trajectory.turns[:1]),
        "no latent block": run(
            QUESTIONS[:1], made.lab.engine, Silent(), Sampling(4), modes="off", max_turns=1
        )[0],
    }
    for message, broken in cases.items():
        with pytest.raises(ValueError, match=message):
            inspect(broken, model, made.lab.codec)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_interventions_equal_hooks_on_the_embedding_layer(written, family, kind):
    """Next-token distributions of the action, and the action written greedily, at a second turn
    with an earlier block."""
    made = written(family)
    site, donor = made.sites[1], made.sites[3]
    assert site.block.turn == donor.block.turn == 1
    change = Intervention(kind, step=2 if kind in ("patch", "drop") else None)
    z = made.lab.thoughts(site, change, donor)
    effect = made.lab.effect(site, change, donor)
    context = (
        site.prefix + [made.model.config.latent_token_id] * len(z) + made.lab.codec.latent_close
    )
    fed_z = [*site.trajectory.latents[:4], *z]

    def along(action, ids, vectors):
        return slow_logprobs(made.model, [*ids, *action], vectors)[len(ids) - 1 : -1]

    action = site.action_ids
    read = made.lab.next_token_logprobs(site, [site.z, z], action)
    recorded = site.trajectory.ids[: site.block.action], site.trajectory.latents
    changed, intact = along(action, context, fed_z), along(action, *recorded)
    assert (read[0] - intact).abs().max() < 1e-5 and (read[1] - changed).abs().max() < 1e-5
    assert effect.kl == pytest.approx(
        (intact.exp() * (intact - changed)).sum(-1).mean().item(), abs=1e-5
    )
    wanted = torch.tensor(donor.action_ids)
    gain = along(donor.action_ids, context, fed_z) - along(donor.action_ids, *recorded)
    assert effect.donor_gain == pytest.approx(
        gain.gather(1, wanted[:, None]).mean().item(), abs=1e-5
    )
    ids = list(context)
    for token in effect.output.ids:
        ids.append(int(slow_logprobs(made.model, ids, fed_z)[-1].argmax()))
        assert ids[-1] == token
    assert effect.action == made.lab.codec.text(ids[len(context) :]).strip()


@pytest.mark.parametrize("family", FAMILIES)
def test_patching_z_into_itself_changes_nothing(written, family):
    made = written(family, temperature=0)
    for site in made.sites[:2]:
        for step in (None, 3):
            effect = made.lab.effect(site, Intervention("patch", step), donor=site)
            assert (
                effect.kl == 0
                and effect.distance == 0
                and not effect.changed
                and not effect.to_donor
            )
            assert (
                effect.output.ids[: len(site.action_ids)] == site.action_ids
            )  # greedy as recorded


def test_what_each_intervention_does_to_z():
    rng = np.random.default_rng(0)
    z, donor, mean = rng.standard_normal((3, 4, 16)).astype(np.float32)

    def new(kind, step=None, control=False, seed=1):
        return replaced(
            z,
            Intervention(kind, step, control),
            np.random.default_rng(seed),
            donor=donor,
            mean=mean,
        )

    norm = np.linalg.norm
    assert not new("zero").any() and (new("mean") == mean).all() and (new("patch") == donor).all()
    np.testing.assert_allclose(norm(new("noise"), axis=1), norm(z, axis=1), rtol=1e-5)
    assert (
        (new("none") == z).all()
        and new("drop").shape == (0, 16)
        and (new("drop", 1) == z[[0, 2, 3]]).all()
    )
    shuffled = [
        tuple(np.flatnonzero((z == row).all(1))[0] for row in new("shuffle", seed=seed))
        for seed in range(30)
    ]
    assert all(sorted(order) == [0, 1, 2, 3] for order in shuffled) and (0, 1, 2, 3) not in shuffled
    for kind in ("zero", "mean", "noise", "patch"):
        assert (new(kind, 2)[[0, 1, 3]] == z[[0, 1, 3]]).all() and (new(kind, 2)[2] != z[2]).any()
        for step in (None, 2):
            moved, control = new(kind, step) - z, new(kind, step, control=True, seed=5) - z
            if kind != "noise":  # whose own draw differs
                np.testing.assert_allclose(norm(moved, axis=1), norm(control, axis=1), atol=1e-5)
            assert abs((moved[2] @ control[2]) / norm(moved[2]) / norm(control[2])) < 0.9
    filled = new("drop", 1, control=True)
    assert (filled[[0, 2, 3]] == z[[0, 2, 3]]).all() and norm(filled[1]) == pytest.approx(
        norm(z[1]), rel=1e-5
    )
    for change, message in (
        (Intervention("patch"), "donor"),
        (Intervention("mean"), "mean"),
        (Intervention("zero", 4), "0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            replaced(z, change, rng)
    with pytest.raises(ValueError, match="at least two"):
        replaced(z[:1], Intervention("shuffle"), rng)
    with pytest.raises(ValueError, match="zap"):
        Intervention("zap")


def test_one_latent_step_is_enough(written):
    made = written(num_latent=1)
    readings = inspect(made.trajectories[0], made.model, made.lab.codec)
    assert len(readings) == 2 and readings.block_cosines(0).shape == (1, 1)
    changes = list_interventions(1)
    assert [change.kind for change in changes] == [kind for kind in KINDS if kind != "shuffle"]
    effects = made.lab.effects([(made.sites[0], change, made.sites[2]) for change in changes])
    assert (
        all(np.isfinite(effect.kl) for effect in effects)
        and max(effect.kl for effect in effects) > 0
    )


def test_a_batch_of_interventions_equals_each_alone(written):
    made = written()
    cases = [
        (site, Intervention(kind, control=control), made.sites[(number + 2) % 6])
        for number, site in enumerate(made.sites[:3])
        for kind in ("patch", "drop")
        for control in (False, True)
    ]
    for case, effect in zip(cases, made.lab.effects(cases)):
        alone = InterventionLab(made.lab.engine, max_new_tokens=NEW_TOKENS).effect(*case)
        assert (alone.action, alone.reference, alone.to_donor) == (
            effect.action,
            effect.reference,
            effect.to_donor,
        )
        assert alone.kl == pytest.approx(effect.kl, abs=1e-6) and alone.donor_gain == pytest.approx(
            effect.donor_gain, abs=1e-6
        )


def test_an_intact_episode_goes_on_as_it_was_recorded(written):
    made = written(temperature=0)
    site = made.sites[0]
    lab, last = (
        InterventionLab(made.lab.engine, max_new_tokens=len(site.action_ids)),
        site.trajectory.turns[1],
    )
    replay = Replay(lab.engine, [_script(lab, lab.effect(site, INTACT))])
    sampling = Sampling(last.end - last.start, 0.0)
    again = run(
        [site.trajectory.question], replay, Silent(), sampling, modes="latent", max_turns=2
    )[0]
    assert again.ids == site.trajectory.ids and again.origins == site.trajectory.origins
    np.testing.assert_allclose(again.latents, site.trajectory.latents, atol=1e-5)
    drop = made.lab.effect(site, Intervention("drop", 1))
    script = _script(made.lab, drop)[0]
    assert script.origins.count(Origin.LATENT) == len(script.latents) == 3


def test_tables_hold_effects_beside_their_controls(written):
    made = written(num_latent=2)
    given = donors(made.sites, seed=1)
    for site, donor in zip(made.sites, given):
        assert (
            donor.trajectory.question.id != site.trajectory.question.id
            and donor.block.turn == site.block.turn
        )
    assert all(
        d.block.turn != s.block.turn
        for s, d in zip(made.sites, donors(made.sites, same_turn=False))
    )
    assert donors(made.sites, same_type=False) == [None] * 6  # all questions here are of one type
    changes = list_interventions(2, ("zero", "patch"), per_step=True)
    episodes = {
        "environment": Silent(),
        "modes": "latent",
        "max_turns": 3,
        "max_new_tokens": 12,
        "chunk": 4,
    }
    effects = measure_effects(made.lab, made.sites, changes, given, **episodes)
    assert (
        len(effects) == 6 * 2 * 2
        and set(effects["k"]) == {1, 2}
        and set(effects["correct"]) <= {0.0, 1.0}
    )
    first = effects.iloc[3]
    alone = made.lab.effect(made.sites[0], Intervention("patch", 1), given[0])
    assert (
        first["kl"] == pytest.approx(alone.kl, abs=1e-6)
        and first["intervention"] == "patch"
        and first["k"] == 2
    )
    summary = mean_effects(effects, resamples=200)
    row = summary[
        (summary["intervention"] == "zero") & (summary["k"] == 1) & (summary["measure"] == "kl")
    ].iloc[0]
    part = effects[(effects["intervention"] == "zero") & (effects["k"] == 1)]
    assert (
        row["mean"] == pytest.approx(part["kl"].mean())
        and row["questions"] == 3
        and row["turns"] == 6
    )
    assert (
        row["difference"] == pytest.approx((part["kl"] - part["control_kl"]).mean())
        and row["low"] <= row["mean"] <= row["high"]
    )
    assert list(step_effects(effects, "zero", resamples=50)["turn"].unique()) == [1, 2]
    with pytest.raises(ValueError, match="per_step"):
        step_effects(effects, "noise")


def test_an_action_moves_to_the_donors_kind_only_from_another_one():
    def moved(reference, donor, action):
        return Effect(None, INTACT, None, None, action, reference, 0.0, 0.0, donor).to_donor_kind

    assert moved("<search>Peru</search>", "<answer>12</answer>", "<answer>Peru</answer>") == 1
    assert moved("<search>Peru</search>", "<answer>12</answer>", "<search>Chad</search>") == 0
    assert moved("<search>Peru</search>", "<answer>12</answer>", "no tag") == 0
    assert np.isnan(
        moved("<search>Peru</search>", "<search>Chad</search>", "<search>Chad</search>")
    )
    assert np.isnan(moved("<search>Peru</search>", "", "<answer>1</answer>"))
