"""Speculative decoding on a GPU, its benchmark: every part on a small random model, without a GPU."""

import gc
import itertools
import json
from types import SimpleNamespace

import msgspec
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.gpu import kernels
from benchmarks.gpu.large_models import Deadline
from benchmarks.gpu.model_files import QWEN_CODER, write_gguf
from benchmarks.gpu.speculation import __main__ as benchmark
from benchmarks.gpu.speculation import inputs, transcript
from benchmarks.gpu.speculation.engine import Engine
from benchmarks.gpu.speculation.inputs import CODER_SESSION, Coder, Recorded
from benchmarks.gpu.speculation.parts import NoInputs, Setup
from benchmarks.gpu.speculation.verification import FixedDrafts, VerifySteps, attention_share, with_ratios
from emberline.engine.runners.gpu import shapes
from emberline.engine.runners.gpu.batch import VerifyShape
from emberline.models.eagle3 import Eagle3Config, Eagle3Head
from emberline.models.eagle3_files import save_head
from emberline.protocol.request import ToolCall
from emberline.protocol.token_ids import unpack
from emberline.text.text_model import TextModel
from emberline.weights.checkpoint import open_checkpoint
from tests.engine.fakes import VOCAB
from tests.engine.runners.gpu.test_runner import Padded, loop_of
from tests.kernels.gpu.batches import everyday

