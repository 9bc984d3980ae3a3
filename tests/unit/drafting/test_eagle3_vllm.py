"""The head computes what vLLM's own implementation computes on the same weights.

vLLM runs a small random target with the saved head as its drafter; every call of its draft model
is recorded and repeated here, so prompts, chains and catching up are all compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hvd_ray.drafting.eagle3_checkpoint import load_head, save_head, target_shape

from .eagle3_heads import SMALL, random_head

pytestmark = [pytest.mark.model]
pytest.importorskip("vllm")

RECORD_CALLS = """
import json, sys
import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams

target, head, out = sys.argv[1:]
llm = LLM(
    model=target, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=128,
    max_num_seqs=2, distributed_executor_backend="uni", enable_prefix_caching=False,
    speculative_config={"method": "eagle3", "model": head, "num_speculative_tokens": 3},
)
runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
model = runner.drafter.model
calls, names = {}, []

def record(kind, *tensors):
    for part, tensor in enumerate(tensors):
        calls[f"{len(names):03d}.{part}"] = tensor.detach().clone().contiguous()
    names.append(kind)

combine, compute_logits, inner = model.combine_hidden_states, model.compute_logits, model.model

def spy_combine(hidden):
    result = combine(hidden)
    record("combine", hidden, result)
    return result

def spy_logits(hidden):
    result = compute_logits(hidden)
    record("logits", hidden, result)
    return result

class Spy(torch.nn.Module):
    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped
    def forward(self, input_ids, positions, hidden_states, input_embeds=None):
        normed, feature = self.wrapped(input_ids, positions, hidden_states, input_embeds)
        record("forward", input_ids, positions, hidden_states, normed, feature)
        return normed, feature
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)

model.combine_hidden_states, model.compute_logits, model.model = spy_combine, spy_logits, Spy(inner)
prompt = {"prompt_token_ids": [5, 9, 17, 33, 2, 60, 41, 8, 12, 30]}
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
llm.generate([prompt], params, use_tqdm=False)
save_file(calls, out)
json.dump(names, open(out + ".json", "w"))
"""


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention on a CPU knows no narrower heads
        max_position_embeddings=128,
        eos_token_id=2,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_every_call_of_vllms_draft_model_is_reproduced(target_folder: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    save_head(
        random_head(config=replace(SMALL, head_dim=32)),
        tmp_path / "eagle3-head",
        dtype=torch.float32,
    )
    names, calls = _recorded_calls(target_folder, tmp_path)
    target = LlamaForCausalLM.from_pretrained(target_folder)
    head = load_head(tmp_path / "eagle3-head", target=target_shape(target))
    kv = head.new_kv()
    kinds = {"combine": 0, "forward": 0, "logits": 0}
    with torch.inference_mode():
        for index, kind in enumerate(names):
            kinds[kind] += 1
            part = [calls[f"{index:03d}.{n}"] for n in range(5) if f"{index:03d}.{n}" in calls]
            if kind == "combine":
                _close(head.combine(part[0]), part[1])
            elif kind == "forward":
                tokens_T, positions_T, feature_TH, normed_TH, next_TH = part
                kv.truncate(int(positions_T[0]))
                ours = head.extend(kv, tokens_T.long(), feature_TH)
                _close(ours[0], normed_TH)
                _close(ours[1], next_TH)
            else:
                over_target_TU = torch.full_like(part[1], float("-inf"))
                ids_V = head.weights.draft_to_target_V
                over_target_TU[:, ids_V] = head.logits(part[0])
                _close(over_target_TU, part[1])
    assert kinds["combine"] >= 3
    assert kinds["forward"] > kinds["combine"], "no chain was drafted"


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def _recorded_calls(target: Path, folder: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Run vLLM in a process of its own: it sets threads and global state for good."""
    out = folder / "calls.safetensors"
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [
        sys.executable,
        "-c",
        RECORD_CALLS,
        str(target),
        str(folder / "eagle3-head"),
        str(out),
    ]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(Path(f"{out}.json").read_text()), load_file(out)
