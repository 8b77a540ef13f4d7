"""The command line's own things: the app, printing, and errors as one line.

Every command returns a code of ``mlakit.errors.ExitCode``. A user's mistake ends with one line on
standard error and exit code 2, never with a traceback.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from typing import Annotated

import typer

from mlakit import versions
from mlakit.errors import ExitCode, LockedError, MisuseError, RefusedError, one_line

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


_MISNAMED = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.EACCES, errno.EPERM, errno.EROFS),
}
"""what the system says of a file or folder that a person named"""


def main() -> None:
    """Run the command line and exit with the command's code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(sys.argv[1:] or ["--help"], "mlakit", standalone_mode=False)
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = ExitCode.OK
    except Exception as error:
        # Python's own exit code, 1, would say "regression".
        if getattr(error, "errno", None) in _MISNAMED:
            sys.exit(_complain(f"{error.filename or 'a file'}: {error.strerror}"))
        if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            traceback.print_exc()
        code = _complain(f"{one_line(error)}; what was measured is kept", code=ExitCode.FAILED)
    sys.exit(int(code or 0))


def _complain(text: str, code: int = ExitCode.MISUSE) -> int:
    """``text`` as one line on standard error; returns ``code``."""
    print("mlakit:", *text.splitlines(), file=sys.stderr)
    return code


def split(values: list[str] | None) -> list[str]:
    """``["a,b", "c"]`` as ``["a", "b", "c"]``."""
    return [v.strip() for text in values or [] for v in text.split(",") if v.strip()]


def whole(values: list[str] | None) -> list[int]:
    """Numbers of rows from their spellings."""
    from mlakit.sweep import grid

    return [grid.whole(v) for v in split(values)]


def print_rows(rows: list[dict], title: str, as_json: bool = False) -> None:
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