SHAPE = {
    "block_count": 4, "context_length": 1024, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 2, "attention.head_count_kv": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Restore what a benchmark sets for its own process."""
    monkeypatch.setattr(shapes, "MIN_DRAWS", shapes.MIN_DRAWS)


@pytest.fixture(autouse=True, scope="module")
def unfrozen():
    """Let the garbage collector see again, after this module's tests, what the engines froze."""
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def setup(smollm2, tmp_path_factory):
    """A random model with the default model's vocabulary, a random head for it, and the requests."""
    folder = tmp_path_factory.mktemp("speculation")
    model = folder / "model.gguf"
    write_gguf(model, SHAPE)
    checkpoint = open_checkpoint(model)
    torch.manual_seed(0)
    save_head(Eagle3Head(Eagle3Config.of(checkpoint.config, 256, checkpoint.fingerprint)), folder / "head")
    trace = folder / "trace.jsonl"
    rows = [{"input": f"edit file {n} " * 8, "output": "the same line of code; " * 12} for n in range(4)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    inputs.write(inputs.make(trace, smollm2), folder / "tokens")
    return Setup(model, model, folder / "head", inputs.read(folder / "tokens"), "cpu", quick=True)


def measured(setup, name, setting, tmp_path):
    figures = benchmark.Figures(tmp_path / "figures.json")
    benchmark.PARTS[name].measure(setup, setting, Deadline(None), figures)
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    return figures


def test_the_requests_are_those_of_the_tree(setup):
    assert len(setup.inputs.calls) == 50
    assert all(call.request.grammar for call in setup.inputs.calls)
    assert len(setup.inputs.chats) == 64
    assert len(setup.inputs.recorded) == 4


def test_steps_that_verify_drafts_are_timed(setup, tmp_path):
    figures = measured(setup, "verify", "grammar", tmp_path)
    assert figures.keys() == {"batch 1, context 64", "batch 2, context 64"}
    for rows in figures.values():
        assert rows.keys() == {"0", "1", "2"}
        assert rows["0"]["loop_ms_ratio"] == 1
        assert rows["2"]["loop_ms_ratio"] == rows["2"]["loop_ms"] / rows["0"]["loop_ms"]


@pytest.mark.parametrize("setting", ["off", "grammar"])
def test_tool_calls_are_replayed(setup, tmp_path, setting):
    figures = measured(setup, "tools", setting, tmp_path)
    assert figures["calls"] == 4
    accepted = sum(figures["drafts"]["grammar"]["accepted"]) if setting == "grammar" else 0
    assert (accepted > 20) == (setting == "grammar")
    assert (figures["tokens_per_step"] > 1.5) == (setting == "grammar")


def test_replies_that_no_draft_fits(setup, tmp_path):
    figures = measured(setup, "auto", "auto", tmp_path)
    names = {f"random tokens of {n}, batch {batch}" for n in (10_000, 50) for batch in (1, 4)}
    assert figures["tokens_per_s"].keys() == names | {"recorded, batch 1"}


@pytest.mark.parametrize("setting", ["off", "eagle3"])
def test_a_head_drafts_for_held_out_prompts(setup, tmp_path, setting):
    figures = measured(setup, "head", setting, tmp_path)
    assert figures["tokens_per_s"].keys() == {"1", "2"}
    assert figures["batch 2"]["tokens"] > 10
    assert figures["drafts"].keys() == ({"eagle3"} if setting == "eagle3" else set())


def test_recorded_replies_are_replayed(setup, tmp_path):
    figures = measured(setup, "replies", "suffix", tmp_path)
    assert figures["tokens_per_s"].keys() == {"1", "2"}
    assert sum(figures["drafts"]["suffix"]["accepted"]) > 0
    without = setup._replace(inputs=None)
    with pytest.raises(NoInputs):
        measured(without, "replies", "suffix", tmp_path)


# --- a coding agent's session ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session(tiny_model):
    turns = [transcript.USER[0], transcript.USER[2]]  # without and with a file attached
    return transcript.record(tiny_model, turns, max_reply=100, n_threads=1)  # bytes: enough for every tool's call


def test_a_session_is_recorded(session, tmp_path):
    assert [message.role for message in session.messages] == ["system", *["user", "assistant", "tool"] * 2]
    assert "<file path=cart.py>" in session.messages[4].content
    assert len(session.requests) == 2
    assert all(request.grammar and 0 < len(reply) <= 100 for request, reply in session.requests)
    inputs.write_session(session, tmp_path / "session.gz")
    assert inputs.read_session(tmp_path / "session.gz") == session


@pytest.mark.parametrize("setting", ["off", "auto"])
def test_a_session_is_replayed(setup, session, tiny_model, tmp_path, setting):
    vocabulary = TextModel.load(tiny_model).vocabulary
    both = msgspec.structs.replace(setup.inputs, coder=Coder(vocabulary, session.requests))
    figures = measured(setup._replace(inputs=both, coder=tiny_model), "coder", setting, tmp_path)
    assert figures["tokens_per_s"].keys() == {"1"}
    assert figures["requests"] == 2
    assert figures["tokens"] + figures["untimed_tokens"] == sum(len(reply) for _, reply in session.requests)
    assert (figures["untimed_tokens"] > 3) == (setting == "auto"), "replies that begin with forced tokens"
    accepted = sum(sum(each["accepted"]) for each in figures["drafts"].values())
    assert (accepted > 5) == (setting == "auto")
    with pytest.raises(NoInputs, match="--coder-model"):
        measured(setup, "coder", setting, tmp_path)


def test_the_session_of_the_tree_is_one():
    """Every prompt begins with the one before it and what was replied to that."""
    requests = inputs.read_session(CODER_SESSION).requests
    assert len(requests) >= 10
    for (before, reply), (after, _) in itertools.pairwise(requests):
        known = unpack(before.prompt_ids) + reply
        assert unpack(after.prompt_ids)[: len(known)] == known


def test_the_shape_of_the_coder_is_built(tmp_path):
    smaller = {"num_hidden_layers": 1, "vocab_size": 1024, "intermediate_size": 896}
    config = QWEN_CODER | smaller | {"eos_token_id": 1, "bos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = Engine(tmp_path, "auto", "cpu", 1)
    reply = list(range(20, 30))
    assert engine.run([engine.work([3, 4, 5], reply)], 1).n_tokens == 9


def test_tools_run_in_their_folder_alone(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "test_a.py").write_text("def test_a():\n    assert 1 == 2\n")
    project = transcript.Project(tmp_path / "project")

    def run(name, **arguments):
        return project.run(ToolCall("", name, json.dumps(arguments)))

    assert "1 failed" in run("run_tests")
    assert run("str_replace", path="test_a.py", old="= 2", new="= 1") == "test_a.py: replaced"
    assert "1 passed" in run("run_tests")
    assert run("write_file", path="b/../c.py", content="a\nb\n") == "b/../c.py: 2 lines written"
    assert run("read_file", path="c.py") == "a\nb\n"
    assert "not once" in run("str_replace", path="c.py", old="z", new="")
    assert "outside the project" in run("write_file", path="../d.py", content="")
    assert run("read_file", path="none.py").startswith("error: ")
    assert run("read_file", where="c.py").startswith("error: ")
    assert project.run(ToolCall("", "read_file", '{"path": "c')).startswith("error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["project"]


def test_settings_are_processes_whose_figures_are_kept(setup, tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = ["--only", "verify", "--quick", "--device", "cpu", "--model", str(setup.model), "--json", str(out)]
    assert benchmark.main(flags) == 0
    facts = json.loads(out.read_text())["verify"]
    assert facts["grammar"].keys() == {"batch 1, context 64", "batch 2, context 64"}
    assert "batch 1, context 64: 0 drafts 1.000, 1 drafts " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        benchmark.main(["--only", "verify,everything"])


def test_a_process_that_fails_or_takes_too_long_says_so(setup, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    flags = ["--only", "verify", "--quick", "--device", "cpu", "--json", str(out), "--model", str(tmp_path / "none")]
    assert benchmark.main(flags) == 1
    assert "none" in json.loads(out.read_text())["verify"]["grammar"]["failed"]
    monkeypatch.setattr(benchmark, "GRACE_S", 0.0)
    assert benchmark.main([*flags, "--model", str(setup.model), "--limit-s", "0.2"]) == 1
    assert json.loads(out.read_text())["verify"]["grammar"]["failed"] == "not done after 0 s"


# --- the GPU's runner, on the CPU -----------------------------------------------------------------------------------


class Graph:
    """In place of a captured one: its replay runs the step."""

    def __init__(self, run):
        self._run, self.n_replays, self.graph = run, 0, SimpleNamespace(replay=self.replay)

    def replay(self):
        self.n_replays += 1
        self.result = self._run()


def captured_loop():
    loop, _ = loop_of(Padded(), speculation=FixedDrafts(), n_blocks=60)
    runner = loop.runner
    for kind in runner.step_kinds():
        runner._graphs._captured[kind] = Graph(lambda kind=kind: runner._body(kind))
    return loop


SWEEP = itertools.product([1, 2, 4], [0, 1, 2, 4])


@pytest.mark.parametrize(("batch", "n_drafts"), everyday(SWEEP, [(1, 0), (4, 0), (1, 1), (4, 2), (2, 4)]))
def test_the_gpus_own_graphs_verify_the_drafts(batch, n_drafts, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.speculation.verification.TOKEN", 3)
    loop = captured_loop()
    found = VerifySteps(loop, VOCAB).time(batch, 80, n_drafts, n_steps=6)
    assert found.keys() == {"loop_ms", "graph_ms"}
    graphs = {kind.shape: graph.n_replays for kind, graph in loop.runner._graphs._captured.items() if graph.n_replays}
    shape = VerifyShape(batch, batch * (1 + n_drafts)) if n_drafts else batch
    assert graphs[shape] > 6 + 20, "its steps, and the replays that were timed"
    assert not loop.busy


def test_drafts_that_are_left_out_are_noticed(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.speculation.verification.TOKEN", 3)
    loop = captured_loop()
    monkeypatch.setattr(loop.runner, "_verify_kind", lambda batch, plan: None)
    with pytest.raises(AssertionError, match="0 of 12 draft tokens were accepted"):
        VerifySteps(loop, VOCAB).time(1, 80, 2, n_steps=6)


def test_ratios_are_to_the_step_without_drafts():
    rows = {"0": {"loop_ms": 4.0, "graph_ms": None}, "2": {"loop_ms": 5.0, "graph_ms": None}}
    assert with_ratios(rows)["2"] == {"loop_ms": 5.0, "graph_ms": None, "loop_ms_ratio": 1.25}


def test_attention_is_a_share_of_the_graphs_time():
    steps = {"a": {"0": {"graph_ms": 4.0}, "2": {"graph_ms": None}}, "failed": "late"}
    attention = {"a": {"0": {"layer_us": 12.5}, "2": {"layer_us": 20.0}}, "b": {"0": {"layer_us": 9.0}}}
    assert attention_share({"grammar": steps, "attention": attention}) == {"a": {"0": 0.1}}


def test_attention_of_rows_with_several_tokens_is_that_of_the_reference():
    card = kernels.Card("cpu", torch.float32, 1.0, 1.0)
    for case in (kernels.verify_case(card, 8, 2, 3, 40), kernels.decode_case(card, 8, 2, 40)):
        case.run(0)
        assert kernels._error(case.got(), case.want()) < kernels.LIMIT


def test_recorded_requests_are_few_one_at_a_time():
    from benchmarks.gpu.speculation.parts import FEW, asked_for

    recorded = [Recorded([1], [2])] * 40
    assert (len(asked_for(recorded, 1)), len(asked_for(recorded, 16))) == (FEW, 40)
