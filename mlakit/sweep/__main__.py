"""``python -m mlakit.sweep --preset qk-norm --out runs``: a sweep without the command line.

It needs only torch, triton, numpy, pandas and pyarrow, so it runs on a bare GPU machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from mlakit.errors import ExitCode, LockedError, MisuseError, unforeseen
from mlakit.sweep import grid
from mlakit.sweep.run import progress_line, refuse_beside_resume, run_asked, run_sweep


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m mlakit.sweep", description=__doc__)
    p.add_argument("--preset", choices=grid.PRESETS)
    p.add_argument("--out", default="runs", help="the folder that the run's folder goes into")
    p.add_argument("--resume", metavar="RUN", help="the folder of a run to go on with")
    p.add_argument("--force", action="store_true", help="resume in another environment")
    p.add_argument("--retry", default="", help="statuses to measure again, with --resume")
    p.add_argument("--measure", default="timing", help="timing, accuracy or both")
    p.add_argument("--time-limit-s", type=float)
    for name, default in grid.DEFAULTS.items():
        kind = float if name == "budget_s" else int if name == "seed" else str
        p.add_argument("--" + name.replace("_", "-"), type=kind, help=f"default: {default}")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The bare command; returns an ``ExitCode``."""
    a = _arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    values = {n: getattr(a, n) for n in grid.DEFAULTS}
    values = {n: v.split(",") if isinstance(v, str) else v for n, v in values.items()}
    options = {"time_limit_s": a.time_limit_s}
    options["progress"] = lambda *job: print(progress_line(*job), flush=True)
    try:
        if a.resume:
            asked = values | {"preset": a.preset}
            refuse_beside_resume(*(name for name, value in asked.items() if value is not None))
            retry = a.retry.split(",") if a.retry else ()
            summary = run_sweep(None, a.resume, force=a.force, retry=retry, **options)
        else:
            options["measure"] = a.measure.split(",")
            summary = run_asked(values | {"preset": a.preset}, a.out, **options)
    except MisuseError as error:
        print(error, file=sys.stderr)
        return ExitCode.MISUSE
    except (KeyboardInterrupt, LockedError) as error:
        why = str(error) or "interrupted"
        print(f"{why}; what was measured is kept, --resume goes on", file=sys.stderr)
        return ExitCode.INCOMPLETE
    except Exception as error:
        text, code = unforeseen(error)
        print(text, file=sys.stderr)
        return code
    print(summary)
    print(summary.run_dir)
    return summary.exit_code


if __name__ == "__main__":
    sys.exit(main())
