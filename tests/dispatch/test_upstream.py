"""Engines' policies against their own released source, branch by branch, over all contexts."""

import os
from collections import Counter
from pathlib import Path

import pytest
import vllm_source
from package_index import download
from sglang_source import Release

from mlakit.dispatch import diff, policies

RELEASES = {
    "0.5.10.post1": "sglang_0_5_10_post1",
    "0.5.11": "sglang_0_5_11",
    "0.5.12": "sglang_0_5_12",
    "0.5.15": "sglang_0_5_15",
    "0.5.23": "sglang_0_5_23",
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    return tmp_path_factory.mktemp("sglang")


@pytest.mark.upstream
@pytest.mark.parametrize("version", RELEASES)
def test_policy_equals_the_released_branch(version, wheels):
    release = Release(download(f"sglang=={version}", wheels))
    wrong, seen = [], Counter()
    for c in diff.contexts():
        path, launches = release.choose(c)
        ours = policies.choose(c, RELEASES[version])
        seen[path] += 1
        if ours.path != path or (launches is not None and ours.launches != launches):
            row = {k: v for k, v in diff.describe(c).items() if k != "k_eps"}
            wrong.append(f"{row}: {version} runs {path} x{launches}, ours says {ours.path} "
                         f"x{ours.launches}")  # fmt: skip
    assert not wrong, f"{len(wrong)} rows differ, the first: {wrong[0]}"
    assert all(seen[p] for p in ("aiter_mxfp4", "aiter_fp8_group128", "dual_stream"))
    assert bool(seen["aiter_fused"]) == (version != "0.5.10.post1")
    assert bool(seen["raises"]) == (version != "0.5.10.post1")


@pytest.mark.upstream
def test_vllm_policy_equals_the_released_pass():
    wheel = os.environ.get("MLAKIT_VLLM_WHEEL")
    if wheel is None:
        pytest.skip(
            "vLLM's wheel is 336 MB and its source package cannot be had without building it: "
            "pip download --no-deps vllm==0.33.0, then set MLAKIT_VLLM_WHEEL to the file"
        )
    release = vllm_source.Release(Path(wheel))
    seen = Counter()
    for c in diff.contexts():
        if c.q_lora_rank:
            path = release.choose(c)
            seen[path] += 1
            ours = policies.choose(c, "vllm_compile").path
            assert ours == path, f"{diff.describe(c)}: vLLM runs {path}, ours says {ours}"
    assert set(seen) >= {"aiter_fused", "aiter_fp8_group128", "aiter_fp8_token", "raises"}
