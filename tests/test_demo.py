"""examples/: the pieces of the demo by themselves, then the script as a user runs it, with a tiny model and text."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
SIZES = {"layers": 2, "width": 16, "heads": 2, "context": 16, "batch": 4, "warmup": 2, "sample": 8}
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    """The modules of examples/, imported as the script imports them."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import checkpoint
        import corpus
        import launch
        import model
        import pretrain
        import report

        names = {"checkpoint": checkpoint, "corpus": corpus, "launch": launch, "model": model}
        yield SimpleNamespace(**names, pretrain=pretrain, report=report)
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in ("checkpoint", "corpus", "launch", "model", "pretrain", "report"):
            sys.modules.pop(name, None)  # other folders have files of these names


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of source files, large enough to be accepted, both parts of it."""
    folder = tmp_path_factory.mktemp("text")
    for index in range(400):
        (folder / f"file_{index:03}.py").write_text(f"def function_{index}(argument):\n    return argument\n" * 10)
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "installed.py").write_text("never read")
    return folder


def test_text_is_split_by_path_and_installed_packages_are_left_out(demo: Any, text: Path) -> None:
    read = demo.corpus.read_corpus(text, context=16)
    held_out = [path for path in sorted(text.glob("*.py")) if demo.corpus.is_held_out(path.name)]
    assert 0 < len(held_out) < 80
    assert bytes(read.held_out.tolist()) == b"\n".join(path.read_bytes() for path in held_out)
    assert b"never read" not in bytes(read.training.tolist())
    assert demo.corpus.read_corpus(text, context=16).fingerprint == read.fingerprint


def test_too_little_text_is_refused_with_the_numbers(demo: Any, tmp_path: Path) -> None:
    with pytest.raises(demo.corpus.CorpusError, match=r"0 bytes .* at least 100,000"):
        demo.corpus.read_corpus(tmp_path, context=16)


@pytest.mark.parametrize("world", [2, 8])
def test_global_batch_does_not_depend_on_the_world(demo: Any, world: int) -> None:
    text = torch.arange(5000) % 251
    offsets = demo.corpus.training_offsets(text.to(torch.uint8), 16, 8, seed=3, step=7)
    rows = [demo.corpus.rows_of_rank(offsets, rank, world) for rank in range(world)]
    assert torch.cat(rows).equal(offsets)
    inputs, targets = demo.corpus.windows(text, offsets, 16, torch.device("cpu"))
    assert inputs.shape == targets.shape == (8, 16)
    assert inputs[:, 1:].equal(targets[:, :-1])
    assert not offsets.equal(demo.corpus.training_offsets(text, 16, 8, seed=3, step=8))


def test_validation_windows_reach_the_end_of_the_text(demo: Any) -> None:
    text = torch.zeros(100, dtype=torch.uint8)
    offsets = demo.corpus.held_out_offsets(text, 16, 5)
    assert offsets[0] == 0 and offsets[-1] + 16 + 1 == len(text)


def test_model_sees_no_later_byte(demo: Any) -> None:
    model = demo.model.GPT(demo.model.GPTConfig(layers=2, width=16, heads=2, context=12))
    tokens = torch.randint(256, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 8] ^= 1
    before, after = model(tokens), model(changed)
    assert before[:, :8].equal(after[:, :8])
    assert not before[:, 8:].equal(after[:, 8:])


def test_starting_weights_follow_from_name_and_seed(demo: Any) -> None:
    value = demo.model.initial_value
    shape = torch.Size((32, 16))
    assert value("blocks.0.mlp_in.weight", shape, 1).equal(value("blocks.0.mlp_in.weight", shape, 1))
    assert not value("blocks.0.mlp_in.weight", shape, 1).equal(value("blocks.1.mlp_in.weight", shape, 1))
    assert not value("blocks.0.mlp_in.weight", shape, 1).equal(value("blocks.0.mlp_in.weight", shape, 2))
    assert value("head.weight", shape, 1).count_nonzero() == 0


def test_learning_rate_warms_up_and_ends_at_a_tenth(demo: Any) -> None:
    options = SimpleNamespace(steps=100, warmup=10, learning_rate=1.0)
    rates = [demo.pretrain.learning_rate(step, options) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[10] == pytest.approx(1.0) and rates[100] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[10:]))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model": {"width": 8}}, "another model"), ({"seed": 1}, "another seed"), ({"fingerprint": 2}, "training text")],
)
def test_a_checkpoint_of_another_run_is_refused(demo: Any, change: dict[str, Any], words: str) -> None:
    record = {"model": {"width": 16}, "seed": 0, "fingerprint": 1}
    found, wanted = demo.checkpoint.Record(**(record | change)), demo.checkpoint.Record(**record)
    with pytest.raises(demo.checkpoint.CheckpointUnusable, match=words):
        demo.checkpoint.check_same_run("here", found, wanted)


def test_a_damaged_checkpoint_is_passed_over_and_one_alone_refused(demo: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    new = demo.checkpoint.Record({}, 0, 0)
    assert demo.checkpoint.resume(tmp_path, model, optimizer, new) is None
    for step in (1, 2):
        demo.checkpoint.save(tmp_path, model, optimizer, demo.checkpoint.Record({}, 0, 0, step=step))
    for step in (2, 1):
        with (tmp_path / "checkpoints" / f"step-00000000{step}" / "rank-0.safetensors").open("r+b") as file:
            file.truncate(100)
        if step == 2:
            with pytest.warns(UserWarning, match="truncated"):
                assert demo.checkpoint.resume(tmp_path, model, optimizer, new).step == 1
    with pytest.raises(demo.checkpoint.CheckpointUnusable, match="truncated"), pytest.warns(UserWarning):
        demo.checkpoint.resume(tmp_path, model, optimizer, new)


@pytest.mark.parametrize(("ranks", "chosen"), [(1, "cuda"), (2, "cpu")])
def test_ranks_without_a_gpu_each_train_on_the_cpu(demo: Any, ranks: int, chosen: str) -> None:
    """`make demo` starts two, on machines with one GPU, too."""
    launch = demo.launch
    there = {"is_available": lambda: True, "current_accelerator": lambda: torch.device("cuda")}
    there |= {"device_count": lambda: 1, "set_device_index": lambda index: None}
    with (
        mock.patch.multiple(torch.accelerator, **there),
        mock.patch.object(launch, "LOCAL_WORLD", ranks),
        mock.patch.object(launch.dist, "init_process_group") as init,
    ):
        assert launch.start_process_group(None).type == chosen
    assert init.call_args.args == ("nccl" if chosen == "cuda" else "gloo",)


def test_sizes_are_readable(demo: Any) -> None:
    sizes = [demo.report.human_bytes(count) for count in (999, 1000, 999_960, 12_345_678, 2.5e12)]
    assert sizes == ["999 B", "1.0 kB", "1.0 MB", "12.3 MB", "2.5 TB"]


def losses(out: Path) -> list[float]:
    newest = out / "checkpoints" / (out / "checkpoints" / "latest").read_text().strip()
    return json.loads((newest / "manifest.json").read_text())["manifest"]["values"]["state"]["record"]["losses"]


@pytest.fixture
def run(demo: Any, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`run(out, *arguments)`: a tiny run in this process, which is the one rank; what it prints."""

    def act(out: Path, *arguments: str) -> str:
        words = ["pretrain.py", "--device", "cpu", "--data", str(text), "--out", str(out), *TINY, *arguments]
        monkeypatch.setattr(sys, "argv", words)
        demo.pretrain.main()
        return capsys.readouterr().out

    return act


