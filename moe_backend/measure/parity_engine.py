# SPDX-License-Identifier: Apache-2.0
"""One engine run of the parity check: ``python -m moe_backend.measure.parity_engine JOB.json``.

Runs alone in a process, so that the engine's memory is free again before the next one starts.
Writes next to the job: progress.json while it works, result.json and activations at the end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NUM_LOGPROBS = 5  # alternatives per position; enough to see a near tie


class Progress:
    """Written whole by rename, so that a reader never sees half a line."""

    def __init__(self, file: Path, total: int) -> None:
        self.file, self.total, self.done = file, total, 0

    def tell(self, words: str, step: int = 0) -> None:
        self.done += step
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({"words": words, "done": self.done, "total": self.total}))
        os.replace(new, self.file)


def plain(logprobs: dict[int, Any]) -> list[list[float]]:
    """[[token, log-probability]…], best first."""
    pairs = [(token, entry.logprob) for token, entry in logprobs.items()]
    return [[t, p] for t, p in sorted(pairs, key=lambda pair: -pair[1])]


class Engine:
    """vLLM with one request in flight: on a CPU its results depend on the batch."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)

    def _one(self, prompt: Any, **sampling: Any) -> Any:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0.0, **sampling)
        return self.llm.generate([prompt], parameters, use_tqdm=False)[0]

    def greedy(self, prompt: str | list[int], num_tokens: int) -> dict[str, Any]:
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        done = self._one(given, max_tokens=num_tokens, ignore_eos=True)
        return {"prompt": list(done.prompt_token_ids), "output": list(done.outputs[0].token_ids)}

    def forced(self, tokens: list[int]) -> list[list[list[float]]]:
        """Log-probabilities at every position but the first, given all tokens before it."""
        done = self._one({"prompt_token_ids": tokens}, max_tokens=1, prompt_logprobs=NUM_LOGPROBS)
        return [plain(entry) for entry in done.prompt_logprobs[1:]]

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.llm.collective_rpc(method, args=args)


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    prompts, source = job["prompts"], job.get("source")
    progress = Progress(folder / "progress.json", 2 * len(prompts) + 1)
    progress.tell("starting the engine")
    engine = Engine(job["engine"])
    result: dict[str, Any] = {"status": engine.call("moe_status")[0]}
    if job.get("fault"):
        result["fault"] = engine.call("parity_fault")[0]
    progress.tell("generating", 1)
    result["greedy"] = []
    for prompt in prompts:
        result["greedy"].append(engine.greedy(prompt, job["num_tokens"]))
        progress.tell("generating", 1)
    if source is None:
        result["blocks"] = engine.call("parity_start", job["num_captured"])[0]
        sequences = [g["prompt"] + g["output"] for g in result["greedy"]]
    else:
        sequences = json.loads((Path(source) / "result.json").read_text())["sequences"]
    result["sequences"], result["forced"] = sequences, []
    for tokens in sequences:
        result["forced"].append(engine.forced(tokens))
        progress.tell("scoring the default's text", 1)
    target = str(folder / "activations.safetensors")
    if source is None:
        engine.call("parity_save", target)
    else:
        progress.tell("replaying captured activations")
        engine.call("parity_replay", str(Path(source) / "activations.safetensors"), target)
    return result


def main() -> None:
    file = Path(sys.argv[1])
    result = run(json.loads(file.read_text()), file.parent)
    (file.parent / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
