"""Commands that look: what is here, which paths there are, which one a rule picks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from mlakit.archs import default_device
from mlakit.cli import base
from mlakit.cli.base import Json, app, print_rows
from mlakit.errors import MisuseError


@app.command(epilog="Example: mlakit doctor --json")
def doctor(as_json: Json = False) -> None:
    """What is here, what was wanted, and what to do about the difference."""
    from mlakit.dispatch.doctor import doctor as examine

    report = examine()
    if as_json:
        print(json.dumps(report.to_json(), indent=1, default=str))
        return
    print_rows(report.to_rows(), "mlakit doctor")


@app.command(epilog="Example: mlakit paths --arch gfx950")
def paths(
    arch: Annotated[str, typer.Option(help="For this arch instead of this machine.")] = "",
    as_json: Json = False,
) -> None:
    """Every way to run the step, and why those that cannot run here cannot."""
    from mlakit.context import Context
    from mlakit.dispatch import probe
    from mlakit.paths import registry

    context = Context(arch=arch) if arch else probe.here(default_device())
    rows = [
        {
            "path": p.name,
            "output": p.output,
            "launches": p.launches,
            "rounding": p.rounding_on(context.arch, context.dtype),
            "runs": "yes" if (why := _why_not(p, context)) is None else f"no: {why}",
            "what it is": p.text,
        }
        for p in registry.all_paths()
    ]
    print_rows(rows, f"paths on {context.arch}", as_json)


def _why_not(path, context) -> str | None:
    """Why a path cannot deliver its own output in ``context``; a quantised path is asked for it."""
    try:
        return path.supports(replace(context, quant=path.output))
    except MisuseError as error:
        return str(error)


@app.command(epilog="Example: mlakit explain --arch gfx950 --aiter --policy sglang_before_fix")
def explain(
    context: typer.Context,
    policy: Annotated[str, typer.Option(help="Whose rule: mlakit, sglang_today, ...")] = "mlakit",
    arch: Annotated[str, typer.Option(help="For this arch instead of this machine.")] = "",
    batch: Annotated[str, typer.Option("--batch", "-m", help="Rows M.")] = "64",
    hidden: Annotated[str, typer.Option(help="q+kv widths or a model's name.")] = "DeepSeek-V3",
    dtype: base.Dtype = "bf16",
    weight_dtype: Annotated[str, typer.Option(help="dtype of q_b_proj: bf16, fp8_ocp, ...")] = "",
    quant: Annotated[str, typer.Option(help="none, fp8_group128, fp8_token, mxfp4.")] = "none",
    aiter: Annotated[bool, typer.Option("--aiter", help="AITER is in use there.")] = False,
    aiter_api: Annotated[str, typer.Option(help="Its norm: none, pair, unified.")] = "pair",
    capture: Annotated[bool, typer.Option("--capture", help="During graph capture.")] = False,
    as_json: Json = False,
) -> None:
    """Which path a rule picks in a context, why, and why not each of the others."""
    from mlakit.context import Context
    from mlakit.dispatch import probe
    from mlakit.dispatch.explain import explain as ask
    from mlakit.shapes import parse_hidden
    from mlakit.sweep import grid

    if not aiter:
        base.refuse_beside(context, "without --aiter", "aiter_api")
    widths = parse_hidden(hidden)
    asked: dict = {"m": grid.whole(batch), "dtype": dtype, "norm_weight_dtype": dtype}
    asked |= {"q_lora_rank": widths.q_lora_rank, "kv_lora_rank": widths.kv_lora_rank}
    asked |= {"weight_dtype": weight_dtype or dtype, "quant": quant, "capture": capture}
    if arch:
        asked |= {"use_aiter": aiter, "aiter_api": aiter_api if aiter else "none"}
        call = Context(arch=arch, **asked)
    else:
        if aiter:
            raise MisuseError("--aiter speaks of a card: name it too, for example --arch gfx950")
        call = replace(probe.here(default_device()), **asked)
    answer = ask(call, policy)
    if as_json:
        print(json.dumps(answer.to_json(), indent=1, default=str))
        return
    print(f"on {call.arch}, {answer.line}")
    print(f"the rule: {answer.rule.text} ({answer.rule.source})")
    if answer.here:
        print(f"not here: {answer.here}")
    print_rows(answer.to_rows(), "every path")
