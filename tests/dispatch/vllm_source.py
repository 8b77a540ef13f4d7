"""Reads vLLM's dual-norm compile pass out of its own wheel and evaluates it."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path

PASS = "vllm/compilation/passes/fusion/rocm_aiter_fusion.py"
OPS = "vllm/_aiter_ops.py"
KINDS = {"DYNAMIC_QUANT_OP": "aiter_fp8_token", "GROUP_QUANT_OP": "aiter_fp8_group128"}
FIRST_IMPORTS = {  # path -> the function of OPS whose import decides whether AITER has it
    "aiter_fused": "_fused_mla_dual_rms_norm_impl",
    "aiter_fp8_token": "_fused_mla_dual_rms_norm_per_token_quant_impl",
    "aiter_fp8_group128": "_fused_mla_dual_rms_norm_group_quant_impl",
}
# What each AITER generation's modules hold, read in its git tags.
HAS = {
    "none": set(),
    "pair": {"fused_qk_rmsnorm", "fused_qk_rmsnorm_group_quant"},
    "unified": {
        "fused_qk_rmsnorm",
        "_fused_qk_rmsnorm",
        "fused_qk_rmsnorm_group_quant",
        "fused_qk_rmsnorm_per_token_quant",
    },
}


class Release:
    """The pass, its gate and its operations' imports."""

    def __init__(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as z:
            trees = {n: ast.parse(z.read(n)) for n in (PASS, OPS, "vllm/platforms/rocm.py")}
            manager = z.read("vllm/compilation/passes/pass_manager.py").decode()
        gate = "self.pass_config.fuse_mla_dual_rms_norm and rocm_aiter_ops.is_enabled()"
        assert gate in manager
        classes = {n.name: n for n in trees[PASS].body if isinstance(n, ast.ClassDef)}
        loop = next(
            n for n in ast.walk(classes["MLADualRMSNormFusionPass"]) if isinstance(n, ast.For)
        )
        self.eps = set(ast.literal_eval(loop.iter))
        self.paths = set()
        for call in (n for n in ast.walk(loop) if isinstance(n, ast.Call)):
            if isinstance(call.func, ast.Name):
                body = ast.unparse(classes[call.func.id])
                assert "self.empty_bf16(" in body
                kind = [path for op, path in KINDS.items() if f"self.{op}" in body]
                self.paths.add(kind[0] if kind else "aiter_fused")
        functions = {n.name: n for n in ast.walk(trees[OPS]) if isinstance(n, ast.FunctionDef)}
        supported = ast.unparse(functions["is_aiter_found_and_supported"])
        self.least_cdna = int(supported.rpartition("get_cdna_version() > ")[2].split()[0])
        self.needs = {
            path: next(n for n in functions[name].body if isinstance(n, ast.ImportFrom))
            for path, name in FIRST_IMPORTS.items()
        }
        rocm = {n.name: n for n in trees["vllm/platforms/rocm.py"].body if hasattr(n, "name")}
        self.cdna = {}
        for test in (n for n in rocm["get_cdna_version"].body if isinstance(n, ast.If)):
            self.cdna[test.test.func.id.removeprefix("on_")] = test.body[0].value.value

    def choose(self, c) -> str:
        """The path of a compiled run in a mlakit context with q_lora_rank above 0."""
        enabled = c.use_aiter and self.cdna.get(c.arch, 0) > self.least_cdna
        if not enabled or c.dtype != "bf16" or c.q_eps != c.k_eps or c.q_eps not in self.eps:
            return "aiter_split" if c.use_aiter else "engine_split"
        path = "aiter_fused"
        if c.weight_dtype.startswith("fp8"):
            path = "aiter_fp8_group128" if c.block_scale else "aiter_fp8_token"
        assert path in self.paths
        names = {a.name for a in self.needs[path].names}
        return path if names <= HAS[c.aiter_api] else "raises"
