"""The same questions through two steps of a small model in a folder, and harness logs as input."""

import json

import pytest

from mlakit.drift.evals import evaluate, read_results, significance
from mlakit.errors import MisuseError

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A randomly initialised DeepseekV3 that knows ten digits, saved as users have theirs."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    where = tmp_path_factory.mktemp("model")
    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", *"0123456789"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    ).save_pretrained(where)
    config = transformers.DeepseekV3Config(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=2,
        num_experts_per_tok=1, n_group=1, topk_group=1, first_k_dense_replace=2, vocab_size=14,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(where)
    return where


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("questions") / "q.jsonl"
    rows = [
        {"id": i, "prompt": " ".join(f"{i:02d}{(7 * i) % 100:02d}"), "answer": str(i % 10)}
        for i in range(12)
    ]
    file.write_text("\n".join(json.dumps(r) for r in rows))
    return file


def test_transformers_own_rounding_flips_nothing(folder, questions, tmp_path):
    judged = evaluate(folder, questions, "unpatched", "cast_then_weight", tmp_path)
    assert judged.paired
    assert judged.flips == (0, 0)
    texts = [
        [json.loads(line)["text"] for line in (tmp_path / f"{n}.jsonl").open()]
        for n in ("unpatched", "cast_then_weight")
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1, "the model answers something that depends on the question"


def test_another_step_is_really_run(folder, questions, tmp_path, monkeypatch):
    from mlakit.models import hf

    seen = []

    def zeros(q, q_weight, q_eps, k, k_weight, k_eps):
        seen.append(q.shape)
        return q * 0, k * 0

    monkeypatch.setattr(hf, "step_of", lambda name: zeros)
    evaluate(folder, questions, "unpatched", "torch_native", tmp_path)
    assert seen
    plain, other = ((tmp_path / f"{n}.jsonl").read_text() for n in ("unpatched", "torch_native"))
    assert plain != other


def test_misuse(folder, questions, tmp_path):
    for args, text in (
        ((tmp_path, questions, "unpatched", "truncate", tmp_path), "holds no config.json"),
        ((folder, questions, "truncate", "truncate", tmp_path), "both sides are truncate"),
        ((folder, questions, "unpatched", "torch_nativ", tmp_path), "did you mean 'torch_native'"),
        ((folder, tmp_path / "no.jsonl", "unpatched", "truncate", tmp_path), "give a JSONL"),
    ):
        with pytest.raises(MisuseError, match=text):
            evaluate(*args)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": 1, "prompt": "1"}\n')
    with pytest.raises(MisuseError, match="line 1 lacks answer"):
        evaluate(folder, bad, "unpatched", "truncate", tmp_path)


def test_lm_evaluation_harness_logs(tmp_path):
    """Its per-sample JSONL: one line a document and filter, the metric under its own name."""
    files = []
    for side, flexible in (("a", [1, 1, 0, 0]), ("b", [1, 0, 1, 0])):
        file = tmp_path / f"samples_gsm8k_{side}.jsonl"
        lines = [
            {"doc_id": i, "doc": {}, "target": "x", "resps": [["y"]], "filter": name,
             "metrics": ["exact_match"], "exact_match": float(v), "doc_hash": "h"}
            for name, values in (("strict-match", [0, 0, 0, 0]), ("flexible-extract", flexible))
            for i, v in enumerate(values)
        ]  # fmt: skip
        file.write_text("\n".join(json.dumps(x) for x in lines))
        files.append(file)
    with pytest.raises(MisuseError, match="holds flexible-extract, strict-match: give"):
        read_results(files[0])
    with pytest.raises(MisuseError, match="did you mean 'strict-match'"):
        read_results(f"{files[0]}#strict_match")
    assert read_results(f"{files[0]}#flexible-extract") == {
        "0": True, "1": True, "2": False, "3": False,
    }  # fmt: skip
    judged = significance(*(f"{f}#flexible-extract" for f in files))
    assert judged.flips == (1, 1)


def test_the_harness_logs_are_questions_too(folder, questions, tmp_path):
    """The same questions as plain lines and as a log of a generating task get the same answers."""
    plain = [json.loads(line) for line in questions.open()][:4]
    log = tmp_path / "samples_task.jsonl"
    log.write_text("\n".join(
        json.dumps({
            "doc_id": q["id"], "doc": {}, "target": q["answer"], "filter": name, "exact_match": 0.0,
            "arguments": {"gen_args_0": {"arg_0": q["prompt"], "arg_1": {"until": ["x"]}}},
        })
        for name in ("strict-match", "flexible-extract") for q in plain
    ))  # fmt: skip
    short = tmp_path / "q.jsonl"
    short.write_text("\n".join(json.dumps(q) for q in plain))
    for file, out in ((short, "plain"), (log, "log")):
        evaluate(folder, file, "unpatched", "truncate", tmp_path / out)
    for side in ("unpatched.jsonl", "truncate.jsonl"):
        assert (tmp_path / "log" / side).read_text() == (tmp_path / "plain" / side).read_text()
    scored = {"doc_id": 0, "target": "1", "arguments": {
        "gen_args_0": {"arg_0": "p", "arg_1": " yes"}, "gen_args_1": {"arg_0": "p", "arg_1": " no"},
    }}  # fmt: skip
    log.write_text(json.dumps(scored))
    with pytest.raises(MisuseError, match="score given choices"):
        evaluate(folder, log, "unpatched", "truncate", tmp_path)
