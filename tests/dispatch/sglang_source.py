"""Reads SGLang's own dispatch out of a released wheel and evaluates it: no code of ours in it."""

from __future__ import annotations

import ast
import zipfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

METHODS = "sglang/srt/models/deepseek_common/attention_forward_methods/"
COMMON = "sglang/srt/models/deepseek_common/utils.py"
LEAVES = {
    "fused_rms_mxfp4_quant": "aiter_mxfp4",
    "fused_rms_fp8_group_quant": "aiter_fp8_group128",
    "fused_qk_rmsnorm_bf16": "aiter_fused",
}
EXISTS = {
    "none": set(),
    "pair": {"aiter.ops.fused_qk_norm_rope_cache_quant"},
    "unified": {"aiter.ops.fused_qk_rmsnorm_group_quant"},
}


text_of = cache(ast.unparse)


@cache
def code_of(node: ast.expr):
    return compile(ast.Expression(node), "sglang", "eval")


class Release:
    """One wheel's relevant files, parsed once."""

    def __init__(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as z:
            names = set(z.namelist())
            portable = METHODS + "triton_qk_rmsnorm.py"
            text = z.read(portable).decode() if portable in names else ""
            self.triton_copies = "x2d = x.reshape(-1, N).contiguous()" in text

            def tree(name: str) -> ast.Module:
                return ast.parse(z.read(name))

            rocm = METHODS + "forward_mla_rocm.py"
            self.mla = {"cuda": tree(METHODS + "forward_mla.py")}
            self.mla["hip"] = tree(rocm) if rocm in names else self.mla["cuda"]
            mha = METHODS + "forward_mha_rocm.py"
            self.mha = tree(mha if mha in names else METHODS + "forward_mha.py")
            self.common = tree(COMMON)
            self.model = tree("sglang/srt/models/deepseek_v2.py")
            norm = tree("sglang/srt/layers/layernorm.py")
        self.stream = next(
            n.value
            for n in ast.walk(self.model)
            if isinstance(n, ast.Assign)
            and text_of(n.targets[0]) == "self.alt_stream"
            and isinstance(n.value, ast.IfExp)
        )
        forward = text_of(_function(norm, "forward_aiter"))
        self.copies = "x = x.contiguous()" in forward
        self.chains = {card: _chain(tree) for card, tree in self.mla.items()}
        self.prefill = _prefill_chains(self.mha)

    def choose(self, c) -> tuple[str, int]:
        """(path, launches) that this release runs in a mlakit context."""
        hip = c.vendor == "amd"
        names = self._names(c, hip)
        tree = self.mla["hip" if hip else "cuda"]
        bf16 = self._bf16_kernel(tree, names, c)
        if bf16 == "raises":
            return "raises", 0
        if c.q_lora_rank == 0:
            return self._split(c, 1)
        if c.prefill:
            return self._prefill(names, c)
        leaf = _walk(self.chains["hip" if hip else "cuda"], names)
        if leaf == "dual_stream":
            return "dual_stream", self._split(c, 2)[1]
        if leaf == "split":
            return self._split(c, 2)
        if leaf == "aiter_fused" and bf16 != "aiter":
            return bf16
        return leaf, 2 if leaf == "aiter_fused" and c.m >= 16384 else 1

    def _names(self, c, hip: bool) -> dict:
        on = {n for n in c.switches if "=" not in n} | (
            {"SGLANG_USE_AITER"} if c.use_aiter else set()
        )
        weight = {
            "bf16": "bfloat16", "int8": "int8", "fp8_ocp": "float8_e4m3fn",
            "fp8_fnuz": "float8_e4m3fnuz", "mxfp4": "uint8",
        }[c.weight_dtype]  # fmt: skip
        scale = SimpleNamespace(dim=lambda: 2, shape=(4, 4 if c.block_scale else 1))
        proj = SimpleNamespace(weight=SimpleNamespace(dtype=weight), weight_scale=scale)
        torch = SimpleNamespace(
            uint8="uint8", float8_e4m3fn="float8_e4m3fn", cuda=SimpleNamespace(Stream=object),
            nn=SimpleNamespace(Module=object),
        )  # fmt: skip
        env = SimpleNamespace(get=lambda: False)
        names = {
            "torch": torch, "is_hip": lambda: hip, "is_cuda": lambda: c.vendor == "nvidia",
            "is_gfx95_supported": lambda: hip and "gfx95" in c.arch,
            "is_gfx1250_supported": lambda: hip and "gfx1250" in c.arch,
            "get_bool_env_var": lambda name, default="false": name in on,
            "get_is_capture_mode": lambda: c.capture,
            "_is_cuda": c.vendor == "nvidia", "_is_musa": False, "_is_hip": hip, "_is_npu": False,
            "envs": _Envs(on, env), "hasattr": hasattr, "getattr": getattr,
        }  # fmt: skip
        for node in self.common.body:
            wanted = ("_use_aiter", "_use_aiter_gfx95", "_is_gfx95_supported")
            if isinstance(node, ast.Assign) and node.targets[0].id in wanted:
                names[node.targets[0].id] = _value(node.value, names)
            if isinstance(node, ast.FunctionDef) and node.name == "_is_block_scale_fp8":
                exec(compile(ast.Module([node], []), "common", "exec"), names)
        names["self"] = SimpleNamespace(
            alt_stream=_value(self.stream, names), q_b_proj=proj, kv_b_proj=proj,
            use_nsa=False, use_dsa=False,
        )  # fmt: skip
        return names

    def _bf16_kernel(self, tree, names, c):
        """What the name fused_qk_rmsnorm_bf16 is bound to: aiter, raises, or a (path, launches)."""
        for node in tree.body:
            if isinstance(node, ast.If) and "fused_qk_rmsnorm" in text_of(node):
                if not _value(node.test, names):
                    continue
                return self._bind(node.body, names, EXISTS[c.aiter_api])
        return "aiter"

    def _bind(self, body, names, exists):
        for node in body:
            text = text_of(node)
            if "fused_qk_rmsnorm" not in text:
                continue
            if isinstance(node, ast.If):
                return self._bind(
                    node.body if _value(node.test, names) else node.orelse, names, exists
                )
            if isinstance(node, ast.Try):
                found = self._bind(node.body, names, exists)
                return (
                    self._bind(node.handlers[0].body, names, exists) if found == "raises" else found
                )
            if isinstance(node, ast.ImportFrom):
                if "triton_qk_rmsnorm" in node.module:
                    if node.names[0].name == "fused_qk_rmsnorm_torch":
                        return "torch_native", None
                    return "triton_split", 4 if self.triton_copies else 2
                return "aiter" if node.module in exists else "raises"
        raise AssertionError("no import of the dual norm in this branch")

    def _split(self, c, norms: int) -> tuple[str, int]:
        if not c.use_aiter:
            return "engine_split", norms
        copies = self.copies and c.layout == "split"
        return "aiter_split", norms * 2 if copies else norms

    def _prefill(self, names, c) -> tuple[str, int]:
        path, one = self._split(c, 1)
        leaves = [_walk(chain, names) for chain in self.prefill]
        return path, sum(1 if leaf.startswith("aiter_") else one for leaf in leaves)


class _Envs:
    def __init__(self, on, off):
        self._on, self._off = on, off

    def __getattr__(self, name):
        return SimpleNamespace(get=lambda: name in self._on)


def _value(node, names):
    return eval(code_of(node), names)


def _function(tree, *wanted):
    return next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in wanted)


