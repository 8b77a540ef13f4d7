"""The small model: its numbers, its questions, its decoding, and that training repeats itself."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

from mlakit.models import mla, small


@pytest.fixture(scope="module")
def model():
    return small.load()


@pytest.fixture(scope="module")
def came_to():
    return json.loads(small.weights_file().with_suffix(".json").read_text("utf-8"))


def test_the_weights_are_few_small_and_bf16(model):
    weights = [getattr(x, f.name) for x in model.layers for f in fields(mla.Layer)]
    weights += [w for mlp in model.mlps for w in mlp]
    weights += [model.embedding, model.last_norm, model.head]
    assert {w.dtype for w in weights} == {torch.bfloat16}
    assert 100_000 < sum(w.numel() for w in weights) < 1_000_000
    assert small.weights_file().stat().st_size < 2_000_000


def test_the_weights_are_those_that_training_gave(came_to):
    assert small.digest(small._stored()) == came_to["digest"]
    changed = {n: w.clone() for n, w in small._stored().items()}
    changed["head"][0, 0] += 1
    assert small.digest(changed) != came_to["digest"]


def test_questions_are_products_with_their_units_first():
    for row in small.questions(200).tolist():
        digits = "".join(map(str, row[:3])), str(row[4]), "".join(map(str, row[:5:-1]))
        assert row[3] == small.TIMES
        assert row[5] == small.EQUALS
        assert int(digits[0]) * int(digits[1]) == int(digits[2])
    every = {tuple(row) for row in small.questions(10_000).tolist()}
    assert len(every) == 10_000


def test_some_answers_are_wrong(model, came_to):
    assert 0.6 < came_to["right_of_all_10000"] < 0.95
    share = float(small.right(model, small.questions(1000), small.plain_step).double().mean())
    assert abs(share - came_to["right_of_all_10000"]) < 0.04


def test_right_is_what_decoding_digit_by_digit_gives(model):
    asked = small.questions(60)
    said = asked[:, : -small.ANSWER]
    with torch.no_grad():
        for _ in range(small.ANSWER):
            best = small.logits(model, said, small.plain_step)[:, -1].argmax(-1)
            said = torch.cat((said, best[:, None]), 1)
    decoded = (said == asked).all(1)
    assert decoded.tolist() == small.right(model, asked, small.plain_step).tolist()
    assert 0 < int(decoded.sum()) < len(asked)


def test_attention_is_that_of_the_reference(model):
    """Each sequence of a batch against ``mla.attend_causal`` of it alone."""
    generator = torch.Generator().manual_seed(0)
    n, t, d = 3, 5, small.DIMS

    def normal(*shape):
        return torch.randn(n * t, *shape, generator=generator)

    ready = mla.Prepared(
        normal(d.heads, d.kv_lora_rank),
        normal(d.heads, d.rope),
        normal(d.kv_lora_rank),
        normal(d.rope),
    )
    got = small._attend(ready, n)
    for i in range(n):
        part = mla.Prepared(*(x[i * t : (i + 1) * t] for x in ready))
        want = mla.attend_causal(part, d.scaling)
        torch.testing.assert_close(got[i * t : (i + 1) * t], want, rtol=1e-5, atol=1e-5)


def test_twenty_steps_from_the_seed_repeat_themselves(came_to):
    """In a process of its own: bits depend on the number of threads."""
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from mlakit.models import small\n"
        "print(small.build()); print(small.digest(small.train(20)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    build, digest = done.stdout.splitlines()[-2:]
    if build != came_to["build"]:
        pytest.skip(f"trained on {came_to['build']}; this is {build}")
    assert digest == came_to["digest_of_20_steps"]
