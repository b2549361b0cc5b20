# SPDX-License-Identifier: Apache-2.0
"""One real engine on a tiny checkpoint; prints what test_engine.py looks at as one line of JSON.

Usage: engine_run.py MODEL JSON, where JSON holds LLM arguments and "reload", another model.
"""

from __future__ import annotations

import json
import sys

PROMPTS = ("The quick brown fox", "Once upon a time there was", "def main():")


def generate(llm) -> list:
    """Tokens and log-probabilities, one request at a time: CPU attention depends on the batch."""
    from vllm import SamplingParams

    found = []
    for prompt in PROMPTS:
        sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
        out = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        values = [next(iter(place.values())).logprob for place in out.logprobs]
        found.append([list(out.token_ids), values])
    return found


def main() -> None:
    from vllm import LLM

    model, arguments = sys.argv[1], json.loads(sys.argv[2])
    other = arguments.pop("reload", None)
    llm = LLM(
        model,
        max_model_len=128,
        max_num_seqs=2,
        seed=0,
        worker_extension_cls="moe_backend.vllm_plugin.status.StatusExtension",
        **arguments,
    )
    found = {"cold": generate(llm), "status": llm.collective_rpc("moe_status")[0]}
    if other:
        for name, path in (("other", other), ("again", model)) * 2:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            found.setdefault(name, []).append(generate(llm))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
