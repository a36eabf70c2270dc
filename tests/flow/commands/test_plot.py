"""``etha plot PAIR BATCH`` and completion, against an agent with a registered batch."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from etha.cli import app
from etha.errors import AgentUnavailableError, ConfigError
from tests.flow.commands.running import etha
from tests.flow.commands.sending import here, sent
from tests.flow.sites import Site
from tests.flow.ways import Way

SECONDS = 60
SHELLS = ("bash", "zsh", "fish")


def texts(path: Path) -> str:
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()))


@pytest.mark.ways(Way.LOCAL, Way.TCP)
async def test_a_live_batch_is_drawn_with_its_last_transfer(
    site: Site, pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "batch.svg"
    async with sent(site, pair, "policy"):
        await here(site, "plot", pair, "policy", "-o", str(path))
        assert capsys.readouterr().out == f"wrote {path}\n"
        text = texts(path)
        # The name of a test's pair is long, and so the picture shortens it in the middle.
        assert re.search(rf"batch policy of pair {pair[:10]}\S*\.\.\.\S*{pair[-10:]}: trainer to inference", text), text
        assert re.search(r"last transfer: version 7, 4.16 kB in [0-9.]+ (ms|us|s)", text), text
        assert "trainer sends" in text and "inference receives" in text and "rank 0" in text
        await here(site, "plot", pair, "policy", "-o", str(path), "--direction", "inference")
        assert "inference sends" in texts(path) and "last transfer from trainer: version 7" in texts(path)
        with pytest.raises(ConfigError, match="its sides are inference and trainer"):
            await here(site, "plot", pair, "policy", "-o", str(path), "--direction", "nobody")
        for names in ((pair, "other"), ("other", "policy")):
            with pytest.raises(ConfigError, match=f"there are, as PAIR BATCH: .*{pair} policy"):
                await here(site, "plot", *names, "-o", str(path))


async def test_drawing_a_live_batch_imports_no_torch(served: Site, pair: str, tmp_path: Path) -> None:
    code = (
        "import sys; from etha.cli import app\n"
        "try: app(sys.argv[1:])\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    async with sent(served, pair, "policy"):
        command = [sys.executable, "-c", code, "plot", pair, "policy", "-o", str(tmp_path / "batch.png")]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr


def test_a_plot_without_an_agent_or_with_a_wrong_suffix_says_so(runtime: Path, tmp_path: Path) -> None:
    for name, error, says in (
        ("b.jpg", ConfigError, r"its name must end in \.svg, \.png, \.pdf"),
        ("b.svg", AgentUnavailableError, "no agent is running"),
    ):
        with pytest.raises(error, match=says):
            app(["plot", "p", "b", "-o", str(tmp_path / name)], standalone_mode=False)
    assert not list(tmp_path.iterdir())


def completed(
    words: str, shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    """What TAB offers at the end of ``words``, and what is written to standard error."""
    monkeypatch.setenv("_ETHA_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", words)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    with pytest.raises(SystemExit) as ended:
        app([], prog_name="etha")
    assert not ended.value.code
    shown = capsys.readouterr()
    return shown.out, shown.err


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_offers_commands_and_is_silent_without_an_agent(
    shell: str, runtime: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = completed("etha st", shell, monkeypatch, capsys)
    assert "status" in out and "stop" in out and "doctor" not in out and not err
    for words in ("etha plot ", "etha plot weights ", "etha stop --device "):
        out, err = completed(words, shell, monkeypatch, capsys)
        assert not err and "Traceback" not in out and "weights" not in out
    monkeypatch.setenv("ETHA_IDLE", "never")  # a setting that cannot be read
    assert completed("etha plot ", shell, monkeypatch, capsys)[1] == ""


async def test_completion_knows_pairs_batches_and_devices(served: Site, pair: str) -> None:
    async with sent(served, pair, "policy"):

        async def offered(words: str) -> str:
            variables = {"_ETHA_COMPLETE": "complete_bash", "COMP_WORDS": words}
            done = await asyncio.to_thread(etha, **variables, COMP_CWORD=str(len(words.split(" ")) - 1))
            assert not done.stderr, done.stderr
            return done.stdout

        assert pair in (await offered(f"etha plot {pair[:8]}")).split()
        assert (await offered(f"etha plot {pair} po")).split() == ["policy"]
        assert (await offered("etha stop --device ")).split() == ["cpu"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_script_can_be_shown(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_ETHA_COMPLETE", f"source_{shell}")
    with pytest.raises(SystemExit):
        app([], prog_name="etha")
    assert "_ETHA_COMPLETE" in capsys.readouterr().out
