"""The command line: parse, call, print. Every command returns a code of ``mlakit.errors.ExitCode``.

A user's mistake ends with one line on standard error and exit code 2, never with a traceback.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import click
import typer

from mlakit.errors import ExitCode, MisuseError, RefusedError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Which kernel path should run the QK RMSNorm step of MLA here, how fast is it, "
    "how far does it drift, and is it worth it?",
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Arch = Annotated[
    list[str], typer.Option("--arch", "-a", help="An arch, or several with commas: cpu,gfx950.")
]


def main() -> None:
    """Run the command line and exit with the command's code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(standalone_mode=False)
    except (MisuseError, RefusedError) as error:
        code = _complain(str(error))
    except click.exceptions.NoArgsIsHelpError as error:
        code = _complain(error.format_message(), prefix="")
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" (see: {context.command_path} --help)" if context else ""
        code = _complain(f"{error.format_message()}{hint}")
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        code = _complain(f"{error.filename or error}: {error.strerror or 'not there'}")
    except (KeyboardInterrupt, click.exceptions.Abort):
        code = _complain("stopped; what was measured is kept", code=ExitCode.INCOMPLETE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.OK
    sys.exit(int(code or 0))


def _complain(text: str, code: int = ExitCode.MISUSE, prefix: str = "mlakit: ") -> int:
    print(f"{prefix}{text}", file=sys.stderr)
    return code


def _split(values: list[str] | None) -> list[str]:
    """``["a,b", "c"]`` as ``["a", "b", "c"]``."""
    return [v.strip() for text in values or [] for v in text.split(",") if v.strip()]


def _whole(values: list[str]) -> list[int]:
    from mlakit.sweep.grid import whole

    return [whole(v) for v in values]


def _print_rows(rows: list[dict], title: str, as_json: bool = False) -> None:
    """Rows as a table on a terminal, as tab-separated lines elsewhere, or as JSON."""
    from mlakit.report.show import number

    if as_json:
        print(json.dumps(rows, indent=1, default=str))
        return
    columns = list(rows[0]) if rows else []
    if not sys.stdout.isatty():
        print("\t".join(columns))
        for row in rows:
            print("\t".join(number(row[c]).replace("\n", " ") for c in columns))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(number(row[c]) for c in columns))
    Console().print(table)


def _line(text: str) -> None:
    """One plain line of progress, never in the way of what a command prints."""
    print(text, file=sys.stderr, flush=True)


@app.command(epilog="Example: mlakit doctor --json")
def doctor(as_json: Json = False) -> None:
    """What is here, what was wanted, and what to do about the difference."""
    from mlakit.dispatch.doctor import doctor as examine

    report = examine()
    if as_json:
        print(json.dumps(report.to_json(), indent=1, default=str))
        return
    _print_rows(report.to_rows(), "mlakit doctor")


@app.command(epilog="Example: mlakit paths --arch gfx950")
def paths(
    arch: Annotated[str, typer.Option(help="For this arch instead of this machine.")] = "",
    as_json: Json = False,
) -> None:
    """Every way to run the step, and why those that cannot run here cannot."""
    from mlakit.context import Context
    from mlakit.dispatch import probe
    from mlakit.paths import registry

    context = Context(arch=arch) if arch else probe.here(probe.default_device())
    rows = [
        {
            "path": p.name,
            "output": p.output,
            "launches": p.launches,
            "rounding": p.rounding,
            "runs": "yes" if (why := _why_not(p, context)) is None else f"no: {why}",
            "what it is": p.text,
        }
        for p in registry.all_paths()
    ]
    _print_rows(rows, f"paths on {context.arch}", as_json)


def _why_not(path, context) -> str | None:
    """Why a path cannot deliver its own output in ``context``; a quantised path is asked for it."""
    from dataclasses import replace

    try:
        return path.supports(replace(context, quant=path.output))
    except MisuseError as error:
        return str(error)


@app.command(epilog="Example: mlakit explain --arch gfx950 --aiter --policy sglang_before_fix")
def explain(
    policy: Annotated[str, typer.Option(help="Whose rule: mlakit, sglang_today, ...")] = "mlakit",
    arch: Annotated[str, typer.Option(help="For this arch instead of this machine.")] = "",
    batch: Annotated[str, typer.Option("--batch", "-m", help="Rows M.")] = "64",
    hidden: Annotated[str, typer.Option(help="q+kv widths or a model's name.")] = "DeepSeek-V3",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    weight_dtype: Annotated[str, typer.Option(help="dtype of q_b_proj: bf16, fp8_ocp, ...")] = "",
    quant: Annotated[str, typer.Option(help="none, fp8_group128, fp8_token, mxfp4.")] = "none",
    aiter: Annotated[bool, typer.Option("--aiter", help="AITER is in use there.")] = False,
    capture: Annotated[bool, typer.Option("--capture", help="During graph capture.")] = False,
    as_json: Json = False,
) -> None:
    """Which path a rule picks in a context, why, and why not each of the others."""
    from mlakit.context import Context
    from mlakit.dispatch import probe
    from mlakit.dispatch.explain import explain as ask
    from mlakit.shapes import parse_hidden

    widths = parse_hidden(hidden)
    asked = {
        "m": _whole([batch])[0],
        "q_lora_rank": widths.q_lora_rank,
        "kv_lora_rank": widths.kv_lora_rank,
        "dtype": dtype,
        "norm_weight_dtype": dtype,
        "weight_dtype": weight_dtype or dtype,
        "quant": quant,
        "capture": capture,
    }
    if arch:
        context = Context(
            arch=arch, use_aiter=aiter, aiter_api="unified" if aiter else "none", **asked
        )
    else:
        from dataclasses import replace

        if aiter:
            raise MisuseError("--aiter speaks of a card: name it too, for example --arch gfx950")
        context = replace(probe.here(probe.default_device()), **asked)
    answer = ask(context, policy)
    if as_json:
        print(json.dumps(answer.to_json(), indent=1, default=str))
        return
    print(f"{answer.policy} on {context.arch}: {answer.path}: {answer.reason}")
    _print_rows(answer.to_rows(), "every path")


@app.command(epilog="Example: mlakit significance --a 0.928 --b 0.935 --n 1319")
def significance(
    a: Annotated[str, typer.Option(help="Accuracy, correct answers, or a per-question file.")],
    b: Annotated[str, typer.Option(help="The same of the other side.")] = "",
    n: Annotated[int, typer.Option(help="Questions; needed unless a and b are files.")] = 0,
    as_json: Json = False,
) -> None:
    """Is the difference between two evaluation results real?"""
    from mlakit.drift.evals import significance as judge

    answer = judge(_figure(a), _figure(b) if b else None, n or None)
    print(json.dumps(answer.to_json(), indent=1) if as_json else answer.text)


def _figure(text: str) -> float | int | str:
    """A number where ``text`` is one, else the path of a file."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