def test_demo_on_two_ranks_goes_on_on_one(run: Any, tmp_path: Path, text: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = ["--device", "cpu", "--data", str(text), "--out", str(two), *TINY, "--steps", "6", "--save-every", "4"]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / "pretrain.py"), *given], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "on 2 x cpu (gloo)" in done.stdout
        and "step      6  loss " in done.stdout
        and "tokens/s" in done.stdout
        and "Validation loss:" in done.stdout
    )
    assert sorted(path.name for path in two.iterdir()) == [
        "checkpoints",
        "loss.png",
        "memory.png",
        "timeline.png",
        "trace",
    ]
    run(one, "--steps", "6")
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    assert "after step 6 of 8" in run(two, "--steps", "8")  # resumed on one rank
    assert len(losses(two)) == 8
    assert "Already finished at step 8" in run(two, "--steps", "8")
    run(two, "--steps", "3", "--layers", "1", "--fresh")
    assert len(losses(two)) == 3


def test_demo_saves_when_interrupted(demo: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = demo.pretrain.train_step

    def interrupted(*given: Any, step_of: Any = step, **keywords: Any) -> Any:
        if keywords["step"] == 2:
            signal.raise_signal(signal.SIGINT)
        return step_of(*given, **keywords)

    monkeypatch.setattr(demo.pretrain, "train_step", interrupted)
    said = run(tmp_path, "--steps", "100", "--save-every", "100")
    assert "Interrupted after step 3 of 100" in said and len(losses(tmp_path)) == 3


def test_a_batch_that_the_ranks_cannot_share_is_refused_in_one_line(
    demo: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules[demo.pretrain.parse_options.__module__], "WORLD", 2)
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, "--batch", "3")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert said.startswith("pretrain.py: --batch 3 does not divide by 2 ranks")
