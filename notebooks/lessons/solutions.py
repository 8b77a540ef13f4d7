"""A solution for each exercise, as the code of its cell; the tests hold the judges to them."""

SOLUTIONS = {
    "1.1": "answer = 64",
    "1.2": """
def answer(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
""",
    "1.3": "answer = 2 * (64 * 2048 + 2048 + 64 * 2048)",
    "2.1": """
def answer(q, q_weight, q_eps, k, k_weight, k_eps):
    return (
        torch.nn.functional.rms_norm(q, q_weight.shape, q_weight, q_eps),
        torch.nn.functional.rms_norm(k, k_weight.shape, k_weight, k_eps),
    )
""",
    "2.2": "answer = 16",
    "3.1": 'answer = Context(arch="gfx950", use_aiter=True, aiter_api="pair")',
    "3.2": """
def answer(arch, aiter):
    return "aiter_fused" if aiter else "engine_split"
""",
    "3.3": "answer = 16384",
    "4.1": """
def answer(base, this):
    return np.median(base / this)
""",
    "4.2": "answer = float(np.median(base / this))",
    "4.3": "answer = (32 << 20) // slot + 1",
    "5.1": """
def answer(x):
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()
""",
    "5.2": "answer = -1",
    "5.3": 'answer = "cast_then_weight"',
    "6.1": "answer = 64e6 / (20_000 - 3 * 61)",
    "6.2": "answer = (1e6 / 90.12 - 1e6 / 90.84) / 61",
    "6.3": "answer = False",
}
