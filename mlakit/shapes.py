"""MLA models and the widths of their latent norms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mlakit.datafiles import data_dir, maybe, read_table
from mlakit.errors import MisuseError, unknown


@dataclass(frozen=True)
class Widths:
    """Elements per row of the step: q part, kv part, and the rope part behind them.

    ``q_lora_rank`` is 0 for models without a q latent (kv alone is normalised).
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_rope_head_dim: int = 64

    @property
    def hidden(self) -> int:
        """Normalised elements per row: q_lora_rank + kv_lora_rank."""
        return self.q_lora_rank + self.kv_lora_rank

    @property
    def row_stride(self) -> int:
        """Elements from one row of the qkv_a buffer to the next."""
        return self.hidden + self.qk_rope_head_dim

    def __str__(self) -> str:
        return f"{self.q_lora_rank}+{self.kv_lora_rank}"


@dataclass(frozen=True)
class Model:
    """What mlakit uses of a line of ``data/models.csv``; None where no source gave the figure."""

    name: str
    aliases: tuple[str, ...]
    hidden_size: int | None
    num_heads: int | None
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int | None
    qk_rope_head_dim: int
    v_head_dim: int | None
    hf_latent_norm_eps: float | None
    serving_latent_norm_eps: float | None

    @property
    def widths(self) -> Widths:
        """The pair's widths and what lies behind them in the qkv_a row."""
        return Widths(self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim)

    @property
    def eps(self) -> float:
        """The eps that serving engines use; 1e-6 (DeepSeek's) where no source gave one."""
        return self.serving_latent_norm_eps or 1e-6


def _model(r: dict) -> Model:
    figures: dict = {n: maybe(int, r[n]) for n in "hidden_size num_heads v_head_dim".split()}
    figures |= {n: maybe(int, r[n]) or 0 for n in ("q_lora_rank", "qk_rope_head_dim")}
    figures |= {"kv_lora_rank": int(r["kv_lora_rank"])}
    figures |= {"qk_nope_head_dim": maybe(int, r["qk_nope_head_dim"])}
    figures |= {n: maybe(float, r[n]) for n in ("hf_latent_norm_eps", "serving_latent_norm_eps")}
    aliases = tuple(a for a in r["aliases"].split("|") if a)
    return Model(name=r["model"], aliases=aliases, **figures)


@cache
def models() -> tuple[Model, ...]:
    """Every model of ``data/models.csv``, in the file's order."""
    return read_table(data_dir() / "models.csv", _model)


@cache
def _by_name() -> dict[str, Model]:
    return {n.lower(): m for m in models() for n in (m.name, *m.aliases)}


def model(name: str) -> Model:
    """The model called ``name`` (any case, aliases too).

    Raises:
        MisuseError: no such model; the message gives the nearest name.
    """
    found = _by_name().get(name.strip().lower())
    if found is None:
        raise unknown("model", name, [m.name for m in models()])
    return found


def parse_hidden(text: str) -> Widths:
    """Widths from ``"1536+512"``, ``"1536+512+64"`` (with the rope part) or a model's name.

    Raises:
        MisuseError: neither three numbers, two numbers, nor a known model.
    """
    if not isinstance(text, str):
        raise MisuseError(f"hidden is {text!r}: write q+kv, for example '1536+512'")
    parts = text.split("+")
    if len(parts) in (2, 3) and all(p.strip().isdecimal() for p in parts):
        q, kv, *rope = (int(p) for p in parts)
        if kv < 1 or max(q, kv, *rope) > 65536:
            raise MisuseError(
                f"hidden {text!r}: kv must be 1 to 65536, q and rope 0 to 65536; "
                "write q+kv, for example 1536+512"
            )
        return Widths(q, kv, rope[0] if rope else 64)
    return model(text).widths
