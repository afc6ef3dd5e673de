"""`rankfold generate`: the tokens and prompt logprobs of prompts, on a topology."""

from __future__ import annotations

import argparse
from typing import Any

from rankfold.commands.model_options import add_model, options_of
from rankfold.commands.refuse import broke, refuse, told


def add(commands: Any) -> None:
    """Add the command to the command line."""
    generate = commands.add_parser(
        "generate",
        help="generate tokens after prompts of token ids, and score the prompts",
        epilog="exit codes: 0 done, and as the other topology did; 1 not so; 2 bad usage; 3 the "
        "run itself broke",
    )
    add_model(generate)
    generate.add_argument(
        "--prompt",
        required=True,
        metavar="IDS",
        help="token ids between commas, prompts between semicolons, such as '1,2,3;4,5'",
    )
    generate.add_argument(
        "--tokens", type=int, default=16, metavar="N", help="tokens to generate (default 16)"
    )
    generate.add_argument(
        "--seed-sampling", type=int, metavar="SEED", help="sample with this seed (default: greedy)"
    )
    generate.add_argument(
        "--temperature", type=float, default=1.0, help="of seeded sampling (default 1)"
    )
    generate.add_argument("--against", metavar="TOPOLOGY", help="compare with this topology")
    generate.add_argument("--json", action="store_true", help="print the report as JSON")
    generate.set_defaults(command=_generate)


def _generate(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from sim import SimError

    try:
        from rankfold.errors import UsageError
        from rankfold.serving.generate import render, run_generate
        from rankfold.serving.request import Request
        from rankfold.serving.sampling import Sampling

        if arguments.tokens < 1:
            raise UsageError(f"--tokens {arguments.tokens}: use 1 or more")
        requests = [
            Request(prompt=prompt, decode=arguments.tokens - 1)
            for prompt in _prompts(arguments.prompt)
        ]
        if arguments.seed_sampling is None and arguments.temperature != 1:
            raise UsageError(
                "--temperature: give --seed-sampling too; without it sampling is greedy"
            )
        sampling = Sampling(seed=arguments.seed_sampling, temperature=arguments.temperature)
        with Console(stderr=True).status("starting") as status:
            report = run_generate(options_of(arguments), requests, sampling, status.update)
    except SimError as error:
        return broke("generate", error, as_json=arguments.json)
    except (ValueError, ImportError) as error:
        return refuse("generate", error)
    return told(report, render, as_json=arguments.json)


def _prompts(text: str) -> list[tuple[int, ...]]:
    """Numbers between commas, of each prompt between semicolons."""
    from rankfold.errors import UsageError

    try:
        return [tuple(int(part) for part in one.split(",")) for one in text.split(";")]
    except ValueError:
        raise UsageError(
            f"--prompt {text!r}: use token ids between commas, and semicolons between prompts, "
            "such as '1,2,3;4,5'"
        ) from None
