"""The commands of the full-scale validation, for the person who has the weights.

They are those by which sequence parallelism under pipeline parallelism was validated in vLLM.
"""

from __future__ import annotations

MODEL = "MiniMaxAI/MiniMax-M3.1-Flash"

_SERVE = (
    f"vllm serve {MODEL} --trust-remote-code --max-model-len 16384 "
    "--max-num-batched-tokens 16384 --max-num-seqs 64 --gpu-memory-utilization 0.85 "
    "--no-enable-prefix-caching --enable-expert-parallel --moe-backend deep_gemm_mega_moe "
    "--tensor-parallel-size 2 --pipeline-parallel-size {pp}"
)
_DSPARK = (
    """ --speculative-config '{"method": "dspark", "num_speculative_tokens": 7, """
    """"attention_backend": "FLASHINFER_TS", "kv_cache_dtype": "fp8", """
    """"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}'"""
)
WORKLOADS = (
    ("decode", 512, 512, 64, 512),
    ("mixed", 2048, 256, 64, 256),
    ("prefill", 8192, 16, 8, 64),
)
"""Name, input tokens, output tokens, requests at a time, and requests in all."""


def commands() -> list[tuple[str, str]]:
    """(what it is for, the command), in the order in which to run them."""
    found = [
        ("serve, one stage: the reference", _SERVE.format(pp=1)),
        ("serve, two stages", _SERVE.format(pp=2)),
        ("serve, two stages, with DSpark", _SERVE.format(pp=2) + _DSPARK),
        (
            "GSM8K, on each server (tests/evals/gsm8k of vLLM's repository)",
            "python gsm8k_eval.py --max-concurrency 64 --use-chat-completions --max-tokens 1024 "
            "--save-results gsm8k-pp2.json",
        ),
        (
            "prompt logprobs, on each server; prompts.json holds a list of six prompts",
            "curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d "
            f'"$(jq -c \'{{model: "{MODEL}", prompt: ., max_tokens: 1, temperature: 0, '
            "prompt_logprobs: 0}' prompts.json)\" > logprobs-pp2.json",
        ),
    ]
    for name, given, wanted, at_once, count in WORKLOADS:
        found.append(
            (
                f"throughput, {name}: twice on a vLLM that keeps sequence parallelism on under "
                "pipeline parallelism, and twice on one without that change (off), in turns",
                f"vllm bench serve --model {MODEL} --dataset-name random "
                f"--random-input-len {given} --random-output-len {wanted} --num-prompts {count} "
                f"--max-concurrency {at_once} --ignore-eos --seed 1 --save-result "
                f"--result-filename {name}-on-1.json",
            )
        )
    found.append(
        (
            "the verdicts",
            "rankfold gpu --read pp1=logprobs-pp1.json pp2=logprobs-pp2.json pp2=gsm8k-pp2.json "
            "on=decode-on-1.json off=decode-off-1.json on=decode-on-2.json off=decode-off-2.json",
        )
    )
    return found