def _chain(tree) -> ast.If:
    prepare = _function(tree, "forward_absorb_rocm_prepare", "forward_absorb_prepare")
    return next(
        n
        for n in ast.walk(prepare)
        if isinstance(n, ast.If)
        and "alt_stream" in text_of(n.test)
        and "q_a_layernorm" in text_of(n.body[2])
    )


def _prefill_chains(tree) -> tuple[ast.If, ast.If]:
    """The chains that choose q's norm and kv's norm in prefill; no call there takes both."""
    prepare = _function(tree, "forward_normal_prepare", "forward_normal_rocm_prepare")
    for n in ast.walk(prepare):
        if isinstance(n, ast.Call) and text_of(n.func) in LEAVES:
            assert text_of(n.args[3]) == "None", "prefill uses the dual kernel"
    found = [n for n in ast.walk(prepare) if isinstance(n, ast.If)]
    q = next(n for n in found if text_of(n.test) in ("self.use_nsa", "self.use_dsa"))
    kv = next(n for n in found if "kv_b_proj" in text_of(n.test) and "_layernorm" in text_of(n))
    return q, kv


def _walk(node: ast.If, names) -> str:
    """Follow the chain's own tests to the branch that runs, and name what it runs."""
    body = node.body if _value(node.test, names) else node.orelse
    for inner in body:
        if isinstance(inner, ast.If) and "_layernorm" in text_of(inner):
            return _walk(inner, names)
    text = "\n".join(text_of(n) for n in body)
    for call, path in LEAVES.items():
        if call + "(" in text:
            return path
    return "dual_stream" if "alt_stream" in text else "split"
