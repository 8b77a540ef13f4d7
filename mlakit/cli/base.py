"""The command line's own things: the app, printing, and errors as one line.

Every command returns a code of ``mlakit.errors.ExitCode``. A user's mistake ends with one line on
standard error and exit code 2, never with a traceback.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from typing import Annotated

import typer

from mlakit import __version__, versions
from mlakit.errors import ExitCode, LockedError, MisuseError, RefusedError, unforeseen

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    help="Which kernel path should run the QK RMSNorm step of MLA here, how fast is it, "
    "how far does it drift, and is it worth it?",
)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Names = list[str] | None
Arch = Annotated[Names, typer.Option("--arch", "-a", help="Archs, with commas: cpu,gfx950.")]
Models = Annotated[Names, typer.Option("--model", help="Models, with commas.")]
Hidden = Annotated[Names, typer.Option(help="q+kv widths, with commas: 1536+512.")]
Batches = Annotated[Names, typer.Option("--batch", "-m", help="Rows M, with commas.")]
Dtypes = Annotated[Names, typer.Option(help="bf16, fp16, fp32.")]
Dtype = Annotated[str, typer.Option(help="bf16, fp16 or fp32.")]
Quants = Annotated[Names, typer.Option(help="none, fp8_group128, ...")]
Paths = Annotated[Names, typer.Option(help="Paths; all by default.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the inputs.")]
Out = Annotated[str, typer.Option(help="The folder that the run's folder goes into.")]


_UsageError = typer.BadParameter.__mro__[2]
"""click's own base error; recent typers carry a copy of click, so it is reached through typer."""


def _print_version(asked: bool) -> None:
    if asked:
        print(f"mlakit {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="mlakit's version."),
]


@app.callback()
def _of_every_command(version: _Version = False) -> None:
    pass


def main() -> None:
    """Run the command line and exit with the command's code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(sys.argv[1:] or ["--help"], "mlakit", standalone_mode=False)
        if code == 128 + signal.SIGINT:  # what typer makes of a Ctrl-C
            raise KeyboardInterrupt
        sys.stdout.flush()  # here an error has its code; on the way out it would have Python's
    except (MisuseError, RefusedError) as error:
        code = _complain(str(error))
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        see = f"; see: {context.command_path} --help" if context else ""
        code = _complain(error.format_message().rstrip(".") + see)
    except ModuleNotFoundError as error:
        module = (error.name or "mlakit").split(".")[0]
        if module == "mlakit":
            raise
        code = _complain(f"{module} is not here: pip install {versions.install_of(module)}")
    except LockedError as error:
        code = _complain(str(error), code=ExitCode.INCOMPLETE)
    except (KeyboardInterrupt, typer.Abort):
        code = _complain("stopped; what was measured is kept", code=ExitCode.INCOMPLETE)
    except BrokenPipeError:
        code = _reader_gone()
    except SystemExit as ended:
        # typer and rich make 1 of a closed pipe, which would say "regression"
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        code = _reader_gone()
    except Exception as error:
        text, code = unforeseen(error)
        code = _complain(text, code)
    sys.exit(int(code or 0))


def _complain(text: str, code: int = ExitCode.MISUSE) -> int:
    """``text`` as one line on standard error; returns ``code``."""
    with contextlib.suppress(BrokenPipeError):
        print("mlakit:", *text.splitlines(), file=sys.stderr)
    return code


def _reader_gone() -> int:
    """What a shell says of a program that a closed pipe ended, as in ``mlakit paths | head -1``."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def refuse_beside(context: typer.Context, why: str, *names: str) -> None:
    """Refuse what was typed of ``names`` where it would do nothing; ``why``: "without --resume".

    Raises:
        MisuseError: one of them was typed.
    """
    typed = [n for n in names if context.get_parameter_source(n).name == "COMMANDLINE"]
    if typed:
        options = {p.name: p.opts[0] for p in context.command.params}
        given = ", ".join(options[n] for n in typed)
        raise MisuseError(f"{given} would do nothing {why}: leave it out")


def split(values: list[str] | None) -> list[str]:
    """``["a,b", "c"]`` as ``["a", "b", "c"]``."""
    return [v.strip() for text in values or [] for v in text.split(",") if v.strip()]


def whole(values: list[str] | None) -> list[int]:
    """Numbers of rows from their spellings."""
    from mlakit.sweep import grid

    return [grid.whole(v) for v in split(values)]


def print_rows(rows: list[dict], title: str, as_json: bool = False) -> None:
    """Rows below their title: a table on a terminal, elsewhere tab-separated lines; or as JSON."""
    from mlakit.report.show import number

    if as_json:
        print(json.dumps(rows, indent=1, default=str))
        return
    columns = list(rows[0]) if rows else []
    if not sys.stdout.isatty():
        print(f"# {title}")
        print("\t".join(columns))
        for row in rows:
            print("\t".join(number(row[c]).replace("\n", " ") for c in columns))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(escape(column), overflow="fold")
    for row in rows:  # escaped, or rich takes the extra of `pip install mlakit[triton]` for a style
        table.add_row(*(escape(number(row[c])) for c in columns))
    Console().print(table)


def line(text: str) -> None:
    """One plain line of progress, never in the way of what a command prints."""
    print(text, file=sys.stderr, flush=True)


def given(**options) -> dict:
    """The options that were given: without None and empty lists."""
    return {k: v for k, v in options.items() if v not in (None, "", [], ())}


def progress():
    """Progress for a sweep: a bar on a terminal, one plain line a cell elsewhere."""
    if not sys.stderr.isatty():
        from mlakit.sweep.run import progress_line

        return lambda *job: line(progress_line(*job))
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    text = TextColumn("{task.description}")
    bar = Progress(text, *columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("measuring", total=None)
    bar.start()

    def told(done: int, total: int, cell, words: str) -> None:
        text = f"{cell.arch} {cell.widths} M={cell.m}: {words}"
        bar.update(task, completed=done, total=total, description=text)
        if done == total:
            bar.stop()

    return told
